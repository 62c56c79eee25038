"""The events of an exchange, and the report of a round, which is made from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from tepal.exchange.bounds import MOST_NOTES
from tepal.exchange.layout import Names
from tepal.exchange.plan import EVALUATE, INTRODUCE, LAYER_BUDGET, PROBE, TRAIN, Outgoing, Plan, Reply
from tepal.exchange.traffic import Traffic
from tepal.strategies.aggregate import ON_TESTS, RECORDED, mean_metrics, of_most, over_clients
from tepal.strategies.rounds.travel import Travel
from tepal.strategies.rounds.weights import with_limited_weights

SERVER = "server"
"""Stands in a report where a client's name would, for a note of the server itself."""

ASKED, REPLIED, REFUSED, LOST, LEFT_BEHIND = "asked", "replied", "refused", "lost", "not waited for"
"""States of a client in a round. After the first, and before one of the others, its state is its task (`DOING`)."""
DOING: Mapping[str, str] = {TRAIN: "training", EVALUATE: "scoring", PROBE: "probing"}


MOST_FIGURES = 12
"""Scores in a line of the log."""
NOT_KEPT = f"further notes are not kept: at most {MOST_NOTES} of a client in a round"
"""Stands for the further notes of a client in a round."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")  # a name that cannot be taken for a figure, or for two


class RoundFailed(RuntimeError):
    """A round failed, usually for too few clients. `result` has the model of the last finished round."""

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Sent:
    """A message was sent."""

    outgoing: Outgoing
    traffic: Traffic
    entries: tuple[Names, ...]
    """The entries of each part that it carries."""
    again: bool
    """The client had been sent a message before, and lacked entries or was restarted."""
    left_out: float | None = None
    """The share of the squared norm that its differences leave out; None if it has none in `auto`, or is sent again."""


@dataclass(frozen=True)
class Arrived:
    """An answer of any kind arrived."""

    outgoing: Outgoing
    traffic: Traffic
    notes: Names
    """Errors from which the client recovered, in its words."""


@dataclass(frozen=True)
class Answered:
    """A client sent a good reply."""

    outgoing: Outgoing
    reply: Reply
    seconds: float
    """Time since the client was sent the plan."""


@dataclass(frozen=True)
class Failure:
    """A client without a good reply in this exchange."""

    outgoing: Outgoing
    client: str
    """Its name; while it is not settled, its node and the name that it gave itself."""
    state: str
    """REFUSED: its answer must not be merged. LOST: it did not answer. LEFT_BEHIND: enough others had answered."""
    reason: str = ""
    lasting: bool = False
    """It would fail again: it reports that it cannot answer, its app lacks the mod, or the method cannot use it."""
    by_client: bool = False
    """The reason is the client's own."""
    unanswered: bool = False
    """The client did not answer in time."""
    of_model: bool = False
    """The model that it was sent may be the reason: its app raised, or its answer could not be merged."""


@dataclass(frozen=True)
class Late:
    """An answer to an earlier exchange arrived and was dropped."""

    client: str
    round: int


Event = Sent | Arrived | Answered | Failure | Late


@dataclass
class ClientReport:
    """A client's progress in a round."""

    state: str = ASKED
    examples: int | None = None
    """The weight of its reply."""
    budget: float | None = None
    """Its budget of layers, if it declared one."""
    bytes_down: int = 0
    bytes_up: int = 0
    """Payload bytes to and from the client."""
    seconds: float = 0.0
    """Time from sending to reading the answer, summed over the exchanges of the round."""


