"""Files that jobs read: the code, apps, data sets, pretrained weights. A machine keeps them by their digest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import tepal
from tepal.host.superlink import stage_app
from tepal.tools.cluster.machine import Size, digest_of, files_below, size_of

_LEFT_OUT = ("__pycache__", "*.pyc")


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
        self.code = _code(self._copy("code"))

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def of_app(self, app: Path) -> Input:
        """The files of an app's bundle."""
        return self._read("app", app, self._of_app)

    def of(self, path: Path) -> Input:
        """A file or a folder, by its own name. Raises OSError if it cannot be read."""
        return self._read("", path, _of)

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
        return _input(files_below(copy), "the app")


def _of(path: Path) -> Input:
    files = {path.name: path} if path.is_file() else {
        f"{path.name}/{name}": file for name, file in files_below(path).items()
    }  # fmt: skip
    if not files:
        raise FileNotFoundError(f"{path} is empty, or is no file or folder")
    return _input(files, path.name, path.name)


def _code(copy: Path) -> Input:
    """The package `tepal`."""
    package = Path(tepal.__file__).parent
    shutil.copytree(package, copy / "tepal", ignore=shutil.ignore_patterns(*_LEFT_OUT))
    return _input(files_below(copy), "the code")


def _input(files: Mapping[str, Path], what: str, entry: str = "") -> Input:
    return Input(digest_of(files), files, what, entry)
