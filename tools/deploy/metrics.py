"""A server's metrics for Prometheus: from its journal, and from metrics.jsonl of the newest run and those in progress.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tepal.host.metrics import Families
from tepal.host.text import LONGEST_NAME, visible
from tepal.records.round_record import COUNTED
from tepal.tools.deploy.journal import Journal

if TYPE_CHECKING:
    from tepal.tools.dashboard.views import RunView


def server_families(journal: Journal, folders: Sequence[Path]) -> Families:
    """Return a server's metrics, from its journal and the runs in its folders."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    up = GaugeMetricFamily("tepal_superlink_up", "1 while the SuperLink runs")
    up.add_metric([], float(journal.superlink == "running"))
    starts = CounterMetricFamily("tepal_superlink_starts", "Starts of the SuperLink since this server's own")
    starts.add_metric([], journal.superlink_starts)
    nodes = GaugeMetricFamily("tepal_nodes_registered", "Nodes whose keys are registered")
    nodes.add_metric([], len(journal.nodes))
    memory = GaugeMetricFamily("tepal_server_resident_bytes", "Resident memory", labels=["process"])
    for process, size in _resident().items():
        memory.add_metric([process], size)
    return [up, starts, nodes, memory, *run_families(_newest_and_running(folders))]


def run_families(runs: Sequence[RunView]) -> Families:
    """Return the metrics of runs, from their metrics.jsonl."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    state = GaugeMetricFamily("tepal_run_state", "1 for the state that the run is in", labels=["run", "state"])
    done = GaugeMetricFamily("tepal_run_rounds", "Rounds that have ended", labels=["run", "strategy"])
    asked = GaugeMetricFamily("tepal_run_rounds_asked", "Rounds of the whole run", labels=["run", "strategy"])
    score = GaugeMetricFamily("tepal_run_score", "The last accuracy, or RMSE", labels=["run", "measure"])
    moved = CounterMetricFamily(
        "tepal_run_bytes", "Bytes of all clients: payload, and manifests and headers", labels=["run", "direction"]
    )
    replies = CounterMetricFamily("tepal_run_replies", "Clients' replies, by outcome", labels=["run", "outcome"])
    seconds = SummaryMetricFamily("tepal_run_round_seconds", "Duration of the rounds", labels=["run"])
    for run in runs:
        name = visible(run.path.name, LONGEST_NAME)
        try:
            facts, lines = run.facts(), run.metrics
        except Exception:  # a damaged file must not hide the other runs
            state.add_metric([name, "unreadable"], 1)
            continue
        strategy = visible(facts["strategy"] or "", LONGEST_NAME)
        state.add_metric([name, facts["state"]], 1)
        done.add_metric([name, strategy], facts["rounds"] or 0)
        if facts["rounds_asked"]:
            asked.add_metric([name, strategy], facts["rounds_asked"])
        if facts["score"] is not None:
            score.add_metric([name, facts["measure"]], facts["score"])
        for direction in ("down", "up", "overhead"):
            moved.add_metric([name, direction], sum(line.value(f"bytes_{direction}") or 0 for line in lines))
        replies.add_metric([name, "replied"], sum(line.clients_replied or 0 for line in lines))
        for outcome in COUNTED:
            replies.add_metric([name, outcome], sum(len(line.value(outcome)) for line in lines))
        took = [line.seconds for line in lines if line.round > 0 and line.seconds is not None]
        seconds.add_metric([name], len(took), sum(took))
    return [state, done, asked, score, moved, replies, seconds]


def _newest_and_running(folders: Sequence[Path]) -> list[RunView]:
    """Return the newest run and the runs in progress."""
    from tepal.tools.dashboard.views import RunView, views

    there = [view for folder in folders if folder.is_dir() for view in views(folder) if isinstance(view, RunView)]
    there.sort(key=lambda view: view.started, reverse=True)
    return [view for number, view in enumerate(there) if number == 0 or view.running]


def _resident() -> dict[str, int]:
    """Return the resident memory of this process and of its descendants, in bytes."""
    own = psutil.Process(os.getpid())
    children = 0
    with contextlib.suppress(psutil.Error):
        for child in own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                children += child.memory_info().rss
    return {"server": own.memory_info().rss, "superlink": children}
