"""Weighted means over clients, updated with each reply, so that no reply needs to be stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from tepal.exchange.threads import CHUNK, PIECE, in_threads
from tepal.strategies.scaled import ScaledPart

_BLOCK = 1 << 24  # elements that are allocated together: large blocks are faster, as their pages are larger
_GROUP = 50
"""Parts in a group, whose float32 mean is updated part by part. Each update rounds once; the error of 50 updates, in
any order, is less than 1e-6 of the values. The means of several groups are averaged likewise, in a second array."""

_SMALL = 1 << 16  # elements up to which an entry's mean is float64, which takes no time or memory worth saving

_Step = tuple[np.ndarray, np.ndarray | None, float]
"""(mean, values, share) of the update mean ← mean + share·(values − mean); share 1 overwrites the mean. None: zeros."""

_LEAST_FACTOR = 1 / 16
"""A part that is scaled down further is computed before it is averaged: the digits that its values have before they are
scaled would be lost in the mean."""


MOST_WEIGHT = 1e100
"""Largest weight of a part: the sum of the weights of any number of parts is then finite."""


class Mean(Protocol):
    """A mean of the clients' parts, weighted or robust: entries are added client by client."""

    def add(self, part: Mapping[str, np.ndarray], weight: float) -> None:
        """Add the entries of one client. After any error nothing has been added.

        Args:
            part: entry name → array; shape and dtype as in earlier parts.
            weight: of this client, > 0 and at most `MOST_WEIGHT`.

        Raises:
            ValueError: a weight out of range, or an entry of another shape or dtype than before.
            OSError: the part cannot be stored.
        """
        ...

    def prepare(self, part: Mapping[str, np.ndarray], weight: float) -> Callable[[], None]:
        """Do all of `add` that may fail, and return the function that adds the part and cannot fail.

        A caller that adds to several means prepares all of them before it adds to the first. Nothing else may be
        prepared in between. Arguments and errors are those of `add`.
        """
        ...

    def result(self) -> dict[str, np.ndarray]:
        """Entry name → mean, read-only, in the dtype of the parts. Call it once, after the last part."""
        ...


class WeightedMean:
    """Weighted mean Σ_k w_k·x_k / Σ_k w_k of each entry over the parts that have it, updated with each part:

        m ← m + w_k/W·(x_k − m)            W: sum of the weights so far, including w_k

    so that nothing overflows, and values that are equal in all parts are unchanged, bit for bit. A large float32 or
    float16 entry has one float32 array (with more than 50 parts, two), and its mean depends on the order of the parts
    by less than 1e-6 of the values; every other entry has a float64 array, and depends on it by 1e-15. An entry that is
    in no part is not in the result. Means of integer entries (counters) are rounded to the nearest integer and keep
    their dtype; the mean of a bool entry is the majority.

    Of a `ScaledPart` with a factor of 1/16 or more, the values are added as they were returned, with a smaller weight;
    those from which they started are added once for all parts, with the rest of their weights.
    """

    def __init__(self) -> None:
        self._means: dict[str, _EntryMean] = {}

    def add(self, part: Mapping[str, np.ndarray], weight: float) -> None:
        """Add the entries of one client. After any error nothing has been added.

        Args:
            part: entry name → array; shape and dtype as in earlier parts.
            weight: of this client, > 0 and at most `MOST_WEIGHT`; usually its number of training examples.

        Raises:
            ValueError: a weight out of range, or an entry of another shape or dtype than before.
        """
        self.prepare(part, weight)()

    def prepare(self, part: Mapping[str, np.ndarray], weight: float) -> Callable[[], None]:
        """See `Mean.prepare`."""
        if isinstance(part, ScaledPart) and part.factor < _LEAST_FACTOR:
            part = dict(part)
        whole = part if isinstance(part, ScaledPart) else ScaledPart(part, {}, 1.0)
        returned, starts, factor = whole.returned, whole.starts, whole.factor
        known = {name: (mean.values.shape, mean.dtype) for name, mean in self._means.items()}
        check_part(returned, weight, known)
        check_starts(returned, starts)
        if not factor * weight:
            raise ValueError(f"weight is {weight:g}, of which a part that is scaled by {factor:g} has none")
        new = {name: array for name, array in returned.items() if name not in self._means}
        made = {
            name: _EntryMean(values, array.dtype)
            for (name, array), values in zip(new.items(), _empty(new.values()), strict=True)
        }

        def add() -> None:
            self._means.update(made)
            means = [self._means[name] for name in returned]
            _update([mean.end_group() for mean in means if mean.count == _GROUP])
            scales = [factor if array.dtype.kind == "f" else 1.0 for array in returned.values()]
            pulls = [
                mean.pull(starts.get(name), (1 - scale) * weight)
                for mean, name, scale in zip(means, returned, scales, strict=True)
            ]
            _update([step for steps in pulls for step in steps])
            _update(
                [
                    (mean.values, array, mean.share(scale * weight))
                    for mean, array, scale in zip(means, returned.values(), scales, strict=True)
                ]
            )

        return add

    def result(self) -> dict[str, np.ndarray]:
        """Entry name → mean, read-only, in the dtype of the parts. Call it once, after the last part."""
        means, self._means = self._means, {}
        _update([step for mean in means.values() for step in mean.pulled()])
        _update([mean.end_group() for mean in means.values() if mean.groups is not None])
        return {name: mean.result() for name, mean in means.items()}


