"""A Flower `Grid` whose nodes are ClientApps in this process: for trying a method out, for tests and measurements."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Self

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

_AHEAD = 4  # messages that are begun beside those at work, at least

NodeConfig = Mapping[str, str | int | float | bool]


Answers = ClientApp | Callable[[Message, Context], Message]
"""What answers a client's messages: its app, or what hands them on to it."""


@dataclass
class Node:
    """One simulated machine: its app, and the context that Flower would give it."""

    app: Answers
    config: NodeConfig
    name: str = ""
    """Under which its key would be registered at the server; "" for none."""
    context: Context = field(init=False)


class InProcessGrid(Grid):
    """Runs a message's ClientApp when its reply is pulled, in the order of the pulls; several at once run ahead of it.

    Args:
        nodes: the clients; more may be added, and any removed, between rounds.
        run_config: of the run, as the apps' contexts show it.
        spoil: called with (node, message, reply) for every reply; what it returns is delivered in its place, and None
            means that nothing ever comes. For tests of faults.
        at_once: so many clients are at work at once, each in a thread. Their apps must allow it: this project's has a
            model for each thread.
        gathering: is called with the number of clients that begin together; what it returns is called with (function,
            argument) for each, in its thread.
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
        self.spoil = spoil or (lambda node, message, reply: reply)
        self.nodes: dict[int, Node] = {}
        self._sent: dict[str, Message] = {}
        self._next_id = 1
        self.at_once = at_once
        self.gathering = gathering
        # Threads of its own, whoever pulls: an app may keep what is dear by the thread, as a model.
        self._threads = ThreadPoolExecutor(at_once, "client")
        self._answers: dict[str, Future[Message | None]] = {}  # begun, and not pulled yet
        self._lock = threading.Lock()
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a Message outside a task needs them
        for node in nodes:
            self.add(node)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End its threads, and what they keep with them; nothing more is answered."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def add(self, node: Node) -> int:
        """Connect a node; returns its node id."""
        node_id = self._next_id
        self._next_id += 1
        node.context = Context(1, node_id, dict(node.config), RecordDict(), dict(self.run_config))
        self.nodes[node_id] = node
        return node_id

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

    def _begin(self, message_id: str) -> None:
        """Have this message answered, and with several at once those that were sent after it.

        So many are begun ahead that all threads have work while a slow client is waited for, and so few that the
        replies which wait to be pulled are few. A gathering begins together, and not before the one before it is over.
        """
        asked = [message_id] if message_id in self._sent else []
        if self.gathering:
            most = self.at_once if asked else 0
        else:
            most = self.at_once + max(self.at_once, _AHEAD) - len(self._answers) if self.at_once > 1 else len(asked)
        others = (other for other in self._sent if other != message_id)
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
        except Exception as error:  # as Flower does: an app that raises answers with error code 2
            reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        return self.spoil(node, message, reply)

    def set_run(self, run: Run) -> None:
        """There is only one run, 1."""

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("make messages with flwr.app.Message(content, node_id, message_type)")


def _run(answer: Callable[[Message], Message | None], message: Message) -> Message | None:
    return answer(message)
