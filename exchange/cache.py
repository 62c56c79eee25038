"""The client's cache: parts as safetensors files, named by content digest.

    <root>/<experiment>/content/<part id>.safetensors          the values, once for all clients on this machine
    <root>/<experiment>/clients/<name>/<tree>.<block>@<part id>.safetensors    a hard link: this client's copy
    <root>/<experiment>/personal/<name>/                       see `tepal.exchange.personal`

A client caches at most one part of a block of a tree: a newer one replaces the older one. Content that no client uses
any more has a link count of one. Files are written under another name and renamed. A damaged file does not match its
entries' digests; it is removed, and the server sends the part again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from urllib.parse import quote

import numpy as np

from tepal.exchange.files import SUFFIX, DamagedFile, read_arrays, write_arrays
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.parts import Part
from tepal.host.files import remove_abandoned

log = getLogger("flwr")

DEFAULT_LIMIT = 8_000_000_000
"""Bytes on disk over all experiments and clients of one cache folder."""

_CONTENT, _CLIENTS = "content", "clients"
_WAITING = "waiting."
_HEADER = 300  # approximate bytes of one entry's description in a file: its name (twice), shape and digest
_SLACK = 0.01
"""Share of the limit that a process may write before it lists the cache folder again."""


@dataclass
class _Usage:
    """An estimate of the bytes that all parts in a cache folder use, without a listing for each write.

    If other processes remove parts, the estimate is too high; the folder is listed again when it reaches the limit. If
    they write parts, it is too low. Each process therefore also lists the folder before its own writes since the last
    listing exceed 1 % of the limit. Each other process writes at most as much (or one part, if that is larger) before
    it lists the folder, too: n processes exceed the limit by at most about n %.
    """

    listed: int
    """Bytes after the last listing by this process, and after the removals that it caused."""
    written: int = 0
    """Bytes that this process has written since."""


_usages: dict[Path, _Usage] = {}  # by cache folder
_making_room = threading.Lock()


def default_root() -> Path:
    """The cache folder: `$TEPAL_CACHE`, otherwise `tepal` in the user's cache folder."""
    if root := os.environ.get("TEPAL_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tepal"


def _file_name(text: str) -> str:
    """A file name that is unique to `text`."""
    return quote(text, safe="").replace(".", "%2E")


class ClientCache:
    """The cached parts of one client in one experiment.

    If the cache cannot be written (full disk, read-only folder), this is logged, and training goes on: the server sends
    what is not cached.
    """

    def __init__(self, root: Path, experiment: str, client: str, limit: int = DEFAULT_LIMIT) -> None:
        self.root = root
        self.limit = limit
        self._content = root / _file_name(experiment) / _CONTENT
        self._links = root / _file_name(experiment) / _CLIENTS / _file_name(client)
        self.personal = root / _file_name(experiment) / "personal" / _file_name(client)
        """The folder of this client's personal state, which has no size limit."""
        self.notes: list[str] = []
        """Problems, for the server's log."""

    def holds(self) -> Names:
        """Ids of the cached parts, without those of an exchange that waits for a resend."""
        return tuple(sorted({_id_of(link) for link in self._held() if not link.name.startswith(_WAITING)}))

    def find(self, part: Part) -> dict[str, np.ndarray]:
        """The entries of `part`; {} if it is not cached, or if its file is damaged, which is then removed."""
        link = next((link for link in self._held() if _id_of(link) == part.id), None)
        if link is None:
            return {}
        try:
            stored = read_arrays(link, part.digest_of)
        except FileNotFoundError:  # another process has removed it to make room
            return {}
        except (OSError, DamagedFile) as error:
            self._drop_damaged(link, part.block, str(error))
            return {}
        with contextlib.suppress(OSError):
            os.utime(link)
        return stored

    def keep(self, part: Part, values: Arrays, *, waiting: bool = False) -> None:
        """Cache a complete part in place of an older one of the same block.

        `waiting`: only until the server has sent the entries that the part's message lacks.
        """
        slot = f"{_WAITING * waiting}{_file_name(part.tree)}.{_file_name(part.block)}"
        link = self._links / f"{slot}@{part.id}{SUFFIX}"
        try:
            content = self._content / f"{part.id}{SUFFIX}"
            self._links.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                for _ in range(3):  # another process may remove content without links between the two steps
                    if not content.exists():
                        self._write(content, {name: values[name] for name in part.names})
                    with contextlib.suppress(FileNotFoundError):
                        _link(content, link)
                        break
        except OSError as error:
            self._note(f"block {part.block!r} cannot be cached in {self.root}: {error}")
            return
        for old in self._held():
            if old.name.startswith(f"{slot}@") and old != link:
                self._unlink(old)

    def drop_waiting(self) -> None:
        """Remove the parts that were cached as `waiting`."""
        for link in self._held():
            if link.name.startswith(_WAITING):
                self._unlink(link)

    def _held(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from list(self._links.glob(f"*@*{SUFFIX}"))

    def _write(self, path: Path, values: Arrays) -> None:
        self._make_room(sum(array.nbytes + _HEADER for array in values.values()))
        # Not durable: a file that a crash damages is found by its digests, and sent again. If another process has
        # written the same content in the meantime, its file stays: clients may already link to it.
        write_arrays(path, values, durable=False, replace=False)

    def _unlink(self, link: Path) -> None:
        """Remove a client's link to a part, and the content if no other client links to it."""
        with contextlib.suppress(OSError):
            link.unlink()
            content = self._content / f"{_id_of(link)}{SUFFIX}"
            if content.stat().st_nlink == 1:
                content.unlink()

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self.notes.append(text)

    def _drop_damaged(self, link: Path, block: str, reason: str) -> None:
        self._note(f"block {block!r} is removed from the cache and will be sent again: {link}: {reason}")
        with contextlib.suppress(OSError):
            content = self._content / f"{_id_of(link)}{SUFFIX}"
            if content.samefile(link):
                content.unlink()
        with contextlib.suppress(OSError):
            link.unlink()

    def _make_room(self, nbytes: int) -> None:
        """Ensure that `nbytes` more are within the limit, by this process's estimate (see `_Usage`)."""
        root = self.root.absolute()
        with _making_room:
            usage = _usages.get(root)
            allowed = 0.0 if usage is None else min(_SLACK * self.limit, self.limit - usage.listed)
            if usage is None or usage.written + nbytes > allowed:
                usage = _usages[root] = _Usage(self._evict(nbytes))
            usage.written += nbytes

    def _evict(self, nbytes: int) -> int:
        """Make room for `nbytes` more if they would exceed the limit; return the bytes that all parts then use.

        The least recently used parts of all experiments are removed, until 1 % of the limit is free in addition, so
        that the next write does not list the folder again.
        """
        contents = sorted(_contents(self.root))
        used = sum(size for _, size, _ in contents)
        if used + nbytes <= self.limit:
            return used
        dropped: dict[Path, set[str]] = {}  # by experiment
        for _, size, content in contents:
            if used + nbytes <= (1 - _SLACK) * self.limit:
                break
            used -= size
            dropped.setdefault(content.parent.parent, set()).add(content.name)
        for experiment, names in dropped.items():
            text = "The client's cache has reached its limit of %d bytes and removes %d parts of %s."
            log.info(text, self.limit, len(names), experiment.name)
            for name in names:  # first, so that no client links to it after the links are listed
                (experiment / _CONTENT / name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # `forget_parts` removes folders at the same time
                for link in experiment.glob(f"{_CLIENTS}/*/*@*{SUFFIX}"):
                    if f"{_id_of(link)}{SUFFIX}" in names:
                        link.unlink(missing_ok=True)
        return used


def _contents(root: Path) -> Iterator[tuple[float, int, Path]]:
    """(time of last use, bytes, path) of the parts of all experiments, without those removed during the listing."""
    for folder in root.glob(f"*/{_CONTENT}"):
        remove_abandoned(folder)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(OSError):
                        found = entry.stat()
                        yield found.st_mtime, found.st_size, folder / entry.name


def forget_parts(experiment: Path) -> None:
    """Remove all parts of an experiment (a folder in a cache's root). The clients' personal state stays."""
    for name in (_CONTENT, _CLIENTS):
        shutil.rmtree(experiment / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty if there is personal state
        experiment.rmdir()


def _id_of(link: Path) -> str:
    return link.name.rpartition("@")[2].removesuffix(SUFFIX)


def _link(content: Path, link: Path) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            os.link(content, link)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(content, link)
