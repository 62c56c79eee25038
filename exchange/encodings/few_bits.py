"""Codecs with less than a byte for each value: int4, ternary, sign. Each row (first axis) has a float32 scale.

They are for differences with error feedback: without a generator, what they leave out of a row is less than the row
itself (a contraction), and is added to the next difference.
"""

from __future__ import annotations

import math

import numpy as np

from tepal.exchange.encodings.codec import bytes_of, chunks, read_scales, rows_of, scaled
from tepal.exchange.encodings.dense import in_steps

_TRITS = 5  # in a byte: 3⁵ = 243
_POWERS = tuple(3**place for place in range(_TRITS))
_OF_BYTE = np.array([[byte // power % 3 - 1 for power in _POWERS] for byte in range(256)], np.int8)
_SHARE = 0.7  # of the mean magnitude: above it a value counts (Li and Liu 2016, arXiv:1605.04711)


class Int4:
    """Integers from -7 to 7 in units of max|row| / 7, two in a byte, the first in the lower half."""

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        scales, whole = in_steps(values, 7, random)
        return b"".join([bytes_of(scales), bytes_of(in_halves(whole))])

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        return 4 * shape[0] + -(-math.prod(shape) // 2)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        scales, packed = read_scales(data, shape)
        return scaled(from_halves(packed, math.prod(shape)), scales, shape)


class Ternary:
    """-1, 0 or 1 in units of the row's scale, five in a byte.

    Without a generator the values count whose magnitude is above 0.7 of the row's mean magnitude, and the scale is the
    mean of theirs, which is best for them. With one it is unbiased, as in TernGrad (Wen et al. 2017, arXiv:1705.07878):
    the scale is max|row|, and a value counts with the probability |value| / scale.
    """

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        rows = rows_of(values)
        scales = np.zeros(len(rows), "<f4")
        trits = np.ones(-(-rows.size // _TRITS) * _TRITS, np.uint8)  # 1 stands for 0
        of_rows = trits[: rows.size].reshape(rows.shape)
        for part in chunks(*rows.shape):
            magnitude = np.abs(rows[part])
            with np.errstate(invalid="ignore", over="ignore"):  # of rows that are not finite
                if random is None:
                    mean = magnitude.sum(axis=1, dtype=np.float64) / max(rows.shape[1], 1)
                    # Rounded down, so that something is kept of every row that is not zero.
                    threshold = np.nextafter((_SHARE * mean).astype(np.float32), np.float32(0))
                    kept = magnitude > threshold[:, None]
                    total = magnitude.sum(axis=1, dtype=np.float64, where=kept)
                    scale = total / np.maximum(np.count_nonzero(kept, axis=1), 1)
                else:
                    scale = magnitude.max(axis=1, initial=0.0)
                    kept = random.random(magnitude.shape, np.float32) * scale[:, None] < magnitude
            scales[part] = _finite(scale, magnitude)
            of_rows[part] += kept & (rows[part] > 0)
            of_rows[part] -= kept & (rows[part] < 0)
        packed = np.zeros(trits.size // _TRITS, np.uint8)
        for place, power in enumerate(_POWERS):
            packed += trits[place::_TRITS] * np.uint8(power)
        return b"".join([bytes_of(scales), bytes_of(packed)])

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        return 4 * shape[0] + -(-math.prod(shape) // _TRITS)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        scales, packed = read_scales(data, shape)
        if packed.size and packed.max() >= 3**_TRITS:
            raise ValueError("it has bytes that five ternary values do not stand for")
        return scaled(_OF_BYTE[packed].reshape(-1)[: math.prod(shape)], scales, shape)


class Sign:
    """The sign of each value, a bit, in units of the row's mean magnitude (Karimireddy et al. 2019, arXiv:1901.09847).

    A 0 has the sign of a positive value.
    """

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        rows = rows_of(values)
        scales = np.zeros(len(rows), "<f4")
        for part in chunks(*rows.shape):
            magnitude = np.abs(rows[part])
            total = magnitude.sum(axis=1, dtype=np.float64)
            scales[part] = _finite(total / max(rows.shape[1], 1), magnitude)
        return b"".join([bytes_of(scales), bytes_of(np.packbits(rows.reshape(-1) >= 0))])

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        return 4 * shape[0] + -(-math.prod(shape) // 8)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        scales, packed = read_scales(data, shape)
        signs = np.unpackbits(packed)[: math.prod(shape)].view(np.int8)
        signs *= 2
        signs -= 1
        return scaled(signs, scales, shape)


def in_halves(whole: np.ndarray) -> np.ndarray:
    """Integers from -7 to 7, two in a byte (uint8), the first in the lower half."""
    halves = np.zeros(-(-whole.size // 2) * 2, np.uint8)
    np.add(whole.reshape(-1), 7, out=halves[: whole.size], casting="unsafe")
    return halves[::2] | halves[1::2] << 4


def from_halves(packed: np.ndarray, size: int) -> np.ndarray:
    """So many integers (int8) from what `in_halves` made of them. Raises ValueError for bytes that it does not make."""
    halves = np.empty((packed.size, 2), np.int8)
    np.bitwise_and(packed, 15, out=halves[:, 0], casting="unsafe")
    np.right_shift(packed, 4, out=halves[:, 1], casting="unsafe")
    if (halves == 15).any():
        raise ValueError("it has numbers that four bits of int4 do not stand for")
    halves -= 7
    return halves.reshape(-1)[:size]


def _finite(scale: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """The scales of rows; NaN for a row with a value that is not finite, which is then decoded as NaN."""
    return np.where(np.isfinite(magnitude).all(axis=1), scale, np.nan)
