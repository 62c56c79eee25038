"""The process that runs the ClientApp of one run, from its first message until a message of another run.

It replaces the process that Flower starts for every message (`flwr.supernode.runtime.run_clientapp`), and exchanges the
same requests with the SuperNode, by `runtime.py`. It imports no `tepal` before the app's bundle is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import Any

import psutil
from flwr.app import Context, Error, Message
from flwr.app.message import remove_content_from_message
from flwr.cli.install import install_from_fab
from flwr.clientapp.client_app import ClientApp, LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, context_to_proto, fab_from_proto, message_to_proto, run_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
)
from flwr.supercore import log
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from .link import Link
from .objects import fetch, hash_chunks, push, tree_of
from .patches import quick
from .runtime import RuntimeClient, RuntimeFailed, RuntimeRefused
from .single import plain, reads_single, written


def main() -> None:
    """Answer the messages that the parent announces: `worker.py LINK FOLDER LIMIT [MODULE …]`.

    LINK is the file descriptor of a socket, FOLDER for the app's bundle, LIMIT the bytes of memory (0: no limit). Each
    MODULE is imported at once, if it is installed.
    """
    link, folder, limit, *modules = sys.argv[1:]
    to_parent = Link.inherited(link)
    _ignore_signals()
    _limit_memory(int(limit))
    for module in modules:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    _keep_loaded()
    process = psutil.Process()
    to_parent.send("ready", rss=process.memory_info().rss)
    handler = MessageHandler(Path(folder))
    for order in to_parent:
        result = handler.handle(order["address"], order["token"], to_parent)
        to_parent.send("done", ok=result.ok, reason=result.reason, rss=process.memory_info().rss)
        _give_back_memory()
    os._exit(0)


def pull_task_input(client: RuntimeClient) -> tuple[Message, Context, Run, Fab, bool]:
    """As Flower's function; also return whether the message's sender reads messages in one object."""
    task = client.PullTaskInput(PullTaskInputRequest())
    context = context_from_proto(task.context)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, task.run.run_id, context.node_id
    announced = client.PullMessages(PullAppMessagesRequest())
    if not announced.messages_list:
        raise RuntimeError("the SuperNode has no message for this task")
    object_id = announced.message_object_trees[0].object_id
    pull_all = quick(pull_objects)
    root = pull_all([object_id], client.PullObject)[object_id]
    message = fetch(root, object_id, client.PullObject, pull_all)
    client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=object_id))
    message.metadata.__dict__["_message_id"] = object_id
    return message, context, run_from_proto(task.run), fab_from_proto(task.fab), reads_single(root)


def push_reply(client: RuntimeClient, reply: Message, single: bool) -> None:
    """As Flower's `push_message`. `single`: the receiver reads messages in one object."""
    hash_chunks(reply)
    with no_object_id_recompute():
        root = written(reply, single=True) if single else plain(reply)
        object_id = root.object_id
        reply.metadata.__dict__["_message_id"] = object_id
        tree, objects = tree_of(root, object_id)
    proto = message_to_proto(remove_content_from_message(reply))
    request = PushAppMessagesRequest(messages_list=[proto], message_object_trees=[tree])
    answer = client.PushMessages(request)
    push(objects, answer.objects_to_push, partial(client.PushObject, answer.session_id))


class BundleError(LoadClientAppError):
    """The app's bundle cannot be unpacked: it is damaged, or the disk is full."""


@dataclass(frozen=True)
class TaskResult:
    """The outcome of a message. `reason` is Flower's text of an error."""

    ok: bool
    reason: str = ""


class MessageHandler:
    """Answers the messages of one run, one after the other, with the ClientApp that it loads for the first of them.

    The app's bundle is unpacked in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._app: ClientApp | None = None
        self._client: RuntimeClient | None = None

    def handle(self, address: str, token: str, to_parent: Link) -> TaskResult:
        """Pull the token's message from the SuperNode, call the app, and push its reply. `address`: of its socket."""
        if self._client is not None and str(self._client.path) != address:  # of another SuperNode
            self._client.close()
            self._client = None
        self._client = self._client or RuntimeClient(address)
        self._client.token = token
        return self._handle(self._client, to_parent)

    def _handle(self, client: RuntimeClient, to_parent: Link) -> TaskResult:
        message = context = None
        single = False
        try:
            message, context, run, fab, single = pull_task_input(client)
            metadata = message.metadata
            to_parent.send("began", run=run.run_id, type=metadata.message_type, round=metadata.group_id)
            if self._app is None:
                self._app = self._load(run, fab)
                _keep_loaded()
            reply = self._app(message=message, context=context)
            to_parent.send("answered")
            result = TaskResult(True)
        except (Exception, SystemExit) as error:
            log(ERROR, "ClientApp raised an exception", exc_info=error)
            code, reason = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"
            if isinstance(error, LoadClientAppError):
                code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
                reason = "An exception was raised when attempting to load `ClientApp`"
                reason += f": {error}" if isinstance(error, BundleError) else ""
            result = TaskResult(False, reason)
            if message is not None:
                reply = Message(Error(code=code, reason=reason), reply_to=message)
        try:
            if message is not None and context is not None:
                push_reply(client, reply, single)
        except Exception as error:
            log(ERROR, "The reply cannot be sent to the SuperNode", exc_info=error)
            result = TaskResult(False, f"its reply cannot be sent to the SuperNode: {type(error).__name__}: {error}")
        outcome = SubStatus.COMPLETED if result.ok else SubStatus.FAILED
        try:
            final = context_to_proto(context) if context is not None else None
            client.PushTaskOutput(PushTaskOutputRequest(context=final, sub_status=outcome, details=result.reason))
        except (OSError, RuntimeRefused, RuntimeFailed) as error:  # the parent sees that the SuperNode has ended
            log(ERROR, "The end of a task cannot be reported to the SuperNode: %s", error)
        return result

    def _load(self, run: Any, fab: Any) -> ClientApp:
        try:
            installed = install_from_fab(fab.content, install_dir=self.folder, skip_prompt=True)
        except Exception as error:
            raise BundleError(f"its bundle cannot be unpacked: {error}") from error
        load = get_load_client_app_fn(default_app_ref="", app_path=str(installed), multi_app=True)
        return load(run.fab_id, run.fab_version, fab.hash_str)


def _ignore_signals() -> None:
    """Ignore Ctrl-C and SIGTERM, which all processes of a service get: the parent stops this one."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)  # programs that it starts would inherit SIG_IGN
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers])


def _limit_memory(limit: int) -> None:
    """Let allocations beyond `limit` bytes of private memory raise MemoryError, which Flower reports."""
    if limit:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _keep_loaded() -> None:
    """Exclude what was imported from garbage collection, which takes a tenth of a second more with torch."""
    gc.collect()
    gc.freeze()


def _give_back_memory() -> None:
    """Return the memory of the message's arrays to the system; glibc would keep it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
