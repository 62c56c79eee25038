"""Whether a classifier's probabilities can be relied on: its calibration, and a threshold for uncertain predictions.

Calibration follows Guo et al. (arXiv 1706.04599, section 2): predictions are put into 15 bins by the probability of the
predicted class, and in each bin the mean probability is compared with the accuracy. Everything is summed over examples,
so that parts of a data set can be counted one by one and added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import Tensor

BINS = 15
"""Bins of equal width; bin k = 0..14 has probabilities in (k/15, (k + 1)/15]."""
FALSE_ALARMS = 0.05
"""Largest share of the held-out examples that are flagged as uncertain."""


@dataclass(frozen=True)
class Calibration:
    """Sums over the examples in each bin, of `BINS` numbers each; `+` adds those of other examples.

    examples: number of examples.
    correct: number of them whose predicted class is right.
    probability: sum of the probabilities of their predicted classes.
    """

    examples: tuple[int, ...]
    correct: tuple[int, ...]
    probability: tuple[float, ...]

    @staticmethod
    def of(probability: Tensor, correct: Tensor) -> Calibration:
        """Count examples.

        Args:
            probability: (n,) float64 on the CPU, of the predicted classes, 0 to 1.
            correct: (n,) bool, whether the predicted class is right.
        """
        # Of the mean over an ensemble, the rounded logarithm may be just above 0.
        probability = probability.clamp(max=1.0)
        edges = torch.arange(1, BINS, dtype=torch.float64) / BINS
        bins = torch.bucketize(probability, edges)
        sums = (torch.bincount(bins, weights, BINS).tolist() for weights in (None, correct.double(), probability))
        examples, right, probabilities = sums
        return Calibration(tuple(examples), tuple(map(int, right)), tuple(probabilities))

    def __add__(self, other: Calibration) -> Calibration:
        mine, others = vars(self), vars(other)
        return Calibration(**{name: tuple(map(add, mine[name], others[name])) for name in mine})

    @property
    def error(self) -> float:
        """Expected calibration error, 0 to 1: mean of |accuracy − mean probability| over the bins, by their examples.

        Raises ValueError if there are no examples.
        """
        count = sum(self.examples)
        if not count:
            raise ValueError("the calibration error of no examples is not defined: give at least one prediction")
        return sum(abs(right - sure) for right, sure in zip(self.correct, self.probability, strict=True)) / count

    @property
    def metrics(self) -> dict[str, Any]:
        """The error and, by bin, mean probability, accuracy and examples, by the names of metrics; 0 for empty bins."""
        return {
            "calibration-error": self.error,
            "calibration-probability": self._means(self.probability),
            "calibration-accuracy": self._means(self.correct),
            "calibration-examples": list(self.examples),
        }

    def _means(self, sums: tuple[float, ...]) -> list[float]:
        return [of / count if count else 0.0 for of, count in zip(sums, self.examples, strict=True)]


def entropy_threshold(entropies: Tensor) -> float:
    """Return the smallest of these entropies that at most a share of `FALSE_ALARMS` of them exceed.

    Args:
        entropies: (n,), at least one; of the predictions for examples that are as the model should know them.
    """
    allowed = math.floor(FALSE_ALARMS * len(entropies) + 1e-9)
    return float(entropies.sort().values[len(entropies) - 1 - allowed])


def flagged(known: Tensor, others: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how many predictions of other examples have an entropy above that of most known ones.

    Args:
        known: entropies of the predictions for held-out examples (n,), from which the threshold follows.
        others: name → entropies of the predictions for other examples.

    Returns:
        `entropy-threshold` in nats and `flagged-<name>`, a share from 0 to 1, by the names of metrics; {} if an entropy
        is NaN, as after a training that has diverged.
    """
    if any(bool(entropies.isnan().any()) for entropies in (known, *others.values())):
        return {}
    threshold = entropy_threshold(known)
    shares = {f"flagged-{name}": float((each > threshold).double().mean()) for name, each in others.items()}
    return {"entropy-threshold": threshold, **shares}
