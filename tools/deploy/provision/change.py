"""Changes of a folder that are applied as a whole or not at all: new files are staged, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tepal.host.files import locked
from tepal.host.site import ProvisionError

Tree = dict[str, "bytes | Tree"]
"""Files by name; a folder is a tree."""

_PUBLIC = (".crt", ".pub")  # the server's user can read these also when root has copied them


class Change:
    """The changes of one call to a folder. New files are written to a hidden folder in it; `commit` only renames."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._renames: list[tuple[Path, Path]] = []

    def add(self, target: Path, content: bytes | Tree) -> None:
        """Add a file or folder that does not exist yet."""
        new = self._staged()
        write_tree(new, content, target.suffix)
        self.move(new, target)

    def move(self, source: Path, target: Path) -> None:
        self._renames.append((source, target))

    def replace(self, target: Path, content: bytes, old: Path | None = None) -> None:
        """Replace a file, and keep the present one as `old`, if given, in place of an earlier `old`."""
        if os.path.lexists(target):
            if old is not None and os.path.lexists(old):
                self.move(old, self._staged())
            self.move(target, old or self._staged())
        self.add(target, content)

    def commit(self) -> None:
        done: list[tuple[Path, Path]] = []
        try:
            for source, target in self._renames:
                if os.path.lexists(target):
                    raise ProvisionError(f"{target} exists already and is not replaced: move it away")
                os.rename(source, target)
                done.append((source, target))
        except BaseException:
            for source, target in reversed(done):
                os.rename(target, source)
            raise

    def _staged(self) -> Path:
        return self._staging / secrets.token_hex(8)


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Change]:
    """Change a folder at the end of the block or, after an exception, not at all; one call at a time."""
    refusal = ProvisionError(f"another `tepal provision` is changing {folder}: try again when it has ended")
    with locked(folder, refusal), tempfile.TemporaryDirectory(prefix=".provision-", dir=folder) as staging:
        change = Change(Path(staging))
        yield change
        change.commit()


def write_tree(path: Path, content: bytes | Tree, suffix: str = "") -> None:
    """Write a folder (mode 0700), a certificate or public key (0644) or another file (0600), whatever the umask.

    No other user can read a folder, or a file of mode 0600, at any moment. `suffix`: that of the final name of `path`.
    """
    if isinstance(content, dict):
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        for name, inner in content.items():
            write_tree(path / name, inner)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        # The umask may have removed more rights.
        os.fchmod(descriptor, 0o644 if (suffix or path.suffix) in _PUBLIC else 0o600)
        file.write(content)
