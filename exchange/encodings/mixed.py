"""Several arrays in one code: those in whole steps, and matrices as products of two thin ones where that takes less."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from tepal.exchange.encodings.codec import bytes_of, rows_of, sides_of
from tepal.exchange.encodings.coding import from_huffman, in_huffman, longest_in_huffman
from tepal.exchange.encodings.low_rank import directions, product, unit_of
from tepal.exchange.encodings.sparse import magnitudes
from tepal.exchange.encodings.steps import Steps, bits_of, dot

_ALL_IN_STEPS, _SOME_PRODUCTS = 0, 1  # the first byte
_NUMBER = 4
_RANK = 32  # the highest of a product
_MOST = 127  # the largest number of steps
_ROUNDED = 0.15  # of the share that may be left out: what rounding P and Q leaves out of the squared norm
_SAMPLE = 160  # rows, or somewhat more
_ENTROPY = 2.05  # bits of a number of P or Q in steps of its root mean square, with a normal distribution


class _Product(NamedTuple):
    """P (r, m) and Q (r, n) in whole steps, int8, and the steps of Q (r), float32; those of P are 1."""

    left: np.ndarray
    right: np.ndarray
    scales: np.ndarray

    @property
    def nbytes(self) -> int:
        """About its bytes among others, and some more than these alone, because they share the tables of one code."""
        return self.scales.nbytes + len(in_huffman(self.numbers))

    @property
    def numbers(self) -> np.ndarray:
        return np.concatenate([self.left.reshape(-1), self.right.reshape(-1)]).view(np.uint8)


@dataclass(frozen=True)
class Mixed:
    """Arrays, one after the other: each in steps, or as P Qᵀ of a rank up to 32, whichever has fewer bytes.

    The threshold of the steps, which all arrays of a part share, says what is left out of each array. A matrix is a
    product if some rank leaves out no more than that with fewer bytes. Changes of a round are often near a low rank:
    those of a layer are a sum of few outer products, of what its inputs and its errors have in common. P has the
    directions of the rows with most of the squared norm (see `low_rank`), and Q is best for the rounded P. Rounding P
    and Q leaves out .15 of what may be left out: if that is .6 of the squared norm, they are rounded to three quarters
    of their root mean square, most numbers are -1, 0 or 1, and a number has two and a half bits.

    Bytes: 0 if all arrays are in steps, and their code; otherwise 1, the rank of each matrix (a byte each; 0: in
    steps), the length of the numbers' code (4), the scale of each column of Q (float32), the numbers of P and Q of one
    matrix after the other in Huffman's code, and the code of the steps of all others, if there are any.
    """

    shapes: tuple[tuple[int, ...], ...]
    steps: Steps

    width = 1

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        arrays = [some.reshape(shape) for some, shape in zip(_cut(flat, self._sizes), self.shapes, strict=True)]
        products = [self._product(array) for array in arrays]
        if not any(products):
            return bytes([_ALL_IN_STEPS]) + self.steps.write(values, None)
        made = [one for one in products if one]
        coded = in_huffman(np.concatenate([one.numbers for one in made]))
        each = [*zip(arrays, products, strict=True)]
        ranks = bytes(len(one.scales) if one else 0 for array, one in each if array.ndim > 1)
        others = [array.reshape(-1) for array, one in each if not one]
        return b"".join(
            [
                bytes([_SOME_PRODUCTS]), ranks, len(coded).to_bytes(_NUMBER, "little"),
                bytes_of(np.concatenate([one.scales for one in made])), coded,
                self.steps.write(np.concatenate(others), None) if any(array.size for array in others) else b"",
            ]
        )  # fmt: skip

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        head = self._head(data)
        if head is None:
            return 1 + self.steps.length(shape, data[1:])
        ranks, start, coded = head
        end = start + 4 * sum(ranks) + coded
        others = sum(self._in_steps(ranks))
        return end + (self.steps.length((others,), data[end:]) if others else 0)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        head = self._head(data)
        if head is None:
            return self.steps.read(data[1:], shape)
        ranks, start, coded = head
        end = start + 4 * sum(ranks)
        scales = np.frombuffer(data[start:end], "<f4").astype(np.float32)
        of_each = zip(ranks, self.shapes, strict=True)
        sides = [number for rank, shape in of_each if rank for number in _numbers(rank, shape)]
        found = from_huffman(data[end : end + coded], sum(sides)).view(np.int8)
        if len(found) != sum(sides) or found.min() < -_MOST:
            raise ValueError(f"its numbers of steps are not those of {sum(sides)} in its products")
        in_steps = self._in_steps(ranks)
        others = sum(in_steps)
        rest = self.steps.read(data[end + coded :], (others,)) if others else np.zeros(0, np.float32)
        values = np.empty(sum(self._sizes), np.float32)
        numbers = _cut(found, sides)
        each = zip(_cut(values, self._sizes), ranks, _cut(scales, ranks), _cut(rest, in_steps), strict=True)
        for array, rank, scale, steps in each:
            if not rank:
                array[:] = steps
                continue
            left, right = (next(numbers).astype(np.float32).reshape(rank, -1) for _ in range(2))
            with np.errstate(all="ignore"):  # the scales come from the other side
                right *= scale[:, None]
            array[:] = product(left, right).reshape(-1)
        return values.reshape(shape)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    def _in_steps(self, ranks: Sequence[int]) -> list[int]:
        """The number of values in steps of each array."""
        return [0 if rank else size for rank, size in zip(ranks, self._sizes, strict=True)]

    def _head(self, data: memoryview) -> tuple[list[int], int, int] | None:
        """The rank of each array, where the scales begin, and the length of the numbers' code; None: all in steps."""
        if not data or data[0] not in (_ALL_IN_STEPS, _SOME_PRODUCTS):
            raise ValueError("its first byte says neither that all arrays are in steps nor that some are products")
        if data[0] == _ALL_IN_STEPS:
            return None
        matrices = [len(shape) > 1 for shape in self.shapes]
        start = 1 + sum(matrices) + _NUMBER
        if len(data) < start:
            raise ValueError(f"it has {len(data)} bytes, but {start} say which arrays are products")
        stated = iter(data[1 : start - _NUMBER])
        ranks = [next(stated) if matrix else 0 for matrix in matrices]
        coded = int.from_bytes(data[start - _NUMBER : start], "little")
        each = [*zip(ranks, self.shapes, strict=True)]
        most = sum(number for rank, shape in each for number in _numbers(rank, shape))
        high = any(rank > min(_RANK, *sides_of(shape)) for rank, shape in each)
        if high or not any(ranks) or coded > longest_in_huffman(most):
            raise ValueError(f"it declares products of the ranks {ranks} in {coded} bytes, not those of its arrays")
        return ranks, start, coded

    def _product(self, array: np.ndarray) -> _Product | None:
        """A matrix as a product that leaves out no more than its steps would; None if that takes as many bytes."""
        if array.ndim < 2 or self.steps.threshold is None:
            return None
        rows = rows_of(array)
        flat, least = magnitudes(rows.reshape(-1)), self.steps.threshold.least
        kept = flat[flat >= least]
        if not kept.size or not math.isfinite(largest := float(kept.max())):
            return None
        nbytes = bits_of(np.append(np.float32(least), kept), flat.size) * flat.size / 8
        unit = unit_of(largest)
        for part in (flat, kept):
            part *= unit
        squares = dot(flat, flat)
        left_out = max(squares - dot(kept, kept), 0.0)
        rounded = _ROUNDED * left_out / squares
        step = math.sqrt(6 * rounded)  # a number is off by a twelfth of its squared step, in P as in Q
        bits = max(_ENTROPY - math.log2(max(step, 1e-9)), 1.0)
        most = min(_RANK, int(nbytes / (_NUMBER + bits / 8 * sum(rows.shape))), *rows.shape)
        if not most or not _may_hold(rows, unit, most, 1 - left_out / squares):
            return None
        columns, held = directions(rows, unit, most)
        enough = np.flatnonzero(squares - (1 - rounded) * np.cumsum(held) <= left_out)
        if not enough.size:
            return None
        found = _first_of(range(int(enough[0]) + 1, most + 1), rows, unit, columns, step, squares - left_out)
        return found if found and found.nbytes < len(self.steps.write(array, None)) else None


