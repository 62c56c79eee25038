"""Weighted means over clients, as the replies come in: no list of models is ever held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tepal.exchange.threads import in_threads

_CHUNK = 1 << 17  # elements: what one step works on stays in the processor's cache
_PIECE = 1 << 20  # elements that a thread takes at a time
_BLOCK = 1 << 24  # elements that are allocated at once: in large blocks the system gives memory by larger pages, sooner
_GROUP = 50
"""Parts whose float32 mean is taken step by step. Each step rounds once; of so many, in any order, less than 1e-6 is
left of the values. Of more, the means of groups are averaged likewise, for which there is a second array."""

_SMALL = 1 << 16  # elements up to which an entry's mean is float64, which costs nothing there

_Step = tuple[np.ndarray, np.ndarray, float]
"""(mean, values, share): mean ← mean + share·(values − mean); with share 1 whatever was in it is overwritten."""


class WeightedMean:
    """Per-entry weighted mean Σ_k w_k·x_k / Σ_k w_k over the parts that have the entry, taken as they come:

        m ← m + w_k/W·(x_k − m)            W: sum of the weights so far, w_k among them

    so that nothing overflows, and what is equal in all parts stays as it is, bit for bit. Of a large float32 or float16
    entry there is one float32 array (over 50 parts, a second one), and the order of the parts shows by less than 1e-6
    of the values; of all others there is a float64 array, and it shows by 1e-15. An entry that no part has is not in
    the result. Means of integer entries (counters) are rounded to the nearest integer and keep their dtype, means of
    bool entries are the majority.
    """

    def __init__(self) -> None:
        self._means: dict[str, _Mean] = {}

    def add(self, part: Mapping[str, np.ndarray], weight: float) -> None:
        """Add the entries of one client.

        Args:
            part: entry name → array; shape and dtype as in earlier parts.
            weight: of this client, > 0 and finite; usually its number of training examples.

        Raises:
            ValueError: a weight that is not positive and finite, or an entry of another shape or dtype than before.
        """
        if not (np.isfinite(weight) and weight > 0):
            raise ValueError(f"a weight must be positive and finite, and is {weight}")
        for name, array in part.items():
            mean = self._means.get(name)
            if mean is not None and (array.shape, array.dtype) != (mean.values.shape, mean.dtype):
                raise ValueError(
                    f"entry {name!r} is {array.dtype}{list(array.shape)}, and was "
                    f"{mean.dtype}{list(mean.values.shape)} before"
                )
        new = {name: array for name, array in part.items() if name not in self._means}
        for (name, array), values in zip(new.items(), _empty(new.values()), strict=True):
            self._means[name] = _Mean(values, array.dtype)
        means = [self._means[name] for name in part]
        _take([mean.end_group() for mean in means if mean.count == _GROUP])
        _take([(mean.values, array, mean.share(weight)) for mean, array in zip(means, part.values(), strict=True)])

    def result(self) -> dict[str, np.ndarray]:
        """Entry name → mean, read-only, in the dtype of the parts. It ends this mean: the arrays are its own."""
        means, self._means = self._means, {}
        _take([mean.end_group() for mean in means.values() if mean.groups is not None])
        return {name: mean.result() for name, mean in means.items()}


class _Mean:
    """The mean of one entry."""

    def __init__(self, values: np.ndarray, dtype: np.dtype) -> None:
        self.values = values
        self.dtype = dtype  # of the parts
        self.weight, self.count = 0.0, 0
        self.groups: np.ndarray | None = None
        """Mean of the groups that have ended."""
        self.weight_of_groups = 0.0

    def share(self, weight: float) -> float:
        """The share of the next part in the mean of its group."""
        self.weight += weight
        self.count += 1
        return weight / self.weight

    def end_group(self) -> _Step:
        """The step that takes the group's mean into that of the groups."""
        if self.groups is None:
            self.groups = np.empty_like(self.values)
        self.weight_of_groups += self.weight
        share = self.weight / self.weight_of_groups
        self.weight, self.count = 0.0, 0
        return self.groups, self.values, share

    def result(self) -> np.ndarray:
        mean: Any = self.values if self.groups is None else self.groups
        if self.dtype.kind == "b":
            mean = mean >= 0.5
        elif self.dtype.kind in "iu":
            mean = np.rint(mean)
        result = np.asarray(mean, dtype=self.dtype)
        result.flags.writeable = False
        return result


def _empty(entries: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Arrays for the means of these entries."""
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


def _take(steps: list[_Step]) -> None:
    pieces: list[_Step] = []
    for mean, values, share in steps:
        mean, values = mean.reshape(-1), values.reshape(-1)
        pieces += [(mean[k : k + _PIECE], values[k : k + _PIECE], share) for k in range(0, mean.size, _PIECE)]
    in_threads(_take_piece, pieces, sum(values.nbytes for _, values, _ in pieces))


def _take_piece(step: _Step) -> None:
    mean, values, share = step
    if share == 1:
        np.copyto(mean, values)
        return
    scratch = np.empty(min(_CHUNK, mean.size), mean.dtype)
    for start in range(0, mean.size, _CHUNK):
        m, x = mean[start : start + _CHUNK], values[start : start + _CHUNK]
        difference = scratch[: m.size]
        np.subtract(x, m, out=difference)
        np.multiply(difference, share, out=difference)
        np.add(m, difference, out=m)


def with_joiners(mean: Mapping[str, np.ndarray], before: int, now: int) -> dict[str, np.ndarray]:
    """A mean over clients after more of them joined, each with zero: the sum stays.

    Args:
        mean: entry name → mean over the clients of before.
        before, now: how many clients there were and are; with none before, the mean is zero and stays.
    """
    if now == before or not before:
        return dict(mean)
    return {name: (values * (before / now)).astype(values.dtype) for name, values in mean.items()}


ON_TESTS = ("received-", "trained-", "personal-", "ensemble-")
"""How the names of metrics begin that a client measures on its own test examples: the model they are of."""


def mean_metrics(
    replies: Iterable[tuple[Mapping[str, float], int]], weighted_by: str, *, alike: bool = False
) -> dict[str, float]:
    """Weighted mean of the metrics of several clients.

    Metrics that are measured on test examples, which is what a name with a prefix `received-`, `trained-` or
    `personal-` says, weigh by the client's `test-examples`; all others by its weight.

    Args:
        replies: (metrics, weight) of each client. A metric that a client does not have leaves that client out.
        weighted_by: the metric that the weight was taken from; it and `test-examples` are summed, not averaged.
        alike: what is measured on test examples counts alike for every client, as personalised models are judged.
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
            w = (1.0 if alike else on_tests) if name.startswith(ON_TESTS) else weight
            terms.setdefault(name, []).append(w * value)
            weights.setdefault(name, []).append(w)
    # Exact sums, so that the order in which clients answer does not show.
    totals = {name: math.fsum(each) for name, each in weights.items()}
    return {name: math.fsum(each) / totals[name] for name, each in terms.items() if totals[name]}


def over_clients(replies: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over clients, all counted alike, of what they measured on their own test examples."""
    values: dict[str, list[float]] = {}
    for metrics, _ in replies:
        for name, value in metrics.items():
            if name.startswith(ON_TESTS):
                values.setdefault(name, []).append(value)
    means = {name: math.fsum(found) / len(found) for name, found in values.items()}
    return {
        name: (means[name], math.sqrt(math.fsum((value - means[name]) ** 2 for value in found) / len(found)))
        for name, found in values.items()
    }
