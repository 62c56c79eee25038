"""Flower's Grid, told of a reply as soon as all of it is there, and never blocked by one that is still on its way.

The SuperLink announces a reply before its arrays have arrived. Flower's grid then waits for them in place, at first one
second, then two, four, eight; with many slow clients nothing else is looked for. Here an announced reply is pulled when
its last object is there, and `pull_messages` comes back at once otherwise. Messages are taken apart and put together by
`tepal.host.flower.objects`, with fewer copies.

This uses names of Flower that are not public, of the version in `tepal.host.flower.patches`; with another version,
and in simulation, `prompt` returns the grid as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from logging import getLogger
from typing import Any, cast

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from tepal.host.flower.patches import FLOWER, LONGEST_PAUSE, SHORTEST_PAUSE, quick

try:
    from flwr.app import Metadata
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
    from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
    from flwr.supercore.inflatable.inflatable_object import InflatableObject
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_pull_object_fn_protobuf,
        make_push_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, pull_objects
    from flwr.superlink.grid.http_grid import HttpGrid

    from tepal.host.flower.objects import ReleaseResponses, fetch, hash_chunks, push, tree_of
except ImportError:  # another version of Flower: `prompt` says so
    HttpGrid = object  # type: ignore[misc, assignment]

log = getLogger("flwr")

_ARENAS = -8  # M_ARENA_MAX
_GIVE_BACK = 32_000_000  # bytes that are pulled before what they left behind is given back
_FORGOTTEN = 60.0  # seconds after which a reply that nobody has asked for is not looked for any more


def prompt(grid: Grid) -> Grid:
    """Return a grid over the same connection that pulls replies without waiting, where the installed Flower is known.

    Use it where a strategy is started: `strategy.start(prompt(grid), …)`. The given grid stays usable.
    """
    if version("flwr") != FLOWER:
        log.warning("Rounds take seconds longer: tepal.server_app.grid knows flwr %s, not %s.", FLOWER, version("flwr"))
        return grid
    return PromptGrid(grid) if type(grid) is HttpGrid else grid


@dataclass(frozen=True)
class _Announced:
    """A reply that is on its way."""

    reply_id: str
    answers: str


@dataclass
class _Awaited:
    """When a reply was last asked for, and last looked for at the SuperLink (`time.monotonic`)."""

    asked: float
    looked: float = 0.0


class PromptGrid(HttpGrid):  # type: ignore[misc]
    """See `prompt`."""

    def __init__(self, grid: Grid) -> None:
        self.__dict__ = grid.__dict__  # one connection, whoever of the two opens or closes it
        self._announced: dict[str, _Announced] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._lock = threading.Lock()
        self._pulled = 0
        self.moved_at = 0.0
        """When an object of a reply last came (`time.monotonic`)."""
        with contextlib.suppress(OSError, AttributeError):  # glibc: else every thread keeps memory of its own
            ctypes.CDLL(None).mallopt(_ARENAS, 1)

    @property
    def _runtime_client(self) -> Any:
        client = super()._runtime_client
        if (known := getattr(client, "_interceptors", ())) and not isinstance(known[-1], ReleaseResponses):
            client._interceptors = (*known, ReleaseResponses())
        return client

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """As Flower's."""
        messages = list(messages)
        for message in messages:
            hash_chunks(message)
        pushed = list(super().push_messages(messages))
        with self._lock:
            self._awaited.update((message_id, _Awaited(time.monotonic())) for message_id in pushed if message_id)
        return pushed

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        """As Flower's, without hashing chunks again, and without a copy of all that waits to be sent."""
        protos, trees = [], []
        objects: dict[str, InflatableObject] = {}
        for message in messages:
            protos.append(message_to_proto(remove_content_from_message(message)))
            tree, its_objects = tree_of(message, message.metadata.message_id)
            trees.append(tree)
            objects |= its_objects
        answer = self._runtime_client.PushMessages(
            PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)
        )
        push_one = make_push_object_fn_protobuf(
            self._runtime_client.PushObject, self.node, run_id=run_id, session_id=answer.session_id
        )
        push(objects, answer.objects_to_push, push_one)
        return list(answer.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages that are there as a whole. May be called from several threads at once."""
        asked = list(message_ids)
        self._look_for(asked)
        pulled = []
        for message_id in asked:
            with self._lock:
                announced = self._announced.get(message_id)
            if announced is not None and (reply := self._pull(announced)) is not None:
                pulled.append(reply)
                with self._lock:
                    self._announced.pop(message_id, None)
        return pulled

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push messages, and return the replies that have come when all are there, or after `timeout` seconds."""
        waiting = {message_id for message_id in self.push_messages(messages) if message_id}
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        pause = SHORTEST_PAUSE
        while waiting and (end is None or time.monotonic() < end):
            came = self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            replies += came
            pause = SHORTEST_PAUSE if came else min(1.5 * pause, LONGEST_PAUSE)
            if waiting:
                time.sleep(pause)
        return replies

    def _look_for(self, asked: Iterable[str]) -> None:
        """Ask the SuperLink which replies there are, once for all that are awaited: callers ask for one at a time."""
        now = time.monotonic()
        with self._lock:
            unannounced = [message_id for message_id in asked if message_id not in self._announced]
            for message_id in unannounced:
                self._awaited.setdefault(message_id, _Awaited(now)).asked = now
            if all(now - self._awaited[message_id].looked < SHORTEST_PAUSE for message_id in unannounced):
                return
            self._awaited = {key: each for key, each in self._awaited.items() if now - each.asked < _FORGOTTEN}
            awaited = list(self._awaited)
        answer = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=awaited))
        with self._lock:
            for message_id in awaited:
                if message_id in self._awaited:
                    self._awaited[message_id].looked = now
            for proto in answer.messages_list:
                answers = proto.metadata.reply_to_message_id
                self._announced[answers] = _Announced(proto.metadata.message_id, answers)
                self._awaited.pop(answers, None)

    def _pull(self, announced: _Announced) -> Message | None:
        """The reply, None while it is on its way, or Flower's error message for one that will not come."""
        pull_object = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self.run.run_id)

        def pull(object_id: str) -> bytes:
            content = pull_object(object_id)
            self.moved_at = time.monotonic()
            self._pulled += len(content)
            if self._pulled > _GIVE_BACK:
                self._pulled = 0
                _give_back_memory()
            return content

        _give_back_memory()
        try:
            pull(announced.reply_id)  # it is sent last, and small: looking for it costs nothing
            reply = cast(Message, fetch(announced.reply_id, pull, quick(pull_objects)))
        except ObjectUnavailableError:
            return None
        except ObjectPullError as error:
            reason = f"Reply message objects are unavailable: its sender did not finish the upload. {error}"
            metadata = Metadata(
                run_id=self.run.run_id,
                message_id="",
                src_node_id=self.node.node_id,
                dst_node_id=self.node.node_id,
                message_type=SYSTEM_MESSAGE_TYPE,
                group_id="",
                ttl=0,
                reply_to_message_id=announced.answers,
                created_at=time.time(),
            )
            return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=announced.reply_id
            )
        )
        reply.metadata.__dict__["_message_id"] = announced.reply_id
        return reply


def _give_back_memory() -> None:
    """Return to the system what was freed; glibc keeps some of it otherwise, beside all that a reply needs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
