"""What a server and a node tell Prometheus: `tepal server --metrics HOST:PORT`, `tepal node --metrics HOST:PORT`.

Nothing is counted for it: each scrape reads what is there, of a server its journal and the `metrics.jsonl` of the runs
in progress and of the newest, of a node what `tepal node status` shows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from tepal.client_app.node.node_pb2 import NodeStatus
    from tepal.server_app.supervisor import Journal
    from tepal.server_app.views import RunView

Families = Iterable[Any]
"""Of `prometheus_client`, which is imported where it is used."""

_NODE_STATES = ("starting", "connected", "unreachable", "refused", "draining", "drained", "stopping")
_OUTCOMES = ("refused", "lost", "late", "left_out")  # lists of clients in a line of metrics.jsonl


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


# --- a server ---------------------------------------------------------------------------------------------------------


def server_families(journal: Journal, folders: Sequence[Path]) -> Families:
    """A server's metrics, from its journal and the runs in its folders."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    up = GaugeMetricFamily("tepal_superlink_up", "1 while the SuperLink runs and answers")
    up.add_metric([], float(journal.superlink == "running"))
    starts = CounterMetricFamily("tepal_superlink_starts", "Starts of the SuperLink since this server's own")
    starts.add_metric([], journal.superlink_starts)
    nodes = GaugeMetricFamily("tepal_nodes_registered", "Nodes whose keys are registered")
    nodes.add_metric([], len(journal.nodes))
    memory = GaugeMetricFamily("tepal_server_resident_bytes", "Resident memory", labels=["process"])
    for process, size in _resident().items():
        memory.add_metric([process], size)
    return [up, starts, nodes, memory, *run_families(_seen(folders))]


def run_families(runs: Sequence[RunView]) -> Families:
    """The metrics of runs, as their metrics.jsonl has them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    state = GaugeMetricFamily("tepal_run_state", "1 for the state that the run is in", labels=["run", "state"])
    done = GaugeMetricFamily("tepal_run_rounds", "Rounds that have ended", labels=["run", "strategy"])
    asked = GaugeMetricFamily("tepal_run_rounds_asked", "Rounds of the whole run", labels=["run", "strategy"])
    score = GaugeMetricFamily("tepal_run_score", "The last accuracy, or RMSE", labels=["run", "measure"])
    moved = CounterMetricFamily(
        "tepal_run_bytes", "Payload bytes of all clients, and names and digests", labels=["run", "direction"]
    )
    replies = CounterMetricFamily("tepal_run_replies", "What became of clients' replies", labels=["run", "outcome"])
    seconds = SummaryMetricFamily("tepal_run_round_seconds", "Duration of the rounds", labels=["run"])
    for run in runs:
        try:
            facts, lines = run.facts(), run.metrics
        except (OSError, ValueError):  # a damaged file must not hide the other runs
            state.add_metric([run.path.name, "unreadable"], 1)
            continue
        name, strategy = facts["name"], str(facts["strategy"] or "")
        state.add_metric([name, facts["state"]], 1)
        done.add_metric([name, strategy], facts["rounds"] or 0)
        if facts["rounds_asked"]:
            asked.add_metric([name, strategy], facts["rounds_asked"])
        if facts["score"] is not None:
            score.add_metric([name, facts["measure"]], facts["score"])
        for direction in ("down", "up", "overhead"):
            moved.add_metric([name, direction], sum(line.get(f"bytes_{direction}") or 0 for line in lines))
        replies.add_metric([name, "replied"], sum(line.get("clients_replied") or 0 for line in lines))
        for outcome in _OUTCOMES:
            replies.add_metric([name, outcome], sum(len(line.get(outcome) or ()) for line in lines))
        took = [line["seconds"] for line in lines if line["round"] > 0 and line.get("seconds") is not None]
        seconds.add_metric([name], len(took), sum(took))
    return [state, done, asked, score, moved, replies, seconds]


def _seen(folders: Sequence[Path]) -> list[RunView]:
    """The runs in progress, and the newest."""
    from tepal.server_app.views import RunView, views

    there = [view for folder in folders if folder.is_dir() for view in views(folder) if isinstance(view, RunView)]
    there.sort(key=lambda view: view.started, reverse=True)
    return [view for number, view in enumerate(there) if number == 0 or view.running]


def _resident() -> dict[str, int]:
    """Bytes of this process, and of all that it has started."""
    own = psutil.Process(os.getpid())
    children = 0
    with contextlib.suppress(psutil.Error):
        for child in own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                children += child.memory_info().rss
    return {"server": own.memory_info().rss, "superlink": children}


# --- a node -----------------------------------------------------------------------------------------------------------


def node_families(status: NodeStatus, stages: Mapping[str, tuple[int, float]]) -> Families:
    """A node's metrics.

    Args:
        status: What the node is doing.
        stages: For each stage of a message's way how many messages went it, and the sum of their seconds.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    state = GaugeMetricFamily("tepal_node_state", "1 for the state that the node is in", labels=["state"])
    for name in _NODE_STATES:
        state.add_metric([name], float(status.state == name))
    up = GaugeMetricFamily("tepal_node_uptime_seconds", "Since the node was started")
    up.add_metric([], status.uptime_seconds)
    messages = CounterMetricFamily("tepal_node_messages", "Messages, by what came of them", labels=["outcome"])
    messages.add_metric(["answered"], status.answered)
    messages.add_metric(["failed"], status.failed)
    deaths = CounterMetricFamily("tepal_node_deaths", "Processes that ended of themselves", labels=["process"])
    deaths.add_metric(["executor"], status.executors_died)
    deaths.add_metric(["supernode"], status.supernodes_died)
    at_work = GaugeMetricFamily("tepal_node_message_age_seconds", "Of the message in hand; 0 without one")
    at_work.add_metric([], status.message_seconds)
    latency = SummaryMetricFamily("tepal_node_message_seconds", "Of answered messages, by stage", labels=["stage"])
    for stage, (count, seconds) in stages.items():
        latency.add_metric([stage], count, seconds)
    memory = GaugeMetricFamily("tepal_node_resident_bytes", "Resident memory", labels=["process"])
    sizes: Counter[str] = Counter()
    for process in status.processes:
        sizes[process.role] += process.resident_bytes
    for role, size in sizes.items():
        memory.add_metric([role], size)
    return [state, up, messages, deaths, at_work, latency, memory]
