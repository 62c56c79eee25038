"""A run of a real deployment, as those see it who watch it: Prometheus, whoever collects logs, and trackers.

One deployment and one run, in which a site refuses, for all tests. `metrics.jsonl` is what counts: the others must say
the same.
"""

import contextlib
import json
import re
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

from tepal.client_app.node.service import Control
from tepal.host.processes import free_port
from tepal.host.toml import to_toml
from tests.integration.loopback import ROOT, own_data, pairs
from tests.integration.test_resume import wait_for
from tests.integration.test_server import Deployment
from tests.lines import read_lines
from tests.unit.server_app.test_trackers import check_that_they_show, expected, in_mlflow
from tests.unit.server_app.test_wandb import the_run, values

pytest.importorskip("prometheus_client", reason="pip install 'tepal[prometheus]'")

pytestmark = pytest.mark.deployment

ROUNDS = 4
CONFIG = {
    "num-server-rounds": ROUNDS, "fedfrozen.warmup-rounds": 2, "local-steps": 4, "min-clients": 2, "seed": 3,
    "trackers": "tensorboard, mlflow, wandb", "wandb.mode": "offline",
}  # fmt: skip
SITES = ("site-0", "site-1", "site-2")


def scraped(address):
    """(name, labels in their order) → value, by the parser of Prometheus' own client."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = httpx.get(f"http://{address}/metrics", timeout=10)
    answer.raise_for_status()
    samples = (sample for family in text_string_to_metric_families(answer.text) for sample in family.samples)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """What was seen of the run, while it went on and when it had ended; the deployment is stopped by then."""
    folder = tmp_path_factory.mktemp("observed")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.delenv("TEPAL_CACHE", raising=False)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        deployment = Deployment(folder, list(SITES), as_forks=False)  # their memory is looked at
        (folder / "config.toml").write_text(to_toml(CONFIG))
        addresses = {name: f"127.0.0.1:{free_port()}" for name in ("server", *SITES)}
        latest = deployment.state / "runs" / "latest"
        seen = SimpleNamespace(deployment=deployment, during=[], nodes_during=[], status={}, resident={}, nodes={})

        def options(name):
            return "--metrics", addresses[name], "--log-format", "json"

        server = stack.enter_context(deployment.server(ROOT, "-c", str(folder / "config.toml"), *options("server")))
        # A node that comes before its key is registered is refused, and says so: not what is looked at here.
        wait_for(lambda: registered(deployment) == len(SITES), "the keys' registration", lambda: server.running)
        configs = [*own_data(folder, 2), {"data-path": "/nowhere"}]
        nodes = {
            name: stack.enter_context(deployment.node(name, pairs(config), *options(name)))
            for name, config in zip(SITES, configs, strict=True)
        }
        wait_for((latest / "metrics.jsonl").exists, "the first round", lambda: server.running)
        seen.run = latest.resolve()
        while not (seen.run / "summary.json").exists():
            assert server.running, server.tail()
            before = read_lines(seen.run)
            told = scraped(addresses["server"])
            if before == read_lines(seen.run):
                seen.during.append((before, told))
            seen.nodes_during.append(scraped(addresses["site-0"]))
            time.sleep(0.1)
        wait_for(lambda: deployment.journal()["run"]["state"] == "ended", "its being noted", lambda: server.running)
        seen.after = scraped(addresses["server"])
        for name, node in nodes.items():
            with contextlib.closing(Control(f"unix:{folder / name}.sock")) as control:
                wait_for(lambda: not control.status().message_type, "the node to be idle")
                seen.nodes[name], seen.status[name] = scraped(addresses[name]), control.status()
            seen.resident[name] = psutil.Process(node.pid).memory_info().rss
        seen.resident["server"] = psutil.Process(server.pid).memory_info().rss
    yield seen


def registered(deployment):
    try:
        return len(deployment.journal()["nodes"])
    except FileNotFoundError:
        return 0


def by_metrics_jsonl(lines, name, state):
    """What Prometheus must be told of a run, by its lines as they are in the file."""
    trained = [line for line in lines if line["round"] > 0]
    told = {("tepal_run_state", name, state): 1, ("tepal_run_rounds", name, "fedfrozen"): len(trained)}
    told["tepal_run_rounds_asked", name, "fedfrozen"] = ROUNDS
    told["tepal_run_score", name, "accuracy"] = lines[-1]["accuracy"]
    for direction in ("down", "up", "overhead"):
        told["tepal_run_bytes_total", name, direction] = sum(line[f"bytes_{direction}"] or 0 for line in lines)
    told["tepal_run_replies_total", name, "replied"] = sum(line["clients_replied"] for line in lines)
    for outcome in ("refused", "lost", "late", "left_out"):
        told["tepal_run_replies_total", name, outcome] = sum(len(line[outcome]) for line in lines)
    told["tepal_run_round_seconds_count", name] = len(trained)
    told["tepal_run_round_seconds_sum", name] = pytest.approx(sum(line["seconds"] for line in trained))
    return told


def of_runs(told):
    return {key: value for key, value in told.items() if key[0].startswith("tepal_run_")}


def by_stage(told, what):
    return {key[1]: value for key, value in told.items() if key[0] == f"tepal_node_message_seconds_{what}"}


def log_of(observed, name):
    lines = (observed.deployment.folder / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in lines]


def the_one(told, message):
    """The line with this message, which is there once."""
    found = [line for line in told if line["message"] == message]
    assert len(found) == 1, f"{len(found)} lines say: {message}"
    return found[0]


# Prometheus -----------------------------------------------------------------------------------------------------------


def test_what_prometheus_sees_of_a_run_while_it_goes_on_is_what_metrics_jsonl_has_by_then(observed):
    counts = {len(lines) for lines, _ in observed.during}
    assert len(counts) >= 3 and max(counts) > 2, "too little of the run was seen"
    for lines, told in observed.during:
        assert of_runs(told) == by_metrics_jsonl(lines, observed.run.name, "running")
        assert told["tepal_superlink_up",] == 1 and told["tepal_nodes_registered",] == len(SITES)
        assert told["tepal_server_resident_bytes", "superlink"] > told["tepal_server_resident_bytes", "server"]


def test_what_prometheus_sees_of_a_run_that_has_ended_is_what_metrics_jsonl_has(observed):
    lines = read_lines(observed.run)
    assert of_runs(observed.after) == by_metrics_jsonl(lines, observed.run.name, "finished")
    assert observed.after["tepal_run_replies_total", observed.run.name, "refused"] == 1
    assert observed.after["tepal_superlink_starts_total",] == 1
    resident = observed.after["tepal_server_resident_bytes", "server"]
    assert resident == pytest.approx(observed.resident["server"], rel=0.3)


def test_nodes_tell_prometheus_of_the_messages_that_metrics_jsonl_has(observed):
    """An introduction, a round's training each, and the scoring of the last model; their time is in the rounds'."""
    lines = read_lines(observed.run)
    scored = sum(line["clients_accuracy"] is not None for line in lines)
    for name, told in observed.nodes.items():
        answered = 1 if name == "site-2" else 1 + ROUNDS + scored
        assert told["tepal_node_messages_total", "answered"] == answered, name
        assert told["tepal_node_messages_total", "failed"] == 0 and told["tepal_node_state", "connected"] == 1
        assert told["tepal_node_deaths_total", "executor"] == told["tepal_node_deaths_total", "supernode"] == 0
        assert set(by_stage(told, "count").values()) == {answered}
        assert 0 < sum(by_stage(told, "sum").values()) < sum(line["seconds"] for line in lines if line["round"] > 0)
        sizes = {key[1]: value for key, value in told.items() if key[0] == "tepal_node_resident_bytes"}
        assert sizes.keys() == {process.role for process in observed.status[name].processes}
        assert sizes["node"] == pytest.approx(observed.resident[name], rel=0.3)


def test_a_node_that_is_at_work_says_so_to_prometheus(observed):
    ages = [told["tepal_node_message_age_seconds",] for told in observed.nodes_during]
    answered = [told["tepal_node_messages_total", "answered"] for told in observed.nodes_during]
    assert max(ages) > 0 and answered == sorted(answered)
    assert observed.nodes["site-0"]["tepal_node_message_age_seconds",] == 0


# Logs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["server", *SITES])
def test_every_line_of_a_log_is_an_object_and_they_stand_in_the_order_of_their_times(observed, name):
    told = log_of(observed, name)
    assert len(told) > 10
    assert {frozenset(line) for line in told} == {frozenset({"time", "level", "source", "message"})}
    times = [line["time"] for line in told]
    assert times == sorted(times)
    assert [line for line in told if line["level"] not in ("debug", "info", "warning")] == []
    unread = re.compile(r"(INFO|WARNING)\s*:|\S+ \S+ (INFO|WARNING) |\x1b|$")
    assert [line for line in told if unread.match(line["message"])] == []


def test_the_servers_log_has_the_facts_of_the_run_each_in_a_line(observed):
    told, lines = log_of(observed, "server"), read_lines(observed.run)
    for name in SITES:
        assert the_one(told, f"Node {name}: registered.")["source"] == "tepal server"
    the_one(told, f"This run is kept in {observed.run}")
    [refused] = lines[1]["refused"]
    assert "/nowhere: no such file or folder" in refused["reason"]
    assert the_one(told, f"site-2 returned no result in round 1: {refused['reason']}")["level"] == "warning"
    the_one(told, f"Accuracy {lines[-1]['accuracy']} after {ROUNDS} rounds.")
    the_one(told, f"Report: {observed.run / 'report.html'}")
    the_one(told, f"{observed.run} has ended.")


def test_a_nodes_log_has_each_message_in_a_line_with_the_time_that_prometheus_is_told(observed):
    form = re.compile(r"Answered (\w+) of round (\d+) in [\d.]+ s: .* ([\d.]+) in the app, .*")
    for name, node in observed.nodes.items():
        answered = [match for line in log_of(observed, name) if (match := form.fullmatch(line["message"]))]
        assert len(answered) == node["tepal_node_messages_total", "answered"]
        seconds = sum(float(match[3]) for match in answered)
        assert seconds == pytest.approx(by_stage(node, "sum")["app"], abs=0.005 * len(answered) + 1e-6)
    trained = [int(match[2]) for line in log_of(observed, "site-0")
               if (match := form.fullmatch(line["message"])) and match[1] == "train"]  # fmt: skip
    assert trained == [1, *range(1, ROUNDS + 1)], "the introduction is asked in the first round"
    [said] = [line for line in log_of(observed, "site-2") if "cannot take part" in line["message"]]
    assert said["level"] == "warning" and read_lines(observed.run)[1]["refused"][0]["reason"] in said["message"]


# Trackers -------------------------------------------------------------------------------------------------------------


def test_tensorboard_and_mlflow_show_what_metrics_jsonl_says(observed):
    check_that_they_show(observed.run)
    shown, run = in_mlflow(observed.run)
    assert {step for (step, _), _ in shown} == set(range(ROUNDS + 1))
    assert dict(shown)[1, "refused"] == 1 and run.info.status == "FINISHED"
    assert run.data.params["trackers"] == CONFIG["trackers"] and run.data.params["strategy"] == "fedfrozen"
    assert run.data.tags["tepal.run"] == str(observed.run)


def test_weights_and_biases_shows_what_metrics_jsonl_says(observed):
    found = the_run(observed.run)
    assert values(found.rows) == expected(observed.run)
    assert (found.exit, found.record.display_name, found.record.run_group) == (0, observed.run.name, "fedfrozen")
