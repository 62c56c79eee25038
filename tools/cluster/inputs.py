"""Files that jobs read: the code, apps, data sets, pretrained weights. A machine keeps them by their digest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import tepal
from tepal.exchange.secret import own_secret
from tepal.host.superlink import stage_app
from tepal.tools.cluster.machine import Size, digest_of, files_below, size_of
from tepal.tools.simulation.engine import RunStopped
from tepal.tools.simulation.running import cache_in

_LEFT_OUT = ("__pycache__", "*.pyc")
_PART = 16 * 2**20  # bytes of files in one call


@dataclass(frozen=True)
class Input:
    """Files by their relative paths, with their digest.

    Args:
        digest: see `digest_of`.
        files: relative path → file on this machine.
        what: it is, in messages.
        entry: what a job names: the path of the file or folder in the input; "": all of it.
    """

    digest: str
    files: Mapping[str, Path]
    what: str
    entry: str = ""

    def on(self, store: str) -> str:
        """Its path on a machine whose inputs are in this folder."""
        return str(Path(store) / self.digest / self.entry)

    @property
    def size(self) -> Size:
        return size_of(self.files)


class Inputs:
    """The inputs of a command, each read once. A context manager, which removes the copies that it makes of apps."""

    def __init__(self) -> None:
        self._copies, self._known, self._reading = ExitStack(), dict[tuple[str, Path], Input](), Lock()
        self._sending, self._looking = dict[object, Lock](), Lock()
        self.stopped = Event()
        """Once it is set, no further file is read: large ones take minutes."""
        self.code = self._input(_code(self._copy("code")), "the code")

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def of_app(self, app: Path) -> Input:
        """The files of an app's bundle."""
        return self._read("app", app, self._of_app)

    def of(self, path: Path) -> Input:
        """A file or a folder, by its own name. Raises OSError if it cannot be read."""
        return self._read("", path, self._of)

    def sending(self, place: object) -> Lock:
        """A lock for sending inputs to a machine: a second job waits, and then finds what the first one has sent."""
        with self._looking:
            return self._sending.setdefault(place, Lock())

    def _read(self, kind: str, path: Path, read: Callable[[Path], Input]) -> Input:
        with self._reading:  # jobs in threads ask for the same, and large files take a while
            if (kind, path) not in self._known:
                self._known[kind, path] = read(path)
            return self._known[kind, path]

    def _copy(self, what: str) -> Path:
        """An empty folder for a copy: what is sent later is the same, also if the original is changed meanwhile."""
        return Path(self._copies.enter_context(tempfile.TemporaryDirectory(prefix=f"tepal-{what}-")))

    def _of_app(self, app: Path) -> Input:
        copy = self._copy("app")
        stage_app(app, copy)
        return self._input(files_below(copy), "the app")

    def _of(self, path: Path) -> Input:
        files = {path.name: path} if path.is_file() else {
            f"{path.name}/{name}": file for name, file in files_below(path).items()
        }  # fmt: skip
        if not files:
            raise FileNotFoundError(f"{path} is empty, or is no file or folder")
        return self._input(files, path.name, path.name)

    def _input(self, files: Mapping[str, Path], what: str, entry: str = "") -> Input:
        return Input(digest_of(files, self._look), files, what, entry)

    def _look(self) -> None:
        if self.stopped.is_set():
            raise RunStopped


def _code(copy: Path) -> Mapping[str, Path]:
    """A copy of the package `tepal`."""
    package = Path(tepal.__file__).parent
    shutil.copytree(package, copy / "tepal", ignore=shutil.ignore_patterns(*_LEFT_OUT))
    return files_below(copy)


def caches_for(kept: Path | None, runs: Path) -> Path:
    """The folder of the clients' caches, by default that of the folder `runs`, with the secret of its clients.

    It is sent to machines, so that a client has the same name wherever it trains.
    """
    caches = kept or cache_in(runs)
    with suppress(OSError):  # the clients then note it in the log
        own_secret(caches / "secret", "", "")
    return caches


# --- files in calls -------------------------------------------------------------------------------------------------

Part = tuple[str, int, bytes]
"""A part of a file: name, offset and content."""


def parts_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """A file in parts: offset and content. An empty file has one."""
    with path.open("rb") as file:
        offset = 0
        while (content := file.read(_PART)) or not offset:
            yield offset, content
            offset += len(content)
            if not content:
                return


def calls_of(files: Mapping[str, Path]) -> Iterator[tuple[list[Part], list[str]]]:
    """The parts of files for each call, as many as fit into one, and the files that end with it, in their order.

    An answer takes longer than a small file.
    """
    parts, ended, size = list[Part](), list[str](), 0
    for name, path in files.items():
        for offset, content in parts_of(path):
            if parts and size + len(content) > _PART:
                yield parts, ended
                parts, ended, size = [], [], 0
            parts.append((name, offset, content))
            size += len(content)
        ended.append(name)
    if parts:
        yield parts, ended
