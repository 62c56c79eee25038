"""An engine runs an app to its end, says why it failed, and leaves nothing behind, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tepal.host.processes import MARK, marked
from tepal.host.superlink import RunError, stage_app
from tepal.tools.simulation.process_engine import ProcessEngine
from tepal.tools.simulation.ray_engine import RayEngine
from tests.packages import ROOT

PYPROJECT = """
[project]
name = "toy-app"
version = "0.1.0"
description = "A toy"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "tepal"
fab-include = ["/toy/**/*.py"]

[tool.flwr.app.components]
serverapp = "toy.server:app"
clientapp = "toy.client:app"

[tool.flwr.app.config]
num-server-rounds = 2
result = ""
note = ""
mode = "work"
a.x = 1
a.y = 0.5
"""

SERVER = """
import json, os, pathlib, time
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
runs = []

@app.main()
def main(grid, context):
    config = context.run_config
    runs.append(config["note"])
    print("the server app begins")
    if config["mode"] == "raise":
        raise ValueError("warm-up-rounds is 7\\nexpected at most 5")
    if config["mode"] == "wait":
        time.sleep(300)
    rounds = config["num-server-rounds"]
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=2)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(2)]), num_rounds=rounds)
    [array] = result.arrays.to_numpy_ndarrays()
    answer = {"array": array.tolist(), "config": dict(config), "folder": os.listdir(), "file": __file__}
    answer |= {"runs": runs, "parent": os.getppid(), "ray": os.environ.get("RAY_ADDRESS")}
    pathlib.Path(config["result"]).write_text(json.dumps(answer))
"""

CLIENT = """
import os, signal
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
prepared = []

def prepare(run_config, clients):
    prepared.append(clients)

@app.train()
def train(msg, context):
    if context.run_config["mode"] == "die" and context.node_config["partition-id"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    arrays = [array + 1 + context.node_config["partition-id"] for array in msg.content["arrays"].to_numpy_ndarrays()]
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=msg)
"""


@pytest.fixture
def app(tmp_path):
    """A Flower app in a folder with a name that Flower refuses for an app, beside things that are not part of it."""
    folder = tmp_path / "Toy app (copy 2)"
    (folder / "toy").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "toy" / "__init__.py").touch()
    (folder / "toy" / "server.py").write_text(SERVER)
    (folder / "toy" / "client.py").write_text(CLIENT)
    return folder


@pytest.fixture
def mark(monkeypatch):
    """Marks every process that this test starts, so that it can look for what was left."""
    token = f"launcher-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(MARK, token)
    return token


@pytest.fixture(autouse=True)
def nothing_is_left(mark, monkeypatch):
    # Short, because Ray's sockets lie below it, else an engine goes to /tmp itself.
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield
        assert marked(mark) == []
        assert [path.name for path in Path(folder).iterdir() if path.is_dir()] == []


both_ways = pytest.mark.parametrize("kind", [RayEngine, ProcessEngine])


def simulate(kind, app, clients=2, **run):
    with kind(app, clients) as engine:
        return engine.run(**run)


FAILED = (
    "The run failed: ValueError: warm-up-rounds is 7\nexpected at most 5 (toy/server.py, line {}, in main)\n"
    "The whole log: {}"
)


@pytest.mark.simulation
@pytest.mark.parametrize("kind", [RayEngine, ProcessEngine])
def test_an_engine_serves_one_run_after_another_with_what_it_started_for_the_first(kind, app, tmp_path):
    answers, events = [], []
    config = {"note": 'it\'s "quoted", naïve\nand long', "a.x": 3}
    with kind(app, 2, 0.5) as engine:
        for number in range(2):
            result, log = tmp_path / f"{number}.json", tmp_path / f"{number}.log"
            changes = {**config, "result": str(result)}
            outcome = engine.run(changes, log=log, on_event=lambda kind, text: events.append((kind, text)))
            assert outcome.status == "completed"
            answers.append(json.loads(result.read_text()))
            answer = answers[-1]
            # Two clients add 1 and 2 to what they get, twice: the mean grows by 1.5 a round.
            assert answer["array"] == [3.0, 3.0]
            assert answer["config"] == changes | {"num-server-rounds": 2, "mode": "work", "a.y": 0.5}
            assert answer["folder"] == [], "the apps must run in an empty folder: actors import from it first"
            assert "toy/server.py" in answer["file"] and not answer["file"].startswith(str(app))
            assert answer["runs"] == [config["note"]], "a run begins from the same state as the one before it"
            assert log.read_text().count("the server app begins") == 1 and "\x1b" not in log.read_text()
            assert ("log", "the server app begins") in events
            with pytest.raises(RunError) as caught:
                engine.run(['mode="raise"'], log=log)
            line = SERVER.splitlines().index('        raise ValueError("warm-up-rounds is 7\\nexpected at most 5")') + 1
            assert str(caught.value) == FAILED.format(line, log)
    assert len({answer["parent"] if kind is ProcessEngine else answer["ray"] for answer in answers}) == 1
    stages = [text for kind, text in events if kind == "stage"]
    assert len([text for text in stages if text.startswith("Starting")]) == (1 if kind is RayEngine else 0)


@pytest.mark.simulation
def test_a_client_whose_process_is_killed_costs_its_part_of_the_run(app, tmp_path):
    with ProcessEngine(app, 2, 0.5) as engine:
        config = {"result": str(tmp_path / "result.json"), "mode": "die", "num-server-rounds": 1}
        outcome = engine.run(config, log=tmp_path / "run.log")
        assert outcome.status == "completed"
        assert json.loads((tmp_path / "result.json").read_text())["array"] == [2.0, 2.0], "of the other client"
    assert "the process that the client ran in has ended" in (tmp_path / "run.log").read_text()


@pytest.mark.simulation
def test_what_the_clients_share_is_read_before_their_processes_are_forked(app, tmp_path):
    client = app / "toy" / "client.py"
    say = 'os.write(1, f"prepared for {prepared} in {os.getpid()}\\n".encode())'  # whole, whoever else writes
    shown = client.read_text().replace("arrays = [", f"{say}\n    arrays = [")
    client.write_text(shown)
    with ProcessEngine(app, 2, 0.5) as engine:
        for number in range(2):
            log = tmp_path / f"{number}.log"
            engine.run({"result": str(tmp_path / "result.json")}, log=log)
            lines = [line for line in log.read_text().splitlines() if line.startswith("prepared for")]
            assert len(lines) == 4
            assert {line.split(" in ")[0] for line in lines} == {f"prepared for {[2] * (number + 1)}"}
            assert len({line.split(" in ")[1] for line in lines}) == 2, "a process for each client at work"


@pytest.mark.simulation
def test_what_is_started_ahead_imports_the_app_before_its_first_run(app, tmp_path, monkeypatch):
    monkeypatch.setenv("AHEAD", str(tmp_path))
    with (app / "toy" / "client.py").open("a") as client:
        client.write(AHEAD)
    with ProcessEngine(app, 2) as engine:
        engine.start_ahead()
        deadline = time.monotonic() + 60
        while not (found := list(tmp_path.glob("ahead-*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        [ahead] = found
        engine.start_ahead()  # again, which changes nothing
        engine.cache = tmp_path / "cache"
        for _ in range(2):
            assert engine.run({"result": str(tmp_path / "result.json")}).status == "completed"
        answer = json.loads((tmp_path / "result.json").read_text())
    assert list(tmp_path.glob("ahead-*")) == [ahead] and answer["parent"] == int(ahead.name.removeprefix("ahead-"))
    assert (tmp_path / "cached").read_text() == str(tmp_path / "cache")


# At the end of the client's module: `import_ahead` leaves a file with its process in the name.
AHEAD = """
import pathlib

