"""Files that appear whole, and locks between processes.

Imports nothing of this project: of this folder, the app bundle has only this file, `text.py`, `toml.py` and `flower/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

_PARTIAL = ".writing-"  # how the names of files begin that are being written
ABANDONED = 3600.0
"""Seconds without a change after which a file that was being written was left by a process that was killed."""
_RETRY = 0.0005, 0.02  # seconds between the first two attempts to get a lock, doubled up to the second number


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, overwrite: bool = True) -> Iterator[Path]:
    """Yield the path of a new file in the same folder, and rename that file to `path` at the end of the block.

    Readers see the old file or the new one, never a part. After an exception the new file is removed and `path` stays
    as it was. Writers in several threads or processes may replace one file at the same time: the last one wins.

    Args:
        path: the file to write, or a symbolic link to make.
        durable: wait until content and name are on the disk.
        overwrite: replace a file that exists; otherwise that file stays, where the file system has hard links.
    """
    partial = path.with_name(f"{_PARTIAL}{os.urandom(8).hex()}")
    try:
        yield partial
        if durable:
            _sync(partial)
        if overwrite or not _linked(partial, path):
            os.replace(partial, path)
        if durable:
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def remove_abandoned(folder: Path, *others: str, after: float = ABANDONED) -> None:
    """Remove the files that `replacing` left in this folder because its process was killed.

    Args:
        folder: where it was writing.
        others: patterns of the names of more files that are being written.
        after: seconds without a change after which a file is removed.
    """
    before = time.time() - after
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # another process may be removing the folder
        for entry in entries:
            if any(fnmatch(entry.name, pattern) for pattern in (f"{_PARTIAL}*", *others)):
                with contextlib.suppress(OSError):  # another process may have finished the file
                    if entry.stat(follow_symlinks=False).st_mtime <= before:
                        os.unlink(entry.path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in this folder are on the disk."""
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        _sync(folder)


def new_log(name: str) -> Path:
    """Make an empty file `tepal-<name>-….log` in the system's temporary folder."""
    with tempfile.NamedTemporaryFile(prefix=f"tepal-{name}-", suffix=".log", delete=False) as file:
        return Path(file.name)


@contextlib.contextmanager
def locked(path: Path, refusal: Exception, *, patience: float = 0.0) -> Iterator[None]:
    """Lock an existing file or folder until the block ends, or this process and its forked children end.

    The lock is advisory (`flock`): it excludes only those that lock the same path. It creates no file.

    Raises `refusal` when another process still has the lock after `patience` seconds.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # NFS locks a file that is open for writing
    try:
        give_up = time.monotonic() + patience
        pause, longest = _RETRY
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= give_up:
                    raise refusal from error
                time.sleep(pause)
                pause = min(2 * pause, longest)
        yield
        fcntl.flock(handle, fcntl.LOCK_UN)  # also for a child that another thread has forked
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether another process has locked this path. The check itself takes a shared lock for an instant."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _linked(partial: Path, path: Path) -> bool:
    """Give the file the name `path` unless a file has it; False on a file system without hard links."""
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:
        return False
    return True
