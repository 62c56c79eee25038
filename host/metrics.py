"""Serve metrics to Prometheus: `--metrics HOST:PORT` of `tepal server` and `tepal node`.

Each scrape reads the present state; no counters are kept.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Families = Iterable[Any]
"""Metric families of `prometheus_client`, which is imported only where it is used."""


class MetricsError(ValueError):
    """Metrics cannot be served. The message has the reason and what to do."""


@contextlib.contextmanager
def serving(address: str, families: Callable[[], Families]) -> Iterator[None]:
    """Serve `http://address/metrics` during the block; with the address "", serve nothing.

    Args:
        address: HOST:PORT.
        families: Called at every scrape, in another thread.

    Raises MetricsError for an invalid or unavailable address, or a missing package.
    """
    if not address:
        yield
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise MetricsError(
            "--metrics needs prometheus-client, which is not installed: pip install 'tepal[prometheus]'"
        )
    from prometheus_client import CollectorRegistry, start_http_server

    class Scraped:
        def collect(self) -> Families:
            return families()

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise MetricsError(f"--metrics is {address!r}, expected HOST:PORT, such as 127.0.0.1:9464")
    registry = CollectorRegistry()
    registry.register(Scraped())
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise MetricsError(f"cannot listen on --metrics {address}: {error.strerror or error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
