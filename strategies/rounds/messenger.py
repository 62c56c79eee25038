"""One exchange with many clients over Flower's grid: messages are sent, and replies are yielded as they arrive.

Entries that a client lacks are sent in the same exchange, and a client that was restarted is sent its message again.
Replies are yielded one by one and not kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from tepal.exchange.bounds import BadReply
from tepal.exchange.layout import Names
from tepal.exchange.plan import EVALUATE, INTRODUCE, PROBE, TRAIN, Outgoing, Plan, Reply
from tepal.exchange.sender import (
    BadIntroduction,
    ClientRefuses,
    Exchange,
    Missing,
    NoMod,
    OtherVersion,
    Sender,
)
from tepal.exchange.traffic import Traffic
from tepal.host.text import visible
from tepal.strategies.rounds.inbox import Inbox
from tepal.strategies.rounds.ledger import ClientLedger
from tepal.strategies.rounds.metric_names import MetricNames
from tepal.strategies.rounds.report import (
    LEFT_BEHIND,
    LOST,
    REFUSED,
    SERVER,
    Answered,
    Arrived,
    Event,
    Failure,
    Late,
    Sent,
)
from tepal.strategies.rounds.weights import misstated

log = getLogger("flwr")

RESENDS = 2
"""How often a client is sent entries again in one round: those that it lacks, or all after a restart."""

_LATE = 60.0  # seconds after the deadline in which a reply is still delivered, to be recognised and dropped
_LOOK_AROUND = 5.0  # seconds between two checks whether nodes were restarted; at least
_LOOKS = 20  # times the duration of a check, for which the SuperLink lists all its nodes, perhaps many thousands
_GIVE_UP = 60.0  # seconds for which pulling a reply is repeated when it fails

_OF_THE_SERVER = re.compile(rf"({SERVER}|node \d+( \(.*)?)", re.IGNORECASE)
"""Names that reports have for the server itself, and for nodes whose name is not known yet."""


@dataclass(frozen=True)
class _Waiting:
    """A message that has no answer yet."""

    exchange: Exchange
    resends: int
    begun: float
    """When (`time.monotonic`) the client was first sent a message in this exchange."""
    ends: float
    """When (`time.monotonic`) the SuperLink stops accepting replies to it."""

    @property
    def outgoing(self) -> Outgoing:
        return self.exchange.outgoing

    @property
    def overdue(self) -> tuple[Late, float]:
        """What is kept after the exchange, and until when: not what was sent, which may be as large as the model."""
        return Late(self.outgoing.name, self.outgoing.plan.round), self.ends


class RejectedByMethod(BadReply):
    """A reply of `client` that fits the plan and that the method cannot use."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(reason)
        self.client = client


def _accepted(plan: Plan, reply: Reply) -> None:
    """Accept a reply."""


