"""Processes in which trials are computed at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process

from tepal.host.processes import ProcessError


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes with one thread each. They end with the block, and with this process.

    Raises ProcessError if one of them ends before: then the others are stopped.
    """
    with _one_thread_each(), ProcessPoolExecutor(count, get_context("spawn"), _start_worker) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise ProcessError(
                "the process of a trial has ended, most likely killed because the memory ran out: lower --at-once, "
                f"which is {count}. What is computed is kept: the same command goes on with the rest"
            ) from error


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started in a block have one thread for numerical work: also in threads that torch does not
    know, and in NumPy's libraries. More would wait for one another actively, and slow all processes down."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _start_worker() -> None:
    """Use one thread in a process of the pool, and end the process when its parent has ended."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
