"""Connections to the SuperLink that are refused or lost: what the parent is told, and when the next attempt is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
from flwr.supercore.retry import RetryInvoker, exponential

from .link import Link

_LONGEST_RECONNECT = 5  # seconds between two attempts to reach the SuperLink (Flower: 20)


def explain_refusal(code: str, details: str) -> str:
    """Return why the SuperLink refuses this node and what to do, from its error code and details."""
    if "Invalid timestamp" in details:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
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
