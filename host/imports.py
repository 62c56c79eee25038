"""Imports without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Imports make a million objects, none of which is garbage: to look through them again and again takes a third of the
    time of importing PyTorch and what belongs to it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
