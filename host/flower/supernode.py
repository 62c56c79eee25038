"""Run Flower's SuperNode in a process of its own, with shorter waits for messages and replies.

Flower polls for a message every three seconds and for its reply every half second, and answers a message whose process
died only after a minute. Changed are the connection's `receive` (`Prompt`), the node's state (`PromptState`), the
pauses between requests for an object that was announced, and how the Runtime API is served (`runtime.py`).
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
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from .link import Link, die_with_parent
from .patches import SHORTEST_PAUSE, change, quick
from .polling import FirstPause
from .refusals import channel, push_once, reconnecting, report_refusal, steady
from .runtime import RuntimeServer

_PAUSE = 1 / 8  # between two requests for a message, as a share of the time since the last message
_MESSAGE_WAIT = 5.0  # seconds for which a task waits for its message
_CHECK_TOKENS = 20.0  # seconds for which the main loop waits for a reply before it checks task tokens again
_LEAVE = 6.0  # seconds to leave the SuperLink when the parent has died
_REPORT = 5.0  # seconds between two reports to the parent that the SuperLink answers
_STALLED = 30.0  # seconds without a further object of a message, after which its sender counts as dead
_KEPT_TASKS = 100  # finished tasks whose entry stays; Flower keeps all


def main() -> None:
    """Run Flower's SuperNode: `supernode.py LINK POLL SOCKET OPTION …`.

    LINK is the file descriptor of a socket to the parent, POLL the longest pause in seconds between two requests for a
    message, SOCKET the path at which the Runtime API is served, each OPTION one of `flower-supernode`.
    """
    number, poll, runtime, *options = sys.argv[1:]
    link = Link.inherited(number)
    # SIGINT lets Flower deregister at the SuperLink, which would otherwise count the node as connected. SIGTERM is
    # ignored: a service manager sends it to all processes, and this one may still have a reply to send.
    die_with_parent(os.getppid(), signal.SIGINT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Flower's handler restores this one at the first SIGINT. Linux sends one for every thread of the parent that ends,
    # and a KeyboardInterrupt while gRPC shuts down has kept processes from ending.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    prompt = Prompt(link, float(poll))
    change_flower(link, prompt, Path(runtime))
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
        # The interpreter's own exit waits for threads of HTTP and gRPC, and `_listen` cannot end it any more.
        logging.shutdown()
        os._exit(code)


def change_flower(link: Link, prompt: Prompt, runtime: Path) -> None:
    """Let Flower's SuperNode use the functions of this file. Raises `UnsupportedFlowerVersion` if a name is missing."""
    inside = "flwr.supernode.start_client_internal"
    change("flwr.supernode.cli.flower_supernode", "_start_supernode_http_api", lambda _: partial(_serve, runtime))
    change("flwr.supernode.cli.flower_supernode", "NodeStateFactory", lambda _: partial(PromptStateFactory, link=link))
    # Flower's shutdown has five seconds, and its last step is the request to the SuperLink.
    change("flwr.supernode.cli.flower_supernode", "HTTP_SERVER_SHUTDOWN_TIMEOUT", lambda _: 0.5)
    change(inside, "pull_objects", lambda pull: partial(pull_while_it_comes, quick(pull)))
    change(inside, "grpc_request_response", prompt.around)
    change(inside, "register_signal_handlers", lambda register: partial(_without_sigterm, register))
    change(inside, "_make_fleet_connection_retry_invoker", lambda make: partial(reconnecting, make, link))
    connection = "flwr.client.grpc_rere_client.connection"
    change(connection, "flwr_exit", lambda leave: partial(report_refusal, link, leave))
    change(connection, "create_channel", lambda _: channel)
    change(connection, "HeartbeatSender", lambda sender: lambda beat: sender(partial(steady, beat)))


class _Serving:
    """What Flower's SuperNode holds in place of its HTTP server and its thread, and ends at its own end."""

    def __init__(self, server: RuntimeServer) -> None:
        self._server = server

    def join(self, timeout: float | None = None) -> None:
        self._server.stop()

    def is_alive(self) -> bool:
        return False


