"""An app of one's own, as `tepal init` writes it and docs/own-app.md has it: run by every command of the page."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import torch

from tepal.host.processes import MARK, marked
from tests.packages import ROOT

BIN = Path(sys.executable).parent


@pytest.fixture
def shell(tmp_path):
    """Runs a command in a user's folder without Tepal's checkout, and afterwards ends what it left running."""
    token = uuid.uuid4().hex
    environment = {
        **os.environ, MARK: token, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "COLUMNS": "200", "FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip

    def run(command, folder=tmp_path, **variables):
        output = tmp_path / "output"  # a pipe would stay open as long as the SuperLink that `flwr run` leaves behind
        with output.open("w") as file:
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment | variables, stdout=file, stderr=subprocess.STDOUT,
                timeout=300,
            )  # fmt: skip
        return done.returncode, output.read_text()

    yield run
    left = list(marked(token))
    for process in left:
        process.terminate()
    for process in psutil.wait_procs(left, timeout=30)[1]:
        process.kill()


def app_in(shell, tmp_path):
    status, output = shell("tepal init ward")
    assert status == 0, output
    return tmp_path / "ward"


def accuracy_in(output):
    return float(re.search(r"^accuracy (\S+)", output, re.MULTILINE)[1])


@pytest.mark.deployment
def test_it_runs_simulated_and_on_a_deployment_and_what_it_writes_is_kept(shell, tmp_path):
    app = app_in(shell, tmp_path)
    for command in ("tepal simulate . --clients 3", "tepal loopback . --clients 3"):
        status, output = shell(command, app)
        assert status == 0 and accuracy_in(output) > 0.7, output
        kept = Path(re.search(r"^Its log and files: (.+)$", output, re.MULTILINE)[1])
        assert kept.parent == app / "runs" and torch.load(kept / "final.pt")["head.weight"].shape == (10, 32)
        assert "Round 4 of 4, frozen: 3 of 3 clients" in (kept / "flower.log").read_text()
    status, output = shell("tepal simulate . --clients 3 -c 'learning-rat=1'", app)
    assert status == 1 and "ward has no run configuration key learning-rat" in output


@pytest.mark.simulation
def test_flowers_own_command_runs_it(shell, tmp_path):
    app = app_in(shell, tmp_path)
    command = "flwr run . --stream --run-config 'local-epochs=1 num-server-rounds=2 warmup-rounds=1'"
    status, output = shell(command, app, FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1")
    assert status == 0 and "Round 2 of 2, frozen: 2 of 2 clients" in output and accuracy_in(output) > 0.1, output


def test_with_selective_layers_the_mod_replies_to_the_probes(shell, tmp_path):
    app = app_in(shell, tmp_path)
    server = app / "ward" / "server_app.py"
    text = server.read_text().replace("FedFrozen(warmup_rounds=config[\"warmup-rounds\"]", "SelectiveLayers(budget=1")
    server.write_text(text.replace("FedFrozen", "SelectiveLayers"))
    status, output = shell("tepal simulate . --clients 3", app)
    assert status == 0 and "3 of 3 clients" in output, output
    client = app / "ward" / "client_app.py"
    client.write_text(client.read_text().replace("reply_to_probes(app, model_and_data)\n", ""))
    status, output = shell("tepal simulate . --clients 3", app)
    assert status == 1 and "its app does not reply to probes: call reply_to_probes" in output
