"""Who takes part in a round: nodes introduce themselves, and a cohort is drawn from the available clients."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
from flwr.proto.node_pb2 import NodeInfo

from tepal.exchange.plan import INTRODUCE, LABEL_COUNTS, Outgoing, Plan, Reply
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.nodes import Nodes
from tepal.strategies.rounds.report import Answered, Failure, RoundFailed, RoundReport

log = getLogger("flwr")

_INTRODUCTION = 300.0  # seconds that a new node is given to introduce itself
_INTRODUCED = 1000, 4  # nodes at a time, and times a round's cohort, whichever is more: many thousands take rounds
_LOG_AGAIN, _ASK_AGAIN = 15.0, 3.0  # seconds
_RETURN = 300.0  # seconds that a deterministic run which is resumed waits for the clients that it had

Send = Callable[[Iterable[Outgoing], float], Iterator[Answered | Failure]]
"""Sends these messages, and yields what came of each within so many seconds."""


@dataclass(frozen=True)
class Rules:
    """How many clients take part, and how they are drawn. See `MethodStrategy`."""

    fraction_train: float
    min_available_nodes: int
    needed_by: str
    """The option that `min_available_nodes` comes from."""
    min_replies: int
    seed: int
    deterministic: bool

    def size(self, available: int, fraction: float) -> int:
        """How many of the available clients a round takes."""
        return cohort_size(available, fraction, self.min_replies)


def cohort_size(available: int, fraction: float, min_replies: int) -> int:
    """How many of the available clients a round takes."""
    return min(available, max(int(available * fraction), min_replies))


class Cohorts:
    """The clients of a run.

    Args:
        rules: how many take part.
        list_nodes: the connected nodes, as the grid lists them.
        ledger: what is known of each client.
    """

    def __init__(self, rules: Rules, list_nodes: Callable[[], list[NodeInfo]], ledger: ClientLedger) -> None:
        self.rules = rules
        self.awaited: set[str] = set()
        """Clients that a resumed run waits for."""
        self._list_nodes = list_nodes
        self._ledger = ledger
        self._nodes = Nodes()

    def available(self) -> tuple[str, ...]:
        """Names of the clients that can take part, sorted."""
        return tuple(self._nodes.available())

    def node_of(self, client: str) -> int:
        """The node of an available client."""
        return self._nodes.node_of()[client]

    def wait(self, report: RoundReport, settings: Mapping[str, Any], timeout: float, send: Send) -> None:
        """Wait until enough clients are available; new nodes introduce themselves.

        Raises:
            RoundFailed: there are too few after `timeout` seconds, or of those connected too few can take part.
        """
        rules = self.rules
        begun = time.monotonic()
        deadline = begun + timeout
        log_again = ask_again = begun  # when it is logged what is waited for; when silent nodes are asked again
        while True:
            looked = time.monotonic()
            try:
                self._nodes.update(self._list_nodes())
            except Exception as error:  # a SuperLink that is busy or starting; it is asked again until the deadline
                log.warning("The SuperLink does not say which nodes are there: %s", error)
            too_few = len(self._nodes.available()) < rules.min_available_nodes
            silent_too = too_few and time.monotonic() >= ask_again
            if asked := dict(self._nodes.take_new(report.round, silent_too=silent_too, most=self._at_once())):
                self._meet(asked, report, settings, min(timeout, _INTRODUCTION), send)
                ask_again = time.monotonic() + _ASK_AGAIN
            available, refusals = len(self._nodes.available()), self._nodes.refusals()
            self.awaited -= {*self._nodes.available()}
            if self.awaited and time.monotonic() > min(begun + _RETURN, deadline):
                log.warning(
                    "%s took part before the run was resumed and did not come back: the run goes on without them, and "
                    "will not end as it would have.", ", ".join(sorted(self.awaited)),
                )  # fmt: skip
                self.awaited.clear()
            if available >= rules.min_available_nodes and not self.awaited:
                return
            if available < rules.min_available_nodes <= available + len(refusals) and not self._nodes.waiting():
                raise RoundFailed(
                    f"only {available} of {available + len(refusals)} clients can take part, and "
                    f"{rules.min_available_nodes} are needed ({rules.needed_by}). The others say: "
                    + "; ".join(sorted(set(refusals)))
                )
            if time.monotonic() > deadline:
                raise RoundFailed(
                    f"{available} clients are there after {timeout:g} s, and {rules.min_available_nodes} are "
                    f"needed: start more SuperNodes, or set {rules.needed_by} lower" + report.reasons()
                )
            if time.monotonic() >= log_again:
                log_again = time.monotonic() + _LOG_AGAIN
                if available < rules.min_available_nodes:
                    log.info("Waiting for clients: %d are there, %d are needed.", available, rules.min_available_nodes)
                else:
                    log.info("Waiting for %s, as the run was resumed.", ", ".join(sorted(self.awaited)))
            # A list of many thousands of nodes must not keep the SuperLink busy.
            time.sleep(max(0.5, time.monotonic() - looked))

    def draw(self, fraction: float, report: RoundReport, attempt: int, action: str) -> Draw:
        """What this attempt at a round draws its cohort from."""
        available = self._nodes.available()
        left_out = self._ledger.standing.out(self._nodes.node_of(), report.round)
        if len(available) - len(left_out) < self.rules.min_replies:
            left_out = []  # better those than none
        out = set(left_out)
        names = tuple(name for name in available if name not in out)
        # A share of all that are connected, also while most of them have not introduced themselves yet.
        size = min(len(names), self.rules.size(len(names) + self._nodes.waiting(), fraction))
        rng = np.random.default_rng([self.rules.seed, report.round, attempt, zlib.crc32(action.encode())])
        return Draw(names, size, rng, left_out)

    def _at_once(self) -> int | None:
        """How many new nodes introduce themselves before a round; None for all of them."""
        rules = self.rules
        if rules.deterministic:  # which of them come first is not the same in another run
            return None
        least, times = _INTRODUCED
        connected = len(self._nodes.available()) + self._nodes.waiting()
        return max(least, times * rules.size(connected, rules.fraction_train), rules.min_available_nodes)

    def _meet(
        self,
        asked: Mapping[int, str],
        report: RoundReport,
        settings: Mapping[str, Any],
        timeout: float,
        send: Send,
    ) -> None:
        """Ask new nodes (node id → registered name or "") who they are, what they hold, and whether they can train."""
        settings = {**settings, "server-round": report.round}
        introductions = [
            Outgoing(Plan(client=name, round=report.round, action=INTRODUCE, needs={}), _nothing, settings, node_id)
            for node_id, name in asked.items()
        ]
        introduced: dict[int, Reply] = {}
        refused: dict[int, str] = {}
        for answer in send(introductions, timeout):
            if isinstance(answer, Answered):
                introduced[answer.outgoing.node_id] = answer.reply
            elif answer.lasting:
                refused[answer.outgoing.node_id] = answer.reason
        names = self._nodes.settle(
            {node_id: reply.client for node_id, reply in introduced.items()}, refused, asked, report.round
        )
        for node_id, name in names.items():
            reply = introduced[node_id]
            self._ledger.cached(name, reply.holds if reply.client == name else ())
            if (counts := reply.vectors.get(LABEL_COUNTS)) and min(counts) >= 0:
                report.label_counts[name] = counts
        for name in self._nodes.returned(names.values()):
            self._ledger.standing.good(name)


@dataclass(frozen=True)
class Draw:
    """What a cohort is drawn from."""

    names: tuple[str, ...]
    """Clients, sorted."""
    size: int
    rng: np.random.Generator
    """Of this draw alone."""
    left_out: list[str]
    """Clients that are available and not asked, because they failed several times in a row."""

    def at_random(self) -> list[str]:
        """A cohort of which every client is as likely as any other, sorted."""
        return sorted(self.names[k] for k in self.rng.choice(len(self.names), self.size, replace=False))


def _nothing(tree: str) -> Mapping[str, np.ndarray]:
    return {}
