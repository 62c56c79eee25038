"""Which round's model a run delivers, and when it ends early, by the scores in `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tepal.records.round_record import RoundRecord
from tepal.server_app.config import RunConfig
from tepal.server_app.config.ending import best_metric
from tepal.strategies import MethodStrategy, RoundReport
from tepal.strategies.rounds.best import BestModel, Scores
from tepal.training.tasks import TASKS

_HIGHER = ("accuracy", "macro-f1")
"""Scores of which more is better; the others are errors."""


def best_model(config: RunConfig, strategy: MethodStrategy, *, on_server: bool) -> BestModel:
    """Return what follows a run's scores, for `MethodStrategy.best`.

    All scores of a run are of one kind: of the server's held-out examples, of the clients' own test examples or, of
    personal models, the mean over the clients. A global model that clients score as they train has its score in the
    next round.

    Args:
        config: the run config.
        strategy: of the run.
        on_server: whether the server scores the model.
    """
    rounds = config.rounds
    if not rounds.patience and rounds.deliver == "last":
        return BestModel()
    metric, task = best_metric(config), TASKS[config.data.kind]
    personal = strategy.method.train_metrics_of != "received"
    kind = "server" if on_server else "personal" if personal else "clients"
    later = not on_server and strategy.method.train_metrics_of == strategy.method.eval_metrics_of == "received"

    def scores(report: RoundReport) -> Scores:
        line = RoundRecord.of(report, 0, task)
        own = line.value(metric.replace("-", "_")) if line.accuracy_of == kind else None
        return Scores(own, _received(report, metric) if later else None)

    return BestModel(
        scores,
        higher=metric in _HIGHER,
        patience=rounds.patience,
        least=rounds.min_improvement,
        delivered=rounds.deliver == "best",
    )


def _received(report: RoundReport, metric: str) -> float | None:
    """The clients' score of the model that a round started from."""
    name = "loss" if metric == "rmse" else metric
    score = report.train_metrics.get(f"received-{name}")
    if score is None or metric != "rmse":
        return score
    return math.sqrt(score) if score >= 0 else math.nan


def ending_figures(config: RunConfig, strategy: MethodStrategy) -> dict[str, Any]:
    """Return the figures of `summary.json` about the model that was delivered, and the run's end."""
    rounds, best, delivered = config.rounds, strategy.best, strategy.result_round
    if not rounds.patience and rounds.deliver == "last":
        return {"delivered_round": delivered}
    standing, ended = best.standing, best.ended_early
    return {
        "delivered_round": delivered,
        "deliver": rounds.deliver,
        "best_by": best_metric(config),
        "best_round": standing.best_round,
        "best_score": standing.best,
        "ended_early": f"{ended.without} evaluation{'s' * (ended.without != 1)} without improvement" if ended else None,
    }


def ending_metadata(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return what a model file's metadata has of these figures: its round and, of the best model, by which score."""
    found = {"round": str(figures["delivered_round"])}
    if figures.get("deliver") == "best" and figures["best_round"] == figures["delivered_round"]:
        found |= {"best-by": figures["best_by"], "best-score": str(figures["best_score"])}
    return found
