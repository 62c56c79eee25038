"""The clients that take part in a round: nodes introduce themselves, and a cohort is drawn from those available."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import getLogger
from typing import Any

import numpy as np
from flwr.proto.node_pb2 import NodeInfo

from tepal.exchange.bounds import MOST_EXAMPLES, is_count
from tepal.exchange.plan import INTRODUCE, LABEL_COUNTS, Outgoing, Plan, Reply
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.nodes import Nodes
from tepal.strategies.rounds.report import Answered, Failure, RoundFailed, RoundReport

log = getLogger("flwr")

_INTRODUCTION = 300.0  # seconds within which a new node must introduce itself
_INTRODUCED = 1000, 4  # at most so many nodes before a round, or so many times a cohort, whichever is more
_LOG_AGAIN, _ASK_AGAIN = 15.0, 3.0  # seconds
_REASONS = 10  # of clients that cannot take part, in a line
_UNABLE, _NEARLY_ALL = 100, 0.9  # more clients, and a larger share, end a run if they cannot take part
_RETURN = 300.0  # seconds for which a resumed deterministic run waits for its earlier clients

Send = Callable[[Iterable[Outgoing], float], Iterator[Answered | Failure]]
"""Sends these messages, and yields the result of each within this many seconds."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How many clients take part in a round, and how they are drawn. The fields are options of `MethodStrategy`."""

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_available_nodes: int = 2
    min_replies: int = 1
    max_replies: int | None = None
    seed: int = 0
    deterministic: bool = False
    max_weight_share: float = 0.5
    needed_by: str = "min_available_nodes"
    """The option from which `min_available_nodes` follows, for errors."""

    def __post_init__(self) -> None:
        check("fraction_train", self.fraction_train, 0 < self.fraction_train <= 1, "in (0, 1]")
        check("fraction_evaluate", self.fraction_evaluate, 0 <= self.fraction_evaluate <= 1, "in [0, 1]")
        check("min_available_nodes", self.min_available_nodes, self.min_available_nodes >= 1, "at least 1")
        check("min_replies", self.min_replies, self.min_replies >= 1, "at least 1")
        enough = self.max_replies is None or self.max_replies >= self.min_replies
        check("max_replies", self.max_replies, enough, "at least min_replies")
        check("max_weight_share", self.max_weight_share, 0 < self.max_weight_share <= 1, "in (0, 1]")

    @property
    def needed(self) -> int:
        """Clients that must be available before a round starts."""
        return max(self.min_available_nodes, self.min_replies)

    def size(self, available: int, fraction: float) -> int:
        """The size of a cohort drawn from so many available clients."""
        return min(available, max(int(available * fraction), self.min_replies))


def check_able(unable: int, asked: int, report: RoundReport) -> None:
    """Raise RoundFailed if nearly all of many clients that were asked for the first time cannot take part.

    What they have in common is at fault, such as a data set that was changed. Without this all others would be asked
    and refused, and the run would go on with the few clients that it knows.
    """
    if unable > _UNABLE and unable > _NEARLY_ALL * asked:
        raise RoundFailed(
            f"{unable} of {asked} clients that were asked for the first time in round {report.round} cannot take part: "
            "correct the common cause, and resume the run" + report.reasons()
        )


def check(name: str, value: object, good: bool, allowed: str) -> None:
    """Check an option. Raises ValueError unless `good`; `allowed` describes good values."""
    if not good:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


