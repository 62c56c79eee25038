"""Several processors for large arrays: numpy's loops and hashlib let other threads run while they work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

WORTH = 1 << 22
"""Bytes from which on work is shared among threads: below, starting them takes longer."""

_MOST = 4  # they share one memory, which two to four of them keep busy


def in_threads(work: Callable[[T], R], items: Iterable[T], nbytes: int) -> list[R]:
    """`work` of every item, in their order. `nbytes`: of all that is worked on, after which threads are worth it."""
    threads = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST)
    if nbytes < WORTH or threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
