"""Threads for work on large arrays: NumPy's loops and digests release the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import current_thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 1 << 17
"""Elements that one operation processes: they fit into the processor's cache."""
PIECE = 1 << 20
"""Elements that a thread processes at a time."""
WORTH = 1 << 22
"""Bytes from which work is shared among threads; for fewer, starting the threads takes longer than they save."""

_NAME = "arrays"  # of the threads: work in one of them that asks for threads again has none
_MOST = 4  # two to four threads use the whole memory bandwidth


def in_threads(work: Callable[[T], R], items: Iterable[T], nbytes: int) -> list[R]:
    """The results of `work` for all items, in their order. `nbytes`: size of all items, which decides about threads.

    Each thread takes the next item as soon as it has finished one. An item costs no task of the pool: the threads of
    Python run in turn, and each task would have them wait for one another.
    """
    threads = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST)
    if nbytes < WORTH or threads == 1 or current_thread().name.startswith(_NAME):
        return [work(item) for item in items]
    chosen = list(items)
    results: dict[int, R] = {}
    left = iter(range(len(chosen)))

    def work_off() -> None:
        for number in left:
            results[number] = work(chosen[number])

    at_work = [_pool(threads).submit(work_off) for _ in range(threads)]
    try:
        for each in at_work:
            each.result()
    finally:  # after an error, or Ctrl-C: the threads begin nothing more
        for _ in left:
            pass
        wait(at_work)
    return [results[number] for number in range(len(chosen))]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process: starting them takes longer than the work on a small model."""
    return ThreadPoolExecutor(threads, _NAME)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of its parent's threads
