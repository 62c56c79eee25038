"""What is kept of a round, from which tables, reports, the dashboard and trackers are made: a line of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who reads a run needs neither Flower nor torch
    from tepal.strategies.rounds.report import RoundReport
    from tepal.training.tasks import Task

Reasons = list[dict[str, str]]
"""Entries {"client": …, "reason": …}."""

_SCORES = ("accuracy", "loss")
_LARGEST = 700.0  # e to more than this is no number


def _where_known() -> Any:
    """A column that only the lines of some runs have."""
    return field(default=None, metadata={"optional": True})


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round. Its fields, in their order, are the columns; None stands for what was not measured.

    `accuracy` and `loss` are of the global model (or ensemble) after the round, on the server's held-out examples or,
    with `accuracy_of` "clients", on the clients' own test examples. "personal": every client has a personal model, and
    it is the mean over the clients of each one's on its own test examples. `received_…` are of the model that the round
    started from, on the clients' test examples, and `clients_…` of the result of the round: mean and standard deviation
    over the clients, each counted alike, of the accuracy or, in a regression, of the root mean squared error.
    """

    round: int
    phase: str
    clients_asked: int
    clients_replied: int
    refused: Reasons
    lost: Reasons
    late: Reasons
    left_out: Reasons
    notes: Reasons
    accuracy: float | None
    loss: float | None
    macro_f1: float | None
    perplexity: float | None
    rmse: float | None
    accuracy_of: str | None
    clients_accuracy: float | None
    clients_rmse: float | None
    clients_spread: float | None
    received_accuracy: float | None
    received_loss: float | None
    received_rmse: float | None
    trained_accuracy: float | None
    train_loss: float | None
    learning_rate: float | None
    bytes_down: int
    """Payload to all clients; `bytes_up` from all."""
    bytes_up: int
    bytes_overhead: int
    """Manifests and headers, both ways."""
    bytes_fedavg: int
    """What the same exchanges would have moved, had they been FedAvg's; `bytes_fedavg_down` of it to clients."""
    bytes_fedavg_down: int
    resent: int
    seconds: float
    seconds_train: float
    step_seconds: float | None
    lowest_accuracy: float | None = _where_known()
    """Of an ensemble's modes, as the following are."""
    highest_accuracy: float | None = _where_known()
    entropy: float | None = _where_known()
    disagreement: float | None = _where_known()
    variance_over_members: float | None = _where_known()

    @staticmethod
    def of(report: RoundReport, model_bytes: int, task: Task) -> RoundRecord:
        """Of a round that has ended; `model_bytes` of the whole model."""
        train, server = report.train_metrics, report.server_metrics
        clients = _of_result(report)
        accuracy_of = None
        if not server.keys().isdisjoint(_SCORES):
            accuracy_of = "server"
        elif any(clients[name] is not None for name in _SCORES):
            accuracy_of = "clients" if report.train_metrics_of == "received" else "personal"
        scored: Mapping[str, float | None] = server if accuracy_of == "server" else clients
        loss = scored.get("loss")
        return RoundRecord(
            round=report.round,
            phase=report.phase,
            clients_asked=len(report.asked),
            clients_replied=len(report.replied),
            refused=_reasons(report.refused),
            lost=_reasons(report.lost),
            late=_reasons((client, f"it is an answer to round {number}") for client, number in report.late),
            left_out=_reasons((client, "it failed several times in a row") for client in report.left_out),
            notes=_reasons(report.notes),
            accuracy=scored.get("accuracy"),
            loss=loss,
            macro_f1=scored.get("macro-f1"),
            perplexity=None if not task.perplexity or loss is None else math.exp(min(loss, _LARGEST)),
            rmse=_root(loss, task),
            accuracy_of=accuracy_of,
            clients_accuracy=clients["mean"],
            clients_rmse=clients["rmse"],
            clients_spread=clients["spread"],
            received_accuracy=train.get("received-accuracy"),
            received_loss=train.get("received-loss"),
            received_rmse=_root(train.get("received-loss"), task),
            trained_accuracy=train.get("trained-accuracy"),
            train_loss=train.get("train-loss"),
            learning_rate=report.learning_rate,
            bytes_down=report.down.payload,
            bytes_up=report.up.payload,
            bytes_overhead=report.down.overhead + report.up.overhead,
            bytes_fedavg=(report.fedavg_down + report.fedavg_up) * model_bytes,
            bytes_fedavg_down=report.fedavg_down * model_bytes,
            resent=report.resent,
            seconds=round(report.seconds, 3),
            seconds_train=round(report.seconds_train, 3),
            step_seconds=train.get("step-seconds"),
            **{name: server[key] for name in _OPTIONAL if (key := name.replace("_", "-")) in server},
        )

    def to_line(self) -> dict[str, Any]:
        """Column → value, as a line of `metrics.jsonl` has them."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in _OPTIONAL}


_OPTIONAL = tuple(column.name for column in fields(RoundRecord) if column.metadata.get("optional"))
METRICS_KEYS = tuple(column.name for column in fields(RoundRecord) if column.name not in _OPTIONAL)
"""The columns of every line, in their order."""
COUNTED = ("refused", "lost", "late", "left_out")
"""Columns that list clients; what is plotted of them is how many these are."""


def _of_result(report: RoundReport) -> dict[str, float | None]:
    """What clients measured of the round's result on their own test examples.

    `accuracy` and `loss` as they are averaged (by test examples, but for personal models); `mean` of the accuracy over
    the clients, each counted alike, or of the root mean squared error `rmse`, and its `spread`.
    """
    measured, of = report.evaluate_metrics, f"{report.eval_metrics_of}-"
    if measured.keys().isdisjoint(f"{of}{name}" for name in _SCORES):
        # Without an evaluation, what was measured in training; an app of one's own may say "accuracy" and no more.
        own, plain = report.train_metrics_of != "received", report.eval_metrics_of == "received"
        measured, of = (report.train_metrics, f"{report.train_metrics_of}-") if own else (measured if plain else {}, "")
    rmse, spread = report.over_clients.get(f"{of}rmse", (None, None))
    mean, spread = report.over_clients.get(f"{of}accuracy", (measured.get("accuracy"), spread))
    return {
        "accuracy": measured.get(f"{of}accuracy"),
        "loss": measured.get(f"{of}loss"),
        "macro-f1": measured.get(f"{of}macro-f1"),
        "mean": mean,
        "rmse": rmse,
        "spread": spread,
    }


def _root(loss: float | None, task: Task) -> float | None:
    """Of the mean squared error; None where the loss is another."""
    return math.sqrt(loss) if task.regression and loss is not None else None


def _reasons(reasons: Iterable[tuple[str, str]]) -> Reasons:
    return [{"client": client, "reason": reason} for client, reason in reasons]
