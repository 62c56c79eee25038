"""What Prometheus reads of a server and of a node, scraped over HTTP and parsed by its own parser."""

import contextlib
import ipaddress
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tepal.client_app.node import node_pb2
from tepal.client_app.node.metrics import node_families
from tepal.host import metrics, metrics_server
from tepal.host.metrics import Endpoint, MetricsError, endpoint, serving
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
    with serving(Endpoint(address), families):
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
    assert told["tepal_run_bytes_total", name, "overhead"] == 3_003
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


@pytest.mark.parametrize(
    ("state", "problem", "healthy"),
    [
        ("connected", "", 1),
        ("connected", "its executor does not respond", 0),
        ("unreachable", "the SuperLink at far:9092 does not answer", 0),
        ("starting", "", 0),
        ("drained", "", 0),
    ],
)
def test_a_node_is_healthy_while_it_can_answer_messages(state, problem, healthy):
    told = scraped(lambda: node_families(node_pb2.NodeStatus(state=state, problem=problem), {}))
    assert told["tepal_node_healthy",] == healthy


def test_an_address_that_cannot_be_listened_on_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = f"cannot listen on --metrics {address}"
        with pytest.raises(MetricsError, match=said), serving(Endpoint(address), list):
            pass
    for wrong in ("localhost:", "localhost:0", ":9464", "x", "0", "65536", "1" * 9000, "127.0.0.1:\u0662"):
        with pytest.raises(MetricsError, match="expected HOST:PORT or PORT"), serving(Endpoint(wrong), list):
            pass


NOTHING = {"token_file": None, "token": "", "certificate": None, "key": None, "open": False}
TOKEN = "a-token-of-some-length"


def status(address, token="", **options):
    """The status of an answer to GET /metrics."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        return urllib.request.urlopen(request, timeout=10, **options).status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_port_alone_is_one_of_this_machine():
    port = free_port()
    with serving(endpoint(str(port), **NOTHING), list), socket.socket() as other:
        assert status(f"http://127.0.0.1:{port}/metrics") == 200
        other.bind(("127.0.0.2", port))  # which is free: it is not listened on all addresses


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "[::]", "lab-server", "::", "::ffff:10.0.0.7"])
def test_where_other_machines_reach_it_a_token_is_needed_unless_the_operator_says_otherwise(host, tmp_path):
    address = f"{host}:9464"
    with pytest.raises(MetricsError, match=r"no token is given: .* --metrics-token-file, use 127.0.0.1:9464, or add"):
        endpoint(address, **NOTHING)
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert endpoint(address, **{**NOTHING, "token": TOKEN}).token == TOKEN
    both = {**NOTHING, "token": "of the environment", "token_file": tmp_path / "token"}
    assert endpoint(address, **both).token == TOKEN
    assert endpoint(address, **{**NOTHING, "open": True}).token == ""


@pytest.mark.parametrize("token", ["short", "ü" * 20, "a\nb" * 10])
def test_a_token_that_can_be_guessed_or_is_no_header_is_refused(token, tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(MetricsError, match="expected at least 12"):
        endpoint("9464", **{**NOTHING, "token": token})
    with pytest.raises(MetricsError, match="has 0 characters"):
        endpoint("9464", **{**NOTHING, "token": TOKEN, "token_file": tmp_path / "empty"})


def test_with_a_token_only_who_has_it_is_answered():
    port = free_port()
    with serving(Endpoint(f"127.0.0.1:{port}", TOKEN), list):
        address = f"http://127.0.0.1:{port}/metrics"
        assert [status(address, token) for token in ("", "wrong", TOKEN + "x", TOKEN[:-1])] == [401] * 4
        assert status(address, TOKEN) == status(f"http://127.0.0.1:{port}/", TOKEN) == 200
        assert status(f"http://127.0.0.1:{port}/") == 401


@pytest.fixture
def pems(tmp_path):
    """A certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "metrics")])
    now = datetime.now(UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
        .add_extension(alternative, critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    (tmp_path / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return tmp_path / "cert.pem", tmp_path / "key.pem"


def test_with_a_certificate_it_is_https_and_who_is_silent_delays_nobody(pems):
    certificate, key = pems
    port = free_port()
    context = ssl.create_default_context(cafile=certificate)
    at = endpoint(f"127.0.0.1:{port}", **{**NOTHING, "certificate": certificate, "key": key, "token": TOKEN})
    with serving(at, list), socket.create_connection(("127.0.0.1", port)):
        assert status(f"https://127.0.0.1:{port}/metrics", TOKEN, context=context) == 200
        assert status(f"https://127.0.0.1:{port}/metrics", context=context) == 401
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_certificate_belongs_to_a_key_and_both_are_readable(pems, tmp_path):
    certificate, key = pems
    for given in ({"certificate": certificate}, {"key": key}):
        with pytest.raises(MetricsError, match="belong together"):
            endpoint("9464", **{**NOTHING, **given})
    for wrong in (tmp_path / "missing", certificate):
        with pytest.raises(MetricsError, match="cannot be used"), serving(
            Endpoint(str(free_port()), certificate=certificate, key=wrong), list
        ):
            pass


def test_of_very_many_connections_the_further_are_closed(monkeypatch):
    monkeypatch.setattr(metrics_server, "_MOST_REQUESTS", 2)
    port = free_port()
    with serving(Endpoint(str(port)), list), contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(3)]
        assert silent[2].recv(1) == b""
        silent[0].close()
        silent[1].close()


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", 'quoted" } 1', "\ud800", "x" * 5000])
def test_a_hostile_strategy_is_one_label_and_the_run_is_told(tmp_path, name):
    run = leave_run(tmp_path / "runs", "fedavg", rounds=1, summary=False)
    (run / "summary.json").write_text(json.dumps({"strategy": name, "rounds": 1}))
    told = scraped(lambda: server_families(Journal(tmp_path / "server.json"), [tmp_path / "runs"]))
    [[_, first, second]] = [key for key in told if key[0] == "tepal_run_rounds"]
    assert run.name in (first, second) and (first + second).isprintable() and len(first + second) < 500


@pytest.mark.parametrize("content", ["[" * 100_000, '{"round": 1, "bytes_up": "x"}', '{"round": 1, "refused": 7}'])
def test_a_run_that_cannot_be_read_hides_no_other(tmp_path, content):
    run = leave_run(tmp_path / "runs", "fedavg", rounds=1, summary=False)
    (run / "metrics.jsonl").write_text(content + "\n{}")
    told = scraped(lambda: server_families(Journal(tmp_path / "server.json"), [tmp_path / "runs"]))
    assert told["tepal_run_state", run.name, "unreadable"] == 1


def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MetricsError, match=r"pip install 'tepal\[prometheus\]'"), serving(
        Endpoint("127.0.0.1:9464"), list
    ):
        pass
    with serving(Endpoint(), list):
        pass  # nothing is asked for
