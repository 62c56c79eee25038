"""`RoundRecord`, what is kept of a round: a line of `metrics.jsonl`.

Tables, reports, the dashboard and trackers are made from it, and a column is declared here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict

from tepal.host.text import LONGEST_NAME, visible
from tepal.records.columns import (
    Column,
    bytes_text,
    column,
    columns_of,
    count_text,
    from_values,
    score_text,
    seconds_text,
    step_text,
)

if TYPE_CHECKING:  # reading a run needs neither Flower nor torch
    from tepal.strategies.rounds.report import RoundReport
    from tepal.training.tasks import Task


class Incident(TypedDict):
    """A client (or the server) and what happened to it."""

    client: str
    reason: str


MOST_REASONS = 100
"""Reasons of a kind of incident that are kept of a round."""
LONGEST_REASON = 1000
"""Characters of a reason that are kept."""
NOT_KEPT = f"its reason is not kept: the round has more than {MOST_REASONS}"

_SCORES = ("accuracy", "loss")
_LARGEST = 700.0  # the exponential of more than this overflows
_OF_NORM = "share of squared norm"


def _incidents(heading: str) -> Any:
    return column(heading, "replies", count_text, default_factory=list)


def _score(heading: str = "", *, optional: bool = False) -> Any:
    return column(heading, text=score_text, optional=optional)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """One round. Its fields, in their order, are the columns; None stands for what was not measured.

    `accuracy` and `loss` are of the global model (or ensemble) after the round, on the server's held-out examples or,
    with `accuracy_of` "clients", on the clients' own test examples. "personal": every client has a personal model, and
    it is the mean over the clients of each one's on its own test examples. `received_…` are of the model that the round
    started from, on the clients' test examples, and `clients_…` of the result of the round: mean and standard deviation
    over the clients, each counted alike, of the accuracy or, in a regression, of the root mean squared error.
    """

    round: int = column("round", default=MISSING)
    phase: str | None = column("phase", left=True)
    clients_asked: int | None = column("asked", "clients")
    clients_replied: int | None = column("replied", "clients")
    refused: Sequence[Incident] = _incidents("refused")
    lost: Sequence[Incident] = _incidents("lost")
    late: Sequence[Incident] = _incidents("late")
    left_out: Sequence[Incident] = _incidents("left out")
    notes: Sequence[Incident] = _incidents("recovered")
    accuracy: float | None = _score("accuracy")
    loss: float | None = _score("loss")
    macro_f1: float | None = _score("macro-F1")
    perplexity: float | None = column("perplexity", text="{:.4g}".format)
    rmse: float | None = _score("RMSE")
    accuracy_of: str | None = column("test data", left=True)
    clients_accuracy: float | None = _score("clients’ own tests")
    clients_rmse: float | None = _score("clients’ own tests")
    clients_spread: float | None = _score("spread over clients")
    received_accuracy: float | None = _score()
    received_loss: float | None = _score()
    received_rmse: float | None = _score()
    received_macro_f1: float | None = _score(optional=True)
    received_perplexity: float | None = _score(optional=True)
    trained_accuracy: float | None = _score()
    train_loss: float | None = _score("training loss")
    learning_rate: float | None = column("learning rate", text="{:.3g}".format)
    bytes_down: int | None = column("down", "bytes", bytes_text)
    """Payload to all clients; `bytes_up` from all."""
    bytes_up: int | None = column("up", "bytes", bytes_text)
    bytes_overhead: int | None = column("manifests and headers", "bytes", bytes_text)
    """Manifests and headers, both ways."""
    bytes_fedavg: int | None = column("FedAvg", "bytes", bytes_text)
    """What FedAvg would have transferred in the same exchanges, both ways; `bytes_fedavg_down` of it to clients."""
    bytes_fedavg_down: int | None = column()
    bytes_plain: int | None = column()
    """Of the same entries without an encoding, both ways: relative to FedAvg's, what the strategy alone saves."""
    wire_left_out_down: float | None = column("norm left out, down", _OF_NORM, "{:.3f}".format, optional=True)
    """In `auto`: the share of the squared norm of what was encoded that is left out, in the mean over the messages with
    differences; `wire_left_out_up` in the mean over the clients whose replies were merged (see
    `RoundReport.mean_left_out`)."""
    wire_left_out_up: float | None = column("norm left out, up", _OF_NORM, "{:.3f}".format, optional=True)
    wire_budget: int | None = column("budget", "bytes", bytes_text, optional=True)
    """Of the round's training, both ways; half of it is for each direction. Of it `wire_budget_down` bytes were sent to
    clients, and `wire_budget_up` bytes were sent by clients."""
    wire_budget_down: int | None = column("budget used, down", "bytes", bytes_text, optional=True)
    wire_budget_up: int | None = column("budget used, up", "bytes", bytes_text, optional=True)
    resent: int | None = column("sent again", "parts")
    seconds: float | None = column("time", text=seconds_text)
    seconds_train: float | None = column("of it training", text=seconds_text)
    step_seconds: float | None = column("local step", text=step_text)
    lowest_accuracy: float | None = _score("accuracy of the worst mode", optional=True)
    """Of an ensemble's modes, as the following are."""
    highest_accuracy: float | None = _score("accuracy of the best mode", optional=True)
    entropy: float | None = _score(optional=True)
    """Of the mean prediction, in nats; `mode_entropy` is the mean of the modes' own entropies."""
    mode_entropy: float | None = _score(optional=True)
    disagreement: float | None = _score("disagreement of two modes", optional=True)
    variance_over_members: float | None = _score(optional=True)
    predicted_classes: int | None = column(optional=True)
    """Classes that the model predicts on the server's held-out examples, at least once; and the share of these examples
    that have the most frequent class, the accuracy of a constant answer."""
    largest_class: float | None = _score(optional=True)
    calibration_error: float | None = _score("calibration error", optional=True)
    """On the server's held-out examples; by bin of the predicted class's probability the following three."""
    calibration_probability: Sequence[float] | None = column(optional=True)
    calibration_accuracy: Sequence[float] | None = column(optional=True)
    calibration_examples: Sequence[float] | None = column(optional=True)
    entropy_threshold: float | None = column("entropy threshold", "nats", score_text, optional=True)
    """Entropy above which a prediction is flagged: 5 % of the held-out images exceed it. Of images of no class:"""
    flagged_letters: float | None = _score("letters flagged", optional=True)
    flagged_noise: float | None = _score("noise flagged", optional=True)
    flagged_covered: float | None = _score("covered images flagged", optional=True)

    @staticmethod
    def of(report: RoundReport, model_bytes: int, task: Task) -> RoundRecord:
        """Make the record of a round that has ended; `model_bytes` are those of the whole model."""
        train, server = report.train_metrics, report.server_metrics
        clients = _of_result(report)
        accuracy_of = None
        if not server.keys().isdisjoint(_SCORES):
            accuracy_of = "server"
        elif any(clients[name] is not None for name in _SCORES):
            accuracy_of = "clients" if report.train_metrics_of == "received" else "personal"
        # The result of an ensemble is no model that one client receives.
        received = {} if report.eval_metrics_of == "ensemble" else train
        measured: Mapping[str, Any] = {**server, **report.server_lists}
        scored: Mapping[str, float | None] = server if accuracy_of == "server" else clients
        loss = scored.get("loss")
        return RoundRecord(
            round=report.round,
            phase=report.phase,
            clients_asked=len(report.asked),
            clients_replied=len(report.replied),
            refused=_incident_list(report.refused),
            lost=_incident_list(report.lost),
            late=_incident_list((client, f"it is an answer to round {number}") for client, number in report.late),
            left_out=_incident_list((client, "it failed several times in a row") for client in report.left_out),
            notes=_incident_list(report.notes, counted=False),
            accuracy=scored.get("accuracy"),
            loss=loss,
            macro_f1=scored.get("macro-f1"),
            perplexity=_perplexity(loss, task),
            rmse=_root(loss, task),
            accuracy_of=accuracy_of,
            clients_accuracy=clients["mean"],
            clients_rmse=clients["rmse"],
            clients_spread=clients["spread"],
            received_accuracy=received.get("received-accuracy"),
            received_loss=received.get("received-loss"),
            received_rmse=_root(received.get("received-loss"), task),
            received_macro_f1=received.get("received-macro-f1"),
            received_perplexity=_perplexity(received.get("received-loss"), task),
            trained_accuracy=train.get("trained-accuracy"),
            train_loss=train.get("train-loss"),
            learning_rate=report.learning_rate,
            bytes_down=report.down.payload,
            bytes_up=report.up.payload,
            bytes_overhead=report.down.overhead + report.up.overhead,
            bytes_fedavg=(report.fedavg_down + report.fedavg_up) * model_bytes,
            bytes_fedavg_down=report.fedavg_down * model_bytes,
            bytes_plain=report.down.plain + report.up.plain,
            resent=report.resent,
            seconds=round(report.seconds, 3),
            seconds_train=round(report.seconds_train, 3),
            step_seconds=train.get("step-seconds"),
            **{name: measured[key] for name in _MEASURED if (key := name.replace("_", "-")) in measured},
            **_of_wire(report),
        )

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> RoundRecord:
        """Make the record of a line of `metrics.jsonl`; of a missing column it has None, or an empty list.

        Raises ValueError for a value of another type than its column's.
        """
        return from_values(cls, line)

    def to_line(self) -> dict[str, Any]:
        """Return column → value, as a line of `metrics.jsonl` has them."""
        values = ((name, getattr(self, name)) for name in COLUMNS)
        return {name: value for name, value in values if value is not None or name not in _OPTIONAL}

    def value(self, name: str) -> Any:
        """Return the value of a column that is only named at run time. Raises KeyError for one that is not declared."""
        return getattr(self, COLUMNS[name].key)

    def incidents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (column, client, reason) for each incident of the round."""
        for name in INCIDENTS:
            for each in self.value(name):
                yield name, each.get("client") or "", each.get("reason") or "no reason given"


COLUMNS: Mapping[str, Column] = columns_of(RoundRecord)
"""Every column, by its name."""
_OPTIONAL = {each.name for each in fields(RoundRecord) if each.metadata["optional"]}
WIRE = ("wire_left_out_down", "wire_left_out_up", "wire_budget", "wire_budget_down", "wire_budget_up")
"""Columns of runs in which a direction uses `auto`."""
_MEASURED = _OPTIONAL.difference(WIRE, ("received_macro_f1", "received_perplexity"))
"""Those that the server measures when it scores the model."""
COUNTED = ("refused", "lost", "late", "left_out")
"""Columns that list clients; trackers show how many clients they list."""
INCIDENTS = (*COUNTED, "notes")
BINS = ("calibration_probability", "calibration_accuracy", "calibration_examples")
"""Columns that list numbers, one for each bin of the calibration."""


def columns(*names: str) -> tuple[Column, ...]:
    """Return the columns of these names, in this order. Raises KeyError for one that is not declared."""
    return tuple(COLUMNS[name] for name in names)


def _of_result(report: RoundReport) -> dict[str, float | None]:
    """Return what clients measured of the round's result on their own test examples.

    `accuracy` and `loss` as they are averaged (by test examples, but for personal models); `mean` of the accuracy over
    the clients, each counted alike, or of the root mean squared error `rmse`, and its `spread`.
    """
    measured, of = report.evaluate_metrics, f"{report.eval_metrics_of}-"
    if measured.keys().isdisjoint(f"{of}{name}" for name in _SCORES):
        # Without an evaluation, what was measured in training; a user's app may report "accuracy" alone.
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


def _of_wire(report: RoundReport) -> dict[str, Any]:
    """Return the columns of `WIRE`."""
    down, up = report.mean_left_out
    found: dict[str, Any] = {"wire_left_out_down": down, "wire_left_out_up": up}
    if report.wire_budget:
        sent = {"wire_budget_down": report.down.in_budget, "wire_budget_up": report.up.in_budget}
        found.update({"wire_budget": report.wire_budget, **sent})
    return found


def _root(loss: float | None, task: Task) -> float | None:
    """The root of the mean squared error; None if the task's loss is another one, or is no such error (below 0)."""
    return math.sqrt(loss) if task.regression and loss is not None and loss >= 0 else None


def _perplexity(loss: float | None, task: Task) -> float | None:
    """The exponential of the mean loss; None if the task is not measured by it."""
    return math.exp(min(loss, _LARGEST)) if task.perplexity and loss is not None else None


def _incident_list(reasons: Iterable[tuple[str, str]], *, counted: bool = True) -> list[Incident]:
    """Incidents as they are kept: on one line each, of bounded length, and the reasons of the first MOST_REASONS.

    Of further ones the clients are kept if they are `counted`, and otherwise only how many there are.
    """
    left = iter(reasons)
    kept = [Incident(client=visible(client, LONGEST_NAME), reason=visible(reason, LONGEST_REASON))
            for client, reason in islice(left, MOST_REASONS)]  # fmt: skip
    further = [client for client, _ in left]
    if counted:
        return kept + [Incident(client=visible(client, LONGEST_NAME), reason=NOT_KEPT) for client in further]
    return kept + ([Incident(client="", reason=f"and {len(further):,} more")] if further else [])
