"""The client's cache: parts as safetensors files, named by content digest.

    <root>/<experiment>/content/<part id>.safetensors          the values, once for all clients on this machine
    <root>/<experiment>/clients/<name>/<tree>.<block>@<part id>.safetensors    a hard link: this client's copy
    <root>/<experiment>/layout-<id>.json                       see `tepal.exchange.layouts`
    <root>/<experiment>/personal/<name>/                       see `tepal.exchange.personal`
    <root>/secret                                              see `tepal.exchange.secret`

A client caches at most one part of a block of a tree: a newer one replaces the older one. Content that no client uses
any more has a link count of one. Files are written under another name and renamed. A damaged file does not match its
entries' digests; it is removed, and the server sends the part again.

Several processes may share a folder and its limit (see `cache_usage`): each makes room before it writes a part. The
files that are being written are in addition to the limit for an instant, one for each process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.exchange.cache_usage import CLIENTS, CONTENT, content_of, usage_of
from tepal.exchange.files import (
    LONGEST_LABEL,
    SUFFIX,
    DamagedFile,
    file_name,
    listed_digests,
    map_arrays,
    read_arrays,
    remove_unfinished,
    shortened,
    write_arrays,
)
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.layouts import LAYOUT, folder_of
from tepal.exchange.parts import Digests, Part, digests_of
from tepal.host.files import replacing

log = getLogger("flwr")

DEFAULT_LIMIT = 8_000_000_000
"""Bytes on disk over all experiments and clients of one cache folder."""

ENDED = 30 * 86_400.0
"""Seconds without a change after which a run's personal state may be removed: a stopped node may be resumed before."""

_WAITING = "waiting."
_PERSONAL = "personal"
_HEADER = 300  # approximate bytes of one entry's description in a file: its name (twice), shape and digest
_ATTEMPTS = 10


