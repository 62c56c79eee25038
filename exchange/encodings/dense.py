"""Codecs with one to four bytes for each value: float32, float16, bfloat16, int8."""

from __future__ import annotations

import math

import numpy as np

from tepal.exchange.encodings.codec import EncodingError, bytes_of, chunks, read_scales, rows_of, scaled


class _FixedWidth:
    """Base of codecs with the same number of bytes, of a NumPy dtype, for each value."""

    width: int
    dtype: str

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        return self.width * math.prod(shape)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(data, self.dtype).astype(np.float32).reshape(shape)


class Float32(_FixedWidth):
    width, dtype = 4, "<f4"

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> memoryview:
        return bytes_of(np.ascontiguousarray(values, self.dtype))


class Float16(_FixedWidth):
    width, dtype = 2, "<f2"

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> memoryview:
        with np.errstate(over="ignore"):
            half = values.astype(self.dtype)
        if np.isinf(half).any() and np.isfinite(values).all():
            raise EncodingError(
                f"it has values up to {np.abs(values).max():.3g}, but the largest of float16 is 65504: choose bfloat16"
            )
        return bytes_of(np.ascontiguousarray(half))


_INFINITY, _OVERFLOWS = 0x7F800000, 0x7F7F8000  # bits of float32: infinity, and the least that is rounded to it


class BFloat16(_FixedWidth):
    """The upper half of a float32, rounded to nearest, ties to even."""

    width, dtype = 2, "<u2"

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> memoryview:
        bits = np.ascontiguousarray(values, "<f4").reshape(-1).view("<u4")
        upper = np.empty(bits.size, self.dtype)
        largest = 0
        for part in chunks(bits.size):
            some = bits[part]
            odd = some >> 16
            odd &= 1
            odd += 0x7FFF
            odd += some
            odd >>= 16
            upper[part] = odd
            magnitude = some & 0x7FFFFFFF
            upper[part][magnitude > _INFINITY] = 0x7FC0  # NaN: adding may have changed it
            largest = max(largest, int(magnitude.max()))
        if _OVERFLOWS <= largest < _INFINITY:
            raise EncodingError(
                f"it has values up to {np.abs(values).max():.4g}, but bfloat16 represents values up to "
                "3.39e+38: choose float32"
            )
        return bytes_of(upper)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        bits = np.frombuffer(data, self.dtype).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(shape)


class Int8:
    """A scale for each row, then all integers, from -127 to 127 in units of max|row| / 127."""

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        return b"".join(map(bytes_of, in_steps(values, 127, random)))

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        return 4 * shape[0] + math.prod(shape)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        scales, whole = read_scales(data, shape)
        return scaled(whole.view(np.int8), scales, shape)


def in_steps(values: np.ndarray, most: int, random: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
    """Round each row (first axis) to integers from -most to most, in units of max|row| / most.

    Args:
        values: float32, with at least one axis.
        most: the largest integer, up to 127.
        random: generator for rounding at random, which is unbiased; None: to the nearest.

    Returns:
        The scales (rows,) and the integers (rows, elements of a row), int8. A row with a value that is not finite has
        the scale NaN, and is decoded as NaN.
    """
    rows = rows_of(values)
    scales = np.zeros(len(rows), "<f4")
    whole = np.zeros(rows.shape, np.int8)
    largest_scale = np.nextafter(np.finfo(np.float32).max / np.float32(most), np.float32(0))  # `most` times: finite
    for part in chunks(*rows.shape):
        some = rows[part]
        largest = np.abs(some).max(axis=1, initial=0.0)
        scale = np.where(np.isfinite(largest), np.minimum(largest / np.float32(most), largest_scale), np.nan)
        scales[part] = scale
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = some / scale[:, None]
        if random is None:
            np.rint(steps, out=steps)
        else:
            steps += random.random(steps.shape, np.float32)
            np.floor(steps, out=steps)
        # For rows of zeros, rows that are not finite, and scales so small that they have few bits.
        np.nan_to_num(steps, copy=False, posinf=0, neginf=0)
        whole[part] = np.clip(steps, -most, most, out=steps)
    return scales, whole