class Cohorts:
    """The available clients of a run, and the cohorts drawn from them.

    Args:
        rules: how many clients take part.
        list_nodes: lists the connected nodes.
        ledger: what is known of each client.
        awaited: clients for which the first round waits: a resumed deterministic run needs those that it had.
        classes: the number of classes, if it is known: label counts of another number are not recorded.
        expected: name → node id, if the clients' names are known before they introduce themselves. Of very many such
            clients, each introduces itself when it is drawn for the first time.
    """

    def __init__(
        self,
        rules: Rules,
        list_nodes: Callable[[], Sequence[NodeInfo]],
        ledger: ClientLedger,
        awaited: Iterable[str] = (),
        classes: int | None = None,
        expected: Mapping[str, int] | None = None,
    ) -> None:
        self.rules = rules
        self._classes = classes
        self._awaited = set(awaited)
        self._list_nodes = list_nodes
        self._ledger = ledger
        self._expected = expected or {}
        self._nodes = Nodes(expected)

    def available(self) -> tuple[str, ...]:
        """Names of the available clients, sorted."""
        return tuple(self._nodes.available())

    def count(self) -> int:
        """The number of clients from which cohorts are drawn."""
        return len(self._candidates())

    def introduce_again(self, client: str) -> None:
        """Let a client introduce itself again before the next round."""
        self._nodes.renew(client)

    def node_of(self, client: str) -> int:
        """The node of an available client."""
        return self._nodes.node_of()[client]

    def wait(self, report: RoundReport, settings: Mapping[str, Any], timeout: float, send: Send) -> None:
        """Wait until enough clients are available. New nodes introduce themselves.

        Raises:
            RoundFailed: too few clients are available after `timeout` seconds, or as many as are needed are connected
                and none of them can take part.
        """
        needed, needed_by = self.rules.needed, self.rules.needed_by
        begun = time.monotonic()
        deadline = begun + timeout
        unanswered = False  # a node was asked and has not answered yet: its app may still be starting
        log_again = ask_again = begun  # when the wait is logged next; when silent nodes are asked next
        while True:
            looked = time.monotonic()
            try:
                self._nodes.update(self._list_nodes())
            except Exception as error:  # a SuperLink that is busy or starting; it is asked again until the deadline
                log.warning("The SuperLink does not list its nodes: %s", error)
            if self._when_drawn():
                self._nodes.refuse(self._ledger.refused)  # of a resumed run
            silent_too = len(self._candidates()) < needed and time.monotonic() >= ask_again
            if asked := self._to_ask(report.round, silent_too=silent_too):
                unanswered = self._introduce(asked, report, settings, min(timeout, _INTRODUCTION), send)
                ask_again = time.monotonic() + _ASK_AGAIN
            available, refusals = len(self._candidates()), self._nodes.refusals()
            reasons = sorted(set(refusals))
            refuse = "; ".join(reasons[:_REASONS]) + " …" * (len(reasons) > _REASONS)
            if self._awaited:
                self._awaited.difference_update(self._candidates())
            if self._awaited and time.monotonic() > min(begun + _RETURN, deadline):
                log.warning(
                    "%s took part before the run was resumed and did not reconnect: the run continues without them, "
                    "and its results will differ from those of an uninterrupted run.", ", ".join(sorted(self._awaited)),
                )  # fmt: skip
                self._awaited.clear()
            if available >= needed and not self._awaited:
                return
            # An app's first start may take longer than a round.
            longest = max(timeout, _INTRODUCTION) if unanswered else timeout
            too_late = time.monotonic() > begun + longest
            # While one of them can take part, others may still connect: a single node cannot end the run. Of clients
            # that are all expected, no others can.
            all_said = len(refusals) + (available if self._expected else 0) == self._nodes.connected()
            if (all_said or too_late) and available < needed <= available + len(refusals):
                raise RoundFailed(
                    f"only {available} of {available + len(refusals)} clients can take part; {needed} are needed "
                    f"({needed_by}). The others report: {refuse}"
                )
            if too_late:
                raise RoundFailed(
                    f"{available} clients are connected after {longest:g} s; {needed} are needed: start more "
                    f"SuperNodes, or lower {needed_by}" + report.reasons()
                )
            if time.monotonic() >= log_again:
                log_again = time.monotonic() + _LOG_AGAIN
                if available < needed:
                    others = f" {len(refusals)} others cannot take part: {refuse}" if refusals else ""
                    log.info("Waiting for clients: %d are connected, %d are needed.%s", available, needed, others)
                else:
                    log.info("Waiting for the earlier clients of a resumed run: %s.", ", ".join(sorted(self._awaited)))
            # A list of many thousands of nodes must not keep the SuperLink busy.
            time.sleep(max(0.5, time.monotonic() - looked))

    def draw(self, fraction: float, report: RoundReport, attempt: int, action: str) -> Draw:
        """The clients from which an attempt at a round draws its cohort, and the generator that it draws with."""
        available = self._candidates()
        # Clients that have not introduced themselves since the run was resumed may have failed before.
        left_out = self._ledger.left_out(self._nodes if self._when_drawn() else self._nodes.node_of(), report.round)
        if len(available) - len(left_out) < self.rules.min_replies:
            left_out = []  # too few are left without them
        out = set(left_out)
        names = tuple(name for name in available if name not in out) if out else tuple(available)
        # A share of all connected clients, even while most of them have not introduced themselves yet.
        waiting = 0 if self._when_drawn() else self._nodes.waiting()
        size = min(len(names), self.rules.size(len(names) + waiting, fraction))
        rng = np.random.default_rng([self.rules.seed, report.round, attempt, zlib.crc32(action.encode())])
        return Draw(names, size, rng, left_out)

    def introduce(
        self, cohort: Sequence[str], report: RoundReport, settings: Mapping[str, Any], timeout: float, send: Send
    ) -> Sequence[str]:
        """Let the clients of a cohort introduce themselves that have not. Returns those that can take part."""
        if asked := dict(self._nodes.take(cohort)):
            self._introduce(asked, report, settings, min(timeout, _INTRODUCTION), send)
            here = self._nodes.node_of()
            return [client for client in cohort if client in here]
        return cohort

    def unknown(self, clients: Iterable[str]) -> int:
        """How many of these clients have not introduced themselves, or cannot take part."""
        here = self._nodes.node_of()
        return sum(client not in here for client in clients)

    def _candidates(self) -> Sequence[str]:
        """Names of the clients from which cohorts are drawn, sorted."""
        return self._nodes.candidates() if self._when_drawn() else self._nodes.available()

    def _when_drawn(self) -> bool:
        """Whether clients introduce themselves when they are drawn: there are very many, and their names are known."""
        return bool(self._expected) and self._nodes.connected() > self._most()

    @cached_property
    def _expected_at(self) -> Mapping[int, str]:
        return {node_id: name for name, node_id in self._expected.items()}

    def _to_ask(self, round: int, *, silent_too: bool) -> dict[int, str]:
        """The nodes that introduce themselves before a cohort is drawn: id → registered name or ""."""
        if self._when_drawn():
            return dict(self._nodes.take_silent(round, all_of_them=silent_too))
        # With deterministic=true all of them: their order differs from run to run.
        most = None if self.rules.deterministic else self._most()
        return dict(self._nodes.take_new(round, silent_too=silent_too, most=most))

    def _most(self) -> int:
        """The most new nodes that introduce themselves before a round."""
        least, times = _INTRODUCED
        connected = len(self._nodes.available()) + self._nodes.waiting()
        return max(least, times * self.rules.size(connected, self.rules.fraction_train), self.rules.needed)

    def _introduce(
        self,
        asked: Mapping[int, str],
        report: RoundReport,
        settings: Mapping[str, Any],
        timeout: float,
        send: Send,
    ) -> bool:
        """Ask new nodes (id → registered name or "") for their name and cached parts, and whether they can train.

        Returns whether one of them has not answered.
        """
        settings = {**settings, "server-round": report.round}
        introductions = [
            Outgoing(Plan(client=name, round=report.round, action=INTRODUCE, needs={}), _nothing, settings, node_id)
            for node_id, name in asked.items()
        ]
        introduced: dict[int, Reply] = {}
        refused: dict[int, str] = {}
        by_client: list[int] = []
        unanswered = False
        for answer in send(introductions, timeout):
            if isinstance(answer, Answered):
                introduced[answer.outgoing.node_id] = answer.reply
            else:
                unanswered |= answer.unanswered
                if answer.lasting:
                    refused[answer.outgoing.node_id] = answer.reason
                    if answer.by_client:
                        by_client.append(answer.outgoing.node_id)
        names = self._nodes.settle(
            {node_id: reply.client for node_id, reply in introduced.items()},
            refused,
            asked,
            report.round,
            {node_id: reply.proof for node_id, reply in introduced.items()},
            self._ledger.proofs,
        )
        if refused and self._when_drawn():  # what a client says of itself stands when the run is resumed
            self._ledger.refused.update((self._expected_at[node_id], refused[node_id]) for node_id in by_client)
        for node_id, name in names.items():
            reply = introduced[node_id]
            self._ledger.cached(name, reply.holds if reply.client == name else ())
            self._ledger.stored_layout(name, reply.has_layout)
            self._ledger.introduced(name, reply.metrics)
            if counts := reply.vectors.get(LABEL_COUNTS):
                if self._classes not in (None, len(counts)):
                    log.warning("%s reports label counts of %d classes; the run has %s. They are not recorded.",
                                name, len(counts), self._classes)  # fmt: skip
                elif wrong := [count for count in counts if not is_count(count)]:
                    log.warning("%s reports label counts that are not whole numbers from 0 to %.0e, %g first. They are "
                                "not recorded.", name, MOST_EXAMPLES, wrong[0])  # fmt: skip
                else:
                    report.label_counts[name] = counts
        for name in self._nodes.returned(names.values()):
            self._ledger.restarted(name)
        return unanswered


@dataclass(frozen=True)
class Draw:
    """The candidates of a cohort, and its size."""

    names: tuple[str, ...]
    """Clients, sorted."""
    size: int
    rng: np.random.Generator
    """A generator for this draw alone."""
    left_out: list[str]
    """Available clients that are not candidates, because they failed several times in a row."""

    def at_random(self) -> list[str]:
        """A cohort drawn uniformly, sorted."""
        return sorted(self.names[k] for k in self.rng.choice(len(self.names), self.size, replace=False))


def _nothing(tree: str) -> Mapping[str, np.ndarray]:
    return {}