def default_root() -> Path:
    """The cache folder: `$TEPAL_CACHE`, otherwise `tepal` in the user's cache folder."""
    if root := os.environ.get("TEPAL_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tepal"


class ClientCache:
    """The cached parts of one client in one experiment.

    If the cache cannot be written (full disk, read-only folder), this is logged, and training goes on: the server sends
    what is not cached.
    """

    def __init__(self, root: Path, experiment: str, client: str, limit: int = DEFAULT_LIMIT) -> None:
        self.root = root
        self.limit = limit
        own = folder_of(root, experiment)
        self._content = own / CONTENT
        self._links = own / CLIENTS / file_name(shortened(client))
        self.personal = own / _PERSONAL / file_name(shortened(client))
        """The folder of this client's personal state, which has no size limit; see `drop_ended`."""
        self.secret = root / "secret"
        """The file from which clients' secrets are derived, see `tepal.exchange.secret`."""
        self.notes: list[str] = []
        """Problems, for the server's log."""

    def holds(self) -> Names:
        """Ids of the cached parts, without those of an exchange that waits for a resend."""
        return tuple(sorted({_id_of(link) for link in self._held() if not link.name.startswith(_WAITING)}))

    def has(self, tree: str, block: str) -> bool:
        """Whether a part of this block of a tree is cached."""
        return any(link.name.startswith(f"{_slot(tree, block)}@") for link in self._held())

    def find(self, part: Part) -> dict[str, np.ndarray]:
        """The entries of `part`; {} if it is not cached, or if its file is damaged, which is then removed."""
        if (link := self._link(part.id)) is None:
            return {}
        try:
            listed = listed_digests(link)
            if part.right(listed) != part.names:
                raise DamagedFile("its content is not what its name says")
            stored = read_arrays(link, listed)
        except FileNotFoundError:  # another process has removed it to make room
            return {}
        except (OSError, DamagedFile) as error:
            self._drop_damaged(link, part.block, str(error))
            return {}
        with contextlib.suppress(OSError):
            os.utime(link)
        return stored

    def base(self, id: str, like: Part) -> dict[str, np.ndarray]:
        """The entries of the cached part of this id, which has the same entries as `like`; {} as in `find`."""
        if (link := self._link(id)) is None:
            return {}
        try:
            mapped = map_arrays(link)
            found = {name: mapped[name][0] for name in like.names}
            if like.with_digests(digests_of(found)).id != id:
                raise DamagedFile("its content is not what its name says")
        except FileNotFoundError:
            return {}
        except (OSError, DamagedFile, KeyError) as error:
            self._drop_damaged(link, like.block, str(error))
            return {}
        return found

    def _link(self, id: str) -> Path | None:
        return next((link for link in self._held() if _id_of(link) == id), None)

    def keep(self, part: Part, values: Arrays, *, waiting: bool = False) -> None:
        """Cache a complete part in place of an older one of the same block.

        `waiting`: only until the server has sent the entries that the part's message lacks.
        """
        slot = _WAITING * waiting + _slot(part.tree, part.block)
        link = self._links / f"{slot}@{part.id}{SUFFIX}"
        try:
            if not link.exists():
                self._store(link, {name: values[name] for name in part.names}, part.digest_of)
        except (OSError, ValueError) as error:  # a full disk, or a name that the format does not allow
            self._note(f"block {part.block!r} cannot be cached in {self.root}: {error}")
            return
        self._unlink(old for old in self._held() if old.name.startswith(f"{slot}@") and old != link)

    def drop_waiting(self) -> None:
        """Remove the parts that were cached as `waiting`."""
        self._unlink(link for link in self._held() if link.name.startswith(_WAITING))

    def drop_ended(self) -> None:
        """Remove this client's personal state of other experiments in which nothing has changed for `ENDED`."""
        before = time.time() - ENDED
        for folder in self.root.glob(f"*/{_PERSONAL}/{self.personal.name}"):
            with contextlib.suppress(OSError):  # another process may remove the folder
                if folder == self.personal or folder.stat().st_mtime >= before:
                    continue
                remove_unfinished(folder)
                for file in folder.glob(f"*-*{SUFFIX}"):
                    file.unlink()
                for empty in (folder, folder.parent, folder.parent.parent):
                    empty.rmdir()

    def _held(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from list(self._links.glob(f"*@*{SUFFIX}"))

    def _store(self, link: Path, values: Arrays, digest_of: Mapping[str, bytes]) -> None:
        """Link to the content, which is written if it does not exist. Raises OSError."""
        content = self._content / content_of(link.name)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                for folder in (self._content, self._links):
                    folder.mkdir(parents=True, exist_ok=True)
                with usage_of(self.root) as usage:
                    if content.exists():
                        return _link(content, link)
                    expected = sum(array.nbytes + _HEADER for array in values.values())
                    usage.make_room(expected, self.limit)
                return self._write(content, link, values, digest_of, expected)
            except (FileNotFoundError, FileExistsError):  # another process has removed the folder or the content
                if attempt == _ATTEMPTS:
                    raise

    def _write(
        self, content: Path, link: Path, values: Arrays, digest_of: Mapping[str, bytes], expected: int
    ) -> None:
        """Write content and link to it. `expected`: the bytes that are already counted for it."""
        with contextlib.ExitStack() as published:
            # If another process has written the same content in the meantime, its file stays: clients may already
            # link to it.
            with replacing(content, overwrite=False) as partial:
                # Not durable: a file that a crash damages is found by its digests, and sent again.
                digests = Digests()
                for name, array in values.items():
                    digests.know(array, digest_of[name])
                write_arrays(partial, values, durable=False, digests=digests)
                size = partial.stat().st_size
                usage = published.enter_context(usage_of(self.root))
                usage.nbytes += (0 if content.exists() else size) - expected
            _link(content, link)

    def _unlink(self, links: Iterable[Path]) -> None:
        """Remove links of this client to parts, and the content to which no other client links."""
        if not (found := list(links)):
            return
        with usage_of(self.root) as usage:
            for link in found:
                with contextlib.suppress(OSError):
                    link.unlink()
                    content = self._content / content_of(link.name)
                    if content.stat().st_nlink == 1:
                        usage.remove(content)

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self.notes.append(text)

    def _drop_damaged(self, link: Path, block: str, reason: str) -> None:
        self._note(f"block {block!r} is removed from the cache and will be sent again: {link}: {reason}")
        with usage_of(self.root) as usage:
            with contextlib.suppress(OSError):
                content = self._content / content_of(link.name)
                # With one link it is no client's, or the file system has no hard links, and `link` is a copy of it.
                if content.samefile(link) or content.stat().st_nlink == 1:
                    usage.remove(content)
            with contextlib.suppress(OSError):
                link.unlink()


def forget_parts(experiment: Path) -> None:
    """Remove parts and layouts of an experiment (a folder in a cache's root). The clients' personal state stays."""
    with usage_of(experiment.parent) as usage:
        for name in (CONTENT, CLIENTS):
            shutil.rmtree(experiment / name, ignore_errors=True)
        usage.listed = 0.0  # so that the next write lists the folder
    for file in experiment.glob(LAYOUT):
        with contextlib.suppress(OSError):
            file.unlink()
    with contextlib.suppress(OSError):  # it is not empty if there is personal state
        experiment.rmdir()


def _slot(tree: str, block: str) -> str:
    return ".".join(file_name(shortened(label, LONGEST_LABEL)) for label in (tree, block))


def _id_of(link: Path) -> str:
    return content_of(link.name).removesuffix(SUFFIX)


def _link(content: Path, link: Path) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            os.link(content, link)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links, or one with too many to this file
        with replacing(link) as partial:
            shutil.copyfile(content, partial)
