"""What is said to any SuperLink, and what is read out of its answers."""

import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tepal.host.superlink import CONNECTION, Clock, connect, explain, follow, stage_app
from tepal.host.toml import parse_run_config, to_toml
from tepal.tools.simulation.ray_engine import RayEngine


def test_flower_finds_a_superlink_and_whom_to_trust_in_what_connect_writes(tmp_path, monkeypatch):
    from flwr.cli.flower_config import read_superlink_connection

    monkeypatch.chdir(tmp_path)
    home = tmp_path / 'a "home"'
    monkeypatch.setenv("FLWR_HOME", str(home))
    connect(home, "127.0.0.1:8000")
    connection = read_superlink_connection()
    assert (connection.name, connection.address) == (CONNECTION, "127.0.0.1:8000")
    assert connection.insecure and connection.root_certificates is None

    connect(home, "example.org:443", Path("certificates") / "ca.pem")
    connection = read_superlink_connection()
    assert (connection.name, connection.address) == (CONNECTION, "example.org:443")
    assert not connection.insecure
    assert connection.root_certificates == str(tmp_path / "certificates" / "ca.pem"), "Flower refuses relative paths"


def test_a_folder_that_hides_all_of_itself_is_in_no_bundle(tmp_path):
    app = tmp_path / "app"
    files = {"hidden/.gitignore": "*\n", "hidden/a.yaml": "", "hidden/below/b.yaml": "", "open/.gitignore": "*.md\n",
             "open/c.yaml": "", "pyproject.toml": "[tool.flwr.app]\n"}  # fmt: skip
    for name, text in files.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    assert {path.as_posix() for path in stage_app(app, tmp_path / "staged")} == {"open/c.yaml", "pyproject.toml"}


@pytest.mark.parametrize(
    "value",
    [True, False, 3, -1, 0.1, 1e-05, 1e16, float("inf"), "", "two words", "it's", 'a "b"', "tab\t\\ é 🌷\x7f\n"],
)
def test_flower_reads_the_values_and_types_that_are_written(tmp_path, value):
    from flwr.common.config import parse_config_args

    config = {"table.key-name": value, "two words": 1, "table": "é"}
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    read = parse_config_args([str(tmp_path / "c.toml")])
    assert read == parse_run_config([str(tmp_path / "c.toml")]) == config
    assert type(read["table.key-name"]) is type(value)


def test_run_configuration_is_read_as_flower_reads_it_and_keeps_all_keys_of_a_table(tmp_path):
    from flwr.common.config import parse_config_args

    pairs = "lr=0.1 name='two words' flag=true a.x=1 a.y=\"s\""
    assert parse_run_config([pairs]) == parse_config_args([pairs])
    # Flower itself forgets a.x here.
    assert parse_run_config(["a.x=1", "a.y=2"]) == {"a.x": 1, "a.y": 2}
    (tmp_path / "c.toml").write_text("lr = 1.0\n[a]\nx = 5\n")
    assert parse_run_config([str(tmp_path / "c.toml"), "lr=0.5"]) == {"lr": 0.5, "a.x": 5}


@pytest.mark.parametrize("text", ["mode=raise", "mode", "a=1 b", "no-such-file.toml"])
def test_run_configuration_that_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match=f"run configuration '?{text.partition('=')[0]}"):
        parse_run_config([text])


@pytest.mark.parametrize(
    ("clients", "cpus", "each", "cores"), [(10, 1, 1, 8), (3, 1, 1, 3), (10, 2, 2, 8), (10, 3, 3, 6), (20, 0.5, 1, 16)]
)
def test_clients_at_once_follow_from_cores_and_shares(monkeypatch, clients, cpus, each, cores):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    engine = RayEngine(Path("app"), clients, cpus)
    assert engine.federation == (
        f"num-supernodes={clients} client-resources-num-cpus={each} client-resources-num-gpus=0.0"
    )
    assert engine.cores == cores


def test_more_cores_than_there_are_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    with pytest.raises(ValueError, match="this machine has 8 cores"):
        RayEngine(Path("app"), 2, 9)


def test_of_a_chain_of_exceptions_the_last_that_is_not_flowers_wrapper_is_told():
    log = textwrap.dedent(
        """\
        ERROR :     Simulation raised an exception
        Traceback (most recent call last):
          File "/x/ray_actor.py", line 136, in pool_size
            raise ValueError(
        ValueError: ActorPool is empty.

        The above exception was the direct cause of the following exception:

        Traceback (most recent call last):
          File "/x/vce_api.py", line 267, in run_api
        RuntimeError: Simulation Runtime crashed.

        The above exception was the direct cause of the following exception:

        Traceback (most recent call last):
        RuntimeError: An error was encountered. Ending simulation.
        ERROR :     Exit Code: 700
        """
    )
    assert explain(log, "details") == "ValueError: ActorPool is empty."
    assert explain("nothing of use", "details") == "details"


def test_of_a_failed_server_app_in_deployment_its_last_exception_is_told():
    log = textwrap.dedent(
        """\
        INFO :      ServerApp raised an exception
        ERROR :     ServerApp raised an exception
        Traceback (most recent call last):
          File "/x/run_serverapp.py", line 210, in run_serverapp
          File "/h/.flwr/apps/me.toy.0.1.0.ab12/toy/server.py", line 12, in main
            raise ValueError("no")
        ValueError: the run config is invalid:
          strategy='x': allowed are fedavg, fedfrozen
        ERROR :     Exit Code: 200
        """
    )
    assert explain(log, "details") == (
        "ValueError: the run config is invalid:\n  strategy='x': allowed are fedavg, fedfrozen "
        "(toy/server.py, line 12, in main)"
    )


def test_the_module_of_an_exception_is_not_told():
    log = "ServerApp raised an exception\nTraceback (most recent call last):\ntepal.strategies.base.RoundFailed: no\n"
    assert explain(log) == "RoundFailed: no"


class FakeControl:
    """The Control API's client, for a run that logs two lines and completes."""

    def StreamLogs(self, request):
        for text in ("one\ntw", "o\n"):
            yield SimpleNamespace(log_output=text)

    def ListRuns(self, request):
        status = SimpleNamespace(status="finished", sub_status="completed", details="")
        return SimpleNamespace(run_dict={request.run_id: SimpleNamespace(status=status)})

    def close(self):
        pass


needs_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")


@pytest.mark.parametrize("place", ["run.log", pytest.param("/dev/full", marks=needs_full), "no-folder/run.log"])
def test_a_run_is_followed_to_its_end_also_when_its_log_cannot_be_written(tmp_path, monkeypatch, place):
    monkeypatch.setattr("tepal.host.superlink.control_client", lambda *_: FakeControl())
    log, told = tmp_path / place, []
    superlink = SimpleNamespace(running=True, tail=lambda: "")
    clock = Clock(lambda kind, text: told.append((kind, text)), 30.0)
    assert follow(7, "127.0.0.1:1", superlink, clock, log) == ("completed", "")
    assert told == [("log", "one"), ("log", "two")]
    if place == "run.log":
        assert log.read_text() == "one\ntwo\n"
