"""Flower's own SuperNode in a process of its own, which looks for messages and replies as soon as they can be there.

Flower's looks for a message every three seconds and for its reply every half, and has no answer to a message whose
process died until a minute later. What is changed for that: the connection's `receive` (`Prompt`), the node's state
(`PromptState`), and how long is waited for an object that was announced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from .link import Link, die_with_parent
from .patches import SHORTEST_PAUSE, change, quick

_PAUSE = 1 / 8  # between two looks for a message, of the time since the last one
_LONGEST_RECONNECT = 5  # seconds between two tries to reach a SuperLink that is gone (Flower: 20)
_MOMENT = 5.0  # seconds for which a task waits for its message
_LOOK_UP = 20.0  # seconds for which the main loop waits for a reply before it looks at task tokens again
_GOODBYE = 6.0  # seconds for it when the parent has died
_SAY_AGAIN = 5.0  # seconds between two words to the parent that the SuperLink still answers
_STALLED = 30.0  # seconds without a further object of a message, after which its sender is taken for dead
_KEPT_TASKS = 100  # finished tasks whose entry stays; Flower keeps all


def main() -> None:
    """Run Flower's SuperNode: `supernode.py LINK POLL OPTION …`.

    LINK is the number of an open socket to the parent, POLL the longest pause in seconds between two looks for a
    message, each OPTION one of `flower-supernode`.
    """
    number, poll, *options = sys.argv[1:]
    link = Link.inherited(number)
    # By a signal that it hears, so that it says goodbye to the SuperLink, which takes it for alive otherwise. Not
    # SIGTERM: services are stopped by sending that to all their processes, and this one has a message to send then.
    die_with_parent(os.getppid(), signal.SIGINT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Flower's handler puts this one back when the first SIGINT has come. Linux sends one for every thread of the parent
    # that ends after the one before it, and a KeyboardInterrupt in the midst of gRPC's way out has kept processes.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    prompt = Prompt(link, float(poll))
    change_flower(link, prompt)
    threading.Thread(target=_listen, args=(link, prompt), name="orders", daemon=True).start()
    sys.argv = ["flower-supernode", *options]
    code = 1
    try:
        flower_supernode()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except Exception:
        logging.getLogger("flwr").exception("The SuperNode has ended")
    finally:
        # Not by the interpreter's own way out: it waits for threads of HTTP and gRPC, and `_listen` has no say by then.
        logging.shutdown()
        os._exit(code)


def change_flower(link: Link, prompt: Prompt) -> None:
    """Have Flower's SuperNode use what is in this file. Raises `OtherFlower` where it has not the names for it."""
    inside = "flwr.supernode.start_client_internal"
    change("flwr.supernode.cli.flower_supernode", "NodeStateFactory", lambda _: partial(PromptStateFactory, link=link))
    # Flower's whole way out has five seconds, and the word to the SuperLink is the last of it.
    change("flwr.supernode.cli.flower_supernode", "HTTP_SERVER_SHUTDOWN_TIMEOUT", lambda _: 0.5)
    change(inside, "pull_objects", lambda pull: partial(pull_while_it_comes, quick(pull)))
    change(inside, "grpc_request_response", prompt.around)
    change(inside, "register_signal_handlers", lambda register: partial(_but_sigterm, register))
    change(inside, "_make_fleet_connection_retry_invoker", lambda make: partial(_reconnecting, make, link))
    change("flwr.client.grpc_rere_client.connection", "flwr_exit", lambda leave: partial(_refused, link, leave))


def pull_while_it_comes(
    pull: Callable[..., dict[str, bytes]],
    object_ids: Sequence[str],
    pull_object_fn: Callable[[str], bytes],
    **settings: Any,
) -> dict[str, bytes]:
    """Flower's `pull_objects`, but for a message whose sender has died while it sent it: of that no more comes.

    Raises ObjectPullError when no object has arrived for `_STALLED` seconds, and RunEnded when the run was stopped; the
    node then goes on to its next message.
    """
    arrived = time.monotonic()

    def pull_one(object_id: str) -> bytes:
        nonlocal arrived
        try:
            content = pull_object_fn(object_id)
        except ObjectUnavailableError:
            if time.monotonic() - arrived > _STALLED:
                raise ObjectPullError(object_id, f"no more of its message has come for {_STALLED:g} s") from None
            raise
        arrived = time.monotonic()
        return content

    with _as_failure():
        return pull(object_ids, pull_one, **settings)


class RunEnded(Exception):
    """The run was stopped while its message was being fetched."""


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Flower's RunNotRunningException is none of the exceptions after which its main loop takes a message out again:
    the message and its task would stay, and the node's process would wait for the rest of them and for no other."""
    try:
        yield
    except RunNotRunningException:
        raise RunEnded("its run was stopped") from None


