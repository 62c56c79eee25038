"""What happens in an exchange, as events, and the report of a round, which is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.serverapp.strategy import Result

from tepal.exchange.layout import Names
from tepal.exchange.plan import EVALUATE, INTRODUCE, LAYER_BUDGET, PROBE, TRAIN, Outgoing, Plan, Reply
from tepal.exchange.sender import Traffic
from tepal.strategies.aggregate import mean_metrics, over_clients
from tepal.strategies.rounds.travel import Travel

SERVER = "server"
"""Whose note it is, in a report, when it is not a client's."""

ASKED, REPLIED, REFUSED, LOST, LEFT_BEHIND = "asked", "replied", "refused", "lost", "not waited for"
"""States of a client in a round. Between the first and the others it is at what it was sent (`DOING`)."""
DOING: Mapping[str, str] = {TRAIN: "training", EVALUATE: "scoring", PROBE: "probing"}


class RoundFailed(RuntimeError):
    """Too few clients. Nothing that was learned before is lost: `result` has the model of the last finished round."""

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Sent:
    """A message went out."""

    outgoing: Outgoing
    traffic: Traffic
    entries: tuple[Names, ...]
    """Of each part that travelled."""
    again: bool
    """The client was sent something before, and lacked entries or was restarted."""


@dataclass(frozen=True)
class Arrived:
    """An answer of any kind came in."""

    outgoing: Outgoing
    traffic: Traffic
    notes: Names
    """What went wrong at the client on the way to it, in the client's words."""


@dataclass(frozen=True)
class Answered:
    """A client gave a good reply."""

    outgoing: Outgoing
    reply: Reply
    seconds: float
    """Since the client was sent the plan."""


@dataclass(frozen=True)
class Failure:
    """A client from which this exchange has no reply."""

    outgoing: Outgoing
    client: str
    """The name that it goes by, or calls itself."""
    state: str
    """REFUSED: its answer must not be merged. LOST: none came. LEFT_BEHIND: enough others had answered."""
    reason: str = ""
    lasting: bool = False
    """It would answer so again: it says itself that it cannot, its app lacks the mod, or the method cannot use it."""
    by_client: bool = False
    """The client itself says why it gives no result."""


@dataclass(frozen=True)
class Late:
    """An answer to an earlier exchange came, and was dropped."""

    client: str
    round: int


Event = Sent | Arrived | Answered | Failure | Late


@dataclass
class ClientReport:
    """A client's part in a round, as far as it has come."""

    state: str = ASKED
    examples: int | None = None
    """That its reply is weighted with."""
    budget: float | None = None
    """Of layers, where it declared one."""
    bytes_down: int = 0
    bytes_up: int = 0
    """Payload."""
    seconds: float = 0.0
    """From its being sent something until its answer was read, over the exchanges of the round."""


