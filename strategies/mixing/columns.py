"""Models as an array or in a store, which are read and processed by blocks of columns, on all cores."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

_BLOCK = 1 << 24  # bytes of a block: enough for a fast matrix product, and little compared with n models
_WORKERS = 8  # blocks that are processed at a time, on as many cores
_CHUNK = 1 << 10, 1 << 16  # least and most parameters of a block: fewer need many reads, more lose digits in float32


class Models(Protocol):
    """n models of P floating-point numbers, a row each."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, P)"""
        ...

    def block(self, start: int, stop: int) -> np.ndarray:
        """Columns start … stop−1 of all models, (n, stop − start). Called by several threads at once."""
        ...


class _InMemory:
    """An array as `Models`."""

    def __init__(self, array: np.ndarray) -> None:
        if array.ndim != 2:
            raise ValueError(f"models have the shape {array.shape}; they must be 2-D, with one model a row")
        self._array = array
        self.shape: tuple[int, int] = array.shape

    def block(self, start: int, stop: int) -> np.ndarray:
        return self._array[:, start:stop]


def as_models(models: Models | np.ndarray) -> Models:
    """Models with the interface `Models`. Raises ValueError if there are none, or if they are not floating-point."""
    if isinstance(models, np.ndarray):
        models = _InMemory(models)
    if not models.shape[0]:
        raise ValueError("there are 0 models; there must be at least 1")
    if dtype_of(models).kind != "f":
        raise ValueError(f"models are {dtype_of(models)}; they must be floating-point, as their means are")
    return models


def dtype_of(models: Models) -> np.dtype:
    return models.block(0, 0).dtype


def wide(block: np.ndarray) -> np.ndarray:
    """The block in the dtype in which products are computed: float16 would be slow and overflow."""
    return block.astype(np.result_type(block.dtype, np.float32), copy=False)


def chunk_of(models: Models, chunk: int | None) -> int:
    """Parameters of a block: `chunk`, or as many as blocks of about 16 MB have. Raises ValueError if it is below 1."""
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
    """Results of `work` for every chunk, in the order of the chunks, computed on all cores and a few chunks ahead.

    Each core computes whole chunks, and BLAS uses one thread: threads that share a product wait for each other at every
    step, which takes many times as long on a loaded machine.
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