def check_part(
    part: Mapping[str, np.ndarray], weight: float, known: Mapping[str, tuple[tuple[int, ...], np.dtype]]
) -> None:
    """Check a part against the entries of earlier parts: name → (shape, dtype). Raises ValueError."""
    if not 0 < weight <= MOST_WEIGHT:
        raise ValueError(f"weight is {weight}; it must be positive and at most {MOST_WEIGHT:g}")
    for name, array in part.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"entry {name!r} is {array.dtype}; it must be bool, integer or floating-point")
        shape, dtype = known.get(name, (array.shape, array.dtype))
        if (array.shape, array.dtype) != (shape, dtype):
            raise ValueError(
                f"entry {name!r} is {array.dtype}{list(array.shape)}; it must be {dtype}{list(shape)}, "
                "as in earlier parts"
            )


def check_starts(part: Mapping[str, np.ndarray], starts: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError for an entry that starts from values of another shape."""
    for name, array in part.items():
        if name in starts and starts[name].shape != array.shape:
            raise ValueError(
                f"entry {name!r} has the shape {array.shape}; it must be {starts[name].shape}, as what it starts from"
            )


def as_dtype(mean: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A mean in the dtype of the parts, read-only: the majority of bools, integers rounded to the nearest."""
    values: Any = mean
    if dtype.kind == "b":
        values = mean >= 0.5
    elif dtype.kind in "iu" and mean.dtype.kind == "f":
        # float64 cannot represent the largest 64-bit integers: a mean that rounding moves beyond them is cut off.
        limits = np.iinfo(dtype)
        rounded = np.rint(mean)
        inside = (rounded >= limits.min) & (rounded < float(limits.max))
        values = np.where(inside, rounded, 0).astype(dtype)
        values = np.where(inside, values, np.where(rounded < 0, limits.min, limits.max).astype(dtype))
    result = np.asarray(values, dtype=dtype)
    result.flags.writeable = False
    return result


class _EntryMean:
    """The mean of one entry."""

    def __init__(self, values: np.ndarray, dtype: np.dtype) -> None:
        self.values = values
        self.dtype = dtype  # of the parts
        self.weight, self.count = 0.0, 0
        self.groups: np.ndarray | None = None
        """Mean of the groups that are complete."""
        self.weight_of_groups = 0.0
        self._start: np.ndarray | None = None
        self._pull = 0.0
        """Weight with which `_start`, or zero, must still be added."""

    def share(self, weight: float) -> float:
        """Share of the next part in the mean of its group."""
        self.weight += weight
        self.count += 1
        return weight / self.weight

    def pull(self, start: np.ndarray | None, weight: float) -> list[_Step]:
        """Add a start with this weight later. Returns the update by which an earlier one enters, if it is another."""
        if not weight:
            return []
        earlier = self.pulled() if self._start is not start else []
        self._start = start
        self._pull += weight
        return earlier

    def pulled(self) -> list[_Step]:
        """The update by which the start of scaled parts enters, if there is one."""
        if not self._pull:
            return []
        share = self._pull / (self.weight + self._pull)
        self.weight += self._pull
        self._pull, start, self._start = 0.0, self._start, None
        return [(self.values, start, share)]

    def end_group(self) -> _Step:
        """End the group. Returns the update by which its mean enters the mean of the groups."""
        if self.groups is None:
            self.groups = np.empty_like(self.values)
        self.weight_of_groups += self.weight
        share = self.weight / self.weight_of_groups
        self.weight, self.count = 0.0, 0
        return self.groups, self.values, share

    def result(self) -> np.ndarray:
        return as_dtype(self.values if self.groups is None else self.groups, self.dtype)


def _empty(entries: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Allocate the arrays for the means of these entries."""
    arrays = list(entries)
    narrow = [array.size > _SMALL and array.dtype in (np.float16, np.float32) for array in arrays]
    left = sum(array.size for array, is_narrow in zip(arrays, narrow, strict=True) if is_narrow)
    block = np.empty(0, np.float32)
    for array, is_narrow in zip(arrays, narrow, strict=True):
        if not is_narrow:
            yield np.empty(array.shape, np.float64)
            continue
        if block.size < array.size:
            block = np.empty(max(array.size, min(left, _BLOCK)), np.float32)
        yield block[: array.size].reshape(array.shape)
        block = block[array.size :]
        left -= array.size


def _update(steps: list[_Step]) -> None:
    """Do these updates of means, in place, in several threads."""
    pieces: list[_Step] = []
    for mean, values, share in steps:
        mean, values = mean.reshape(-1), None if values is None else values.reshape(-1)
        pieces += [
            (mean[k : k + PIECE], None if values is None else values[k : k + PIECE], share)
            for k in range(0, mean.size, PIECE)
        ]
    in_threads(_update_piece, pieces, sum(mean.nbytes for mean, _, _ in pieces))


def _update_piece(step: _Step) -> None:
    mean, values, share = step
    if values is None:
        if share == 1:
            mean[...] = 0
        else:
            np.multiply(mean, 1 - share, out=mean)
        return
    if share == 1:
        np.copyto(mean, values)
        return
    scratch = np.empty(min(CHUNK, mean.size), mean.dtype)
    for start in range(0, mean.size, CHUNK):
        m, x = mean[start : start + CHUNK], values[start : start + CHUNK]
        difference = scratch[: m.size]
        np.subtract(x, m, out=difference)
        np.multiply(difference, share, out=difference)
        np.add(m, difference, out=m)


def with_joiners(
    mean: Mapping[str, np.ndarray], clients: Iterable[str], available: Iterable[str]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """A mean over all clients, after new ones joined with the value zero: the sum does not change.

    Args:
        mean: entry name → mean over `clients`; zero if there are none.
        clients: all clients so far.
        available: clients that are available now; those that are not among `clients` join.

    Returns:
        The mean over all clients, and their names, sorted. Without new clients the arrays are the same objects.
    """
    before = tuple(clients)
    known = {*before, *available}
    if len(known) == len(before):
        return dict(mean), before
    names = tuple(sorted(known))
    if not before:
        return dict(mean), names
    share = len(before) / len(names)
    return {name: np.asarray(values * share, dtype=values.dtype) for name, values in mean.items()}, names


ON_TESTS = ("received-", "trained-", "personal-", "ensemble-")
"""Prefixes of metrics that a client measures on its own test examples: they name the model that is measured."""


def mean_metrics(
    replies: Iterable[tuple[Mapping[str, float], int]], weighted_by: str, *, uniform: bool = False
) -> dict[str, float]:
    """Weighted means of the metrics of several clients.

    Metrics that are measured on test examples, whose names begin with one of `ON_TESTS`, are weighted by the client's
    `test-examples`; all others by its weight.

    Args:
        replies: (metrics, weight) of each client. A mean is over the clients that have the metric.
        weighted_by: the metric from which the weight was taken; it and `test-examples` are summed, not averaged.
        uniform: for metrics on test examples, all clients have the same weight, as is usual for personal models.
    """
    terms: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for metrics, weight in replies:
        on_tests = metrics.get("test-examples", weight)
        for name, value in metrics.items():
            if name in (weighted_by, "test-examples"):
                terms.setdefault(name, []).append(value)
                weights[name] = [1.0]
                continue
            w = (1.0 if uniform else on_tests) if name.startswith(ON_TESTS) else weight
            terms.setdefault(name, []).append(w * value)
            weights.setdefault(name, []).append(w)
    # Exact sums: the result does not depend on the order of the replies.
    totals = {name: _sum(each) for name, each in weights.items()}
    return {name: _sum(each) / totals[name] for name, each in terms.items() if totals[name]}


RECORDED = ("accuracy", "loss", "macro-f1", "rmse", "train-loss", "step-seconds")
"""Metrics that are recorded of a round under these names, in addition to those of `ON_TESTS`."""


def of_most(replies: Mapping[str, tuple[Mapping[str, float], int]]) -> dict[str, tuple[Mapping[str, float], int]]:
    """Client → (metrics, weight), without scores that only a few report: they would be a few clients' word.

    A score of `ON_TESTS` is left out if fewer than half of the clients with test examples have it, and where a client
    has no test examples; one of `RECORDED` if fewer than half of the clients have it. All other metrics stay: a method
    may ask them of some clients.

    Args:
        replies: client → (metrics, weight). A client without the metric `test-examples` counts as one that has some.
    """
    tested = {client for client, (metrics, _) in replies.items() if metrics.get("test-examples", 1) > 0}
    having: dict[str, int] = {}
    for client, (metrics, _) in replies.items():
        for name in metrics:
            if client in tested or not name.startswith(ON_TESTS):
                having[name] = having.get(name, 0) + 1

    def stays(client: str, name: str) -> bool:
        if name.startswith(ON_TESTS):
            return client in tested and 2 * having[name] >= len(tested)
        return name not in RECORDED or 2 * having[name] >= len(replies)

    return {
        client: ({name: value for name, value in metrics.items() if stays(client, name)}, weight)
        for client, (metrics, weight) in replies.items()
    }


def over_clients(replies: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over clients, with uniform weights, of their metrics on their own test examples."""
    values: dict[str, list[float]] = {}
    for metrics, _ in replies:
        for name, value in metrics.items():
            if name.startswith(ON_TESTS):
                values.setdefault(name, []).append(value)
    means = {name: _sum(found) / len(found) for name, found in values.items()}
    away = {name: [value - means[name] for value in found] for name, found in values.items()}
    return {name: (means[name], math.sqrt(_sum(d * d for d in found) / len(found))) for name, found in away.items()}


def _sum(values: Iterable[float]) -> float:
    """The exact sum, rounded once. A sum that float64 cannot represent is infinite, or NaN."""
    terms = [float(value) for value in values]
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return sum(terms)
