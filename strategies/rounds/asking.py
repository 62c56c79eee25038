"""The messages of a round: they carry plans, values and the app's settings, and are answered by replies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from tepal.exchange.encodings import EncodingError
from tepal.exchange.plan import RATE, RATE_FACTOR, TRAIN, Outgoing, Plan, Reply, Tree
from tepal.strategies.method import Method
from tepal.strategies.rounds.cohort import Cohorts
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.messenger import Messenger
from tepal.strategies.rounds.report import LEFT_BEHIND, Answered, Failure, RoundFailed, RoundReport
from tepal.strategies.rounds.round import Round
from tepal.strategies.rounds.weights import weight_limit

SCHEDULES: Mapping[str, Callable[..., float]] = {
    "constant": lambda round, rounds: 1.0,
    "cosine": lambda round, rounds: 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds)),
}
"""Name → factor of the learning rate in a `round` of `rounds`, counted from 1."""
_MOST_RATE = 1e3


class Asker:
    """Sends the plans of a round to their clients, and enters all events into the round's report.

    Args:
        method: whose values are sent.
        messenger: sends and receives.
        cohorts: knows the clients' nodes.
        ledger: where clients without a good reply are entered.
        weighted_by: name of the metric with a reply's weight.
        share: the largest share of a client in the weights of a round.
        averages: whether of the replies' values only means over the clients are needed.
        schedule: name of the learning rate schedule.
        on_progress: called with the round's report after every event.
    """

    def __init__(
        self,
        method: Method[Any],
        messenger: Messenger,
        cohorts: Cohorts,
        ledger: ClientLedger,
        *,
        weighted_by: str,
        share: float,
        averages: bool,
        schedule: str,
        on_progress: Callable[[RoundReport], None],
    ) -> None:
        self.method = method
        self.weighted_by, self.share, self.averages = weighted_by, share, averages
        self.schedule = schedule
        self.on_progress = on_progress
        self._messenger, self._cohorts, self._ledger = messenger, cohorts, ledger

    def outgoing(
        self, state: Any, plans: list[Plan], this: Round, *, measured: bool = False, limit: int | None = None
    ) -> list[Outgoing]:
        """Each plan with its client's values, the app's settings and the client's node.

        `limit`: the number of replies that are awaited; None: all.
        """
        clients = len(plans)
        rounds_apart = max(self._cohorts.count() / max(clients, 1), 1.0)
        averaged = self._averaged(plans, limit)
        return [
            Outgoing(
                plan,
                partial(self.method.values, state, plan.client),
                self._settings(state, plan, this),
                self._cohorts.node_of(plan.client),
                measured=measured,
                clients=clients,
                rounds_apart=rounds_apart,
                averaged=averaged[plan.client],
            )
            for plan in plans
        ]

    def _averaged(self, plans: list[Plan], limit: int | None) -> Mapping[str, float]:
        """Client → `Outgoing.averaged`. `limit`: the number of replies that are awaited; None: all."""
        found = dict.fromkeys((plan.client for plan in plans), 0.0)
        means = [plan for plan in plans if plan.returns.keys() == {plan.model} and not plan.remembers]
        if not self.averages or not means:
            return found
        sizes = [self._ledger.size(plan.client, self.weighted_by) for plan in means]
        weights = [size for size in sizes if size] if all(sizes) else [1.0] * len(means)
        most = weight_limit(weights, self.share)  # as replies are merged
        weights = [min(weight, most) for weight in weights]
        sums: dict[tuple[Tree, str], float] = defaultdict(float)
        squares: dict[tuple[Tree, str], float] = defaultdict(float)
        for plan, weight in zip(means, weights, strict=True):
            for entry in plan.returns[plan.model]:
                sums[plan.model, entry] += weight
                squares[plan.model, entry] += weight**2
        share = min(limit / len(plans), 1.0) if limit else 1.0
        for plan in means:
            returned = [(plan.model, entry) for entry in plan.returns[plan.model]]
            found[plan.client] = share * min((sums[key] ** 2 / squares[key] for key in returned), default=0.0)
        return found

    def ask(
        self, messages: list[Outgoing], this: Round, limit: Callable[[], int] | None = None
    ) -> Iterator[Reply]:
        """Send these messages, and yield the good replies as they arrive. `limit`: as of `Messenger.exchange`."""
        try:
            for answer in self.exchange(this.report, messages, this.share(), limit):
                if isinstance(answer, Answered):
                    reply = answer.reply
                    del answer  # it may be as large as the model, and the next one arrives now
                    yield reply
                    del reply
                elif answer.state != LEFT_BEHIND:
                    self._ledger.failed(answer.client, this.number)
        except EncodingError as error:
            raise RoundFailed(f"round {this.number} cannot be sent: {error}") from error

    def exchange(
        self,
        report: RoundReport,
        messages: Iterable[Outgoing],
        timeout: float,
        limit: Callable[[], int] | None = None,
    ) -> Iterator[Answered | Failure]:
        """Send these messages, enter all events into the report, and yield each client's answer or failure."""
        messages = list(messages)
        for outgoing in messages:
            report.ask(outgoing.plan)
        for event in self._messenger.exchange(messages, timeout=timeout, limit=limit):
            report.add(event)
            self.on_progress(report)
            if isinstance(event, Answered | Failure):
                yield event
            del event

    def _settings(self, state: Any, plan: Plan, this: Round) -> Mapping[str, Any]:
        """The app's settings for a plan: its config, the round's number, and the scheduled learning rate."""
        settings = {**this.config, "server-round": plan.round}
        if plan.action != TRAIN:
            return settings
        factor = SCHEDULES[self.schedule](*self.method.progress(state, plan, this.rounds))
        rates = {key: this.config[key] for key in (RATE, "lr") if key in this.config}
        scaled = {key: rate * factor for key, rate in rates.items() if isinstance(rate, int | float)}
        # For a client with a learning rate of its own.
        return {**settings, **scaled, **({RATE_FACTOR: factor} if scaled and factor != 1 else {})}


def mean_rate(messages: list[Outgoing], metrics: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return the mean learning rate of a round's clients; None if the app has another setting for it.

    It is that of a client's message, or the client's own, which its `metrics` then have: a positive number of at most
    `_MOST_RATE`, since a client may report anything.
    """
    rates = []
    for outgoing in messages:
        sent = outgoing.settings.get("lr", outgoing.settings.get(RATE))
        own = metrics.get(outgoing.plan.client, {}).get(RATE, math.nan)
        rates.append(own if 0.0 < own <= _MOST_RATE else sent)
    known = [rate for rate in rates if isinstance(rate, int | float)]
    return sum(known) / len(known) if known else None
