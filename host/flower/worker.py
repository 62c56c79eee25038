"""The process that runs the ClientApp of one run, from its first message until a message of another run.

It replaces the process that Flower starts for every message (`flwr.supernode.runtime.run_clientapp`), and exchanges the
same requests with the SuperNode. It imports no `tepal` before the app's bundle is installed.
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

import httpx
import psutil
from flwr.app import Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp.client_app import ClientApp, LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime import run_clientapp

from .link import Link
from .objects import ReleaseResponses, fetch_from_tree, hash_chunks, push, tree_of
from .patches import change, quick

_PATIENCE = 30.0  # seconds for which a request is repeated while the SuperNode does not answer


def main() -> None:
    """Answer the messages that the parent announces: `worker.py LINK FOLDER LIMIT [MODULE …]`.

    LINK is the file descriptor of a socket, FOLDER for the app's bundle, LIMIT the bytes of memory (0: no limit). Each
    MODULE is imported at once, if it is installed.
    """
    link, folder, limit, *modules = sys.argv[1:]
    to_parent = Link.inherited(link)
    _ignore_signals()
    _limit_memory(int(limit))
    change_flower()
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


def change_flower() -> None:
    """Let Flower's ClientApp process send and receive messages by `objects.py`. Raises `UnsupportedFlowerVersion`."""
    inside = "flwr.supernode.runtime.run_clientapp"
    fetch = partial(fetch_from_tree, pull_all=quick(pull_objects))
    change(inside, "pull_and_inflate_object_from_tree", lambda _: fetch)
    change(inside, "get_object_tree", lambda _: lambda message: tree_of(message, message.metadata.message_id)[0])
    change(inside, "get_all_nested_objects", lambda _: lambda message: tree_of(message, message.metadata.message_id)[1])
    change(inside, "push_objects", lambda _: lambda all, one, object_ids_to_push: push(all, object_ids_to_push, one))


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

    def handle(self, address: str, token: str, to_parent: Link) -> TaskResult:
        """Pull the token's message from the SuperNode's Runtime API, call the app, and push its reply."""
        client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=True,  # it is on this machine's loopback interface
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                RuntimeTokenHttpInterceptor(token),
                ReleaseResponses(),
            ],
            retry_invoker=_retries(),
        )
        with contextlib.closing(client):
            return self._handle(client, to_parent)

    def _handle(self, client: RuntimeHttpClient, to_parent: Link) -> TaskResult:
        message = context = None
        try:
            message, context, run, fab = run_clientapp.pull_task_input(client)
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
                hash_chunks(reply)
                run_clientapp.push_message(client, reply, context)
        except Exception as error:
            log(ERROR, "The reply cannot be sent to the SuperNode", exc_info=error)
            result = TaskResult(False, f"its reply cannot be sent to the SuperNode: {type(error).__name__}: {error}")
        outcome = SubStatus.COMPLETED if result.ok else SubStatus.FAILED
        run_clientapp.push_task_output(client, context, outcome, result.reason)
        return result

    def _load(self, run: Any, fab: Any) -> ClientApp:
        try:
            installed = install_from_fab(fab.content, install_dir=self.folder, skip_prompt=True)
        except Exception as error:
            raise BundleError(f"its bundle cannot be unpacked: {error}") from error
        load = get_load_client_app_fn(default_app_ref="", app_path=str(installed), multi_app=True)
        return load(run.fab_id, run.fab_version, fab.hash_str)


def _retries() -> RetryInvoker:
    """Return Flower's retry invoker, which here raises if a task is gone, and does not interrupt the process."""
    retries = make_simple_http_retry_invoker()
    retries.max_time = _PATIENCE
    retries.should_giveup = lambda error: (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.status_code not in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
    )
    return retries


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
