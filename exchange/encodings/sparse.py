"""The values that are largest in magnitude, and their positions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tepal.exchange.encodings.codec import Codec, bytes_of

_NUMBER = 4  # bytes of each of the two numbers before the values
_ESCAPE = 255  # a gap's byte for 255 places, after which more bytes of this gap follow
_SAMPLE = 1 << 20  # values from which a threshold is computed


class Threshold(NamedTuple):
    """Which values are sent: all of a larger magnitude than `least`, and the first ones of just this magnitude."""

    least: float
    of_equal: float
    """The share of each matrix's values of just this magnitude, in (0, 1]."""


@dataclass(frozen=True)
class TopK:
    """The `share` of the values that are largest in magnitude; all others, and zeros, are decoded as 0.

    Bytes: the number of values (4), the number of bytes of gaps (4), the values as one row of the codec `of`, the gaps.
    A gap is the number of places without a value before one with, a byte for up to 254 of them. These bytes are coded
    by their frequencies (Huffman's code, by zlib). For values at random places this is within a few per cent of the
    entropy: .47 bits for each place if a tenth has values, .29 for a twentieth.
    """

    share: float
    of: Codec
    threshold: Threshold | None = None
    """None: it is computed from the matrix itself."""

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        places = self._places(flat)
        gaps = np.diff(places, prepend=-1) - 1
        ends = np.cumsum(gaps // _ESCAPE + 1) - 1
        written = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, np.uint8)
        written[ends] = gaps % _ESCAPE
        coder = zlib.compressobj(wbits=-zlib.MAX_WBITS, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
        coded = coder.compress(bytes_of(written)) + coder.flush()
        numbers = (number.to_bytes(_NUMBER, "little") for number in (len(places), len(coded)))
        return b"".join([*numbers, self.of.write(flat[places].reshape(1, -1), random), coded])

    def _places(self, flat: np.ndarray) -> np.ndarray:
        """Places of the values that are kept, in ascending order."""
        least, of_equal = self.threshold or threshold(self.share, [flat.size], lambda _: flat)
        magnitude = _magnitude(flat)
        places = np.flatnonzero(magnitude >= least)
        if of_equal == 1:
            return places
        equal = magnitude[places] == least
        dropped = np.count_nonzero(equal) - math.ceil(of_equal * np.count_nonzero(equal))
        return np.delete(places, np.flatnonzero(equal)[-dropped:]) if dropped else places

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        size = math.prod(shape)
        kept, coded = self._numbers(data)
        most = _most_gaps(kept, size)
        if kept > size or coded > most + most // 64 + 64:  # what zlib adds to bytes that it cannot shorten
            raise ValueError(f"it declares {kept} values in {coded} bytes of gaps; {list(shape)} has {size} places")
        return 2 * _NUMBER + self._of_values(kept) + coded

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        kept, _ = self._numbers(data)
        start = 2 * _NUMBER + self._of_values(kept)
        gaps = _decoded(data[start:], _most_gaps(kept, size))
        ends = gaps < _ESCAPE
        # Before the k-th end there are k values, and as many places without one as the sum of the gaps so far.
        places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))
        if len(places) != kept or (kept and places[-1] >= size):
            raise ValueError(f"its gaps do not select {kept} of {size} values")
        values = np.zeros(size, np.float32)
        values[places] = self.of.read(data[2 * _NUMBER : start], (1, kept)).reshape(-1)
        return values.reshape(shape)

    def _numbers(self, data: memoryview) -> tuple[int, int]:
        if len(data) < 2 * _NUMBER:
            raise ValueError(f"it has {len(data)} bytes, but {2 * _NUMBER} declare how many follow")
        kept, coded = (int.from_bytes(data[k * _NUMBER : (k + 1) * _NUMBER], "little") for k in (0, 1))
        return kept, coded

    def _of_values(self, kept: int) -> int:
        return self.of.length((1, kept), memoryview(b""))


def threshold(share: float, sizes: Iterable[int], values: Callable[[int], np.ndarray]) -> Threshold:
    """The threshold for the share of the largest of several arrays' values; no zero reaches it.

    It is computed from all values, or from about a million of them, evenly spaced: then the share is approximate.

    Args:
        share: of the values of all arrays together.
        sizes: their numbers of values.
        values: number of an array → the array; called for one after the other.
    """
    sizes = list(sizes)
    step = max(sum(sizes) // _SAMPLE, 1) | 1  # odd, so that it rarely divides the length of a row
    offsets = [0, *accumulate(sizes)]
    sampled = [_magnitude(values(number).reshape(-1)[-offsets[number] % step :: step]) for number in range(len(sizes))]
    found = np.concatenate([np.zeros(0, np.float32), *sampled])
    if not found.size:
        return Threshold(0.0, 1.0)
    wanted = min(math.ceil(share * found.size), found.size)
    least = np.partition(found, found.size - wanted)[found.size - wanted]
    if not least:
        return Threshold(float(np.finfo(np.float32).smallest_subnormal), 1.0)
    above, equal = np.count_nonzero(found > least), np.count_nonzero(found == least)
    return Threshold(float(least), (wanted - above) / equal)


def _magnitude(flat: np.ndarray) -> np.ndarray:
    """Magnitudes; infinite for NaN, which has to arrive."""
    magnitude: np.ndarray = np.abs(flat)
    np.copyto(magnitude, np.inf, where=np.isnan(magnitude))
    return magnitude


def _most_gaps(kept: int, size: int) -> int:
    return kept + size // _ESCAPE


def _decoded(coded: memoryview, most: int) -> np.ndarray:
    """The bytes of gaps; no more than this many are read, whatever the coded ones stand for."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        gaps = decoder.decompress(coded, most + 1)
    except zlib.error as error:
        raise ValueError(f"its gaps cannot be read ({error})") from error
    if len(gaps) > most or not decoder.eof or decoder.unused_data:
        raise ValueError("its bytes of gaps are too many, or stand for too many gaps")
    return np.frombuffer(gaps, np.uint8)
