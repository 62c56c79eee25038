"""The values of a matrix that are largest in magnitude, and their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tepal.exchange.encodings.codec import Codec, bytes_of

_ESCAPE = 255  # a gap's byte for 255 places, after which more bytes of this gap follow


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
        return b"".join([head, self.of.write(flat[places].reshape(1, -1), random), bytes_of(written)])

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
