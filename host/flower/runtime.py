"""Flower's Runtime API between a SuperNode and the node's other processes, over a Unix socket.

Flower serves it over HTTP, of which a request takes milliseconds of processor time at both ends, and a message needs
twenty. Here the same handlers are called by frames on a connection that stays open. Who may ask is decided as in
Flower: the executor proves that it knows the secret, a worker has its task's token. In addition only the user who runs
the node can open the socket.

A frame is a header of sizes, then its fields. A request has the name of a method, a token, a protobuf message and the
content of an object; an answer has a protobuf message and the content of an object.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ConfirmMessageReceivedResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
    PushTaskOutputRequest,
    PushTaskOutputResponse,
    SendTaskHeartbeatRequest,
    SendTaskHeartbeatResponse,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError

from .objects import new_bytes

log = getLogger("flwr")

_REQUEST = struct.Struct("!HHIQ")  # sizes of method, token, message, content
_ANSWER = struct.Struct("!BIQ")  # status, sizes of message, content
_DONE, _REFUSED, _FAILED, _MISSING, _UNAVAILABLE = range(5)  # status of an answer
_PAUSE = 0.1  # seconds until a connection is accepted after one could not be
_MOST = 1 << 31  # bytes of a frame's field
_LONGEST_PATH = 100  # bytes of a socket's path; systems allow 104 or 108
_WAIT = 5.0  # seconds for which a request for an object that has not arrived waits for it

_METHODS: dict[str, tuple[Any, Any, str]] = {
    "PullTaskInput": (PullTaskInputRequest, PullTaskInputResponse, "pull_task_input"),
    "PullMessages": (PullAppMessagesRequest, PullAppMessagesResponse, "pull_messages"),
    "ConfirmMessageReceived": (
        ConfirmMessageReceivedRequest, ConfirmMessageReceivedResponse, "confirm_message_received",
    ),
    "PushMessages": (PushAppMessagesRequest, PushAppMessagesResponse, "push_messages"),
    "PushTaskOutput": (PushTaskOutputRequest, PushTaskOutputResponse, "push_task_output"),
    "SendTaskHeartbeat": (SendTaskHeartbeatRequest, SendTaskHeartbeatResponse, "send_task_heartbeat"),
}  # fmt: skip
"""Methods of a task: name → types of request and response, and the name of Flower's handler."""


class RuntimeRefused(Exception):
    """The SuperNode does not know the task's token any more, or the secret is another one."""


class RuntimeFailed(Exception):
    """Flower's handler raised an exception; the text is the exception's."""


class RuntimeServer:
    """Serves the Runtime API at a Unix socket, each connection in a thread of its own.

    Args:
        path: of the socket, which is made here and removed by `stop`.
        state: the SuperNode's state.
        secret: that the executor must know.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, state: Any, secret: bytes) -> None:
        from flwr.supercore.servicer.runtime import runtime_handlers as of_all  # clients do without them
        from flwr.supernode.servicer.runtime import runtime_handlers as of_nodes

        self._path, self._state, self._secret = path, state, secret
        self._stopped = False
        self._acquire = of_nodes.acquire_task
        names = [name for _, _, name in _METHODS.values()]
        self._handlers = {name: getattr(of_nodes, name, None) or getattr(of_all, name) for name in names}
        self._socket = socket.socket(socket.AF_UNIX)
        with _short(path) as reachable:
            before = os.umask(0o177)
            try:
                self._socket.bind(reachable)
            finally:
                os.umask(before)
        self._socket.listen(16)
        threading.Thread(target=self._accept, name="runtime", daemon=True).start()

    def stop(self) -> None:
        """Accept no further connection."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # it was stopped; or no descriptor is free now
                if not self._stopped:
                    log.warning("A connection of the node's own processes cannot be accepted: %s", error)
                    time.sleep(_PAUSE)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="runtime", daemon=True).start()
            except RuntimeError as error:  # no further thread can be started now
                log.warning("A connection of the node's own processes cannot be served: %s", error)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                sizes = _REQUEST.unpack(_read(connection, _REQUEST.size))
                method, token, message, content = (_read(connection, size) for size in sizes)
                name, known_by = (each.decode(errors="replace") for each in (method, token))
                status, message, content = self._answer(name, known_by, message, content)
                connection.sendall(_ANSWER.pack(status, len(message), len(content)) + message)
                connection.sendall(content)
                del message, content  # while it waits for the next request

    def _answer(self, method: str, token: str, message: bytes, content: bytes) -> tuple[int, bytes, bytes]:
        try:
            if method == "AcquireTask":
                if not hmac.compare_digest(token, self._secret.hex()):
                    return _REFUSED, b"the executor's secret is another one", b""
                request = AcquireTaskRequest.FromString(message)
                return _DONE, self._acquire(request, self._state).SerializeToString(), b""
            task = self._state.get_task_by_token(token) if token else None
            if task is None:
                return _REFUSED, b"the task's token is not valid", b""
            if method == "PullObject":
                return self._pull(task.run_id, message.decode())
            if method == "PushObject":
                session, _, object_id = message.decode().partition(" ")
                stored = self._state.store_object(task.run_id, session, object_id, content)
                return (_DONE if stored else _MISSING), b"", b""
            request_type, _, name = _METHODS[method]
            answer = self._handlers[name](request_type.FromString(message), self._state, task)
            return _DONE, answer.SerializeToString(), b""
        except Exception as error:  # of one request: the others are not concerned
            log.debug("%s failed.", method, exc_info=True)
            return _FAILED, f"{type(error).__name__}: {error}".encode(errors="replace"), b""

    def _pull(self, run: int, object_id: str) -> tuple[int, bytes, bytes]:
        content = self._state.wait_for_object(run, object_id, _WAIT)
        if content is None:
            return _MISSING, b"", b""
        return (_DONE, b"", content) if content else (_UNAVAILABLE, b"", b"")


