"""Connections to the SuperLink that are refused or lost: what the parent is told, and when the next attempt is made.

Flower neither notices a connection that was lost silently, nor tries again after every error that passes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import RunNotRunningException

from .link import Link

_LONGEST_RECONNECT = 5  # seconds between two attempts to reach the SuperLink (Flower: 20)
_PING = 310_000  # milliseconds without data before a ping; the SuperLink ends connections with more than one in 300 s
_UNANSWERED = 60_000  # milliseconds after which a connection whose data or ping is not acknowledged is lost
_BUSY = "Concurrent RPC"  # in what the SuperLink says when it has as many calls as it takes


def channel(
    server_address: str,
    insecure: bool,
    root_certificates: bytes | None = None,
    max_message_length: int = GRPC_MAX_MESSAGE_LENGTH,
    interceptors: Sequence[grpc.UnaryUnaryClientInterceptor] | None = None,
) -> grpc.Channel:
    """As Flower's `create_channel`, but a connection that was lost silently ends within about a minute.

    Linux would take 15 minutes to give it up. Raises ValueError for `root_certificates` that are damaged, or that are
    given for an insecure connection.
    """
    if insecure and root_certificates is not None:
        raise ValueError("an insecure connection to the SuperLink has no root certificates: leave out one of both")
    options = [
        ("grpc.max_send_message_length", max_message_length),
        ("grpc.max_receive_message_length", max_message_length),
        ("grpc.keepalive_time_ms", _PING),
        ("grpc.keepalive_timeout_ms", _UNANSWERED),  # with keepalive, gRPC also sets TCP_USER_TIMEOUT to it
    ]
    if insecure:
        opened = grpc.insecure_channel(server_address, options=options)
    else:
        try:
            credentials = grpc.ssl_channel_credentials(root_certificates)
        except Exception as error:
            raise ValueError(f"Failed to create SSL channel credentials: {error}") from error
        opened = grpc.secure_channel(server_address, credentials, options=options)
    return opened if interceptors is None else grpc.intercept_channel(opened, *interceptors)


def steady(beat: Callable[[], bool]) -> bool:
    """Send a heartbeat by `beat`; return False if it fails in any way.

    Flower's sender then tries again. After an exception, its thread would end without a word.
    """
    try:
        return beat()
    except (Exception, RunNotRunningException) as error:  # the latter is no Exception
        logging.getLogger("flwr").warning("A heartbeat has failed, and is tried again: %s", error)
        return False


def push_once(
    push: Callable[[int, str, str, bytes], None],
    pull: Callable[[int, str], bytes],
    run_id: int,
    session_id: str,
    object_id: str,
    content: bytes,
) -> None:
    """Push an object as Flower's `push_object`, `push`, and pass if the SuperLink has it already.

    The SuperLink refuses an object that it has, also when its acknowledgement was lost and Flower sends it again.
    """
    try:
        push(run_id, session_id, object_id, content)
    except ObjectPushError:
        with contextlib.suppress(ObjectPullError, ObjectUnavailableError):
            if pull(run_id, object_id) == content:
                return
        raise


def explain_refusal(code: str, details: str) -> str:
    """Return why the SuperLink refuses this node and what to do, from its error code and details."""
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    if "Invalid timestamp" in details:
        return (
            f"the SuperLink does not accept the time of this machine, {now} UTC: its clock is more than 5 seconds "
            "ahead of the SuperLink's, or more than 5 minutes behind it. Set both by NTP"
        )
    if "[code: 2004]" in details:
        return (
            "the SuperLink does not know this node's key: it was never registered, it was revoked, or the SuperLink "
            "was restarted. Its administrator registers it with `tepal provision register`. Or the SuperLink still "
            "counts this node as connected, up to a minute after it was killed"
        )
    if "certificate has expired" in details or "not yet valid" in details:
        return (
            f"the server's certificate is not valid at this machine's time, {now} UTC: set the clock by NTP, or the "
            "server's administrator renews it"
        )
    if "handshake failed" in details.lower() or "certificate" in details.lower():
        return f"no TLS connection to the SuperLink: {details}. Check its address, and that ca.crt is its authority's"
    return f"the SuperLink refuses this node: {' '.join(filter(None, [code, details]))}"


def reconnecting(make: Callable[..., RetryInvoker], link: Link, **settings: Any) -> RetryInvoker:
    """Return Flower's retry invoker with shorter pauses, which reports lost and refused connections to the parent."""
    invoker = make(**settings)
    invoker.wait_gen_factory = lambda: exponential(max_delay=_LONGEST_RECONNECT)
    gives_up, backs_off = invoker.should_giveup, invoker.on_backoff

    def should_give_up(error: Any) -> bool:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            link.send("refused", reason=explain_refusal(error.code().name, error.details() or ""))
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and _BUSY in (error.details() or ""):
            return False
        return gives_up(error) if gives_up else False

    def on_backoff(state: Any) -> None:
        link.send("lost")
        if backs_off:
            backs_off(state)

    invoker.should_giveup, invoker.on_backoff = should_give_up, on_backoff
    return invoker


def report_refusal(
    link: Link, leave: Callable[..., None], code: int, message: str | None = None, **kwargs: Any
) -> None:
    """As Flower's `flwr_exit`, `leave`, after a report to the parent."""
    link.send("refused", reason=explain_refusal("", message or ""))
    leave(code, message, **kwargs)