def _numbers(rank: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of numbers of P and of Q."""
    rows, others = sides_of(shape)
    return rank * rows, rank * others


def _cut(array: np.ndarray, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Views of so many elements, one after the other."""
    ends = [*accumulate(sizes, initial=0)]
    return (array[start:end] for start, end in pairwise(ends))


def _first_of(
    ranks: range, rows: np.ndarray, unit: np.float32, columns: np.ndarray, step: float, least: float
) -> _Product | None:
    """The product of the first of these ranks that takes what is demanded of the rows' squared norm; None: none does.

    Args:
        ranks: ascending.
        rows: (m, n), which are multiplied by `unit`.
        columns: directions of the rows, orthonormal, (highest rank, m), which are rounded.
        step: of the numbers of P and Q; see `_in_steps`.
        least: what ‖A‖² − ‖A − P Qᵀ‖² must be at least, for the rows A.
    """
    left = _in_steps(columns, step)[0]
    outer = (left * unit) @ rows
    gram = np.inner(left, left.astype(np.float64))
    for rank in ranks:
        best = np.linalg.lstsq(gram[:rank, :rank], outer[:rank])[0]
        right, scales = _in_steps(best, step)
        across = right * scales[:, None].astype(np.float64)
        if 2 * np.vdot(outer[:rank], across) - np.vdot(across, gram[:rank, :rank] @ across) >= least:
            return _Product(left[:rank], right, (scales / np.float64(unit)).astype("<f4"))
    return None


def _may_hold(rows: np.ndarray, unit: np.float32, rank: int, share: float) -> bool:
    """Whether so many directions may hold this share of the rows' squared norm, by a sample: of it they hold more."""
    some = rows[:: max(len(rows) // _SAMPLE, 1), :: max(rows.shape[1] // (10 * _SAMPLE), 1)] * unit
    inner = some @ some.T
    return bool(np.linalg.eigvalsh(inner)[-rank:].sum() >= share * np.trace(inner))


def _in_steps(columns: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Columns (r, n) in whole steps, int8, and the best length of a step for these, float32.

    `step`: about its length, in units of a column's root mean square.
    """
    steps = step * np.sqrt(np.square(columns).mean(axis=1, dtype=np.float64))
    steps = np.maximum(np.maximum(steps, np.abs(columns).max(axis=1) / _MOST), np.finfo(np.float32).tiny)
    whole = np.rint(columns / steps[:, None])
    with np.errstate(invalid="ignore"):
        scales = np.einsum("rn,rn->r", whole, columns) / np.maximum(np.einsum("rn,rn->r", whole, whole), 1)
    return whole.astype(np.int8), scales.astype(np.float32)
