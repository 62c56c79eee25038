"""A node's status as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tepal.client_app.node.node_pb2 import NodeStatus
from tepal.host.metrics import Families
from tepal.host.text import LONGEST_NAME, visible

_STATES = ("starting", "connected", "unreachable", "refused", "draining", "drained", "stopping")


def node_families(status: NodeStatus, stages: Mapping[str, tuple[int, float]]) -> Families:
    """A node's metrics.

    Args:
        status: of the node.
        stages: stage of an answered message → number of messages, and the sum of their seconds.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    state = GaugeMetricFamily("tepal_node_state", "1 for the node's state, 0 for the others", labels=["state"])
    for name in _STATES:
        state.add_metric([name], float(status.state == name))
    healthy = GaugeMetricFamily(
        "tepal_node_healthy", "1 while the node can answer messages, as `tepal node status` reports it"
    )
    healthy.add_metric([], float(status.state == "connected" and not status.problem))
    up = GaugeMetricFamily("tepal_node_uptime_seconds", "Seconds since the node was started")
    up.add_metric([], status.uptime_seconds)
    messages = CounterMetricFamily("tepal_node_messages", "Messages, by outcome", labels=["outcome"])
    messages.add_metric(["answered"], status.answered)
    messages.add_metric(["failed"], status.failed)
    deaths = CounterMetricFamily("tepal_node_deaths", "Processes that ended unexpectedly", labels=["process"])
    deaths.add_metric(["executor"], status.executors_died)
    deaths.add_metric(["supernode"], status.supernodes_died)
    at_work = GaugeMetricFamily("tepal_node_message_age_seconds", "Age of the current message; 0 without one")
    at_work.add_metric([], status.message_seconds)
    latency = SummaryMetricFamily(
        "tepal_node_message_seconds", "Seconds of answered messages, by stage", labels=["stage"]
    )
    for stage, (count, seconds) in stages.items():
        latency.add_metric([visible(stage, LONGEST_NAME)], count, seconds)
    memory = GaugeMetricFamily("tepal_node_resident_bytes", "Resident memory", labels=["process"])
    sizes: Counter[str] = Counter()
    for process in status.processes:
        sizes[process.role] += process.resident_bytes
    for role, size in sizes.items():
        memory.add_metric([visible(role, LONGEST_NAME)], size)
    return [state, healthy, up, messages, deaths, at_work, latency, memory]