def _serve(runtime: Path, config: Any, state_factory: PromptStateFactory) -> tuple[_Serving, _Serving]:
    """Serve the Runtime API at the socket, in place of Flower's function that serves it over HTTP."""
    serving = _Serving(RuntimeServer(runtime, state_factory.state(), config.superexec_auth_secret))
    return serving, serving


def pull_while_it_comes(
    pull: Callable[..., dict[str, bytes]],
    object_ids: Sequence[str],
    pull_object_fn: Callable[[str], bytes],
    **settings: Any,
) -> dict[str, bytes]:
    """Pull objects as Flower's `pull_objects`, but end if the message's sender has died while sending it.

    Raises ObjectPullError when no object has arrived for `_STALLED` seconds, and RunEnded when the run was stopped; the
    node then continues with its next message.
    """
    arrived = time.monotonic()

    def pull_one(object_id: str) -> bytes:
        nonlocal arrived
        try:
            content = pull_object_fn(object_id)
        except ObjectUnavailableError:
            if time.monotonic() - arrived > _STALLED:
                raise ObjectPullError(object_id, f"no object of its message has arrived for {_STALLED:g} s") from None
            raise
        arrived = time.monotonic()
        return content

    with _as_failure():
        return pull(object_ids, pull_one, **settings)


class RunEnded(Exception):
    """The run was stopped while its message was being fetched."""


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Raise RunEnded for Flower's RunNotRunningException, after which Flower's main loop would keep the message and
    wait for the rest of it for ever."""
    try:
        yield
    except RunNotRunningException:
        raise RunEnded("its run was stopped") from None


class Prompt:
    """Polls for the next message: at short intervals after the last one, then at longer ones.

    Args:
        link: to the parent, which gets a report of every message and may suspend the polling.
        poll: the longest pause between two requests, in seconds.
    """

    def __init__(self, link: Link, poll: float) -> None:
        self._link = link
        self._poll = poll
        self._wake = threading.Event()
        self._held = False
        self._reported = 0.0
        self._first_pause = FirstPause()

    def hold(self, held: bool) -> None:
        """Suspend or resume the polling."""
        self._held = held
        self._wake.set()

    def around(self, connect: Any) -> Callable[..., Any]:
        """Return Flower's function that connects to the SuperLink, with this polling."""

        @contextlib.contextmanager
        def connected(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with connect(*args, **kwargs) as (node_id, receive, *others, pull, push, confirm):
                self._link.send("connected", node=node_id)

                def confirmed(run_id: int, message_id: str) -> None:
                    with _as_failure():
                        confirm(run_id, message_id)
                    self._link.send("fetched")

                pushed = partial(push_once, push, pull)
                yield (node_id, partial(self._receive, receive), *others, pull, pushed, confirmed)

        return connected

    def _receive(
        self, receive: Callable[[], tuple[Message, ObjectTree] | None]
    ) -> tuple[Message, ObjectTree]:
        """Return the next message. Flower's loop calls this when the reply to the last one was sent."""
        self._link.send("idle", held=self._held)
        since = time.monotonic()
        self._wake.clear()
        if not self._held:
            self._wake.wait(self._first_pause.seconds)
        while True:
            self._wake.clear()
            if self._held:
                self._link.send("idle", held=True)
                self._wake.wait()
                continue
            try:
                received = receive()
            except RunNotRunningException:
                received = None  # the run was stopped; the next message is of another run
            if received is not None:
                metadata = received[0].metadata
                self._first_pause.waited(time.monotonic() - since)
                self._link.send("busy", run=metadata.run_id, type=metadata.message_type, round=metadata.group_id)
                return received
            if time.monotonic() - self._reported > _REPORT:
                self._reported = time.monotonic()
                self._link.send("looked")
            self._wake.wait(min(max(_PAUSE * (time.monotonic() - since), SHORTEST_PAUSE), self._poll))


class PromptState(InMemoryNodeState):
    """The node's state, which reports new tasks, waits for complete replies, and answers for a task that failed."""

    def __init__(self, object_store: Any, link: Link) -> None:
        super().__init__(object_store)
        self._link = link
        self._changed, self._changes = threading.Condition(), 0
        self._new_task: int | None = None
        self._message_of: dict[int, str] = {}
        self._finished: list[int] = []
        put = object_store.put

        def put_and_notify(object_id: str, content: bytes) -> None:
            put(object_id, content)
            self._notify()

        object_store.put = put_and_notify  # Flower's main loop stores what it pulls there, without this class

    def create_task(self, task_type: str, run_id: int, *args: Any, **kwargs: Any) -> int | None:
        # Flower's main loop creates a task, then stores the message that the task is for.
        self._new_task = super().create_task(task_type, run_id, *args, **kwargs)
        return self._new_task

    def store_message(self, message: Message) -> str | None:
        stored = super().store_message(message)
        if stored and not message.metadata.reply_to_message_id and self._new_task is not None:
            self._message_of[self._new_task], self._new_task = stored, None
            self._link.send("task")
        self._notify()
        return stored

    def store_message_and_object_tree(self, *args: Any, **kwargs: Any) -> Any:
        stored = super().store_message_and_object_tree(*args, **kwargs)
        self._notify()
        return stored

    def store_object(self, *args: Any, **kwargs: Any) -> bool:
        stored = super().store_object(*args, **kwargs)
        self._notify()
        return stored

    def get_messages(
        self, *, run_ids: Sequence[int] | None = None, is_reply: bool | None = None, limit: int | None = None
    ) -> Sequence[Message]:
        if is_reply and not self._wait_for(self._has_complete_reply, _CHECK_TOKENS):
            with self.lock_task_store:
                self._cleanup_expired_task_tokens_locked()
            return []
        if is_reply is False:
            # Flower creates a task a moment before it stores the message that the task is for.
            self._wait_for(lambda: self._has_message(run_ids), _MESSAGE_WAIT)
        return super().get_messages(run_ids=run_ids, is_reply=is_reply, limit=limit)

    def wait_for_object(self, run_id: int, object_id: str, seconds: float) -> bytes | None:
        """As `get_object`, but wait until an object that was announced has arrived, at most so many seconds."""
        self._wait_for(lambda: self.get_object(run_id, object_id) != b"", seconds)
        return self.get_object(run_id, object_id)

    def delete_messages(self, *, message_ids: Sequence[str] | None = None) -> None:
        """Delete messages as Flower does, and with them their objects and replies that were not sent."""
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

    def _notify(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        # `ready` takes locks that other threads hold while they call `_notify`, so it is called without the condition.
        end = time.monotonic() + seconds
        while True:
            seen = self._changes
            if ready():
                return True
            left = end - time.monotonic()
            with self._changed:
                if left <= 0 or not self._changed.wait_for(lambda: self._changes != seen, left):  # noqa: B023
                    return False

    def _has_complete_reply(self) -> bool:
        """Whether a reply with all its objects can be sent."""
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
        """Answer a message with an error, unless it has a complete reply; drop an incomplete one."""
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
            # The message's objects stay until it is deleted: the main loop may be fetching them now.
            error = Error(ErrorCode.CLIENT_APP_CRASHED, reason or "ClientApp ended.")
            self._store_error_replies({entry.message.metadata.run_id}, error)

    def _forget(self, task_id: int) -> None:
        self._finished.append(task_id)
        while len(self._finished) > _KEPT_TASKS:
            with self.lock_task_store:
                self.task_store.pop(self._finished.pop(0), None)


class PromptStateFactory(NodeStateFactory):
    """Makes one `PromptState`."""

    def __init__(self, objectstore_factory: Any, link: Link) -> None:
        super().__init__(objectstore_factory)
        self._link = link

    def state(self) -> Any:
        with self.lock:
            if self.state_instance is None:
                self.state_instance = PromptState(self.objectstore_factory.store(), self._link)
            return self.state_instance


def _without_sigterm(register: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    register(*args, **kwargs)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _listen(link: Link, prompt: Prompt) -> None:
    for order in link:
        prompt.hold(bool(order.get("held")))
    # The parent has ended. On Linux `die_with_parent` has sent SIGINT; a second one would interrupt the shutdown.
    if not sys.platform.startswith("linux"):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_LEAVE)
    os._exit(1)  # the SuperLink has not answered
