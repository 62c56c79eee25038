"""Threads for work on large arrays: NumPy's loops and hashlib release the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 1 << 17
"""Elements that one operation processes: they fit into the processor's cache."""
PIECE = 1 << 20
"""Elements that a thread processes at a time."""
WORTH = 1 << 22
"""Bytes from which work is shared among threads; for fewer, starting the threads takes longer than they save."""

_MOST = 4  # two to four threads use the whole memory bandwidth


def in_threads(work: Callable[[T], R], items: Iterable[T], nbytes: int) -> list[R]:
    """The results of `work` for all items, in their order. `nbytes`: size of all items, which decides about threads."""
    threads = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST)
    if nbytes < WORTH or threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