def import_ahead():
    pathlib.Path(os.environ["AHEAD"], f"ahead-{os.getpid()}").touch()

def prepare(run_config, clients):
    pathlib.Path(os.environ["AHEAD"], "cached").write_text(os.environ["TEPAL_CACHE"])
"""


@pytest.mark.simulation
def test_an_app_that_cannot_be_imported_is_reported_by_its_runs(app, tmp_path):
    (app / "toy" / "names.py").write_text("known = set()")
    (app / "toy" / "client.py").write_text(
        "from toy.names import known\n"
        "assert not known, 'known already'\n"
        "known.add(1)\n"
        "raise KeyError('no such setting')\n"
    )
    with ProcessEngine(app, 2) as engine:
        engine.start_ahead()
        for reason in ("no such setting", "known already"):  # the first run has the error of the import ahead of it
            with pytest.raises(RunError, match=reason):
                engine.run({"result": str(tmp_path / "result.json")}, timeout=60)


@pytest.mark.simulation
def test_an_engine_that_cannot_start_ahead_can_be_used_when_the_cause_is_gone(app, tmp_path, monkeypatch):
    def fails(*_):
        raise PermissionError("not now")

    with ProcessEngine(app, 2) as engine:
        with monkeypatch.context() as patched, pytest.raises(PermissionError):
            patched.setattr("tepal.tools.simulation.engine.stage_app", fails)
            engine.start_ahead()
        engine.start_ahead()
        assert engine.run({"result": str(tmp_path / "result.json")}).status == "completed"


@pytest.mark.simulation
def test_in_turn_the_clients_are_in_the_process_of_the_run(app, tmp_path):
    config = {"result": str(tmp_path / "result.json")}
    assert simulate(ProcessEngine, app, run_config=config, log=tmp_path / "log").status == "completed"
    assert json.loads((tmp_path / "result.json").read_text())["array"] == [3.0, 3.0]


@pytest.mark.simulation
def test_a_run_that_was_stopped_at_its_limit_is_not_in_the_way_of_the_next(app, tmp_path, mark):
    with ProcessEngine(app, 2, 0.5) as engine:
        with pytest.raises(RunError, match="longer than 6 s"):
            engine.run({"mode": "wait"}, timeout=6)
        assert marked(mark) == []
        assert engine.run({"result": str(tmp_path / "result.json")}).status == "completed"


@pytest.mark.simulation
@both_ways
def test_the_time_limit_stops_a_run(kind, app):
    begun = time.monotonic()
    with pytest.raises(RunError, match="longer than 6 s"):
        simulate(kind, app, run_config={"mode": "wait"}, timeout=6)
    assert time.monotonic() - begun < 60


@pytest.mark.simulation
def test_a_superlink_that_dies_during_the_run_is_reported_at_once(app, mark):
    killed = []

    def kill_the_superlink(kind: str, text: str) -> None:
        if (kind, text) == ("log", "the server app begins"):
            superlinks = [process for process in marked(mark) if "flower-superlink" in " ".join(process.cmdline())]
            killed.extend(superlinks)
            for process in superlinks:
                process.kill()

    begun = time.monotonic()
    with pytest.raises(RunError, match="SuperLink"):
        simulate(RayEngine, app, run_config={"mode": "wait"}, on_event=kill_the_superlink, timeout=90)
    assert len(killed) == 1
    assert time.monotonic() - begun < 80


CALLER = """
import sys
from pathlib import Path
from tepal.tools.simulation.engines import ProcessEngine, RayEngine
with {"RayEngine": RayEngine, "ProcessEngine": ProcessEngine}[sys.argv[2]](Path(sys.argv[1]), 2) as engine:
    engine.run({"mode": "wait"}, on_event=lambda *event: print(*event, flush=True))
