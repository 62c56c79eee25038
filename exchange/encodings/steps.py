"""Values in whole steps, most of which are 0: how large a step is follows from how much may be left out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from tepal.exchange.encodings.codec import LARGEST, bytes_of, chunks
from tepal.exchange.encodings.coding import from_huffman, gaps_of, in_huffman, longest_in_huffman, most_gaps, places_of
from tepal.exchange.encodings.sparse import magnitudes, sampled_magnitudes

_HEAD = 7 * 4  # bytes before the coded ones: two float32, five numbers
FIXED = _HEAD + 20
"""Bytes that a code has in any case: its head, and one value at a place that is not far."""
_DEAD = 0.66  # of a step: smaller values become 0
_MOST = 127  # steps
_MANY = 0.4  # of the places: more values than this are coded together with the zeros between them, without their places
_SAMPLE = 1 << 17  # values from which the threshold is computed
_FEW = 1 << 10  # with fewer of them that are not 0, it is computed from all values
_PIECE = 1 << 13  # values


class Kept(NamedTuple):
    """Which values are sent: of those that are not less than `least` in magnitude the `share`, evenly spaced."""

    least: float
    share: float = 1.0


@dataclass(frozen=True)
class Steps:
    """Each value as a whole number of steps (a quantizer with a dead zone).

    The threshold is the magnitude below which the values hold the share `left_out` of the squared norm. They become 0.
    It is .66 of a step. A larger value counts as one step up to 1.66 of them, as two up to 2.66, and so on. It is
    decoded as this number of steps, and what the values are larger in the mean, so that a matrix comes closer to its
    values in any case. If half of the squared norm or more may be left out, nearly all values are 0, and nearly all
    others one step; the less may be left out, the more steps there are.

    Bytes: the step, and the mean of what is above a whole number of steps (float32 each); five numbers (4 each: values,
    those of them whose number of steps is sent, the lengths of three codes); the code of the values' places (see
    `coding`); that of the places among them of those whose number is sent; these numbers, with their signs, in
    Huffman's code; the signs of the others, which are one step. No code of places stands for all places: if many values
    are not 0, numbers are sent for all, also for those that are 0.
    """

    left_out: float
    bits: float = 0.0
    """Most bits for a value, in the mean and beyond FIXED; 0: no limit. Within a limit more is left out if needed."""
    unbiased: bool = False
    """Whether several matrices, `fitted` together, are scaled up for what is left out of them: what is decoded has the
    dot product with the values v that they have with themselves, ‖v‖². The error is then larger, D / (1 − D) ‖v‖² if
    the share D is left out, but a mean of many such vectors does not become too short."""
    threshold: Kept | None = None
    """None: it is computed from the matrix itself."""
    scale: float = 1.0
    """By which what is decoded is multiplied."""

    width = 1

    @property
    def or_products(self) -> bool:
        """Whether matrices may be products instead (see `Mixed`): not if they are scaled up, or within a limit."""
        return not (self.unbiased or self.bits)

    def fitted(self, sizes: Sequence[int], values: Callable[[int], np.ndarray]) -> Steps:
        """The codec for several matrices: with one threshold for all of them. Arguments: see `threshold`."""
        found = threshold(self.left_out, sizes, values, self.bits)
        return replace(self, threshold=found, scale=_scale(found, len(sizes), values) if self.unbiased else 1.0)

    def within(self, nbytes: int, matrices: int, values: int) -> Steps | None:
        """The codec with fewer values, if it wrote more than its limit allows; None if it did not.

        `nbytes` is what it wrote for so many matrices with so many values.
        """
        written, limit = nbytes - FIXED * matrices, self.bits * values / 8
        if not self.bits or self.threshold is None or written <= limit:
            return None
        share = self.threshold.share * 0.97 * (limit + (FIXED - _HEAD) * matrices) / (nbytes - _HEAD * matrices)
        return replace(self, threshold=Kept(self.threshold.least, share))

    def write(self, values: np.ndarray, random: np.random.Generator | None) -> bytes:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        least, share = self.threshold or threshold(self.left_out, [flat.size], lambda _: flat, self.bits)
        step = _step(least) if np.isfinite(flat).all() else math.nan
        places = np.flatnonzero(magnitudes(flat) >= least)
        if share < 1:
            some = math.ceil(share * len(places))
            places = places[(np.arange(some) * (len(places) / max(some, 1))).astype(np.int64)]
        if len(places) > _MANY * flat.size:
            if share < 1:
                chosen = np.zeros(flat.size, np.float32)
                chosen[places] = flat[places]
                flat = chosen
            steps, above = _steps(flat, step, fewest=0)
            several, codes = len(steps), [b"", b"", in_huffman(steps.view(np.uint8))]
            signs = np.zeros(0, np.uint8)
        else:
            steps, above = _steps(flat[places], step, fewest=1)
            of_several = np.flatnonzero(np.abs(steps) > 1)
            several = len(of_several)
            written = gaps_of(places), gaps_of(of_several), steps[of_several].view(np.uint8)
            codes = [in_huffman(code) for code in written]
            signs = np.packbits(np.delete(steps, of_several) < 0)
        numbers = np.array([len(steps), several, *map(len, codes)], "<u4")
        step = min(step * self.scale, LARGEST)
        return b"".join([bytes_of(np.array([step, above], "<f4")), bytes_of(numbers), *codes, bytes_of(signs)])

    def length(self, shape: tuple[int, ...], data: memoryview) -> int:
        size = math.prod(shape)
        kept, several, *coded = _numbers(data)
        most = most_gaps(kept, size), most_gaps(several, kept), several
        needless = coded[0] and kept > _MANY * size  # they would be written without their places
        if kept > size or several > kept or any(map(_longer, coded, most)) or needless:
            raise ValueError(
                f"it declares {kept} values, {several} of them with numbers, in {sum(coded)} bytes of codes; "
                f"{list(shape)} has {size} places"
            )
        return _HEAD + sum(coded) - (several - kept) // 8

    def read(self, data: memoryview, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        step, above = np.frombuffer(data[:8], "<f4")
        kept, several, *coded = _numbers(data)
        ends = [*accumulate(coded, initial=_HEAD)]
        codes = [data[start:end] for start, end in pairwise(ends)]
        places, of_several = _places(codes[0], kept, size), _places(codes[1], several, kept)
        numbers = from_huffman(codes[2], several).view(np.int8)
        if len(numbers) != several or (several and numbers.min() < -_MOST):
            raise ValueError(f"its numbers of steps are not those of {several} values")
        signs = np.unpackbits(np.frombuffer(data[ends[-1] :], np.uint8))[: kept - several]
        steps = np.zeros(kept, np.float32)
        steps[of_several] = numbers
        if several < kept:
            of_one = np.ones(kept, bool)
            of_one[of_several] = False
            steps[of_one] = 1 - 2 * signs.view(np.int8)
        with np.errstate(all="ignore"):  # step and mean come from the other side
            steps += np.sign(steps) * above
            steps *= step
            np.clip(steps, -LARGEST, LARGEST, out=steps)  # NaN stays
        values = np.zeros(size, np.float32)
        values[places] = steps
        return values.reshape(shape)


def _step(least: float) -> float:
    """The step of a threshold: a little less, so that the threshold itself is one step, however it is rounded."""
    return min(least / _DEAD * (1 - 1e-6), LARGEST)


def _scale(kept: Kept, matrices: int, values: Callable[[int], np.ndarray]) -> float:
    """See `Steps.unbiased`: squared norm of several matrices, divided by their dot product with what is decoded."""
    step = _step(kept.least)
    squares = product = 0.0
    for number in range(matrices):
        counts = magnitudes(np.ascontiguousarray(values(number), np.float32).reshape(-1)) / np.float32(step)
        squares += dot(counts, counts)
        counts = counts[counts >= _DEAD]
        levels, above = _steps(counts, 1.0, fewest=1)
        product += dot(counts, levels) + above * float(counts.sum(dtype=np.float64))
    return squares / product if product > 0 and math.isfinite(squares / product) else 1.0


def dot(first: np.ndarray, second: np.ndarray) -> float:
    """Of small pieces, each in float32: larger ones would be given to threads that wait for each other."""
    return sum(float(np.vdot(first[k : k + _PIECE], second[k : k + _PIECE])) for k in range(0, len(first), _PIECE))


def _steps(values: np.ndarray, step: float, *, fewest: int) -> tuple[np.ndarray, float]:
    """The number of steps of each value (int8), and what those that are not 0 are above it in the mean, in steps."""
    whole = np.empty(values.shape, np.int8)
    above = 0.0
    counted = 0
    for part in chunks(len(values)):
        with np.errstate(over="ignore", invalid="ignore"):  # of values that are not finite
            steps = np.abs(values[part]) / np.float32(step)
            levels = np.floor(steps + np.float32(1 - _DEAD))
            np.clip(levels, fewest, _MOST, out=levels)
            above += float(steps.sum(dtype=np.float64, where=levels > 0) - levels.sum(dtype=np.float64))
            counted += int(np.count_nonzero(levels))
            whole[part] = np.copysign(levels, values[part])
    return whole, above / max(counted, 1)


def _places(code: memoryview, kept: int, size: int) -> slice | np.ndarray:
    if not code and kept == size:
        return slice(None)
    return places_of(from_huffman(code, most_gaps(kept, size)), kept, size)


def _numbers(data: memoryview) -> list[int]:
    if len(data) < _HEAD:
        raise ValueError(f"it has {len(data)} bytes, but {_HEAD} declare how many follow")
    return [int(number) for number in np.frombuffer(data[8:_HEAD], "<u4")]


def _longer(coded: int, most: int) -> bool:
    return coded > longest_in_huffman(most)


def threshold(
    left_out: float, sizes: Sequence[int], values: Callable[[int], np.ndarray], bits: float = 0.0
) -> Kept:
    """The magnitude below which the values of several arrays hold the share `left_out` of their squared norm.

    At least one value that is not 0 reaches it, and no 0 does. It is computed from all values, or from some hundred
    thousand of them, evenly spaced, and from the largest of all: then the share is approximate.

    Args:
        left_out: share, in [0, 1).
        sizes: numbers of values.
        values: number of an array → the array; called for one after the other.
        bits: more is left out if it must be for no more than about so many bits a value; 0: no limit.
    """
    found, size, largest = _sample(sizes, values)
    if not found.size:
        return Kept(float(np.finfo(np.float32).smallest_subnormal))
    if not math.isfinite(largest):
        return Kept(math.inf)
    squares = np.cumsum(np.square(np.divide(found, largest, dtype=np.float64)))
    first = min(int(np.searchsorted(squares, left_out * squares[-1], side="right")), found.size - 1)
    share = 1.0
    if bits and bits_of(found[first:], size) > bits:
        first = bisect_left(range(found.size), -bits, lo=first, key=lambda k: -bits_of(found[k:], size))
        first = min(first, found.size - 1)
        # Of values of just this magnitude, which may be all, no more are sent than there are bits for.
        share = (found.size - first) / (found.size - int(np.searchsorted(found, found[first])))
    # The largest magnitude must be no more steps than can be counted.
    return Kept(max(float(found[first]), largest * _DEAD / _MOST), share)


def _sample(sizes: Sequence[int], values: Callable[[int], np.ndarray]) -> tuple[np.ndarray, int, float]:
    """Magnitudes that are not 0, ascending; of how many values; and the largest magnitude of all, or infinity."""
    largest = 0.0

    def measured(number: int) -> np.ndarray:
        nonlocal largest
        array = values(number)
        largest = max(largest, _largest(array))
        return array

    found = np.sort(sampled_magnitudes(sizes, measured, _SAMPLE))
    size = found.size
    found = found[int(np.searchsorted(found, 0, side="right")) :]
    if size == sum(sizes) or found.size >= _FEW:
        return found, size, largest
    all_of_them = [magnitudes(flat[flat != 0]) for n in range(len(sizes)) for flat in [values(n).reshape(-1)]]
    return np.sort(np.concatenate(all_of_them)), sum(sizes), largest


def _largest(array: np.ndarray) -> float:
    """The largest magnitude; infinite for NaN."""
    found = max(float(array.max(initial=0.0)), -float(array.min(initial=0.0)))
    return math.inf if math.isnan(found) else found


def bits_of(kept: np.ndarray, size: int) -> float:
    """About how many bits a value has, in the mean, if these magnitudes (ascending) are kept of so many."""
    share = len(kept) / size
    step = np.float32(min(float(kept[0]) / _DEAD, LARGEST))
    with np.errstate(over="ignore"):
        levels = np.minimum(kept / step + np.float32(1 - _DEAD), _MOST)
    counts = np.bincount(levels.astype(np.int64))
    return _entropy(np.array([share, 1 - share])) + share * (1 + _entropy(counts / len(kept)))


def _entropy(shares: np.ndarray) -> float:
    some = shares[shares > 0]
    return float(-np.sum(some * np.log2(some)))
