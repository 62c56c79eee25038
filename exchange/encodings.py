"""Encodings of values in messages, unchanged or in fewer bytes.

Matrices (floating-point entries with two axes or more) may be encoded. Vectors, counters and all others are never
encoded: they are few, and a BatchNorm's variance must not become negative.

    float32     unchanged
    float16     half the bytes; values beyond 65504 are refused
    bfloat16    half the bytes: the range of float32, 8 significant bits
    int8        a quarter: each row (first axis) has a float32 scale, max|row| / 127, and integers from -127 to 127
    top k       the share k of each matrix's values that are largest in magnitude, in one of the dtypes above, and their
                positions: the gaps between them, a byte for each 255

Downloads are rounded to the nearest value. The rounding depends on the value alone, so all clients receive the same
bytes, and digests are those of the decoded values. Uploads are **differences** from the values that the client
received, so that errors are relative to the update and not to the weights. The server adds them to its own exact
values. Rounding of downloads therefore never enters the model: an update that is smaller than a step of the encoding is
not lost. Uploads in `int8` are rounded at random (unbiased). A client adds what `int8` and top k leave out to its next
upload of the same entries: **error feedback** (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847,
algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

DTYPES = ("float32", "float16", "bfloat16", "int8")

_CHUNK = 1 << 18  # elements that are processed at once, so that scratch arrays stay small
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times it is finite
_ESCAPE = 255  # a gap's byte for 255 places, after which more bytes of this gap follow


class EncodingError(ValueError):
    """Values that an encoding cannot represent; the text has the values and what to do."""


class Codec(Protocol):
    """An encoding of one matrix."""

    width: int
    """Bytes of the widest item."""

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes | memoryview:
        """Encode float32 values with at least one axis. `random`: generator for rounding at random (int8 alone)."""

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        """Bytes at the beginning of `data` that encode a matrix of this shape. Raises ValueError if there are none."""

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        """Decode exactly these bytes to a new float32 array. Raises ValueError for bytes that `write` cannot make."""


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _chunks(rows: int, width: int = 1) -> Iterator[slice]:
    """Slices of rows of `width` elements each."""
    several = max(_CHUNK // max(width, 1), 1)
    return (slice(start, start + several) for start in range(0, rows, several))


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
        return _bytes(np.ascontiguousarray(values, self.dtype))


class Float16(_FixedWidth):
    width, dtype = 2, "<f2"

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> memoryview:
        with np.errstate(over="ignore"):
            half = values.astype(self.dtype)
        if np.isinf(half).any() and np.isfinite(values).all():
            raise EncodingError(
                f"it has values up to {np.abs(values).max():.3g}, but the largest of float16 is 65504: choose bfloat16"
            )
        return _bytes(np.ascontiguousarray(half))


class BFloat16(_FixedWidth):
    """The upper half of a float32, rounded to nearest, ties to even."""

    width, dtype = 2, "<u2"

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> memoryview:
        bits = np.ascontiguousarray(values, "<f4").reshape(-1).view("<u4")
        upper = np.empty(bits.size, self.dtype)
        for part in _chunks(bits.size):
            some = bits[part]
            odd = some >> 16
            odd &= 1
            odd += 0x7FFF
            odd += some
            odd >>= 16
            upper[part] = odd
            upper[part][(some & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0  # NaN: adding may have changed it
        return _bytes(upper)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        bits = np.frombuffer(data, self.dtype).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(shape)


class Int8:
    """A scale for each row, then all integers. A row with a value that is not finite is decoded as NaN."""

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        rows = values.reshape(values.shape[0], math.prod(values.shape[1:]))
        scales = np.zeros(len(rows), "<f4")
        whole = np.zeros(rows.shape, np.int8)
        for part in _chunks(*rows.shape):
            some = rows[part]
            largest = np.abs(some).max(axis=1, initial=0.0)
            scale = np.where(np.isfinite(largest), np.minimum(largest / np.float32(127), _LARGEST_SCALE), np.nan)
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
            whole[part] = np.clip(steps, -127, 127, out=steps)
        return b"".join([_bytes(scales), _bytes(whole)])

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        return 4 * shape[0] + math.prod(shape)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        scales = np.frombuffer(data[: 4 * shape[0]], "<f4").astype(np.float32)
        whole = np.frombuffer(data[4 * shape[0] :], np.int8).reshape(shape[0], math.prod(shape[1:]))
        values = np.empty(whole.shape, np.float32)
        with np.errstate(all="ignore"):  # the scales come from the other side
            for part in _chunks(*whole.shape):
                np.multiply(whole[part], scales[part, None], out=values[part], dtype=np.float32)
        return values.reshape(shape)


CODECS: Mapping[str, Codec] = {
    "float32": Float32(), "float16": Float16(), "bfloat16": BFloat16(), "int8": Int8()
}  # fmt: skip


@dataclass(frozen=True)
class TopK:
    """The `share` of the values that are largest in magnitude, at least one; all others are decoded as 0.

    Bytes: the number of bytes of gaps (8), the values as one row of the codec `of`, the gaps.
    """

    share: float
    of: Codec

    width = 1

    def kept(self, size: int) -> int:
        return min(math.ceil(self.share * size), size)

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        places = self._largest(flat)
        gaps = np.diff(places, prepend=-1) - 1
        ends = np.cumsum(gaps // _ESCAPE + 1) - 1
        written = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, np.uint8)
        written[ends] = gaps % _ESCAPE
        head = len(written).to_bytes(8, "little")
        return b"".join([head, self.of.write(flat[places].reshape(1, -1), random), _bytes(written)])

    def _largest(self, flat: np.ndarray) -> np.ndarray:
        """Places of the largest values, in ascending order; of equal values the first."""
        count = self.kept(flat.size)
        if count == flat.size:
            return np.arange(count)
        magnitude = np.abs(flat)
        np.copyto(magnitude, np.inf, where=np.isnan(magnitude))
        least = np.partition(magnitude, flat.size - count)[flat.size - count]
        above = np.flatnonzero(magnitude > least)
        equal = np.flatnonzero(magnitude == least)[: count - len(above)]
        return np.sort(np.concatenate([above, equal]))

    def _of_values(self, shape: tuple[int, ...]) -> int:
        return self.of.length((1, self.kept(math.prod(shape))), memoryview(b""))

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        gaps = int.from_bytes(data[:8], "little")
        most = self.kept(math.prod(shape)) + math.prod(shape) // _ESCAPE
        if len(data) < 8 or gaps > most:
            raise ValueError(f"it declares {gaps} bytes of gaps; {list(shape)} values have at most {most}")
        return 8 + self._of_values(shape) + gaps

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        start = 8 + self._of_values(shape)
        gaps = np.frombuffer(data[start:], np.uint8)
        ends = gaps < _ESCAPE
        count = self.kept(size)
        # Before the k-th end there are k values, and as many places without one as the sum of the gaps so far.
        places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))
        if len(places) != count or (count and places[-1] >= size):
            raise ValueError(f"its gaps do not select {count} of {size} values")
        values = np.zeros(size, np.float32)
        values[places] = self.of.read(data[8:start], (1, count)).reshape(-1)
        return values.reshape(shape)


@dataclass(frozen=True)
class Wire:
    """The encoding of matrices in one direction.

    Args:
        dtype: one of DTYPES.
        top_k: share of the values that are sent; 0: all.
        differences: send the difference of trained values from the received ones.
        feedback: add what is left out to the next upload.
        seed: of rounding at random.
    """

    dtype: str = "float32"
    top_k: float = 0.0
    differences: bool = False
    feedback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"the wire dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not 0 <= self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be between 0 and 1, or 0 for all values")

    @property
    def plain(self) -> bool:
        """Whether nothing is encoded."""
        return self.dtype == "float32" and not self.top_k and not self.differences

    @cached_property
    def _codec(self) -> Codec:
        return TopK(self.top_k, CODECS[self.dtype]) if self.top_k else CODECS[self.dtype]

    def codec(self, dtype: str, shape: tuple[int, ...]) -> Codec | None:
        """The codec of an entry of this dtype and shape; None if it is not encoded."""
        if self.plain or len(shape) < 2 or dtype not in ("float32", "float64"):
            return None
        return self._codec

    def decoded(self, value: np.ndarray) -> np.ndarray:
        """The value as the receiver decodes it, if it is rounded to the nearest."""
        codec = self.codec(value.dtype.name, value.shape)
        if codec is None:
            return value
        written = codec.write(np.asarray(value, np.float32), None)
        return codec.read(memoryview(written), value.shape).astype(value.dtype, copy=False)

    def to_json(self) -> dict[str, Any]:
        return {} if self == PLAIN else asdict(self)

    def random(self, *of: object) -> np.random.Generator | None:
        """A generator from the seed and `of`; None if this encoding does not round at random."""
        if self.dtype != "int8":
            return None
        text = repr(of).encode()
        return np.random.default_rng([self.seed, *text])


PLAIN = Wire()


def add_difference(start: np.ndarray, difference: np.ndarray) -> None:
    """difference ← start + difference: the same operation on both sides gives the same bits."""
    np.add(start, difference, out=difference)
    difference.flags.writeable = False


@dataclass(frozen=True)
class Encoding:
    """The encodings of a run.

    Args:
        down: dtype of matrices in downloads, one of DTYPES.
        up: dtype of their differences in uploads, one of DTYPES.
        top_k: share of each matrix's differences, the largest, that are uploaded; 0: all.
        error_feedback: clients keep what `int8` and top k leave out, and add it to their next upload.
        seed: of int8's rounding at random.

    Raises:
        ValueError: an option is out of range.
    """

    down: str = "float32"
    up: str = "float32"
    top_k: float = 0.0
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.download.dtype and self.upload.dtype  # making both checks the options

    @property
    def download(self) -> Wire:
        return Wire(self.down)

    @property
    def upload(self) -> Wire:
        if (self.down, self.up, self.top_k) == ("float32", "float32", 0):
            return PLAIN
        lossy = self.up == "int8" or self.top_k > 0
        return Wire(self.up, self.top_k, differences=True, feedback=lossy and self.error_feedback, seed=self.seed)

    def __str__(self) -> str:
        if self.upload.plain:
            return "none"
        up = self.up if not self.top_k else f"the largest {100 * self.top_k:g} % of values in {self.up}"
        return f"{self.down} down, {up} up" + ", with error feedback" * self.upload.feedback