@dataclass
class RoundReport:
    """What happened in one round. All figures are measured."""

    round: int
    phase: str
    asked: list[str] = field(default_factory=list)
    cohort: list[str] = field(default_factory=list)
    """The clients of this attempt. Those that fail in a phase before training are not asked to train."""
    replied: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(client, reason): its answer was not merged."""
    not_merged: set[str] = field(default_factory=set)
    """Refused clients whose replies were good by themselves, and not beside the others'."""
    refused_by_client: set[str] = field(default_factory=set)
    """Refused clients that gave the reason themselves."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """(client, reason): it did not answer."""
    failed_by_model: set[str] = field(default_factory=set)
    """Clients that failed, for which the model that they were sent may be the reason."""
    late: list[tuple[str, int]] = field(default_factory=list)
    """(client, round): its answer to that round arrived in this one, and was dropped."""
    went_back: bool = False
    """The run returned to the model before the last merge: this round trained from that one."""
    left_out: list[str] = field(default_factory=list)
    """Connected clients that were not asked: they failed several times in a row, or are suspects."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(client or SERVER, an error from which it recovered): `MOST_NOTES` of each client, and one for all further."""
    down: Traffic = field(default_factory=Traffic)
    up: Traffic = field(default_factory=Traffic)
    wire_budget: int = 0
    """Bytes of the round's budget; 0 without one."""
    left_out_down: list[float] = field(default_factory=list)
    """Of each message with differences in `auto`, the share of their squared norm that it leaves out."""
    left_out_up: dict[str, float] = field(default_factory=dict)
    """Client → the share of the squared norm that its upload in `auto` leaves out."""
    fedavg_down: int = 0
    """How many times FedAvg would have sent the full model down in the same exchanges; `fedavg_up`: up."""
    fedavg_up: int = 0
    resent: int = 0
    learning_rate: float | None = None
    label_counts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Client → number of examples per class, for clients that introduced themselves with it in this round."""
    clients: dict[str, ClientReport] = field(default_factory=dict)
    """By client, for those asked."""
    travel: Travel | None = None
    record: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The method's arrays (`Method.record`), and how often each segment travelled (`shares`)."""
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    evaluate_metrics: Mapping[str, float] = field(default_factory=dict)
    server_metrics: Mapping[str, float] = field(default_factory=dict)
    server_lists: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Metrics of the server that are lists of numbers, such as one number for each bin of a calibration."""
    over_clients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Metric on the clients' test examples → mean and standard deviation over the clients."""
    train_metrics_of: str = "received"
    eval_metrics_of: str = "received"
    """See `Method`."""
    seconds: float = 0.0
    seconds_train: float = 0.0
    _noted: dict[int, int] = field(default_factory=dict, repr=False)
    """Node → its notes."""

    def ask(self, plan: Plan) -> None:
        """Enter that a client is about to be sent this plan."""
        if plan.action != INTRODUCE:
            self.clients.setdefault(plan.client, ClientReport()).state = ASKED

    def add(self, event: Event) -> None:
        """Enter an event. No reference to its arrays is kept."""
        client = None if isinstance(event, Late) else self.clients.get(event.outgoing.plan.client)
        match event:
            case Sent(outgoing, traffic, entries, again, left_out):
                self.down += traffic
                self.left_out_down += [] if left_out is None else [left_out]
                self.resent += again
                if client:
                    client.state = DOING.get(outgoing.plan.action, outgoing.plan.action)
                    client.bytes_down += traffic.payload
                    if self.travel is not None:
                        for names in entries:
                            self.travel.sent(names)
                        if outgoing.plan.action == TRAIN and not again:
                            self.travel.asked(outgoing.plan.trains)
            case Arrived(outgoing, traffic, notes):
                self.up += traffic
                self._note(outgoing, notes)
                if client:
                    client.bytes_up += traffic.payload
            case Answered(outgoing, reply, seconds):
                if reply.left_out is not None:
                    self.left_out_up[reply.client] = reply.left_out
                if client:
                    client.state = REPLIED
                    client.seconds += seconds
                    client.budget = reply.metrics.get(LAYER_BUDGET, client.budget)
                    if outgoing.plan.action == TRAIN:
                        client.examples = reply.examples
                    if self.travel is not None:
                        for part in reply.parts.values():
                            self.travel.returned(tuple(part))
            case Failure(state=state):
                if client:
                    client.state = state
                if state == REFUSED:
                    self.refused.append((event.client, event.reason))
                elif state == LOST:
                    self.lost.append((event.client, event.reason))
                if event.by_client:
                    self.refused_by_client.add(event.client)
                if event.of_model:
                    self.failed_by_model.add(event.client)
            case Late(name, number):
                self.late.append((name, number))

    def _note(self, outgoing: Outgoing, notes: Names) -> None:
        """Enter what a client reports, of all its answers in the round no more than of one."""
        before = self._noted.get(outgoing.node_id, 0)
        self._noted[outgoing.node_id] = before + len(notes)
        kept = [*notes[: max(MOST_NOTES - before, 0)]]
        if before <= MOST_NOTES < before + len(notes):
            kept.append(NOT_KEPT)
        self.notes += [(outgoing.name, note) for note in kept]

    @property
    def mean_left_out(self) -> tuple[float | None, float | None]:
        """The mean share of the squared norm that is left out, down and up; None where nothing is in `auto`.

        Down: over the messages with differences, of which a client may have been sent several. Up: over the clients
        whose replies are merged. Each message or client counts alike. A sum of floats is rounded once, so that it does
        not depend on which client answered first.
        """
        up = [self.left_out_up[client] for client in self.replied if client in self.left_out_up]
        return fmean(self.left_out_down) if self.left_out_down else None, fmean(up) if up else None

    def shares(self) -> Mapping[str, np.ndarray]:
        """How often each segment travelled per client (`Travel.shares`); {} if that is not counted.

        `travel_down` is of all clients of the round, also of those that only score: a model that they are sent to score
        they may train next, and are not sent again. The others are of the clients that were to train.
        """
        if self.travel is None:
            return {}
        down = self.travel.shares(len(self.clients))["travel_down"]
        return {**self.travel.shares(len(self.asked)), "travel_down": down}

    def refuse(self, client: str, reason: str) -> None:
        """Enter that a reply which had arrived is not merged."""
        self.refused.append((client, reason))
        self.not_merged.add(client)
        self.failed_by_model.add(client)
        if client in self.clients:
            self.clients[client].state = REFUSED

    @property
    def drawn(self) -> Sequence[str]:
        """The clients of this attempt, from its first phase on."""
        return self.cohort or self.asked

    def most_failed(self) -> bool:
        """Whether most clients of this attempt have no good reply, and the model that they were sent may be why."""
        failed = [name for name in self.failed_by_model.intersection(self.drawn) if not self._replied(name)]
        return 2 * len(failed) > len(self.drawn)

    def _replied(self, client: str) -> bool:
        return client in self.clients and self.clients[client].state == REPLIED

    def without_refused(self, names: Sequence[str], at_least: int) -> Sequence[str]:
        """These clients without those that are `not_merged`, if as many are left as are needed.

        If most are, the model may be why, and they are needed to tell.
        """
        if 2 * len(self.not_merged.intersection(self.drawn)) > len(self.drawn):
            return names
        rest = tuple(name for name in names if name not in self.not_merged)
        return rest if len(rest) >= at_least else names

    def add_server_metrics(self, record: MetricRecord | None) -> None:
        """Enter what the server measured of the round's result."""
        metrics = dict(record or {})
        self.server_metrics = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self.server_lists = {name: value for name, value in metrics.items() if isinstance(value, list)}

    def mean_of(
        self, metrics: Mapping[str, tuple[Mapping[str, float], int]], of: str, weighted_by: str, *, share: float = 1.0
    ) -> dict[str, float]:
        """The mean of clients' metrics. Their spread, and each personal model's score, are entered into the report.

        Scores that fewer than half of the clients report are left out (`of_most`).

        Args:
            metrics: client → its metrics and weight.
            of: the model that the clients scored, as in the metrics' names.
            weighted_by: the metric that is the weight.
            share: the largest share of one client in a mean's weights.
        """
        metrics = of_most(with_limited_weights(metrics, share))
        self.over_clients = {**self.over_clients, **over_clients(metrics.values())}
        personal = self.train_metrics_of != "received"
        for name in ("accuracy", "rmse") if personal else ():
            # `scored` clients, and the `accuracy` (or `rmse`) of each one's personal model on its own test examples.
            found = {c: own[f"{of}-{name}"] for c, (own, _) in sorted(metrics.items()) if f"{of}-{name}" in own}
            names, scores = np.array([*found], str), np.array([*found.values()], float)
            self.record = {**self.record, **({"scored": names, name: scores} if found else {})}
        return mean_metrics(metrics.values(), weighted_by, uniform=personal)

    def reasons(self) -> str:
        """Each reason for which clients were refused or lost, once, with their names; "" for none."""
        by_reason: dict[str, list[str]] = {}
        own = [note for note in self.notes if note[0] == SERVER]
        for client, reason in [*self.refused, *self.lost, *own]:
            clients = by_reason.setdefault(reason, [])
            if client not in clients:
                clients.append(client)
        said = [f"{', '.join(names[:5])}{' …' * (len(names) > 5)}: {reason}" for reason, names in by_reason.items()]
        return ". " + "; ".join(said[-3:]) if said else ""

    def in_a_line(self, rounds: int) -> str:
        """The round as a line of the log."""
        figures = [
            f"{len(self.replied)} of {len(self.asked)} clients", f"{self.down.payload / 1e6:.3g} MB down",
            f"{self.up.payload / 1e6:.3g} MB up", f"{self.seconds:.1f} s",
        ]  # fmt: skip
        figures += [*self._wire(), *self._scores()]
        return f"Round {self.round} of {rounds}, {self.phase}: {', '.join(figures)}."

    def _wire(self) -> list[str]:
        """What `auto` left out, and how much of the budget was sent; [] without `auto`."""
        shares = zip(self.mean_left_out, ("down", "up"), strict=True)
        left_out = [f"{share:.0%} {way}".replace("%", " %") for share, way in shares if share is not None]
        found = [f"auto left out {' and '.join(left_out)}"] if left_out else []
        if self.wire_budget:
            used = (self.down.in_budget + self.up.in_budget) / self.wire_budget
            found.append(f"used {100 * used:.0f} % of the budget")
        return found

    def _scores(self) -> list[str]:
        """The accuracies and losses of the round, at most `MOST_FIGURES`: those that are known first."""
        every = {**self.train_metrics, **self.evaluate_metrics, **self.server_metrics}
        found = [name for name in sorted(every) if name.endswith(("accuracy", "loss"))]
        known = [name for name in found if name in self.server_metrics or name in RECORDED or name.startswith(ON_TESTS)]
        others = [name for name in found if name not in known]
        plain = [name for name in (*known, *others) if _PLAIN.fullmatch(name)][:MOST_FIGURES]
        shown = [f"{name} {_short(every[name])}" for name in sorted(plain)]
        return shown if len(plain) == len(found) else [*shown, f"{len(found) - len(plain)} more metrics"]


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