"""


@pytest.mark.simulation
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
@both_ways
def test_a_signal_in_mid_run_leaves_no_process_and_no_file(kind, app, mark, number):
    command = [sys.executable, "-c", CALLER, str(app), kind.__name__]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def hear_signals() -> None:  # what runs in the background hands an ignored SIGINT on to its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=hear_signals,
    ) as call:
        assert call.stdout is not None
        try:
            assert any("the server app begins" in line for line in call.stdout)
            names = " ".join(process.name() for process in marked(mark))
            assert kind is ProcessEngine or ("flower-superlin" in names and "flwr-simulation" in names)
            call.send_signal(number)
            assert call.wait(30) in (128 + number, -number)
            # Killed, it leaves the rest to its guard, which takes a moment.
            end = time.monotonic() + 30
            while marked(mark) or any(path.is_dir() for path in Path(os.environ["TMPDIR"]).iterdir()):
                assert number == signal.SIGKILL and time.monotonic() < end
                time.sleep(0.1)
        finally:
            call.kill()


@both_ways
def test_a_folder_without_an_app_and_unknown_keys_are_refused_before_anything_starts(kind, app, tmp_path):
    with pytest.raises(RunError, match="has no pyproject"):
        simulate(kind, tmp_path)
    with pytest.raises(RunError, match=r"no run configuration key a\.z\. It has: a\.x, a\.y, mode"):
        simulate(kind, app, run_config=["a.z=1"])
    with pytest.raises(ValueError, match="clients is 0"):
        simulate(kind, app, clients=0)


def test_an_interpreter_that_ray_cannot_start_is_refused(app, monkeypatch):
    monkeypatch.setattr("sys.executable", "/home/me/my projects/.venv/bin/python")
    with pytest.raises(RunError, match=r"Ray cannot start .*my projects.* --engine process"):
        simulate(RayEngine, app)


NAMES = ("__init__", "client", "server")


def test_the_staged_app_is_what_flower_would_bundle_of_it(app, tmp_path):
    for name in ("toy/data.bin", "toy/test_toy.txt", "notes.py", ".venv/lib/x.py", "env2/lib/y.py", "runs/1/toy/a.py"):
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text("")
    (app / "env2" / "pyvenv.cfg").touch()
    (app / "toy" / "link.py").symlink_to(app / "notes.py")
    (app / "toy" / "secret.py").write_text("")
    (app / ".gitignore").write_text("runs/\nsecret.py\n")
    (tmp_path / "staged").mkdir()
    stage_app(app, tmp_path / "staged")

    def bundle(folder: Path) -> set[str]:
        # Flower's own choice of files, by its own builder.
        from io import BytesIO
        from zipfile import ZipFile

        from flwr.cli.build import build_fab_from_disk

        return {name for name in ZipFile(BytesIO(build_fab_from_disk(folder))).namelist() if name != ".info/CONTENT"}

    assert bundle(app) == bundle(tmp_path / "staged") == {"pyproject.toml", *(f"toy/{n}.py" for n in NAMES)}
    assert not (tmp_path / "staged" / "notes.py").exists()
