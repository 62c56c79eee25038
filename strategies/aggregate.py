"""Weighted means over clients, as the replies come in: no list of models is ever held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_CHUNK = 1 << 16  # elements: the scratch of one multiply-add stays in the processor's cache


class WeightedMean:
    """Per-entry weighted mean Σ_k w_k·x_k / Σ_k w_k, where the sums go over the parts that have the entry.

    Sums are float64, so that the result does not depend on the order of the parts beyond 1e-15 or so. An entry that no
    part has is not in the result. Means of integer entries (counters) are rounded to the nearest integer and keep
    their dtype, means of bool entries are the majority.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}
        self._weights: dict[str, float] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._scratch = np.empty(_CHUNK, np.float64)

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
            if name in self._sums and (array.shape, array.dtype) != (self._sums[name].shape, self._dtypes[name]):
                raise ValueError(
                    f"entry {name!r} is {array.dtype}{list(array.shape)}, and was "
                    f"{self._dtypes[name]}{list(self._sums[name].shape)} before"
                )
        for name, array in part.items():
            if name not in self._sums:
                self._sums[name] = np.asarray(np.multiply(array, weight, dtype=np.float64, order="C"))
                self._weights[name] = weight
                self._dtypes[name] = array.dtype
            else:
                self._multiply_add(self._sums[name].reshape(-1), array.reshape(-1), weight)
                self._weights[name] += weight

    def _multiply_add(self, total: np.ndarray, values: np.ndarray, weight: float) -> None:
        for start in range(0, total.size, _CHUNK):
            chunk = values[start : start + _CHUNK]
            scratch = self._scratch[: chunk.size]
            np.multiply(chunk, weight, out=scratch, dtype=np.float64)
            total[start : start + _CHUNK] += scratch

    def result(self) -> dict[str, np.ndarray]:
        """Entry name → mean, read-only, in the dtype of the parts."""
        means: dict[str, np.ndarray] = {}
        for name, total in self._sums.items():
            dtype = self._dtypes[name]
            mean: Any = total / self._weights[name]
            if dtype.kind == "b":
                mean = mean >= 0.5
            elif dtype.kind in "iu":
                mean = np.rint(mean)
            means[name] = np.asarray(mean, dtype=dtype)
            means[name].flags.writeable = False
        return means


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
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for metrics, weight in replies:
        on_tests = metrics.get("test-examples", weight)
        for name, value in metrics.items():
            if name in (weighted_by, "test-examples"):
                w, value, weights[name] = 1.0, value, 1.0
                sums[name] = sums.get(name, 0) + value
                continue
            w = (1.0 if alike else on_tests) if name.startswith(ON_TESTS) else weight
            sums[name] = sums.get(name, 0.0) + w * value
            weights[name] = weights.get(name, 0.0) + w
    return {name: total / weights[name] for name, total in sums.items() if weights[name]}


def over_clients(replies: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over clients, all counted alike, of what they measured on their own test examples."""
    values: dict[str, list[float]] = {}
    for metrics, _ in replies:
        for name, value in metrics.items():
            if name.startswith(ON_TESTS):
                values.setdefault(name, []).append(value)
    return {name: (float(np.mean(found)), float(np.std(found))) for name, found in values.items()}
