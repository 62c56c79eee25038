"""A Grid for Flower that returns each reply as soon as all of it has arrived, without waiting for incomplete ones.

The SuperLink announces a reply before its arrays have arrived. Flower's grid then waits for them, first one second,
then two, four and eight, and receives no other reply meanwhile. This grid pulls an announced reply when its last object
has arrived; until then `pull_messages` returns without it. `tepal.host.flower.objects` converts messages with fewer
copies, and warm nodes get and return small messages in one object (`tepal.host.flower.single`).

It uses private names of Flower, in the version that `tepal.host.flower.patches` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, pull_objects
from flwr.superlink.grid.http_grid import HttpGrid

from tepal.host.flower.objects import ReleaseResponses, fetch, hash_chunks, push, tree_of
from tepal.host.flower.patches import LONGEST_PAUSE, SHORTEST_PAUSE, quick
from tepal.host.flower.single import Written, reads_single, written

_ARENAS, _MMAP_THRESHOLD = -8, -3  # M_ARENA_MAX, M_MMAP_THRESHOLD
_RETURNED = 1 << 20  # bytes from which freed memory is returned to the system at once
_GIVE_BACK = 32_000_000  # bytes pulled between two calls that return freed memory to the system
_FORGOTTEN = 60.0  # seconds after the last request for a reply, after which the SuperLink is no longer asked for it


@dataclass
class _Awaited:
    """Times (`time.monotonic`) of the last request for a reply, and of the last request to the SuperLink for it."""

    requested: float
    asked: float = 0.0


class PromptGrid(HttpGrid):  # type: ignore[misc]
    """Grid that pulls replies without waiting; see `tepal.server_app.grid.prompt`."""

    def __init__(self, grid: Grid) -> None:
        self.__dict__ = grid.__dict__  # one connection, which either of the two opens and closes
        self._announced: dict[str, str] = {}  # message's id → id of its announced reply
        self._awaited: dict[str, _Awaited] = {}
        self._lock = threading.Lock()
        self._finding = threading.Lock()  # of the thread that asks for announced replies
        self._pulled = 0
        self._reading_single: set[int] = set()  # nodes that read messages in one object
        self._sent: dict[str, tuple[int, bool]] = {}  # id of a message without a reply → its node; is it one object?
        self._sessions: dict[int, str] = {}  # node → when it was started
        self.moved_at = 0.0
        """Time at which the last object of a reply arrived (`time.monotonic`)."""
        self._most_bytes: Callable[[], int] | None = None  # of a reply
        with contextlib.suppress(OSError, AttributeError):  # glibc would otherwise keep freed memory for each thread
            allocator = ctypes.CDLL(None)
            allocator.mallopt(_ARENAS, 1)
            allocator.mallopt(_MMAP_THRESHOLD, _RETURNED)

    @property
    def _runtime_client(self) -> Any:
        client = super()._runtime_client
        if (known := getattr(client, "_interceptors", ())) and not isinstance(known[-1], ReleaseResponses):
            client._interceptors = (*known, ReleaseResponses())
        return client

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push messages as Flower's grid does; returns their ids, "" for a message that was not accepted."""
        messages = list(messages)
        for message in messages:
            hash_chunks(message)
        pushed = list(super().push_messages(messages))
        with self._lock:
            self._awaited.update((message_id, _Awaited(time.monotonic())) for message_id in pushed if message_id)
        return pushed

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        """Push as Flower's grid does, but hash no chunk twice, and copy nothing that waits to be sent."""
        protos, trees, sent = [], [], {}
        objects: dict[str, InflatableObject | Written] = {}
        for message in messages:
            root = written(message, single=message.metadata.dst_node_id in self._reading_single)
            message.metadata.__dict__["_message_id"] = message_id = root.object_id
            sent[message_id] = message.metadata.dst_node_id, not root.children
            protos.append(message_to_proto(remove_content_from_message(message)))
            tree, its_objects = tree_of(root, message_id)
            trees.append(tree)
            objects |= its_objects
        answer = self._runtime_client.PushMessages(
            PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)
        )
        with self._lock:
            self._sent |= sent
        push_one = make_push_object_fn_protobuf(
            self._runtime_client.PushObject, self.node, run_id=run_id, session_id=answer.session_id
        )
        push(objects, answer.objects_to_push, push_one)
        return list(answer.message_ids)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """List the nodes, as Flower's grid does."""
        nodes = list(super().get_nodes())
        for node in nodes:
            if self._sessions.get(node.node_id) != node.last_activated_at:
                self._reading_single.discard(node.node_id)  # it may be another program now
                self._sessions[node.node_id] = node.last_activated_at
        return nodes

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages that have arrived completely. Threads may call it at the same time."""
        requested = list(message_ids)
        self._find_announced(requested)
        pulled = []
        for message_id in requested:
            with self._lock:
                reply_id = self._announced.get(message_id)
            if reply_id is not None and (reply := self._pull(message_id, reply_id)) is not None:
                pulled.append(reply)
                with self._lock:
                    self._announced.pop(message_id, None)
        return pulled

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push messages, and return their replies when all have arrived, or after `timeout` seconds those that have."""
        waiting = {message_id for message_id in self.push_messages(messages) if message_id}
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        pause = SHORTEST_PAUSE
        while waiting and (end is None or time.monotonic() < end):
            received = self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in received}
            replies += received
            pause = SHORTEST_PAUSE if received else min(1.5 * pause, LONGEST_PAUSE)
            if waiting:
                time.sleep(pause)
        return replies

    def limit_replies(self, most: Callable[[], int] | None) -> None:
        """Refuse replies with more bytes than `most` returns when they are pulled. None: there is no limit."""
        self._most_bytes = most

    def _find_announced(self, requested: Iterable[str]) -> None:
        """Ask the SuperLink which replies exist, in one request for all awaited ones: callers name one at a time."""
        # The SuperLink forgets what it has announced, and answers a second request for it with an error.
        with self._finding:
            now = time.monotonic()
            with self._lock:
                unannounced = [message_id for message_id in requested if message_id not in self._announced]
                for message_id in unannounced:
                    self._awaited.setdefault(message_id, _Awaited(now)).requested = now
                if all(now - self._awaited[message_id].asked < SHORTEST_PAUSE for message_id in unannounced):
                    return
                for key in [key for key, each in self._awaited.items() if now - each.requested >= _FORGOTTEN]:
                    del self._awaited[key]
                    self._sent.pop(key, None)
                awaited = list(self._awaited)
            answer = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=awaited))
            with self._lock:
                for message_id in awaited:
                    if message_id in self._awaited:
                        self._awaited[message_id].asked = now
                for proto in answer.messages_list:
                    self._announced[proto.metadata.reply_to_message_id] = proto.metadata.message_id
                    self._awaited.pop(proto.metadata.reply_to_message_id, None)

    def _pull(self, message_id: str, reply_id: str) -> Message | None:
        """Return a reply, None if it is incomplete, or Flower's error message if its sender did not finish it.

        It is also an error message if the reply is larger than allowed, or its objects do not fit together.
        """
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
            root = pull(reply_id)  # its last object, which is small: it fails quickly if the reply is incomplete
            most = self._most_bytes() if self._most_bytes else None
            reply = fetch(root, reply_id, pull, quick(pull_objects), most)
        except ObjectUnavailableError:
            return None
        except (ObjectPullError, ValueError, LookupError, TypeError) as error:  # all but the first: it is no message
            with self._lock:
                self._sent.pop(message_id, None)
            self._confirm(reply_id)  # or the SuperLink would keep its objects until the run ends
            said = "The reply could not be received: its upload is incomplete, or it is too large or malformed."
            reason = f"{said} {error}"
            metadata = Metadata(
                run_id=self.run.run_id,
                message_id="",
                src_node_id=self.node.node_id,
                dst_node_id=self.node.node_id,
                message_type=SYSTEM_MESSAGE_TYPE,
                group_id="",
                ttl=0,
                reply_to_message_id=message_id,
                created_at=time.time(),
            )
            return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
        self._confirm(reply_id)
        if reply.has_error() and reply.metadata.src_node_id == self.node.node_id:
            self._confirm(message_id)  # the SuperLink gave it up, and would keep what its node has not fetched
        # What the reply's own object says of it is its sender's, and was not compared with the message that it answers.
        reply.metadata.__dict__.update(_message_id=reply_id, _reply_to_message_id=message_id)
        self._learn(message_id, reply.has_error(), reads_single(root))
        return reply

    def _confirm(self, message_id: str) -> None:
        """Let the SuperLink delete the objects of a message."""
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=self.run.run_id, message_object_id=message_id)
        )

    def _learn(self, message_id: str, failed: bool, reads: bool) -> None:
        """Remember whether the node that has replied reads messages in one object: the one that the message was for."""
        with self._lock:
            node, single = self._sent.pop(message_id, (None, False))
            if node is None:
                return
            if failed and single:  # perhaps because of that
                self._reading_single.discard(node)
            elif reads and not failed:
                self._reading_single.add(node)


def _give_back_memory() -> None:
    """Return freed memory to the system; glibc would keep some of it in addition to what a reply needs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
