"""A Flower `Grid` whose nodes are ClientApps in this process, for trying out a method, for tests and measurements."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Self, cast

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from tepal.exchange.local import mark_local

_AHEAD = 4  # messages, at least, that wait for a thread in addition to those that run

_LONG = 1.0  # seconds after which a client no longer keeps the replies of others waiting

NodeConfig = Mapping[str, str | int | float | bool]


Answers = ClientApp | Callable[[Message, Context], Message]
"""What replies to a client's messages: its ClientApp, or a function that passes them on to one."""


@dataclass
class Node:
    """One simulated node: its app, and the context that Flower would give it."""

    app: Answers
    config: NodeConfig
    name: str = ""
    """Name under which its key would be registered at the SuperLink; "" if it is not registered."""
    context: Context = field(init=False)


class InProcessGrid(Grid):
    """A Flower `Grid` that runs ClientApps in this process.

    The app of a message runs when its reply is pulled, in the order of the pulls. With `at_once` > 1, apps of further
    messages run before their replies are pulled.

    Args:
        nodes: the clients; nodes may be added and removed between rounds.
        run_config: of the run, as the apps' contexts have it.
        spoil: function of (node, message, reply) that is called for every reply; its result is delivered in place of
            the reply, or nothing at all if it is None. For tests of faults.
        at_once: number of clients that run at once, each in a thread. Their apps must allow it: this project's has a
            model for each thread.
        gathering: function of the number of clients that start together; its result is called with (function, argument)
            for each of them, in the client's thread.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        run_config: NodeConfig | None = None,
        spoil: Callable[[Node, Message, Message], Message | None] | None = None,
        *,
        at_once: int = 1,
        gathering: Callable[[int], Callable[..., Message | None]] | None = None,
    ) -> None:
        self.run_config = dict(run_config or {})
        self.spoil = spoil
        self.nodes: dict[int, Node] = {}
        self._sent: dict[str, Message] = {}
        self._next_id = 1
        self.at_once = at_once
        self.gathering = gathering
        # The same threads, whichever thread pulls: an app may keep objects for each thread, such as a model.
        self._threads = ThreadPoolExecutor(at_once, "client")
        self._answers: dict[str, Future[Message | None]] = {}  # started and not pulled yet
        self._awaited: dict[str, float] = {}  # since when the reply that is due next is awaited (`time.monotonic`)
        self._lock = threading.Lock()
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a Message outside a task needs them
        for node in nodes:
            self.add(node)

    def __init_subclass__(cls) -> None:
        """Whoever pulls in another way is asked for replies in that way: see `Inbox`."""
        super().__init_subclass__()
        if "pull_messages" in vars(cls) and "pull_next" not in vars(cls):
            cls.pull_next = None  # type: ignore[assignment, method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, and free what they keep; further messages get no reply."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def add(self, node: Node) -> int:
        """Connect a node; returns its node id."""
        node_id = self._next_id
        self._next_id += 1
        node.context = self._context(node_id, node.config)
        self.nodes[node_id] = node
        return node_id

    def _context(self, node_id: int, config: NodeConfig) -> Context:
        return Context(1, node_id, dict(config), RecordDict(), dict(self.run_config))

    def remove(self, node_id: int) -> None:
        """Disconnect a node."""
        del self.nodes[node_id]

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node_id, name=node.name) for node_id, node in self.nodes.items()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message_id = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = message_id
            if not self.spoil:
                mark_local(message)
            self._sent[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in list(message_ids):
            with self._lock:
                self._begin(message_id)
                answer = self._answers.pop(message_id, None)
            reply = None if answer is None else answer.result()
            if reply is not None:
                replies.append(reply)
        return replies

    def pull_next(self, message_ids: Collection[str], timeout: float) -> tuple[str, Message | Exception] | None:
        """The reply to the first of these messages, or to a later one if the first one's client takes long.

        The messages' order is that of the replies, so that a run can be repeated, unless a client needs seconds.

        Args:
            message_ids: of all awaited replies; a container that can be searched quickly. Other messages are dropped.
            timeout: seconds to wait.

        Returns:
            (message id, its reply or the error of running its app); None after `timeout` seconds, or at once if no
            reply to these messages will come.
        """
        end = time.monotonic() + timeout
        while True:
            with self._lock:
                if len(self._sent) + len(self._answers) > len(message_ids):
                    for messages in (self._sent, self._answers):
                        for each in [each for each in messages if each not in message_ids]:
                            del messages[each]
                first = next((each for each in message_ids if each in self._sent or each in self._answers), None)
                if first is None:
                    return None
                self._begin(first, message_ids)
                begun = {answer: each for each, answer in self._answers.items()}
                asked = self._answers[first]
            now = time.monotonic()
            patience = self._awaited.setdefault(first, now) + _LONG - now
            done = wait([asked], max(min(end - now, patience), 0)).done
            if not done:
                done = wait(begun, max(end - time.monotonic(), 0), FIRST_COMPLETED).done
            if not done:
                return None
            answer = asked if asked in done else next(each for each in begun if each in done)
            with self._lock:
                del self._answers[begun[answer]]
                self._awaited.pop(begun[answer], None)
            reply = answer.exception() or answer.result()
            if reply is not None:
                return begun[answer], cast("Message | Exception", reply)

    def _begin(self, message_id: str, message_ids: Iterable[str] | None = None) -> None:
        """Start the app of this message, and with several at once those of other messages, in the order of the ids.

        Enough are started ahead that all threads are busy while a slow client's reply is awaited, and few enough that
        few replies are in memory. The clients of a gathering start together, after the gathering before it has ended.
        """
        asked = [message_id] if message_id in self._sent else []
        if self.gathering:
            most = self.at_once if asked else 0
        else:
            most = self.at_once + max(self.at_once, _AHEAD) - len(self._answers) if self.at_once > 1 else len(asked)
            if self.at_once > 1 and most < self.at_once:  # replies that wait must not let threads idle
                most = max(most, self.at_once - sum(not answer.done() for answer in self._answers.values()))
        others = (each for each in message_ids or self._sent if each in self._sent and each != message_id)
        begun = [*asked, *islice(others, max(most - len(asked), 0))]
        run = self.gathering(len(begun)) if self.gathering else _run
        for each in begun:
            self._answers[each] = self._threads.submit(run, self._answer, self._sent.pop(each))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node = self.nodes[message.metadata.dst_node_id]
        try:
            reply = node.app(message, node.context)
        # As in Flower: if an app raises, the reply is an error with code 2. SystemExit would end the thread in silence.
        except BaseException as error:
            reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        if self.spoil:
            return self.spoil(node, message, reply)
        mark_local(reply)
        return reply

    def set_run(self, run: Run) -> None:
        """Do nothing: this grid has one run, with the id 1."""

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("make messages with flwr.app.Message(content, node_id, message_type)")


class PopulationGrid(InProcessGrid):
    """The simulated clients 0 … count - 1 of one app, of which a node exists only while it answers a message.

    A node is kept if its context has a state, which its next message needs.

    Args:
        app: of all clients.
        count: how many clients there are; each has its number as `partition-id`, and the node id after it.
        options: see `InProcessGrid`.
    """

    def __init__(self, app: Answers, count: int, run_config: NodeConfig | None = None, **options: Any) -> None:
        super().__init__((), run_config, **options)
        self._app, self._count = app, count
        self._next_id = count + 1

    @cached_property
    def expected_names(self) -> Mapping[str, int]:
        """Name → node id of the clients: with their numbers they have the names that `own_name` gives them."""
        return {f"client-{number}": number + 1 for number in range(self._count)}

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> tuple[NodeInfo, ...]:  # type: ignore[override]
        """The same tuple at every call, so that a caller need not compare it with the one before."""
        return self._listed

    @cached_property
    def _listed(self) -> tuple[NodeInfo, ...]:
        return tuple(NodeInfo(node_id=number + 1) for number in range(self._count))

    def add(self, node: Node) -> int:
        """Not possible: all nodes exist from the start."""
        raise NotImplementedError("a PopulationGrid has all its nodes from the start: use InProcessGrid")

    remove = add  # type: ignore[assignment]

    def _answer(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id
        if (node := self.nodes.get(node_id)) is None:
            node = Node(self._app, {"partition-id": node_id - 1, "num-partitions": self._count})
            node.context = self._context(node_id, node.config)
            self.nodes[node_id] = node
        try:
            return super()._answer(message)
        finally:
            if not node.context.state:
                self.nodes.pop(node_id, None)


def _run(answer: Callable[[Message], Message | None], message: Message) -> Message | None:
    return answer(message)
