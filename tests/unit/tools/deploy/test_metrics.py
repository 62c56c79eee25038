"""What Prometheus reads of a server and of a node, scraped over HTTP and parsed by its own parser."""

import os
import socket
import urllib.error
import urllib.request

import pytest

from tepal.client_app.node import node_pb2
from tepal.client_app.node.metrics import node_families
from tepal.host import metrics
from tepal.host.metrics import MetricsError, serving
from tepal.host.processes import free_port
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory, held
from tepal.tools.deploy.journal import Journal
from tepal.tools.deploy.metrics import server_families
from tests.comparisons import leave_run

pytest.importorskip("prometheus_client", reason="pip install 'tepal[prometheus]'")


def scraped(families):
    """(name, labels) → value of what is served."""
    from prometheus_client.parser import text_string_to_metric_families

    address = f"127.0.0.1:{free_port()}"
    with serving(address, families):
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


def test_a_servers_runs_are_told_as_metrics_jsonl_has_them(tmp_path):
    journal = Journal(tmp_path / "server.json", superlink="running", superlink_starts=2, nodes=["a", "b", "c"])
    run = leave_run(tmp_path / "runs", "fedfrozen", rounds=1, summary=False)
    troubled = {"clients_replied": 2, "refused": [{"client": "a"}], "lost": [{"client": "b"}, {"client": "c"}]}
    last = RoundRecord(
        round=2, accuracy=0.73, bytes_down=5, bytes_up=7, bytes_overhead=3, seconds=1.5, **troubled
    )  # fmt: skip
    RunDirectory(run, {}).append(last)
    with held(run):
        told = scraped(lambda: server_families(journal, [tmp_path / "runs", tmp_path / "nothing"]))
    name = run.name
    assert told["tepal_superlink_up",] == 1 and told["tepal_superlink_starts_total",] == 2
    assert told["tepal_nodes_registered",] == 3
    assert told["tepal_run_state", name, "running"] == 1
    assert told["tepal_run_rounds", name, "fedfrozen"] == 2 and told["tepal_run_rounds_asked", name, "fedfrozen"] == 3
    # 8 MB down and 6 MB up in the first round, and what the second adds.
    assert told["tepal_run_bytes_total", name, "down"] == 8_000_005
    assert told["tepal_run_bytes_total", name, "up"] == 6_000_007
    assert told["tepal_run_bytes_total", name, "overhead"] == 3
    counts = {outcome: told["tepal_run_replies_total", name, outcome] for outcome in ("replied", "refused", "late")}
    assert counts == {"replied": 2, "refused": 1, "late": 0} and told["tepal_run_replies_total", name, "lost"] == 2
    assert (told["tepal_run_round_seconds_count", name], told["tepal_run_round_seconds_sum", name]) == (2, 3 + 1.5)
    assert told["tepal_run_score", name, "accuracy"] == 0.73
    assert told["tepal_server_resident_bytes", "server"] > 10_000_000


def test_of_the_runs_of_a_server_those_at_work_and_the_newest_are_told(tmp_path):
    names = [f"2026010{day}-000000-fedavg" for day in range(1, 5)]
    runs = [leave_run(tmp_path / "runs", "fedavg").rename(tmp_path / "runs" / name) for name in names]
    (runs[3] / "summary.json").write_text("{")
    with held(runs[1]):
        told = scraped(lambda: server_families(Journal(tmp_path / "server.json"), [tmp_path / "runs"]))
    assert {key[1:] for key in told if key[0] == "tepal_run_state"} == {(names[1], "running"), (names[3], "unreadable")}
    assert told["tepal_superlink_up",] == 0


def test_a_node_tells_what_its_status_shows():
    status = node_pb2.NodeStatus(state="connected", uptime_seconds=60, answered=5, failed=2, executors_died=1,
                                 message_seconds=1.25)  # fmt: skip
    for role, size in (("node", 100), ("executor", 20), ("executor", 3)):
        status.processes.append(node_pb2.Process(role=role, pid=os.getpid(), resident_bytes=size))
    told = scraped(lambda: node_families(status, {"app": (4, 2.5)}))
    states = {key[1]: value for key, value in told.items() if key[0] == "tepal_node_state"}
    assert states.pop("connected") == 1 and set(states.values()) == {0}
    assert told["tepal_node_messages_total", "answered"] == 5 and told["tepal_node_messages_total", "failed"] == 2
    assert told["tepal_node_deaths_total", "executor"] == 1 and told["tepal_node_deaths_total", "supernode"] == 0
    assert told["tepal_node_message_age_seconds",] == 1.25 and told["tepal_node_uptime_seconds",] == 60
    assert (told["tepal_node_message_seconds_count", "app"], told["tepal_node_message_seconds_sum", "app"]) == (4, 2.5)
    assert told["tepal_node_resident_bytes", "executor"] == 23


def test_an_address_that_cannot_be_listened_on_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MetricsError, match=f"cannot listen on --metrics {address}"), serving(address, list):
            pass
    for wrong in ("9464", "localhost:", "localhost:0"):
        with pytest.raises(MetricsError, match="expected HOST:PORT"), serving(wrong, list):
            pass


def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MetricsError, match=r"pip install 'tepal\[prometheus\]'"), serving("127.0.0.1:9464", list):
        pass
    with serving("", list):
        pass  # nothing is asked for
