"""What an encoding of one matrix must do, and what several of them need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

CHUNK = 1 << 18
"""Elements that are processed at once, so that scratch arrays stay small."""

LARGEST = float(np.finfo(np.float32).max)


class EncodingError(ValueError):
    """Values that an encoding cannot represent; the text has the values and what to do."""


class Codec(Protocol):
    """An encoding of one matrix."""

    width: int
    """Bytes of the widest item."""

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes | memoryview:
        """Encode float32 values with at least one axis. `random`: generator for rounding at random, where it can."""

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        """Bytes at the beginning of `data` that encode a matrix of this shape. Raises ValueError if there are none."""

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """Decode exactly these bytes to a new float32 array. Raises ValueError for bytes that stand for no values."""


def bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def chunks(rows: int, width: int = 1) -> Iterator[slice]:
    """Slices of rows of `width` elements each."""
    several = max(CHUNK // max(width, 1), 1)
    return (slice(start, start + several) for start in range(0, rows, several))


def sides_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """The sides of an array as a matrix: rows (first axis), and the number of values in a row."""
    return shape[0], math.prod(shape[1:])


def rows_of(values: np.ndarray) -> np.ndarray:
    """The values as a matrix with the rows of the first axis."""
    return values.reshape(sides_of(values.shape))


def read_scales(data: memoryview, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The float32 scale of each row (first axis) at the beginning of `data`, and the bytes after them."""
    count = 4 * shape[0]
    return np.frombuffer(data[:count], "<f4").astype(np.float32), np.frombuffer(data[count:], np.uint8)


def scaled(whole: np.ndarray, scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 array of a shape whose values are small integers (int8, flat) in units of their row's scale."""
    rows = whole.reshape(sides_of(shape))
    values = np.empty(rows.shape, np.float32)
    with np.errstate(all="ignore"):  # the scales come from the other side
        for part in chunks(*rows.shape):
            np.multiply(rows[part], scales[part, None], out=values[part], dtype=np.float32)
    return values.reshape(shape)