@dataclass
class RoundReport:
    """What happened in one round; every figure in it was measured."""

    round: int
    phase: str
    asked: list[str] = field(default_factory=list)
    replied: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(client, reason): its answer came and was not merged."""
    refused_by_client: set[str] = field(default_factory=set)
    """Clients, of those refused, that themselves said why they give no result."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """(client, reason): no answer came."""
    late: list[tuple[str, int]] = field(default_factory=list)
    """(client, round): its answer to that round came now, and was dropped."""
    left_out: list[str] = field(default_factory=list)
    """Clients that are connected and were not asked, because they failed several times in a row."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(client or SERVER, what went wrong and was recovered from)."""
    down: Traffic = field(default_factory=Traffic)
    up: Traffic = field(default_factory=Traffic)
    fedavg_down: int = 0
    """How often the full model would have gone down, had the same exchanges been FedAvg's."""
    fedavg_up: int = 0
    resent: int = 0
    learning_rate: float | None = None
    label_counts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By client, of those that introduced themselves and reported it: how many of its examples each class has."""
    clients: dict[str, ClientReport] = field(default_factory=dict)
    """By client, of those asked."""
    travel: Travel | None = None
    record: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What the method records of the round (`Method.record`), and what travelled (`Travel.shares`)."""
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    evaluate_metrics: Mapping[str, float] = field(default_factory=dict)
    server_metrics: Mapping[str, float] = field(default_factory=dict)
    over_clients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of metrics that clients measured on their own test examples: mean and standard deviation over the clients."""
    train_metrics_of: str = "received"
    eval_metrics_of: str = "received"
    """See `Method`."""
    seconds: float = 0.0
    seconds_train: float = 0.0

    def ask(self, plan: Plan) -> None:
        """A client is about to be sent this plan."""
        if plan.action != INTRODUCE:
            self.clients.setdefault(plan.client, ClientReport()).state = ASKED

    def add(self, event: Event) -> None:
        """Enter what has happened. Nothing of the event's arrays is kept."""
        client = None if isinstance(event, Late) else self.clients.get(event.outgoing.plan.client)
        match event:
            case Sent(outgoing, traffic, entries, again):
                self.down += traffic
                self.resent += again
                if client:
                    client.state = DOING.get(outgoing.plan.action, outgoing.plan.action)
                    client.bytes_down += traffic.payload
                    if self.travel is not None:
                        for names in entries:
                            self.travel.sent(names)
                        if outgoing.plan.action == TRAIN and not again:
                            self.travel.asked(outgoing.plan.trains)
            case Arrived(_, traffic, notes):
                self.up += traffic
                self.notes += [(event.outgoing.name, note) for note in notes]
                if client:
                    client.bytes_up += traffic.payload
            case Answered(outgoing, reply, seconds):
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
            case Late(name, number):
                self.late.append((name, number))

    def mean_of(
        self, metrics: Mapping[str, tuple[Mapping[str, float], int]], of: str, weighted_by: str
    ) -> dict[str, float]:
        """The mean of clients' metrics (client → metrics, weight); what the mean does not show is entered here.

        `of`: the model that clients scored, as in the names of the metrics.
        """
        self.over_clients = {**self.over_clients, **over_clients(metrics.values())}
        personal = self.train_metrics_of != "received"
        for name in ("accuracy", "rmse") if personal else ():
            # `scored` clients, and the `accuracy` (or `rmse`) of each one's personal model on its own test examples.
            found = {c: own[f"{of}-{name}"] for c, (own, _) in sorted(metrics.items()) if f"{of}-{name}" in own}
            names, scores = np.array([*found], str), np.array([*found.values()], float)
            self.record = {**self.record, **({"scored": names, name: scores} if found else {})}
        return mean_metrics(metrics.values(), weighted_by, alike=personal)

    def reasons(self) -> str:
        """Every reason for which a client was refused or lost once, with the clients that gave it; "" for none."""
        by_reason: dict[str, list[str]] = {}
        own = [note for note in self.notes if note[0] == SERVER]
        for client, reason in [*self.refused, *self.lost, *own]:
            clients = by_reason.setdefault(reason, [])
            if client not in clients:
                clients.append(client)
        said = [f"{', '.join(names[:5])}{' …' * (len(names) > 5)}: {reason}" for reason, names in by_reason.items()]
        return ". " + "; ".join(said[-3:]) if said else ""

    def in_a_line(self, rounds: int) -> str:
        """The round for those who follow the log: `flwr run --stream`, or a file of it."""
        figures = [
            f"{len(self.replied)} of {len(self.asked)} clients", f"{self.down.payload / 1e6:.3g} MB down",
            f"{self.up.payload / 1e6:.3g} MB up", f"{self.seconds:.1f} s",
        ]  # fmt: skip
        scores = {**self.train_metrics, **self.evaluate_metrics, **self.server_metrics}
        figures += [f"{name} {scores[name]:.4f}" for name in sorted(scores) if name.endswith(("accuracy", "loss"))]
        return f"Round {self.round} of {rounds}, {self.phase}: {', '.join(figures)}."
