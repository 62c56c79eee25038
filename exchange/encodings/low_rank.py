"""Matrices as the product of two thin ones."""

from __future__ import annotations

import math

import numpy as np

from tepal.exchange.encodings.codec import LARGEST, bytes_of, chunks, read_scales, rows_of, sides_of
from tepal.exchange.encodings.dense import in_steps
from tepal.exchange.encodings.few_bits import Int4, from_halves, in_halves

_MORE = 8  # directions that are looked at beyond those that are kept
_MOST = 7  # the largest integer
_SMALLEST = 1e-30
_OTHERWISE = Int4()


class LowRank:
    """P Qᵀ of a given rank r, for matrices of m rows (first axis) and n other values, with P (m, r) and Q (n, r).

    As in PowerSGD (Vogels et al. 2019, arXiv:1905.13727, algorithm 1) the columns of P are directions of the rows that
    hold most of the squared norm, and Q is what the matrix has in these directions. PowerSGD begins with the Q of its
    last step and does one power iteration. Here nothing is kept from one message to the next: it begins with r + 8
    random directions, the same ones each time, does one more iteration, and keeps the best r of the r + 8 (Halko et al.
    2011, arXiv:0909.4061). P and Q are in `int4`, with a scale for each column. Q is that of the rounded P, so that
    rounding P costs little, and what is left out is less than the matrix itself (a contraction).

    Bytes: float32 scales of the columns of P, and of Q (r each); integers of P and of Q, a column after the other, two
    in a byte. A matrix for which this is no less than `int4` is in `int4`, such as one with one row. A vector is a
    matrix with one column, of rank 1: it has two scales, and four bits for each value.
    """

    width = 1

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        rank = self._rank(values.shape)
        if not rank:
            return _OTHERWISE.write(values, None)
        rows = np.ascontiguousarray(rows_of(values), np.float32)
        largest = float(np.abs(rows).max())
        if not math.isfinite(largest):
            return b"".join([bytes_of(np.full(2 * rank, np.nan, "<f4")), bytes(_halves(rank, *rows.shape))])
        # Everything is computed for the matrix divided by its largest value, without a copy of it.
        unit = unit_of(largest)
        scales, left = in_steps(directions(rows, unit, rank)[0], _MOST, None)
        columns = left * scales[:, None]
        gram, outer = columns @ columns.T.astype(np.float64), (columns * unit) @ rows
        found, whole = in_steps(np.linalg.lstsq(gram, outer)[0].astype(np.float32), _MOST, None)
        right = whole * found[:, None].astype(np.float64)
        shared, squares = np.vdot(outer, right), np.vdot(right, gram @ right)
        if squares > 2 * shared:  # more would be left out than there was: directions were rounded to nearly the same
            found *= np.float32(shared / squares)
        scales = np.concatenate([scales, np.minimum(found / np.float64(unit), LARGEST / _MOST)])
        whole = np.concatenate([left.reshape(-1), whole.reshape(-1)])
        return b"".join(map(bytes_of, (scales.astype("<f4"), in_halves(whole))))

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        rank = self._rank(shape)
        return _bytes(rank, *sides_of(shape)) if rank else _OTHERWISE.length(shape, data)

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        rank, (rows, others) = self._rank(shape), sides_of(shape)
        if not rank:
            return _OTHERWISE.read(data, shape)
        scales, packed = read_scales(data, (2 * rank,))
        whole = from_halves(packed, rank * (rows + others))
        left = whole[: rank * rows].reshape(rank, rows)
        right = whole[rank * rows :].reshape(rank, others)
        with np.errstate(all="ignore"):  # the scales come from the other side
            return product(left * scales[:rank, None], right * scales[rank:, None]).reshape(shape)

    def _rank(self, shape: tuple[int, ...]) -> int:
        """The rank of a matrix's product; 0: it is not sent as one."""
        sides = sides_of(shape)
        rank = min(self.rank, *sides)
        return rank if _bytes(rank, *sides) < _OTHERWISE.length(shape, memoryview(b"")) else 0


def _halves(rank: int, rows: int, others: int) -> int:
    return -(-rank * (rows + others) // 2)


def _bytes(rank: int, rows: int, others: int) -> int:
    return 4 * 2 * rank + _halves(rank, rows, others)


def unit_of(largest: float) -> np.float32:
    """What a matrix with this largest magnitude is multiplied by, so that no square of a value is too large."""
    return np.float32(1 / max(largest, _SMALLEST))


def directions(rows: np.ndarray, unit: np.float32, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The directions in which rows have most of their norm, with the most first.

    Args:
        rows: (m, n), float32.
        unit: what they are multiplied by; see `unit_of`.
        rank: number of directions, at most m and n.

    Returns:
        Orthonormal directions (rank, m), float32, and the squared norm of the rows in each of them (rank), float64.
    """
    start = np.random.default_rng(0).standard_normal((rows.shape[1], min(rank + _MORE, *rows.shape)), np.float32)
    found, _ = np.linalg.qr(rows @ (start * unit))
    found, _ = np.linalg.qr(rows @ (rows.T @ (found * unit) * unit))
    held = (found * unit).T @ rows
    squares, turns = np.linalg.eigh(held @ held.T.astype(np.float64))
    return (turns[:, : -rank - 1 : -1].T @ found.T).astype(np.float32), squares[: -rank - 1 : -1]


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix (m, n) of P (r, m) and Q (r, n), float32, with the same bits on every machine.

    It is computed value by value: the last bits of a product of matrices differ from library to library.
    """
    values = np.empty((left.shape[1], right.shape[1]), np.float32)
    with np.errstate(all="ignore"):  # they come from the other side
        for part in chunks(*values.shape):
            np.multiply(left[0, part, None], right[0], out=values[part])
            for number in range(1, len(left)):
                values[part] += left[number, part, None] * right[number]
            np.clip(values[part], -LARGEST, LARGEST, out=values[part])  # NaN stays
    return values
