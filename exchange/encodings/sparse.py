"""The values that are largest in magnitude, and their positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tepal.exchange.encodings.codec import Codec
from tepal.exchange.encodings.coding import from_huffman, gaps_of, in_huffman, longest_in_huffman, most_gaps, places_of

_NUMBER = 4  # bytes of each of the two numbers before the values
_SAMPLE = 1 << 20  # values from which a threshold is computed


class Threshold(NamedTuple):
    """Which values are sent: all of a larger magnitude than `least`, and the first ones of just this magnitude."""

    least: float
    of_equal: float
    """The share of each matrix's values of just this magnitude, in (0, 1]."""


@dataclass(frozen=True)
class TopK:
    """The `share` of the values that are largest in magnitude; all others, and zeros, are decoded as 0.

    Bytes: the number of values (4), the number of bytes of gaps (4), the values as one row of the codec `of`, the gaps
    (see `coding`).
    """

    share: float
    of: Codec
    threshold: Threshold | None = None
    """None: it is computed from the matrix itself."""

    width = 1

    def fitted(self, sizes: Sequence[int], values: Callable[[int], np.ndarray]) -> TopK:
        """The codec for several matrices: with one threshold for all of them. Arguments: see `threshold`."""
        return replace(self, threshold=threshold(self.share, sizes, values))

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        places = self._places(flat)
        coded = in_huffman(gaps_of(places))
        numbers = (number.to_bytes(_NUMBER, "little") for number in (len(places), len(coded)))
        return b"".join([*numbers, self.of.write(flat[places].reshape(1, -1), random), coded])

    def _places(self, flat: np.ndarray) -> np.ndarray:
        """Places of the values that are kept, in ascending order."""
        least, of_equal = self.threshold or threshold(self.share, [flat.size], lambda _: flat)
        magnitude = magnitudes(flat)
        places = np.flatnonzero(magnitude >= least)
        if of_equal == 1:
            return places
        equal = magnitude[places] == least
        count = int(np.count_nonzero(equal))
        dropped = count - math.ceil(of_equal * count * (1 - 1e-12))  # a share of 3/29 times 29 may be above 3
        return np.delete(places, np.flatnonzero(equal)[-dropped:]) if dropped else places

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        size = math.prod(shape)
        kept, coded = self._numbers(data)
        if kept > size or coded > longest_in_huffman(most_gaps(kept, size)):
            raise ValueError(f"it declares {kept} values in {coded} bytes of gaps; {list(shape)} has {size} places")
        return 2 * _NUMBER + self._of_values(kept) + coded

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        kept, _ = self._numbers(data)
        start = 2 * _NUMBER + self._of_values(kept)
        places = places_of(from_huffman(data[start:], most_gaps(kept, size)), kept, size)
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


def threshold(share: float, sizes: Sequence[int], values: Callable[[int], np.ndarray]) -> Threshold:
    """The threshold for the share of the largest of several arrays' values; no zero reaches it.

    It is computed from all values, or from about a million of them, evenly spaced: then the share is approximate.

    Args:
        share: of the values of all arrays together.
        sizes: their numbers of values.
        values: number of an array → the array; called for one after the other.
    """
    found = sampled_magnitudes(sizes, values, _SAMPLE)
    if not found.size:
        return Threshold(0.0, 1.0)
    wanted = min(math.ceil(share * found.size), found.size)
    least = np.partition(found, found.size - wanted)[found.size - wanted]
    if not least:
        return Threshold(float(np.finfo(np.float32).smallest_subnormal), 1.0)
    above, equal = np.count_nonzero(found > least), np.count_nonzero(found == least)
    return Threshold(float(least), (wanted - above) / equal)


def sampled_magnitudes(sizes: Sequence[int], values: Callable[[int], np.ndarray], most: int) -> np.ndarray:
    """Magnitudes (float32) of all values of several arrays, or of about `most` of them, evenly spaced.

    Args:
        sizes: numbers of values.
        values: number of an array → the array; called for one after the other.
        most: number of values, of all arrays together.
    """
    step = max(sum(sizes) // most, 1) | 1  # odd, so that it rarely divides the length of a row
    offsets = [0, *accumulate(sizes)]
    sampled = [magnitudes(values(number).reshape(-1)[-offsets[number] % step :: step]) for number in range(len(sizes))]
    return np.concatenate([np.zeros(0, np.float32), *sampled])


def magnitudes(flat: np.ndarray) -> np.ndarray:
    """Magnitudes; infinite for NaN, which has to arrive."""
    magnitude: np.ndarray = np.abs(flat)
    np.copyto(magnitude, np.inf, where=np.isnan(magnitude))
    return magnitude
