"""Metrics for Prometheus, served at an address: `--metrics HOST:PORT` of `tepal server` and `tepal node`.

Nothing is counted for it: each scrape reads what there is.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Families = Iterable[Any]
"""Of `prometheus_client`, which is imported where it is used."""


class MetricsError(ValueError):
    """Metrics cannot be served. The text says why and what to do."""


@contextlib.contextmanager
def serving(address: str, families: Callable[[], Families]) -> Iterator[None]:
    """Serve `http://address/metrics` until the block ends; nothing where the address is "".

    Args:
        address: HOST:PORT.
        families: Asked at every scrape, in a thread of its own.

    Raises MetricsError for an address that cannot be listened on, or a missing package.
    """
    if not address:
        yield
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise MetricsError(
            "--metrics needs prometheus-client, and this Python has no such package: pip install 'tepal[prometheus]'"
        )
    from prometheus_client import CollectorRegistry, start_http_server

    class Scraped:
        def collect(self) -> Families:
            return families()

        def describe(self) -> Families:
            return []  # what there is, is only known when it is asked for

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise MetricsError(f"--metrics {address}: expected HOST:PORT, such as 127.0.0.1:9464")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scraped())
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise MetricsError(f"--metrics {address} cannot be listened on: {error.strerror or error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