class Messenger:
    """Sends plans and reads replies.

    Args:
        grid: Flower's grid.
        sender: makes messages from plans, and reads the replies.
        ledger: what is known of each client.
        weighted_by_key: the metric that is a reply's weight.
        accept: raises ValueError for a reply that the method cannot use. Any other error refuses that reply as well.
    """

    def __init__(
        self,
        grid: Grid,
        sender: Sender,
        ledger: ClientLedger,
        *,
        weighted_by_key: str,
        accept: Callable[[Plan, Reply], None] = _accepted,
    ) -> None:
        self.grid = grid
        self.sender = sender
        self.ledger = ledger
        self.weighted_by_key = weighted_by_key
        self.accept = accept
        self._inbox = Inbox(grid)
        self._waiting: dict[str, _Waiting] = {}  # by message id; of this exchange
        self._gone: dict[int, tuple[_Waiting, str]] = {}  # by node id; of this exchange: it has left the SuperLink
        self._late: dict[str, tuple[Late, float]] = {}  # by message id; of earlier exchanges
        self._sessions: dict[int, str] = {}  # node id → when the node was started
        self._listed: Sequence[NodeInfo] = ()  # the last list of nodes
        self._metric_names = MetricNames(weighted_by_key)

    def exchange(
        self, messages: Iterable[Outgoing], *, timeout: float, limit: Callable[[], int] | None = None
    ) -> Iterator[Event]:
        """Send these messages, and yield events until all clients have answered or `timeout` seconds have passed.

        Each client has exactly one `Answered` or one `Failure`. With a `limit`, the exchange ends after that many good
        replies; later replies are dropped. It is asked again after each event, because whoever gets the events may find
        that a reply is not good after all.
        """
        begun = time.monotonic()
        deadline = begun + timeout
        self._waiting, self._gone = {}, {}
        for outgoing in messages:
            yield self._send(outgoing, deadline)
        self.sender.packer.forget()
        look_around = time.monotonic() + _LOOK_AROUND
        self._inbox.expect(self._late)
        good = 0
        while self._waiting and (limit is None or good < limit()) and time.monotonic() < deadline:
            # A reply may be as large as the model: no reference to one may be left while the next one arrives.
            came = message = event = None
            came = self._inbox.take(min(deadline, look_around) - time.monotonic())
            if came is not None and (asked := self._waiting.pop(came[0], None)) is not None:
                message_id, message = came
                if not isinstance(message, Exception):
                    for event in self._read(asked, message, deadline):
                        good += isinstance(event, Answered)
                        yield event
                elif time.monotonic() - self._inbox.failing_since(message_id) < _GIVE_UP:
                    log.warning("The reply of %s cannot be pulled now: %s", asked.outgoing.name, message)
                    time.sleep(0.5)
                    self._waiting[message_id] = asked
                    self._inbox.expect([message_id])
                else:
                    reason = f"its reply cannot be pulled: {type(message).__name__}: {message}"
                    yield _lost(asked.outgoing, reason)
            elif came is not None and (late := self._dropped(*came)) is not None:
                yield late
            if time.monotonic() >= look_around:
                looked = time.monotonic()
                restarted = self._restarted()
                look_around = time.monotonic() + max(_LOOK_AROUND, _LOOKS * (time.monotonic() - looked))
                again = [self._gone.pop(node)[0] for node in restarted & self._gone.keys()]
                for message_id, asked in list(self._waiting.items()):
                    if asked.outgoing.node_id in restarted and asked.resends < RESENDS:
                        self._late[message_id] = self._waiting.pop(message_id).overdue
                        again.append(asked)
                for asked in again:  # its process had the message, and has ended
                    outgoing = asked.outgoing
                    log.warning("%s was restarted in round %d; its message is sent again.", outgoing.name,
                                outgoing.plan.round)  # fmt: skip
                    yield self._send(outgoing, deadline, asked.resends + 1, asked.begun)
        for asked, reason in self._gone.values():
            yield _lost(asked.outgoing, reason)
        self._gone = {}
        enough = limit is not None and good >= limit()
        for asked in self._waiting.values():
            outgoing = asked.outgoing
            if enough:
                yield Failure(outgoing, outgoing.name, LEFT_BEHIND)
            else:
                yield replace(_lost(outgoing, f"it did not answer within {round(timeout, 2):g} s"), unanswered=True)
        # Messages to which the SuperLink accepts no reply any more are forgotten.
        overdue = {message_id: asked.overdue for message_id, asked in self._waiting.items()}
        self._late = {message_id: of for message_id, of in self._late.items() if of[1] > begun} | overdue
        self._waiting = {}
        self._inbox.forget()

    def nodes(self) -> Sequence[NodeInfo]:
        """List the connected nodes, and remember when each was started: `exchange` notices later restarts."""
        nodes = self.grid.get_nodes()
        if type(nodes) is not tuple:  # else it cannot have changed if it is the last one
            nodes = list(nodes)
        if nodes is not self._listed:
            self._sessions.update((node.node_id, node.last_activated_at) for node in nodes)
            self._listed = nodes
        return nodes

    def close(self) -> None:
        """End the threads that pull replies."""
        self._inbox.close()
        self.accept = _accepted  # it may be a function of the owner, which would so keep itself and a state

    def _send(
        self,
        outgoing: Outgoing,
        deadline: float,
        resends: int = 0,
        begun: float | None = None,
        missing: Mapping[str, Names] | None = None,
    ) -> Sent | Failure:
        plan = outgoing.plan
        content, exchange = self.sender.content(outgoing, self.ledger.record(plan.client), missing)
        now = time.monotonic()
        left = max(deadline - now, 1.0)
        message = Message(content, outgoing.node_id, message_type(plan), ttl=left + _LATE, group_id=str(plan.round))
        try:
            # One at a time, so that a push that fails is known to be this client's.
            ids = [message_id for message_id in self.grid.push_messages([message]) if message_id]
            reason = ""
        except Exception as error:  # an error of one message must not lose the others
            ids, reason = [], f": {type(error).__name__}: {error}"
        if not ids:
            return _lost(outgoing, "its message could not be sent" + reason)
        self._waiting[ids[0]] = _Waiting(exchange, resends, now if begun is None else begun, now + left + _LATE)
        self._inbox.expect(ids)
        plain, again = sum(map(self.sender.layout.nbytes, exchange.sent)), resends > 0
        traffic = Traffic.of(content, plain, 0 if again else exchange.in_budget)
        return Sent(outgoing, traffic, exchange.sent, again, None if again else exchange.left_out)

    def _read(self, asked: _Waiting, message: Message, deadline: float) -> Iterator[Event]:
        """Read an answer: yield a good reply, a failure with its reason, or the entries that must be sent again."""
        outgoing = asked.outgoing
        client, number = outgoing.plan.client, outgoing.plan.round
        if message.has_error() and (outgoing.plan.action != INTRODUCE or not _app_raised(message)):
            reason = f"error {message.error.code}: {_reason(message)}"
            left = message.error.code == ErrorCode.NODE_UNAVAILABLE
            if left and self._waiting and asked.resends < RESENDS:
                self._gone[outgoing.node_id] = asked, reason  # it may come back while others are waited for
                return
            failure = _lost(outgoing, reason)
            if client and _app_raised(message):  # after the exchange's mod has cached what came
                held = self.ledger.record(client).held.difference(asked.exchange.replaces)
                self.ledger.cached(client, held.union(asked.exchange.keeps))
            yield replace(failure, of_model=_app_raised(message))
            return
        traffic = Traffic.of(message.content) if message.has_content() else Traffic()
        traffic.in_budget = traffic.payload if self.sender.encoding.budget else 0
        try:
            answer = self._checked(asked, message)
        except BadReply as error:
            yield Arrived(outgoing, traffic, ())
            yield self._refused(outgoing, error)
            return
        for note in answer.notes:
            log.warning("%s reports in round %d: %s", outgoing.name, number, note)
        if isinstance(answer, Reply):
            traffic.plain = sum(map(self.sender.layout.nbytes, answer.parts.values()))
        yield Arrived(outgoing, traffic, answer.notes)
        if isinstance(answer, Reply):
            yield Answered(outgoing, answer, time.monotonic() - asked.begun)
            return
        if answer.entries:
            log.info("%s lacks entries in round %d; they are sent again.", outgoing.name, number)
        else:
            text = "%s lacks the model's layout in round %d; the message is sent again with it."
            log.info(text, outgoing.name, number)
        resends = asked.resends + 1
        full = resends == RESENDS  # its cache is full: parts may be evicted before the rest arrives
        if full:
            self.ledger.cached(client, ())
        yield self._send(outgoing, deadline, resends, asked.begun, None if full else answer.entries)

    def _checked(self, asked: _Waiting, message: Message) -> Reply | Missing:
        """The answer: a reply that can be merged, or a list of missing entries. Raises BadReply."""
        plan = asked.outgoing.plan
        if message.has_error():
            # The mod answers an introduction itself; only an app without the mod sees one, and fails.
            raise NoMod(_reason(message).splitlines()[-1])
        try:
            answer = self.sender.read(asked.exchange, message, self.weighted_by_key)
        except BadReply:
            raise
        except Exception as error:  # the data is a client's: whatever it causes, only this reply is refused
            log.debug("An answer of %s cannot be read.", asked.outgoing.name, exc_info=True)
            raise BadReply(f"it cannot be read ({type(error).__name__}: {error})") from error
        if plan.client:
            self.ledger.cached(plan.client, answer.holds)
            self.ledger.stored_layout(plan.client, answer.has_layout)
        if isinstance(answer, Reply):
            if plan.action == INTRODUCE:
                self._check_introduction(answer)
            try:
                self.accept(plan, answer)
            except (ValueError, ArithmeticError) as error:
                raise RejectedByMethod(answer.client, str(error)) from error
            except Exception as error:  # of what this client sent: the others' replies are not concerned
                log.debug("A reply of %s cannot be checked.", asked.outgoing.name, exc_info=True)
                reason = f"the method cannot check it ({type(error).__name__}: {error})"
                raise RejectedByMethod(answer.client, reason) from error
            answer = self._metric_names.limited(asked.outgoing, answer)
        elif asked.resends == RESENDS:
            raise BadReply("it lacks entries although they were sent again")
        return answer

    def _check_introduction(self, introduction: Reply) -> None:
        """Raise BadIntroduction for a name that a report has for others, or numbers of examples that cannot be true."""
        name = introduction.client
        if _OF_THE_SERVER.fullmatch(name):
            raise BadIntroduction(
                name, f"it is called {name!r}, which is what reports call the server or its nodes: give it another name"
            )
        if reason := misstated(introduction, self.weighted_by_key):
            raise BadIntroduction(name, reason)

    def _refused(self, outgoing: Outgoing, error: BadReply) -> Failure:
        by_client = isinstance(error, ClientRefuses)
        name = outgoing.name
        if not outgoing.plan.client and isinstance(error, BadIntroduction | ClientRefuses | RejectedByMethod):
            # What a node calls itself is its name only when the introductions of a round are settled.
            name += f" ({error.client})" if error.client else ""
        said, reason = "returned no result" if by_client else "is refused", str(error)
        if isinstance(error, ClientRefuses) and outgoing.plan.client:
            self.ledger.cached(outgoing.plan.client, error.holds)
        log.warning("%s %s in round %d: %s", name, said, outgoing.plan.round, reason)
        lasting = isinstance(error, BadIntroduction | ClientRefuses | NoMod | OtherVersion | RejectedByMethod)
        return Failure(
            outgoing, name, REFUSED, reason, lasting=lasting, by_client=by_client, of_model=not lasting
        )

    def _dropped(self, message_id: str, message: Message | Exception) -> Late | None:
        """Drop a reply that arrives after its round; it was pulled because it would stay in the SuperLink's memory."""
        late, _ = self._late.pop(message_id, (None, 0.0))
        if late is None or isinstance(message, Exception) or message.has_error():
            return None
        log.warning("%s answered round %d too late; its reply is dropped.", late.client, late.round)
        return late

    def _restarted(self) -> set[int]:
        """Ids of nodes that were restarted since they were last listed."""
        before = dict(self._sessions)
        try:
            now = {node.node_id: node.last_activated_at for node in self.nodes()}
        except Exception as error:
            log.warning("The SuperLink does not list its nodes: %s", error)
            return set()
        return {node for node, session in now.items() if before.get(node, session) != session}


def message_type(plan: Plan) -> str:
    """Flower's name of an action, by which an app registers a function. Further phases are `@app.train("<action>")`."""
    if plan.action in (TRAIN, EVALUATE):
        return plan.action
    # The mod answers introductions, but sees only messages for which the app has a function: every app has `train`.
    return TRAIN if plan.action == INTRODUCE else f"{TRAIN}.{plan.action}"


def _lost(outgoing: Outgoing, reason: str) -> Failure:
    reason = visible(reason)
    log.warning("%s is lost in round %d: %s", outgoing.name, outgoing.plan.round, reason)
    return Failure(outgoing, outgoing.name, LOST, reason)


def _app_raised(message: Message) -> bool:
    return bool(message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION)


def _reason(message: Message) -> str:
    reason = (message.error.reason or "").strip()
    if reason.endswith(f"No train function registered with name {PROBE!r}"):
        return "its app does not reply to probes: call reply_to_probes(app, …) in it (docs/methods/selective-layers.md)"
    return reason or "no reason given"
