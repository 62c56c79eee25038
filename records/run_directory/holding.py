"""Locks that keep a folder from other processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_A_LOOK = 0.2  # seconds in which `is_held` lets a folder go


class RunInUse(RuntimeError):
    """Another process runs in this run directory."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder from other processes that hold it, too, until the block or this process ends. Raises RunInUse."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        give_up = time.monotonic() + _A_LOOK
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise RunInUse(f"{folder} belongs to a run that has not ended; stop that one first") from error
                time.sleep(_A_LOOK / 10)  # `is_held` has it for an instant
        yield
    finally:
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether a process that has not ended holds a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Shared: those who look do not take each other for a run.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
