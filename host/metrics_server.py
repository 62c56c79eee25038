"""The HTTP server of metrics: with a token and TLS if they are asked for, and a limit of requests at the same time."""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_SECONDS = 10  # within which a scraper must send its request, and take the answer
_MOST_REQUESTS = 16  # at the same time; further ones are closed


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """Answers requests with the token, if there is one; refuses all others."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        kind, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        right = secrets.compare_digest(given.strip().encode(), token.encode())
        if token and not (kind.lower() == "bearer" and right):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"The metrics' token is missing or wrong.\n"]
        return app(environ, start_response)

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, of which there is a limit."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a connection that breaks, or is not TLS, is no error of this process."""


class _Handler(WSGIRequestHandler):
    """Logs no requests, and waits for none."""

    timeout = _SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        pass


def context_of(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS with a certificate and its key. Raises OSError if they cannot be read, or do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")  # not asked for in the terminal
    return context


def listening(host: str, port: int, app: WSGIApplication, token: str, context: ssl.SSLContext | None) -> WSGIServer:
    """A server of an application, which requires the token, if there is one. Raises OSError if it cannot listen."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    kind = type("_Server", (_Server,), {"address_family": family})
    server: WSGIServer = kind(address[:2], _Handler)
    server.set_app(_guarded(app, token))
    if context is not None:
        # The handshake is made in the thread of the request: a scraper that sends nothing delays no other.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server