class Prompt:
    """Looks for the next message: often after the last one, then less and less.

    Args:
        link: to the parent, which is told of every message, and may have the looking stopped.
        poll: the longest pause between two looks, in seconds.
    """

    def __init__(self, link: Link, poll: float) -> None:
        self._link = link
        self._poll = poll
        self._wake = threading.Event()
        self._held = False
        self._said = 0.0

    def hold(self, held: bool) -> None:
        """Take no further message, or take them again."""
        self._held = held
        self._wake.set()

    def around(self, connect: Any) -> Callable[..., Any]:
        """Flower's function that connects to the SuperLink, with this kind of looking for messages."""

        @contextlib.contextmanager
        def connected(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with connect(*args, **kwargs) as (node_id, receive, *others, confirm):
                self._link.send("connected", node=node_id)

                def confirmed(run_id: int, message_id: str) -> None:
                    with _as_failure():
                        confirm(run_id, message_id)
                    self._link.send("fetched")

                yield (node_id, partial(self._receive, receive), *others, confirmed)

        return connected

    def _receive(
        self, receive: Callable[[], tuple[Message, ObjectTree] | None]
    ) -> tuple[Message, ObjectTree]:
        """Return the next message. Flower's loop comes back here when the reply to the last one was sent."""
        self._link.send("idle", held=self._held)
        since = time.monotonic()
        while True:
            self._wake.clear()
            if self._held:
                self._link.send("idle", held=True)
                self._wake.wait()
                continue
            try:
                received = receive()
            except RunNotRunningException:
                received = None  # the run was stopped; the next message is another's
            if received is not None:
                metadata = received[0].metadata
                self._link.send("busy", run=metadata.run_id, type=metadata.message_type, round=metadata.group_id)
                return received
            if time.monotonic() - self._said > _SAY_AGAIN:
                self._said = time.monotonic()
                self._link.send("looked")
            self._wake.wait(min(max(_PAUSE * (time.monotonic() - since), SHORTEST_PAUSE), self._poll))


class PromptState(InMemoryNodeState):
    """The node's state: says when there is a task, waits for a reply until all of it is there, and answers a message
    whose task failed without a reply."""

    def __init__(self, object_store: Any, link: Link) -> None:
        super().__init__(object_store)
        self._link = link
        self._changed, self._changes = threading.Condition(), 0
        self._new_task: int | None = None
        self._message_of: dict[int, str] = {}
        self._finished: list[int] = []

    def create_task(self, task_type: str, run_id: int, *args: Any, **kwargs: Any) -> int | None:
        # Flower's main loop creates a task, then stores the message that the task is for.
        self._new_task = super().create_task(task_type, run_id, *args, **kwargs)
        return self._new_task

    def store_message(self, message: Message) -> str | None:
        stored = super().store_message(message)
        if stored and not message.metadata.reply_to_message_id and self._new_task is not None:
            self._message_of[self._new_task], self._new_task = stored, None
            self._link.send("task")
        self._tell()
        return stored

    def store_message_and_object_tree(self, *args: Any, **kwargs: Any) -> Any:
        stored = super().store_message_and_object_tree(*args, **kwargs)
        self._tell()
        return stored

    def store_object(self, *args: Any, **kwargs: Any) -> bool:
        stored = super().store_object(*args, **kwargs)
        self._tell()
        return stored

    def get_messages(
        self, *, run_ids: Sequence[int] | None = None, is_reply: bool | None = None, limit: int | None = None
    ) -> Sequence[Message]:
        if is_reply and not self._wait_for(self._whole_reply, _LOOK_UP):
            with self.lock_task_store:
                self._cleanup_expired_task_tokens_locked()
            return []
        if is_reply is False:
            # Flower creates a task a moment before it stores the message that the task is for.
            self._wait_for(lambda: self._has_message(run_ids), _MOMENT)
        return super().get_messages(run_ids=run_ids, is_reply=is_reply, limit=limit)

    def delete_messages(self, *, message_ids: Sequence[str] | None = None) -> None:
        """As Flower's; and what belongs to a message goes with it: its objects, and an answer that was not sent."""
        ids = set(message_ids or ())
        with self._lock_object_push_sessions, self.lock_msg_store:
            ids |= {key for key, entry in self.msg_store.items() if entry.message.metadata.reply_to_message_id in ids}
            super().delete_messages(message_ids=None if message_ids is None else list(ids))
        for message_id in ids:
            self.object_store.delete(message_id)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        finished = super().finish_task(task_id, sub_status, details)
        message_id = self._message_of.pop(task_id, None)
        if finished and message_id and sub_status == SubStatus.FAILED:
            self._answer(message_id, details)
        if finished:
            self._forget(task_id)
        return finished

    def _on_task_tokens_expired(self, tasks: list[Any]) -> None:
        for task in tasks:
            if message_id := self._message_of.pop(task.task_id, None):
                self._answer(message_id, "ClientApp stopped responding.")

    def _tell(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        # `ready` takes locks that others hold while they tell of a change, so it is not asked under the condition's.
        end = time.monotonic() + seconds
        while True:
            seen = self._changes
            if ready():
                return True
            left = end - time.monotonic()
            with self._changed:
                if left <= 0 or not self._changed.wait_for(lambda: self._changes != seen, left):  # noqa: B023
                    return False

    def _whole_reply(self) -> bool:
        """Whether there is a reply to send, with all its objects."""
        with self._lock_object_push_sessions, self.lock_msg_store:
            for message_id, entry in self.msg_store.items():
                if entry.message.metadata.reply_to_message_id and not entry.is_retrieved:
                    session = self._object_push_sessions.get(self._object_push_session_by_root.get(message_id, ""))
                    return session is None or not session.pending_object_ids
        return False

    def _has_message(self, run_ids: Sequence[int] | None) -> bool:
        with self.lock_msg_store:
            return any(
                not entry.is_retrieved
                and not entry.message.metadata.reply_to_message_id
                and (run_ids is None or entry.message.metadata.run_id in run_ids)
                for entry in self.msg_store.values()
            )

    def _answer(self, message_id: str, reason: str) -> None:
        """Answer a message with an error, unless a reply to it is there; drop one that is there in part."""
        with self._lock_object_push_sessions, self.lock_msg_store:
            entry = self.msg_store.get(message_id)
            if entry is None:
                return  # its reply was sent
            for reply_id, other in list(self.msg_store.items()):
                if other.message.metadata.reply_to_message_id == message_id:
                    session = self._object_push_session_by_root.get(reply_id, "")
                    if session not in self._object_push_sessions:
                        return
                    self._cleanup_push_session(session, cleanup_messages=True)
            if not entry.is_retrieved:  # its process died before it asked for the message
                entry.is_retrieved = True
                self.record_message_processing_start(message_id)
            # Its objects stay until it is deleted: the main loop may be fetching them now.
            error = Error(ErrorCode.CLIENT_APP_CRASHED, reason or "ClientApp ended.")
            self._store_error_replies({entry.message.metadata.run_id}, error)

    def _forget(self, task_id: int) -> None:
        self._finished.append(task_id)
        while len(self._finished) > _KEPT_TASKS:
            with self.lock_task_store:
                self.task_store.pop(self._finished.pop(0), None)


class PromptStateFactory(NodeStateFactory):
    """Makes a `PromptState`, once."""

    def __init__(self, objectstore_factory: Any, link: Link) -> None:
        super().__init__(objectstore_factory)
        self._link = link

    def state(self) -> Any:
        with self.lock:
            if self.state_instance is None:
                self.state_instance = PromptState(self.objectstore_factory.store(), self._link)
            return self.state_instance


def explain_refusal(code: str, details: str) -> str:
    """What to do about a SuperLink that does not take this node, from what it says."""
    if "Invalid timestamp" in details:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return (
            f"the SuperLink does not accept the time of this machine, {now} UTC: its clock is more than 5 seconds "
            "before or 5 minutes behind the SuperLink's. Set both by NTP"
        )
    if "[code: 2004]" in details:
        return (
            "the SuperLink does not know this node's key: it was never registered, it was revoked, or the SuperLink "
            "was started anew; its administrator registers it with `tepal provision register`. Or it takes this node "
            "for connected, for a minute after it was killed"
        )
    if "handshake failed" in details.lower() or "certificate" in details.lower():
        return f"no TLS connection to the SuperLink: {details}. Is the address right, and ca.crt that of its authority?"
    return f"the SuperLink does not take this node: {' '.join(filter(None, [code, details]))}"


def _reconnecting(make: Callable[..., RetryInvoker], link: Link, **settings: Any) -> RetryInvoker:
    """Flower's way of trying again, sooner, and with a word to the parent about what is wrong."""
    invoker = make(**settings)
    invoker.wait_gen_factory = lambda: exponential(max_delay=_LONGEST_RECONNECT)
    gives_up, backs_off = invoker.should_giveup, invoker.on_backoff

    def should_give_up(error: Any) -> bool:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            link.send("refused", reason=explain_refusal(error.code().name, error.details() or ""))
        return gives_up(error) if gives_up else False

    def on_backoff(state: Any) -> None:
        link.send("lost")
        if backs_off:
            backs_off(state)

    invoker.should_giveup, invoker.on_backoff = should_give_up, on_backoff
    return invoker


def _but_sigterm(register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    register(*args, **kwargs)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _refused(link: Link, leave: Callable[..., None], code: int, message: str | None = None, **kwargs: Any) -> None:
    link.send("refused", reason=explain_refusal("", message or ""))
    leave(code, message, **kwargs)


def _listen(link: Link, prompt: Prompt) -> None:
    for order in link:
        prompt.hold(bool(order.get("held")))
    # The parent is gone. Linux has said so by a signal (`die_with_parent`), and a second one would cut the goodbye off.
    if not sys.platform.startswith("linux"):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GOODBYE)
    os._exit(1)  # there is no SuperLink to say goodbye to
