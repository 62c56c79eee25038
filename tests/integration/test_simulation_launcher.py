"""`simulate` runs an app to its end, says why it failed, and leaves nothing behind, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tepal.server_app.flower import RunError, stage_app
from tepal.server_app.processes import MARK, marked
from tepal.server_app.simulation import simulate, simulate_in_process

ROOT = Path(__file__).resolve().parents[2]

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

@app.main()
def main(grid, context):
    config = context.run_config
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
    pathlib.Path(config["result"]).write_text(json.dumps(answer))
"""

CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(msg, context):
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
    # Short, because Ray's sockets lie below it, else `simulate` goes to /tmp itself.
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield
        assert marked(mark) == []
        assert [path.name for path in Path(folder).iterdir() if path.is_dir()] == []


both_ways = pytest.mark.parametrize("start", [simulate, simulate_in_process], ids=["in-runtime", "in-process"])


@pytest.mark.simulation
@both_ways
def test_a_run_completes_with_the_configuration_it_was_given(start, app, tmp_path):
    result, events = tmp_path / "result.json", []
    config = {"result": str(result), "note": 'it\'s "quoted", naïve\nand long', "a.x": 3}
    outcome = start(
        app,
        clients=2,
        run_config=config,
        log=tmp_path / "run.log",
        on_event=lambda kind, text: events.append((kind, text)),
        **({"cpus_per_client": 0.5} if start is simulate else {}),
    )
    assert outcome.status == "completed"
    answer = json.loads(result.read_text())
    # Two clients add 1 and 2 to what they get, twice: the mean grows by 1.5 a round.
    assert answer["array"] == [3.0, 3.0]
    assert answer["config"] == config | {"num-server-rounds": 2, "mode": "work", "a.y": 0.5}
    assert answer["folder"] == [], "the apps must run in an empty folder: actors import from it first"
    assert "toy/server.py" in answer["file"] and not answer["file"].startswith(str(app))
    assert "the server app begins" in outcome.log.read_text()
    assert "\x1b" not in outcome.log.read_text()
    assert ("log", "the server app begins") in events
    assert [kind for kind, _ in events].count("stage") == (4 if start is simulate else 2)
    print({stage: round(seconds, 1) for stage, seconds in outcome.seconds.items()})


@pytest.mark.simulation
@both_ways
def test_a_failing_server_app_is_reported_with_its_own_words_and_line(start, app, tmp_path):
    with pytest.raises(RunError) as caught:
        start(app, clients=2, run_config=['mode="raise"'], log=tmp_path / "run.log")
    line = SERVER.splitlines().index('        raise ValueError("warm-up-rounds is 7\\nexpected at most 5")') + 1
    assert str(caught.value) == (
        "The run failed: ValueError: warm-up-rounds is 7\nexpected at most 5 "
        f"(toy/server.py, line {line}, in main)\nThe whole log: {tmp_path / 'run.log'}"
    )


@pytest.mark.simulation
@both_ways
def test_the_time_limit_stops_a_run(start, app):
    begun = time.monotonic()
    with pytest.raises(RunError, match="longer than 6 s"):
        start(app, clients=2, run_config={"mode": "wait"}, timeout=6)
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
        simulate(app, clients=2, run_config={"mode": "wait"}, on_event=kill_the_superlink, timeout=90)
    assert len(killed) == 1
    assert time.monotonic() - begun < 80


CALLER = """
import sys
from pathlib import Path
from tepal.server_app import simulation
start = getattr(simulation, sys.argv[2])
start(Path(sys.argv[1]), clients=2, run_config={"mode": "wait"}, on_event=lambda *event: print(*event, flush=True))
"""


@pytest.mark.simulation
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
@both_ways
def test_a_signal_in_mid_run_leaves_no_process_and_no_file(start, app, mark, number):
    command = [sys.executable, "-c", CALLER, str(app), start.__name__]
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
            assert start is simulate_in_process or ("flower-superlin" in names and "flwr-simulation" in names)
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
def test_a_folder_without_an_app_and_unknown_keys_are_refused_before_anything_starts(start, app, tmp_path):
    with pytest.raises(RunError, match="has no pyproject"):
        start(tmp_path, clients=2)
    with pytest.raises(RunError, match=r"no run configuration key a\.z\. It has: a\.x, a\.y, mode"):
        start(app, clients=2, run_config=["a.z=1"])
    with pytest.raises(ValueError, match="clients is 0"):
        start(app, clients=0)


def test_an_interpreter_that_ray_cannot_start_is_refused(app, monkeypatch):
    monkeypatch.setattr("sys.executable", "/home/me/my projects/.venv/bin/python")
    with pytest.raises(RunError, match=r"Ray cannot start .*my projects"):
        simulate(app, clients=2)


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
