"""The lock of a run directory: only one process runs in it, and others can ask whether one does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from tepal.host.files import is_locked as is_held
from tepal.host.files import locked

__all__ = ["RunInUse", "held", "is_held"]

_PATIENCE = 0.2  # seconds to wait, because `is_held` has the lock for an instant


class RunInUse(RuntimeError):
    """Another process runs in this run directory."""


def held(folder: Path) -> AbstractContextManager[None]:
    """Lock a run directory until the block or this process ends. Raises RunInUse if another process has the lock."""
    refusal = RunInUse(f"{folder} belongs to a run that has not ended; stop that one first")
    return locked(folder, refusal, patience=_PATIENCE)
