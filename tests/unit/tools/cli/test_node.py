"""`tepal node` on the command line: what it refuses, and what `status` and `drain` end with."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tepal.client_app.node import node as parent
from tepal.client_app.node import node_pb2
from tepal.client_app.node.service import Services
from tepal.tools.cli.node import app as node
from tepal.tools.deploy.provision import make
from tests.packages import ROOT


def run(*arguments, **environment):
    return CliRunner().invoke(node, arguments, env=environment, terminal_width=200)


@pytest.fixture
def settings(monkeypatch):
    """What the command would have started a node with."""
    given = []
    monkeypatch.setattr(parent, "run_node", given.append)
    return given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no key is given: name the folder of this node's site with --site"),
        (["--site", "somewhere", "--insecure"], "--site has key and certificate: leave out --insecure"),
        (["--insecure", "--control", "0.0.0.0:9095"], "whoever can connect can drain the node"),
        (["--insecure", "--control", "192.168.1.5:9095"], "expected an address on 127.0.0.1 or unix:/PATH"),
        (["--insecure", "--control", "[::]:9095"], "whoever can connect can drain the node"),
        (["--insecure", "--control", "9095"], "whoever can connect can drain the node"),
        (["--insecure", "--memory-limit", "much"], "'much' is not a size: expected a number with KB, MB, GB or TB"),
        (["--insecure", "--node-config", "partition-id"], "partition-id"),
    ],
)
def test_what_makes_no_sense_is_refused_with_words(settings, arguments, words):
    done = run(*arguments)
    assert done.exit_code == 1 and settings == []
    assert words in " ".join(done.stderr.split()) and "Traceback" not in done.output


@pytest.mark.parametrize("arguments", [["--poll", "0"], ["--grace", "-1"], ["--idle", "0"], ["--no-such-option"]])
def test_numbers_out_of_range_are_wrong_usage(settings, arguments):
    assert run("--insecure", *arguments).exit_code == 2 and settings == []


def test_a_memory_limit_beyond_everything_is_refused_with_words(settings):
    done = run("--insecure", "--memory-limit", "9" * 400)
    assert done.exit_code == 1 and "is not a size" in done.stderr


def test_a_site_that_is_none_is_refused_with_words(settings, tmp_path):
    done = run("--site", str(tmp_path))
    assert done.exit_code == 1 and str(tmp_path) in done.stderr.replace("\n", "") and settings == []


@pytest.mark.parametrize("control", ["127.0.0.1:9099", "localhost:9099", "[::1]:9099", "unix:/run/node.sock"])
def test_control_addresses_of_this_machine_are_taken(settings, control):
    assert run("--insecure", "--control", control).exit_code == 0
    assert settings[0].control == control


def test_options_and_environment_become_settings(settings):
    done = run(
        "--insecure", "--superlink", "far:9092", "--node-config", "partition-id=3 name='x'", "--memory-limit", "2GB",
        "--no-spare", "--poll", "0.5", TEPAL_NODE_GRACE="7", TEPAL_NODE_IDLE="60",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (given,) = settings
    assert (given.superlink, dict(given.node_config)) == ("far:9092", {"partition-id": 3, "name": "x"})
    assert (given.memory_limit, given.spare, given.poll, given.grace, given.idle) == (2 << 30, False, 0.5, 7.0, 60.0)


def test_a_node_config_of_the_environment_is_taken_unless_one_is_given(settings):
    run("--insecure", TEPAL_NODE_CONFIG="partition-id=3 name='a b'")
    run("--insecure", "--node-config", "partition-id=4", TEPAL_NODE_CONFIG="partition-id=3")
    run("--insecure", TEPAL_NODE_CONFIG="")
    assert [dict(given.node_config) for given in settings] == [
        {"partition-id": 3, "name": "a b"}, {"partition-id": 4}, {},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("of_site", "given", "expected"),
    [
        ({"data-path": "/data/scans"}, "", "/data/scans"),
        ({"data-path": "/data/scans"}, 'device="cpu"', "/data/scans"),
        ({"data-path": "/data/scans"}, 'data-path="/data/other"', "/data/other"),
        ({}, 'device="cpu"', "/data/site.npz"),
        ({}, "partition-id=0 num-partitions=3", None),
    ],
)
def test_the_data_path_of_compose_is_for_sites_that_have_none(settings, tmp_path, of_site, given, expected):
    environment = yaml.safe_load((ROOT / "docker/common.yml").read_text())["services"]["client"]["environment"]
    environment = {key: re.sub(r"\$\{\w+:?-(.*)\}", r"\1", value) for key, value in environment.items()}
    assert (environment["TEPAL_NODE_CONFIG"], environment["TEPAL_NODE_DATA"]) == ("", "/data/site.npz")
    made = make(tmp_path / "fleet", hosts=["x"], sites=["north"], node_config=of_site, unpacked=True)
    done = run("--site", str(made.unpacked("north")), **{**environment, "TEPAL_NODE_CONFIG": given})
    assert done.exit_code == 0, done.output
    assert settings[0].node_config.get("data-path") == expected


@pytest.mark.parametrize(("given", "expected"), [("site.npz", "/sites/north/site.npz"), ("/d/x", "/d/x"), ("", None)])
def test_the_data_path_of_the_environment_is_absolute_and_may_be_none(settings, monkeypatch, given, expected):
    monkeypatch.setattr(Path, "absolute", lambda path: Path("/sites/north") / path)
    assert run("--insecure", TEPAL_NODE_DATA=given).exit_code == 0
    assert settings[0].node_config.get("data-path") == expected


def test_a_port_that_is_taken_is_said(monkeypatch):
    def taken(settings):
        raise OSError(f"the node cannot listen on {settings.control}: is there another node on this machine?")

    monkeypatch.setattr(parent, "run_node", taken)
    done = run("--insecure")
    assert done.exit_code == 1 and "is there another node on this machine?" in done.stderr


# Asking a node --------------------------------------------------------------------------------------------------------


@pytest.fixture
def answering(tmp_path):
    """A node that answers with a state; its address."""
    running = []

    def start(state, well, **values):
        answer = node_pb2.NodeStatus(state=state, **values)
        address = f"unix:{tmp_path}/control.sock"
        services = Services(address, "", status=lambda: answer, drain=lambda undo: answer)
        services.serving(well)
        running.append(services)
        return address

    yield start
    for services in running:
        services.stop()


@pytest.mark.parametrize("command", ["status", "drain"])
def test_the_control_address_may_stand_before_the_command(answering, command):
    address = answering("drained", True)
    for done in (run("--control", address, command), run(command, TEPAL_NODE_CONTROL=address)):
        assert done.exit_code == 0 and "drained" in done.stdout


def test_status_of_a_node_that_can_work_ends_with_0_and_shows_it(answering):
    processes = [node_pb2.Process(role="executor", pid=17, resident_bytes=5 << 20, run_id=9)]
    address = answering("connected", True, superlink="far:9092", answered=3, failed=1, processes=processes)
    done = run("status", "--control", address)
    assert done.exit_code == 0
    for words in ("connected", "far:9092", "3, and 1 with an error", "pid 17, 5 MB, run 9"):
        assert words in done.stdout


@pytest.mark.parametrize("state", ["starting", "refused", "unreachable", "drained"])
def test_status_of_a_node_that_cannot_work_ends_with_1_and_says_why(answering, state):
    done = run("status", "--control", answering(state, False, problem="a [problem]"))
    assert done.exit_code == 1
    assert state in done.stdout and "a [problem]" in done.stdout


@pytest.mark.parametrize("state", ["starting", "refused", "unreachable", "drained"])
def test_a_node_that_replies_is_alive_whatever_its_state(answering, state):
    done = run("status", "--alive", "--control", answering(state, False, problem="no server"))
    assert done.exit_code == 0 and state in done.stdout and "no server" in done.stdout


def test_no_node_is_not_alive(tmp_path):
    done = run("status", "--alive", "--control", f"unix:{tmp_path}/none.sock")
    assert done.exit_code == 1 and "no node answers" in done.stderr


def test_status_shows_the_message_in_hand(answering):
    address = answering("connected", True, message_type="train", round="4", run_id=9, message_seconds=75)
    assert "train of round 4, run 9, for 1 min 15 s" in run("status", "--control", address).stdout


@pytest.mark.parametrize("command", ["status", "drain"])
def test_where_no_node_answers_is_said(tmp_path, command):
    done = run(command, "--control", f"unix:{tmp_path}/nobody.sock")
    assert done.exit_code == 1 and "no node answers on" in done.stderr


@pytest.mark.parametrize(
    ("state", "arguments", "code"),
    [("drained", [], 0), ("draining", [], 1), ("connected", ["--undo"], 0), ("drained", ["--undo"], 1)],
)
def test_drain_ends_well_when_it_is_done(answering, state, arguments, code):
    assert run("drain", *arguments, "--wait", "0", "--control", answering(state, True)).exit_code == code
