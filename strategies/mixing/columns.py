"""Models as an array or in a store, read by blocks of columns, and work on these blocks on all cores."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

_BLOCK = 1 << 24  # bytes: a block of this size is large enough for the matrix product and small beside any model
_WORKERS = 8  # blocks in work at a time, on as many cores
_CHUNK = 1 << 10, 1 << 16  # parameters: fewer make many short reads, more add up too much in float32


class Models(Protocol):
    """n models of P floating-point numbers, a row each."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, P)"""
        ...

    def block(self, start: int, stop: int) -> np.ndarray:
        """Columns start … stop−1 of all models, (n, stop − start). Several threads ask at once."""
        ...


class _InMemory:
    """An array as `Models`."""

    def __init__(self, array: np.ndarray) -> None:
        if array.ndim != 2:
            raise ValueError(f"models have the shape {array.shape}; they must be 2-D, a row each")
        self._array = array
        self.shape: tuple[int, int] = array.shape

    def block(self, start: int, stop: int) -> np.ndarray:
        return self._array[:, start:stop]


def as_models(models: Models | np.ndarray) -> Models:
    if isinstance(models, np.ndarray):
        models = _InMemory(models)
    if not models.shape[0]:
        raise ValueError("there are 0 models; there must be at least 1")
    if dtype_of(models).kind != "f":
        raise ValueError(f"models are {dtype_of(models)}; they must be floating-point, for means are")
    return models


def dtype_of(models: Models) -> np.dtype:
    return models.block(0, 0).dtype


def wide(block: np.ndarray) -> np.ndarray:
    """What products are computed in: float16 would be slow and overflow."""
    return block.astype(np.result_type(block.dtype, np.float32), copy=False)


def chunk_of(models: Models, chunk: int | None) -> int:
    if chunk is None:
        fitting = _BLOCK // (models.shape[0] * dtype_of(models).itemsize)
        return min(max(fitting, _CHUNK[0]), _CHUNK[1])
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 parameter")
    return chunk


def chunks_of(models: Models, width: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    step = chunk_of(models, chunk)
    return ((start, min(start + step, width)) for start in range(0, width, step))


def in_order(
    work: Callable[[int, int], np.ndarray], chunks: Iterable[tuple[int, int]]
) -> Iterator[np.ndarray]:
    """`work` of every chunk, in the order of the chunks, on all cores and a few chunks ahead.

    Each core has chunks of its own, and BLAS one thread: threads that share a product wait for each other at every step
    of it, many times as long as it takes where something else runs on the machine.
    """
    workers = min(os.cpu_count() or 1, _WORKERS)
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(workers, "mixing") as pool:
        ahead: deque[Future[np.ndarray]] = deque()
        for start, stop in chunks:
            ahead.append(pool.submit(work, start, stop))
            if len(ahead) > workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def checked_rows(rows: Iterable[int], n: int) -> np.ndarray:
    chosen = np.array([operator.index(row) for row in rows], dtype=np.intp)
    wrong = chosen[(chosen < 0) | (chosen >= n)]
    if wrong.size:
        raise ValueError(f"row {wrong[0]} is out of range; rows of {n} models are 0 … {n - 1}")
    return chosen


def checked_counted(counted: int | None, width: int) -> int:
    if counted is None:
        return width
    if not 0 <= counted <= width:
        raise ValueError(f"counted is {counted}; it must be 0 … {width}, the number of parameters of a model")
    return counted