class RuntimeClient:
    """A client of the Runtime API at a Unix socket, with the methods of Flower's client that the node uses.

    Threads may call it at the same time; each connection serves one at a time, and stays open. All methods raise
    OSError if no SuperNode answers, `RuntimeRefused` if it does not accept `token`, and `RuntimeFailed`.

    Args:
        path: of the socket.
        token: of a task; or the executor's secret, in hexadecimal digits.
        patience: seconds without an answer, after which the SuperNode counts as dead.
    """

    def __init__(self, path: str | Path, token: str = "", patience: float = 30.0) -> None:
        self.path, self.token, self.patience = Path(path), token, patience
        self._free: list[socket.socket] = []

    def AcquireTask(self, request: AcquireTaskRequest) -> AcquireTaskResponse:
        return AcquireTaskResponse.FromString(self._ask("AcquireTask", request.SerializeToString())[1])

    def PullObject(self, object_id: str) -> bytes:
        """Return an object's content. Raises ObjectPullError if there is none, ObjectUnavailableError if it is late."""
        status, _, content = self._ask("PullObject", object_id.encode())
        if status == _MISSING:
            raise ObjectPullError(object_id, "the object could not be found.")
        if status == _UNAVAILABLE:
            raise ObjectUnavailableError(object_id)
        return content

    def PushObject(self, session: str, object_id: str, content: bytes) -> None:
        """Store an object's content. Raises ObjectPushError if the session has ended."""
        if self._ask("PushObject", f"{session} {object_id}".encode(), content)[0] == _MISSING:
            raise ObjectPushError(object_id, 0, session)

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        try:
            _, response_type, _ = _METHODS[name]
        except KeyError:
            raise AttributeError(name) from None
        return lambda request: response_type.FromString(self._ask(name, request.SerializeToString())[1])

    def close(self) -> None:
        """Close all connections that are not in use."""
        while self._free:
            self._free.pop().close()

    def _ask(self, method: str, message: bytes, content: bytes = b"") -> tuple[int, bytes, bytes]:
        connection = self._connection()
        fields = method.encode(), self.token.encode(), message
        try:
            connection.sendall(_REQUEST.pack(*map(len, fields), len(content)) + b"".join(fields))
            if content:
                connection.sendall(content)
            status, *sizes = _ANSWER.unpack(_read(connection, _ANSWER.size))
            answer, content = (_read(connection, size) for size in sizes)
        except BaseException:  # the rest of an answer must not be read as the next one
            connection.close()
            raise
        self._free.append(connection)
        if status in (_REFUSED, _FAILED):
            raise (RuntimeRefused if status == _REFUSED else RuntimeFailed)(answer.decode(errors="replace"))
        return status, answer, content

    def _connection(self) -> socket.socket:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(self.patience)
            with _short(self.path) as reachable:
                connection.connect(reachable)
        except BaseException:
            connection.close()
            raise
        return connection


def _read(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes. Raises OSError if the connection ends before, or for more than a field may have."""
    if size > _MOST:
        raise OSError(f"a frame announces {size} bytes, more than {_MOST}")
    if size == 0:
        return b""
    whole, buffer = new_bytes(size)
    while buffer:
        received = connection.recv_into(buffer)
        if received == 0:
            raise ConnectionError("the connection has ended")
        buffer = buffer[received:]
    return whole


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of this path that is short enough for a socket. Linux has one for every folder."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
