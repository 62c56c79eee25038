"""The bytes that a cache folder uses, and its limit, for all processes that share the folder.

    <root>/usage.json          bytes of all parts, and the time of the last listing; processes lock this file

The number is kept in a file so that a write lists no folder. Every change of the folder's parts is made, and counted,
under the lock. What changes without it (a user removes files, a process is killed) is found when the folder is listed:
every ten minutes, and when the limit is reached. A listing also removes what killed processes have left.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

from tepal.exchange.files import SUFFIX, remove_unfinished
from tepal.host.files import locked

log = getLogger("flwr")

CONTENT, CLIENTS = "content", "clients"

_FILE = "usage.json"
_PATIENCE = 5.0  # seconds to wait for the lock, which is held for milliseconds
_LISTED_EVERY = 600.0  # seconds
_FREED = 0.1
"""Share of the limit that is freed when the limit is reached, so that many writes follow without a listing."""
_LENGTH = 100  # bytes of the file
_BETWEEN = 60.0
"""Seconds for which content without a link stays: a process that cannot lock may be about to link to it."""


class Usage:
    """The parts in one cache folder, while this process has the lock."""

    def __init__(self, root: Path, nbytes: int, listed: float) -> None:
        self._root = root
        self.nbytes = nbytes
        """Bytes of all parts, and of those that are being written."""
        self.listed = listed
        """Time of the last listing; 0: never."""

    def make_room(self, nbytes: int, limit: int) -> None:
        """Count `nbytes` more, and remove the least recently used parts of all experiments if they exceed the limit."""
        if self.nbytes + nbytes > limit or not 0 <= time.time() - self.listed < _LISTED_EVERY:
            self._evict(nbytes, limit)
        self.nbytes += nbytes

    def remove(self, content: Path) -> None:
        """Remove the content of a part. Raises FileNotFoundError."""
        size = content.stat().st_size
        content.unlink()
        self.nbytes = max(self.nbytes - size, 0)

    def _evict(self, nbytes: int, limit: int) -> None:
        """List the folder, and remove parts until `nbytes` more are within the limit and a tenth of it is free.

        For this tenth no part is removed that is larger than what is missing.
        """
        contents = sorted(_listed(self._root), key=lambda content: content.used_at)
        self.listed = time.time()
        self.nbytes = sum(content.size for content in contents)
        if self.nbytes + nbytes <= limit:
            return
        dropped: dict[Path, set[str]] = {}  # by experiment
        for content in contents:
            after = self.nbytes + nbytes - content.size
            if self.nbytes + nbytes <= limit and after < (1 - _FREED) * limit:
                break
            self.nbytes -= content.size
            dropped.setdefault(content.path.parent.parent, set()).add(content.path.name)
        for experiment, names in dropped.items():
            text = "The client's cache has reached its limit of %d bytes and removes %d parts of %s."
            log.info(text, limit, len(names), experiment.name)
            for name in names:
                _unlink(experiment / CONTENT / name)
            for link in _links(experiment):
                if content_of(link.name) in names:
                    _unlink(link)


@contextlib.contextmanager
def usage_of(root: Path) -> Iterator[Usage]:
    """The usage of a cache folder, locked for all processes and threads until the block ends.

    On a file system without locks, or if another process keeps the lock for seconds, the block runs without it:
    nothing that it does can make another process read wrong values.
    """
    file = root / _FILE
    with contextlib.ExitStack() as until_the_end:
        handle: int | None = None
        with contextlib.suppress(OSError):
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            until_the_end.callback(os.close, handle)
            until_the_end.enter_context(locked(file, TimeoutError(f"{file} is locked"), patience=_PATIENCE))
        before = _read(handle)
        usage = Usage(root, *before)
        try:
            yield usage
        finally:
            if handle is not None and (usage.nbytes, usage.listed) != before:
                # In place and always of one length: to truncate the file would make some file systems wait for the
                # disk. On a full disk the next process lists the folder.
                with contextlib.suppress(OSError):
                    text = json.dumps({"bytes": usage.nbytes, "listed": usage.listed}).ljust(_LENGTH)
                    os.pwrite(handle, text.encode(), 0)


def content_of(link: str) -> str:
    """The name of the content of a client's link."""
    return link.rpartition("@")[2]


@dataclass(frozen=True)
class _Content:
    used_at: float
    size: int
    path: Path


def _read(handle: int | None) -> tuple[int, float]:
    """Bytes and time of the last listing; (0, 0) if they are not known, for example in an empty file."""
    try:
        found = json.loads(os.pread(handle, _LENGTH, 0)) if handle is not None else {}
        return max(int(found["bytes"]), 0), float(found["listed"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0, 0.0


def _listed(root: Path) -> Iterator[_Content]:
    """The parts of all experiments. Removes content that no client links to, and files of killed processes.

    A link whose content has no name any more (a process was killed while it removed both) gets one again, so that the
    part is counted, and removed in its turn. On a file system without hard links they are copies, which are counted,
    too.
    """
    for folder in root.glob(f"*/{CONTENT}"):
        remove_unfinished(folder)
        links: dict[str, list[Path]] = {}
        for link in _links(folder.parent):
            links.setdefault(content_of(link.name), []).append(link)
        before = time.time() - _BETWEEN
        for path, found in _scanned(folder):
            if path.name not in links and max(found.st_mtime, found.st_ctime) < before:
                _unlink(path)
                continue
            some = links.pop(path.name, [])
            files = 1 + len(some) if found.st_nlink == 1 else 1
            yield _Content(found.st_mtime, files * found.st_size, path)
        for name, some in links.items():
            with contextlib.suppress(OSError):  # removed
                found, files = some[0].stat(), len(some)
                with contextlib.suppress(OSError):
                    os.link(some[0], folder / name)
                    files = 1
                yield _Content(found.st_mtime, files * found.st_size, folder / name)


def _scanned(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):  # removed during the listing
                    yield Path(entry.path), entry.stat()


def _links(experiment: Path) -> list[Path]:
    """All clients' links. Folders that are removed during the listing have none."""
    found: list[Path] = []
    for client in _children(experiment / CLIENTS):
        found += (link for link in _children(client) if "@" in link.name and link.name.endswith(SUFFIX))
    return found


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
