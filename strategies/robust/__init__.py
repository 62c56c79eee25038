"""Robust means of the clients' parts: a few hostile or broken clients cannot move them far.

They have the interface of `WeightedMean`, and any method uses them through `Run.mean`. The parts of a round are stored
in an unnamed file, so that memory does not grow with the number of clients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tepal.strategies.aggregate import Mean, WeightedMean
from tepal.strategies.robust.coordinates import Median, TrimmedMean
from tepal.strategies.robust.selection import GeometricMedian, Krum

CLIP = "clip"
"""The value of `robust` with which updates are scaled down; before another value's mean, as "clip+rfa"."""
_MEANS = ("trimmed", "median", "krum", "rfa")
ROBUST = ("none", CLIP, *_MEANS, *(f"{CLIP}+{mean}" for mean in _MEANS))
"""Values of the option `robust`."""

__all__ = ["CLIP", "ROBUST", "GeometricMedian", "Krum", "Median", "TrimmedMean", "averages", "clips", "mean_factory"]


def averages(robust: str) -> bool:
    """Whether the clients' parts are averaged with weights, so that only their mean is needed."""
    return robust in ("none", CLIP)


def clips(robust: str) -> bool:
    """Whether updates beyond the running median norm are scaled down to it before they are averaged."""
    return robust.partition("+")[0] == CLIP


def mean_factory(robust: str, hostile_share: float, krum_keep: int, folder: Path | None) -> Callable[[], Mean]:
    """Return the function that makes a mean of the clients' parts.

    Args:
        robust: one of `ROBUST`; "none" and "clip" average with the clients' weights, and "clip+krum" as "krum" does.
        hostile_share: largest share of hostile clients in a round, in [0, 0.5): what "trimmed" drops on either side,
            and f of "krum".
        krum_keep: clients that "krum" averages; 0: all that are not assumed to be hostile.
        folder: of temporary files; None: the system's.

    Raises:
        ValueError: an argument out of range.
    """
    if robust not in ROBUST:
        raise ValueError(f"robust is {robust!r}; it must be one of {', '.join(ROBUST)}")
    if not 0 <= hostile_share < 0.5:
        raise ValueError(f"hostile_share is {hostile_share}; it must be at least 0 and below 0.5")
    if krum_keep < 0:
        raise ValueError(f"krum_keep is {krum_keep}; it must be 0 or a number of clients")
    means: dict[str, Callable[[], Mean]] = {
        "trimmed": partial(TrimmedMean, hostile_share, folder),
        "median": partial(Median, folder),
        "krum": partial(Krum, hostile_share, krum_keep, folder),
        "rfa": partial(GeometricMedian, folder),
    }
    return means.get(robust.rpartition("+")[2], WeightedMean)
