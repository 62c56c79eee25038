"""Addresses to listen on: which of them only this machine reaches, and whether they are free; and proxies."""

from __future__ import annotations

import errno
import os
import re
import socket
import time

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_RETRY = 0.2  # seconds between two attempts to use a port


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be reached from this machine."""
    import ipaddress  # `tepal server status` does not need it

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def why_taken(address: str, patience: float) -> str:
    """Return why no server of this user can listen on `address`, HOST:PORT; "" if one can.

    A port that is in use is tried again for `patience` seconds: its server may have been stopped a moment ago. An
    address that is not one of this machine's is not judged.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + patience
    while (problem := binding_error(host, port)) == errno.EADDRINUSE and time.monotonic() < end:
        time.sleep(_RETRY)
    if problem == errno.EACCES:
        return f"this user may not listen on port {port}, as on most ports below 1024"
    return f"port {port} is used by another program, which `ss -ltnp 'sport = {port}'` shows" if problem else ""


def binding_error(host: str, port: str | int) -> int:
    """Bind each address of a host for an instant; return EADDRINUSE or EACCES if that is why one cannot be, else 0.

    An empty host is all addresses of this machine.
    """
    try:
        places = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return 0
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno
    return 0


def without_proxy(*hosts: str) -> dict[str, str]:
    """Return NO_PROXY, no_proxy and no_grpc_proxy of this process, with its loopback addresses and `hosts` added.

    A program may read only one of the first two, so both get what is in either. "*", for no proxy at all, stays alone:
    with others beside it, most programs read it as a host's name. gRPC always does, and reads the third name first.
    """
    added = [*_LOOPBACK, *filter(_is_host, (host.strip("[]") for host in hosts))]
    kept = _listed("no_proxy", "NO_PROXY")
    text = "*" if "*" in kept else _joined(kept, added)
    return {"NO_PROXY": text, "no_proxy": text, "no_grpc_proxy": _joined(_listed("no_grpc_proxy") or kept, added)}


def _listed(*names: str) -> list[str]:
    """The entries of environment variables, which are separated by commas."""
    return [entry for name in names for each in os.environ.get(name, "").split(",") if (entry := each.strip())]


def _joined(kept: list[str], added: list[str]) -> str:
    return ",".join(dict.fromkeys([*kept, *added]))


def _is_host(text: str) -> bool:
    """Whether a text is a name or address of a host. httpx cannot be used while NO_PROXY has what is none."""
    if ":" not in text:
        return re.fullmatch(r"[A-Za-z0-9_.-]+", text) is not None
    try:
        return bool(socket.inet_pton(socket.AF_INET6, text))
    except OSError:
        return False


def unused_proxy(host: str) -> str:
    """Return a clause for messages that names the proxy which was not used; "" if there is none for `host`."""
    host = host.strip("[]")
    # `host` itself may be what `without_proxy` added.
    domains = [each.lstrip(".") for each in _listed("no_proxy", "NO_PROXY") if each != host]
    if is_loopback(host) or any(each == "*" or f".{host}".endswith(f".{each}") for each in domains):
        return ""
    for name in _PROXIES:
        if proxy := os.environ.get(name):
            # An address may begin with user and password.
            return f"; it was asked directly, and not through the proxy {proxy.rpartition('@')[2]} of {name}"
    return ""
