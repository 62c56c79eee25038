"""The figures of `summary.json`, what a run is measured by, and sums over its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from tepal.records.columns import is_number
from tepal.records.round_record import COLUMNS, RoundRecord

Summed = Literal[
    "bytes_down", "bytes_up", "bytes_overhead", "bytes_fedavg", "bytes_fedavg_down", "bytes_plain", "seconds",
    "seconds_train",
]
"""Columns that are summed over the rounds."""

_RECEIVED = ("accuracy", "loss", "macro_f1", "perplexity", "rmse")  # scores that clients give a round later
_ROUNDING = 1e-9  # far less than one example in a test set, far more than sums of floats lose


@dataclass(frozen=True)
class Measure:
    """What results are measured by.

    Args:
        key: Its column in `metrics.jsonl`.
        share: Whether it is a share of 0 … 1, of which more is better; otherwise it is an error, of which less is.
    """

    key: str
    share: bool

    @property
    def name(self) -> str:
        """Its name within a sentence."""
        return COLUMNS[self.key].heading

    @property
    def title(self) -> str:
        """Its name at the start of a heading."""
        return self.name[0].upper() + self.name[1:]

    def text(self, digits: int = 4) -> str:
        """How plotly writes a value."""
        return f".{digits - 2}%" if self.share else f".{digits}f"

    def good(self, score: float, target: float) -> bool:
        """Whether a score is as good as the target, but for errors of rounding: 0.8 - 0.1 is not exactly 0.7."""
        if self.share:
            return score >= target - _ROUNDING
        return score <= target + _ROUNDING * max(1.0, abs(target))

    def possible(self, target: float) -> bool:
        """Whether a score can be as good as the target."""
        return self.good(1.0 if self.share else 0.0, target)


ACCURACY, RMSE = Measure("accuracy", share=True), Measure("rmse", share=False)


def measured_by(metrics: Sequence[RoundRecord]) -> Measure:
    """The measure of a run: the accuracy, or in a regression the root mean squared error."""
    return RMSE if any(line.rmse is not None for line in metrics) else ACCURACY


def scored(metrics: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Fill in scores that the clients gave a round later: what they *received* is the model after the round before."""
    filled = list(metrics)
    for place, (line, following) in enumerate(pairwise(metrics)):
        if line.accuracy is None and line.loss is None and following.round == line.round + 1:
            scores = {key: following.value(f"received_{key}") for key in _RECEIVED}
            if known := {key: score for key, score in scores.items() if score is not None}:
                filled[place] = replace(line, **known, accuracy_of="clients")
    return filled


def summarise(metrics: Sequence[RoundRecord], config: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `summary.json` that follow from the metrics and the run config (`parameters` does not).

    Accuracy, loss and RMSE are the last ones measured, `step_seconds` is the median of the rounds that have it. A sum
    over rounds of which one is unknown is unknown (None), not smaller.
    """
    down, up, fedavg = total(metrics, "bytes_down"), total(metrics, "bytes_up"), total(metrics, "bytes_fedavg")
    steps = [line.step_seconds for line in metrics if line.step_seconds is not None]
    return {
        "strategy": config.get("strategy"),
        "model": config.get("model"),
        "parameters": None,
        "rounds": max((line.round for line in metrics if line.clients_replied != 0), default=0),
        "accuracy": _last_known(metrics, "accuracy"),
        "loss": _last_known(metrics, "loss"),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_vs_fedavg": (down + up) / fedavg if fedavg and down is not None and up is not None else None,
        "bytes_plain": total(metrics, "bytes_plain"),
        "seconds": total(metrics, "seconds"),
        "refused_replies": sum(len(line.refused) for line in metrics),
        "stopped_by": None,
        "step_seconds": median(steps) if steps else None,
        "rmse": _last_known(metrics, "rmse"),
    }


def savings(transferred: float | None, plain: float | None, fedavg: float | None) -> tuple[float, float] | None:
    """Return the factors of the strategy and of the encoding, whose product is the share of FedAvg's bytes.

    Args:
        transferred: payload bytes, both ways.
        plain: bytes of the same entries without an encoding.
        fedavg: FedAvg's bytes, without an encoding.

    Returns None if nothing was encoded, or a number is unknown or 0.
    """
    if not transferred or not plain or not fedavg or transferred == plain:
        return None
    return plain / fedavg, transferred / plain


def total(metrics: Sequence[RoundRecord], column: Summed) -> float | None:
    """Sum of a column over the rounds, None if a round lacks it; round 0, the initial model, may lack it."""
    values = ((line.round, line.value(column)) for line in metrics)
    return add(*(value for number, value in values if number > 0 or value is not None))


def add(*values: float | None) -> float | None:
    """Their sum, None if one of them is None. One that is too large for a number of a run's files is a float."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    found = sum(known)
    return found if is_number(found) else float(found)


def _last_known(metrics: Sequence[RoundRecord], column: str) -> float | None:
    return next((value for line in reversed(metrics) if (value := line.value(column)) is not None), None)
