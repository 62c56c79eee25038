"""Files that jobs read: the code, apps, data sets, pretrained weights. A machine keeps them by their digest."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tepal
from tepal.host.superlink import stage_app
from tepal.tools.cluster.machine import digest_of, files_below

_LEFT_OUT = ("__pycache__", ".pyc")


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
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


class Inputs:
    """The inputs of a command, each read once. A context manager, which removes the copies that it makes of apps."""

    def __init__(self) -> None:
        self._copies = ExitStack()
        self.code = _code()

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    @lru_cache  # noqa: B019 - one object for a command
    def of_app(self, app: Path) -> Input:
        """The files of an app's bundle."""
        copy = Path(self._copies.enter_context(tempfile.TemporaryDirectory(prefix="tepal-app-")))
        stage_app(app, copy)
        return _input(files_below(copy), "the app")

    @lru_cache  # noqa: B019
    def of(self, path: Path) -> Input:
        """A file or a folder, by its own name. Raises OSError if it cannot be read."""
        files = {path.name: path} if path.is_file() else {
            f"{path.name}/{name}": file for name, file in files_below(path).items()
        }  # fmt: skip
        if not files:
            raise FileNotFoundError(f"{path} is empty, or is no file or folder")
        return _input(files, path.name, path.name)


def _code() -> Input:
    """The package `tepal`."""
    files = files_below(Path(tepal.__file__).parent)
    kept = {f"tepal/{name}": path for name, path in files.items() if not any(part in name for part in _LEFT_OUT)}
    return _input(kept, "the code")


def _input(files: Mapping[str, Path], what: str, entry: str = "") -> Input:
    return Input(digest_of(files), files, what, entry)
