"""Serve metrics to Prometheus: `--metrics HOST:PORT` of `tepal server` and `tepal node`.

Each scrape reads the present state; no counters are kept. On an address that other machines reach, a scrape needs a
bearer token, unless the operator says that the network is private.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepal.host.addresses import is_loopback

Families = Iterable[Any]
"""Metric families of `prometheus_client`, which is imported only where it is used."""

SHORTEST_TOKEN = 12
"""Characters."""
_LOCAL = "127.0.0.1"


class MetricsError(ValueError):
    """Metrics cannot be served. The message has the reason and what to do."""


@dataclass(frozen=True)
class Endpoint:
    """Where and to whom metrics are served.

    Args:
        address: HOST:PORT, or PORT for 127.0.0.1; "" for no metrics.
        token: Required of a scraper, as `Authorization: Bearer …`; "" for none.
        certificate, key: PEM files, for https; None for http.
        open: Serve without a token on an address that other machines reach.
    """

    address: str = ""
    token: str = ""
    certificate: Path | None = None
    key: Path | None = None
    open: bool = False


def endpoint(
    address: str, *, token_file: Path | None, token: str, certificate: Path | None, key: Path | None, open: bool
) -> Endpoint:
    """The endpoint that a command's options describe; the token is that of the file, else `token`.

    Raises MetricsError for options that contradict each other, a short token, or a missing one; OSError for a file of
    the token that cannot be read.
    """
    if (certificate is None) != (key is None):
        raise MetricsError("--metrics-cert and --metrics-key belong together: give both, for https, or neither")
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").strip()
    if (token or token_file) and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise MetricsError(
            f"the token of --metrics has {len(token)} characters, expected at least {SHORTEST_TOKEN}, of ASCII"
        )
    made = Endpoint(address, token, certificate, key, open)
    if address:
        host, port = _parsed(address)
        if not is_loopback(host) and not token and not open:
            raise MetricsError(
                f"--metrics {address} can be reached from other machines, and no token is given: name a file with one "
                f"by --metrics-token-file, use {_LOCAL}:{port}, or add --metrics-open if only Prometheus reaches it"
            )
    return made


def _parsed(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host if colon else _LOCAL
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        raise MetricsError(f"--metrics is {address!r}, expected HOST:PORT or PORT, such as {_LOCAL}:9464")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def serving(at: Endpoint, families: Callable[[], Families]) -> Iterator[None]:
    """Serve `/metrics` during the block; without an address, serve nothing.

    Args:
        at: Where and to whom.
        families: Called at every scrape, in another thread.

    Raises MetricsError for an invalid or unavailable address, a certificate that cannot be used, or a missing package.
    """
    if not at.address:
        yield
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise MetricsError(
            "--metrics needs prometheus-client, which is not installed: pip install 'tepal[prometheus]'"
        )
    from prometheus_client import CollectorRegistry, make_wsgi_app

    from tepal.host.metrics_server import context_of, listening  # `tepal server status` does not need a web server

    class Scraped:
        def collect(self) -> Families:
            return families()

    registry = CollectorRegistry()
    registry.register(Scraped())
    try:
        context = context_of(at.certificate, at.key) if at.certificate and at.key else None
    except OSError as error:  # which ssl.SSLError is
        raise MetricsError(f"--metrics-cert {at.certificate} cannot be used with --metrics-key: {error}") from error
    try:
        server = listening(*_parsed(at.address), make_wsgi_app(registry), at.token, context)
    except OSError as error:
        raise MetricsError(f"cannot listen on --metrics {at.address}: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
