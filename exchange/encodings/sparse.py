"""The values of a matrix that are largest in magnitude, and their positions."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from tepal.exchange.encodings.codec import Codec, bytes_of

_LENGTH = 4  # bytes of the number of bytes of gaps
_ESCAPE = 255  # a gap's byte for 255 places, after which more bytes of this gap follow


@dataclass(frozen=True)
class TopK:
    """The `share` of the values that are largest in magnitude, at least one; all others are decoded as 0.

    Bytes: the number of bytes of gaps (4), the values as one row of the codec `of`, the gaps. A gap is the number of
    places without a value before one with, a byte for up to 254 of them. The bytes are coded by their frequencies
    (Huffman's code, by zlib). For values at random places this is within a few per cent of the entropy: .47 bits for
    each place if a tenth has values, .29 for a twentieth.
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
        coder = zlib.compressobj(wbits=-zlib.MAX_WBITS, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
        coded = coder.compress(bytes_of(written)) + coder.flush()
        values = self.of.write(flat[places].reshape(1, -1), random)
        return b"".join([len(coded).to_bytes(_LENGTH, "little"), values, coded])

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
        coded = int.from_bytes(data[:_LENGTH], "little")
        most = self._most_gaps(shape)
        if len(data) < _LENGTH or coded > most + most // 64 + 64:  # what zlib adds to bytes that it cannot shorten
            raise ValueError(f"it declares {coded} bytes of gaps; {list(shape)} values have at most {most}")
        return _LENGTH + self._of_values(shape) + coded

    def _most_gaps(self, shape: tuple[int, ...]) -> int:
        return self.kept(math.prod(shape)) + math.prod(shape) // _ESCAPE

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        start = _LENGTH + self._of_values(shape)
        gaps = self._gaps(data[start:], self._most_gaps(shape))
        ends = gaps < _ESCAPE
        count = self.kept(size)
        # Before the k-th end there are k values, and as many places without one as the sum of the gaps so far.
        places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))
        if len(places) != count or (count and places[-1] >= size):
            raise ValueError(f"its gaps do not select {count} of {size} values")
        values = np.zeros(size, np.float32)
        values[places] = self.of.read(data[_LENGTH:start], (1, count)).reshape(-1)
        return values.reshape(shape)

    def _gaps(self, coded: memoryview, most: int) -> np.ndarray:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            gaps = decoder.decompress(coded, most + 1)  # no more, whatever the bytes stand for
        except zlib.error as error:
            raise ValueError(f"its gaps cannot be read ({error})") from error
        if len(gaps) > most or not decoder.eof or decoder.unused_data:
            raise ValueError("its bytes of gaps are too many, or stand for too many gaps")
        return np.frombuffer(gaps, np.uint8)
