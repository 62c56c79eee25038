"""One exchange with many clients over Flower's grid: plans go out, good replies come back as they arrive.

What a client lacks is sent to it in the same exchange, and a client that was restarted is asked again; what must not be
merged, and who does not answer, goes into the round's report with its reason. Replies are handed on one by one and not
kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger

import numpy as np
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import EVALUATE, INTRODUCE, LAYER_BUDGET, PROBE, TRAIN, Plan, Reply, Tree
from tepal.exchange.sender import BadReply, ClientRefuses, Missing, NoMod, Sender, Traffic
from tepal.strategies.rounds.inbox import Inbox
from tepal.strategies.rounds.travel import Travel

log = getLogger("flwr")

RESENDS = 2
"""How often a client is sent something again in one round: what it lacks, or all, because it was restarted."""

SERVER = "server"
"""Whose note it is, in a report, when it is not a client's."""

_LATE = 60.0  # seconds after the deadline during which a reply still comes through, to be recognised and dropped
_LOOK_AROUND = 5.0  # seconds between two looks whether nodes that are waited for were restarted, and no less than
_LOOKS = 20  # times what a look takes: the SuperLink then lists all its nodes, which may be many thousands
_GIVE_UP = 60.0  # seconds during which pulling one reply may fail
_LONGEST_REASON = 2000  # characters of what a client says: it goes into logs and metrics


