"""The lines of metrics.jsonl and the figures of summary.json: keys, the measure of a run, and sums over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

SUMMARY_KEYS = (
    "strategy",
    "model",
    "parameters",
    "rounds",
    "accuracy",
    "loss",
    "bytes_up",
    "bytes_down",
    "bytes_vs_fedavg",
    "seconds",
    "refused_replies",
    "stopped_by",
    "step_seconds",
    "rmse",
)


@dataclass(frozen=True)
class Measure:
    """What results are measured by: its key in `metrics.jsonl`, and its name in a sentence.

    share: of 0 … 1, the more the better; else an error, the less the better.
    """

    key: str
    name: str
    share: bool

    @property
    def title(self) -> str:
        return self.name[0].upper() + self.name[1:]

    def text(self, digits: int = 4) -> str:
        """How plotly writes a value."""
        return f".{digits - 2}%" if self.share else f".{digits}f"

    def good(self, score: float, target: float) -> bool:
        """Whether a score is as good as the target."""
        return score >= target if self.share else score <= target


ACCURACY, RMSE = Measure("accuracy", "accuracy", True), Measure("rmse", "RMSE", False)


def measured_by(metrics: Sequence[Mapping[str, Any]]) -> Measure:
    """The measure of a run: of a regression, which has no accuracy, the root mean squared error."""
    return RMSE if any(line.get("rmse") is not None for line in metrics) else ACCURACY


def scored(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fill in scores that the clients gave a round later: what they *received* is the model after the round before."""
    for line, following in pairwise(metrics):
        if line.get("accuracy") is None and line.get("loss") is None and following["round"] == line["round"] + 1:
            scores = {key: following.get(f"received_{key}") for key in ("accuracy", "loss", "rmse")}
            if any(score is not None for score in scores.values()):
                line |= scores | {"accuracy_of": "clients"}
    return metrics


def summarise(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `summary.json`, as far as metrics and config tell them (`parameters` they do not).

    Accuracy and loss are the last ones measured, `step_seconds` is the median of the rounds that tell it. A sum over
    rounds of which one is unknown is unknown (None), not smaller.
    """
    down, up, fedavg = (total(metrics, key) for key in ("bytes_down", "bytes_up", "bytes_fedavg"))
    steps = [line["step_seconds"] for line in metrics if line.get("step_seconds") is not None]
    return {
        "strategy": config.get("strategy"),
        "model": config.get("model"),
        "parameters": None,
        "rounds": max((line["round"] for line in metrics if line.get("clients_replied") != 0), default=0),
        "accuracy": _last_known(metrics, "accuracy"),
        "loss": _last_known(metrics, "loss"),
        "rmse": _last_known(metrics, "rmse"),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_vs_fedavg": (down + up) / fedavg if fedavg and down is not None and up is not None else None,
        "seconds": total(metrics, "seconds"),
        "step_seconds": median(steps) if steps else None,
        "refused_replies": sum(len(line.get("refused") or ()) for line in metrics),
        "stopped_by": None,
    }


def total(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Sum of one key over the rounds, None if a round lacks it; the initial model's score (round 0) may."""
    return add(*(line.get(key) for line in metrics if line["round"] > 0 or line.get(key) is not None))


def add(*values: float | None) -> float | None:
    """Their sum, None if one of them is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _last_known(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)