ASKED, REPLIED, REFUSED, LOST, LEFT_BEHIND = "asked", "replied", "refused", "lost", "not waited for"
"""States of a client in a round. Between the first and the others it is at what it was sent (`DOING`)."""
DOING: Mapping[str, str] = {TRAIN: "training", EVALUATE: "scoring", PROBE: "probing"}


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
    """Clients that are there and were not asked, because they failed several times in a row."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(client or SERVER, what went wrong and was got over)."""
    down: Traffic = field(default_factory=Traffic)
    up: Traffic = field(default_factory=Traffic)
    fedavg_down: int = 0
    """How often the full model would have gone down, had the same exchanges been FedAvg's."""
    fedavg_up: int = 0
    resent: int = 0
    learning_rate: float | None = None
    label_counts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By client, of those that introduced themselves and told it: how many of its examples each class has."""
    clients: dict[str, ClientReport] = field(default_factory=dict)
    """By client, of those asked."""
    travel: Travel | None = None
    record: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What the method says of the round beside its metrics (`Method.record`), and what travelled (`Travel.shares`)."""
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    evaluate_metrics: Mapping[str, float] = field(default_factory=dict)
    server_metrics: Mapping[str, float] = field(default_factory=dict)
    over_clients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of metrics that clients measured on their own test examples: mean and standard deviation over the clients."""
    scored: str = "received"
    judged: str = "received"
    """See `Method`."""
    seconds: float = 0.0
    seconds_train: float = 0.0

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


@dataclass(frozen=True)
class Asked:
    """A plan on its way: to which node, in which exchange, and how often it was sent again."""

    node_id: int
    plan: Plan
    exchange: str = ""
    resends: int = 0
    sent: float = 0.0
    ends: float = 0.0
    """When (`time.monotonic`) it was sent, and when the SuperLink takes no reply to it any more."""

    @property
    def name(self) -> str:
        return self.plan.client or f"node {self.node_id}"


class Messenger:
    """Sends plans and reads replies.

    Args:
        grid: Flower's.
        sender: what to send to whom.
        weighted_by_key: metric that a reply's weight is taken from.
        accept: raises ValueError for a good reply that is of no use.
        noticed: called with the report after every message that was sent and every answer.
    """

    def __init__(
        self,
        grid: Grid,
        sender: Sender,
        *,
        weighted_by_key: str,
        accept: Callable[[Plan, Reply], None] = lambda plan, reply: None,
        noticed: Callable[[RoundReport], None] = lambda report: None,
    ) -> None:
        self.grid = grid
        self.sender = sender
        self.weighted_by_key = weighted_by_key
        self.accept = accept
        self.noticed = noticed
        self._inbox = Inbox(grid)
        self._late: dict[str, Asked] = {}
        self._sessions: dict[int, str] = {}  # node id → when the node was started

    def ask(
        self,
        plans: Iterable[tuple[int, Plan]],
        report: RoundReport,
        *,
        values: Callable[[Plan, Tree], Arrays],
        settings: Callable[[Plan], Mapping[str, object]],
        timeout: float,
        limit: int | None = None,
        refused: dict[int, str] | None = None,
    ) -> Iterator[tuple[int, Reply]]:
        """Send plans to nodes; yield (node id, good reply) until all came, `limit` came, or the deadline.

        Args:
            plans: (node id, plan).
            report: is filled with bytes, refusals and losses.
            values: what a plan's client gets of a tree.
            settings: what the app of a plan's client is told; a plan's options go before it.
            timeout: seconds until the deadline.
            limit: after so many good replies the others are dropped when they come.
            refused: is filled with node id → reason, for clients that themselves cannot take part.
        """
        begun = time.monotonic()
        deadline = begun + timeout
        waiting: dict[str, Asked] = {}

        def send(asked: Asked, missing: Mapping[str, Names] | None = None) -> None:
            plan = asked.plan
            told = {**settings(plan), **plan.options, "server-round": plan.round}
            went: list[Names] = []
            content, exchange = self.sender.content(plan, lambda tree: values(plan, tree), told, missing, went.append)
            now = time.monotonic()
            left = max(deadline - now, 1.0)
            asked = replace(asked, exchange=exchange, sent=asked.sent or now, ends=now + left + _LATE)
            message = Message(content, asked.node_id, message_type(plan), ttl=left + _LATE, group_id=str(plan.round))
            try:
                # One at a time: a push that fails is then known to be this client's.
                ids = [message_id for message_id in self.grid.push_messages([message]) if message_id]
                reason = ""
            except Exception as error:  # whatever the grid raises for one message is no reason to lose the others
                ids, reason = [], f": {type(error).__name__}: {error}"
            if ids:
                traffic = Traffic.of(content)
                report.down += traffic
                _note_sent(report, asked, traffic, went)
                waiting[ids[0]] = asked
                self._inbox.expect(ids)
            else:
                _lose(report, asked, "its message could not be sent" + reason)
            self.noticed(report)

        plans = list(plans)
        for _, plan in plans:
            if plan.action != INTRODUCE:
                report.clients.setdefault(plan.client, ClientReport()).state = ASKED
        for node_id, plan in plans:
            send(Asked(node_id, plan))
        self.sender.all_sent()
        look_around = time.monotonic() + _LOOK_AROUND
        self._inbox.expect(self._late)
        good = 0
        while waiting and (limit is None or good < limit) and time.monotonic() < deadline:
            # A reply may be as large as the model: nothing of one may be left here while the next one comes.
            came = message = answer = None
            came = self._inbox.take(min(deadline, look_around) - time.monotonic())
            if came is not None and (asked := waiting.pop(came[0], None)) is not None:
                message_id, message = came
                if isinstance(message, Exception):
                    if time.monotonic() - self._inbox.failing_since(message_id) < _GIVE_UP:
                        log.warning("The reply of %s cannot be pulled now: %s", asked.name, message)
                        time.sleep(0.5)
                        waiting[message_id] = asked
                        self._inbox.expect([message_id])
                    else:
                        _lose(report, asked, f"its reply cannot be pulled: {type(message).__name__}: {message}")
                    continue
                answer = self._read(asked, message, report, refused, values)
                if isinstance(answer, Missing):
                    report.resent += 1
                    log.info("%s lacks entries in round %d; they are sent.", asked.name, asked.plan.round)
                    again = replace(asked, resends=asked.resends + 1)
                    if again.resends < RESENDS:
                        send(again, answer.entries)
                    else:  # its cache has no room: what it had kept may be gone by the time that the rest arrives
                        self.sender.held[asked.plan.client] = frozenset()
                        send(again)
                elif answer is not None:
                    good += 1
                    self.noticed(report)
                    yield asked.node_id, answer
                else:
                    self.noticed(report)
            elif came is not None:
                self._drop_late(*came, report)
            if time.monotonic() >= look_around:
                looked = time.monotonic()
                restarted = self._restarted()
                look_around = time.monotonic() + max(_LOOK_AROUND, _LOOKS * (time.monotonic() - looked))
                for message_id, asked in list(waiting.items()):
                    if asked.node_id in restarted and asked.resends < RESENDS:
                        # What it had been sent went with its process.
                        log.warning("%s was restarted in round %d, and is asked again.", asked.name, report.round)
                        report.resent += 1
                        self._late[message_id] = waiting.pop(message_id)
                        send(replace(asked, resends=asked.resends + 1))
        if limit is None or good < limit:
            for asked in waiting.values():
                _lose(report, asked, f"it did not answer within {round(timeout, 2):g} s")
        else:
            for asked in waiting.values():
                if asked.plan.client in report.clients:
                    report.clients[asked.plan.client].state = LEFT_BEHIND
        self.noticed(report)
        # Those that were looked for in vain since no reply can come any more are given up.
        self._late = {message_id: asked for message_id, asked in self._late.items() if asked.ends > begun} | waiting
        self._inbox.forget()

    def nodes(self) -> list[NodeInfo]:
        """The connected nodes. `ask` compares with them as they were when last looked at."""
        nodes = list(self.grid.get_nodes())
        self._sessions.update((node.node_id, node.last_activated_at) for node in nodes)
        return nodes

    def close(self) -> None:
        """End what goes on beside: no reply is taken any more."""
        self._inbox.close()

    def _read(
        self,
        asked: Asked,
        message: Message,
        report: RoundReport,
        refused: dict[int, str] | None,
        values: Callable[[Plan, Tree], Arrays],
    ) -> Reply | Missing | None:
        """The checked answer; None, with the reason in the report, for one that must not be merged."""
        try:
            if message.has_error():
                reason = (message.error.reason or "").strip() or "no reason given"
                if asked.plan.action != INTRODUCE or message.error.code != ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                    _lose(report, asked, f"error {message.error.code}: {reason}")
                    return None
                # The mod answers an introduction itself; only an app without it gets to see one, and fails on it.
                raise NoMod(reason.splitlines()[-1])
            if message.has_content():
                traffic = Traffic.of(message.content)
                report.up += traffic
                if asked.plan.client in report.clients:
                    report.clients[asked.plan.client].bytes_up += traffic.payload
            try:
                answer = self.sender.read(
                    asked.plan, asked.exchange, message, self.weighted_by_key, lambda tree: values(asked.plan, tree)
                )
            except BadReply:
                raise
            except Exception as error:  # it is somebody else's data: whatever it does to us, it is refused alone
                log.debug("An answer of %s cannot be read.", asked.name, exc_info=True)
                raise BadReply(f"it cannot be read ({type(error).__name__}: {error})") from error
            if isinstance(answer, Missing) and asked.resends == RESENDS:
                raise BadReply("it lacks entries again after they were sent")
            if isinstance(answer, Reply):
                try:
                    self.accept(asked.plan, answer)
                except ValueError as error:
                    raise _Useless(answer.client, str(error)) from error
                _note_reply(report, asked, answer)
            for text in answer.notes:
                note = (asked.name, text[:_LONGEST_REASON])
                report.notes.append(note)
                log.warning("%s says in round %d: %s", note[0], report.round, note[1])
            return answer
        except BadReply as refusal:
            name, said, reason = asked.name, "is refused", str(refusal)[:_LONGEST_REASON]
            if isinstance(refusal, ClientRefuses | _Useless):
                name = refusal.client
            if isinstance(refusal, ClientRefuses):
                said = "gives no result"
                report.refused_by_client.add(name)
            report.refused.append((name, reason))
            if asked.plan.client in report.clients:
                report.clients[asked.plan.client].state = REFUSED
            if refused is not None and isinstance(refusal, ClientRefuses | NoMod | _Useless):
                refused[asked.node_id] = reason
            log.warning("%s %s in round %d: %s", name, said, report.round, reason)
            return None

    def _drop_late(self, message_id: str, message: Message | Exception, report: RoundReport) -> None:
        """A reply that comes after its round is pulled and dropped: else it stays in the SuperLink's memory."""
        asked = self._late.pop(message_id, None)
        if asked is None or isinstance(message, Exception) or message.has_error():
            return
        report.late.append((asked.name, asked.plan.round))
        log.warning("%s answers round %d too late; its reply is dropped.", asked.name, asked.plan.round)

    def _restarted(self) -> set[int]:
        """Nodes that were restarted since they were last looked at."""
        before = dict(self._sessions)
        try:
            now = {node.node_id: node.last_activated_at for node in self.nodes()}
        except Exception as error:
            log.warning("The SuperLink does not say which nodes are there: %s", error)
            return set()
        return {node for node, session in now.items() if before.get(node, session) != session}


class _Useless(BadReply):
    """The method cannot use it."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(reason)
        self.client = client


def message_type(plan: Plan) -> str:
    """Flower's name of an action: an app has its functions by these. Further phases are `@app.train("<action>")`."""
    if plan.action in (TRAIN, EVALUATE):
        return plan.action
    # The mod answers an introduction, and sees only messages that the app has a function for: every app can train.
    return TRAIN if plan.action == INTRODUCE else f"{TRAIN}.{plan.action}"


def _note_sent(report: RoundReport, asked: Asked, traffic: Traffic, went: Iterable[Names]) -> None:
    plan = asked.plan
    if plan.client not in report.clients:
        return
    client = report.clients[plan.client]
    client.state = DOING.get(plan.action, plan.action)
    client.bytes_down += traffic.payload
    if report.travel is not None:
        for names in went:
            report.travel.sent(names)
        if plan.action == TRAIN and not asked.resends:
            report.travel.asked(plan.trains)


def _note_reply(report: RoundReport, asked: Asked, reply: Reply) -> None:
    if (client := report.clients.get(asked.plan.client)) is None:
        return
    client.state = REPLIED
    client.seconds += time.monotonic() - asked.sent
    client.budget = reply.metrics.get(LAYER_BUDGET, client.budget)
    if asked.plan.action == TRAIN:
        client.examples = reply.examples
    if report.travel is not None:
        for names in reply.parts.values():
            report.travel.returned(tuple(names))


def _lose(report: RoundReport, asked: Asked, reason: str) -> None:
    reason = reason[:_LONGEST_REASON]
    report.lost.append((asked.name, reason))
    if asked.plan.client in report.clients:
        report.clients[asked.plan.client].state = LOST
    log.warning("%s is lost in round %d: %s", asked.name, report.round, reason)
