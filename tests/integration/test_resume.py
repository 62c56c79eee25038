"""A run that was killed goes on, and ends with the bits of a run that never was: in simulation, and on the loopback."""

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tepal.host.processes import started
from tepal.host.superlink import explain
from tepal.host.toml import to_toml
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tests.integration.loopback import ROOT, loopback, own_data, pairs
from tests.lines import read_lines

CONFIG = {
    "fedfrozen.warmup-rounds": 2,
    "optimizer": "sgd",
    "learning-rate": 0.05,
    "local-epochs": 1,
    "deterministic": True,
}
OWN = {"seconds", "seconds_train", "step_seconds", "bytes_overhead", "resent", "notes", "bytes_down", "bytes_plain",
       "wire_left_out_down", "wire_budget_down"}  # fmt: skip
"""What a round's line has of its own in every run; a client that lost its cache with its machine is sent more."""


def bits(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(path / "model.safetensors").items()}


def measured(path: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in OWN} for line in read_lines(path)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Run directory of a run config that ran in this process, from beginning to end.

    `node_configs`: each client's, else they have partitions.
    """
    from client_app.app import app

    def make(values: dict, node_configs: Sequence[Mapping[str, str]] = ()) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TEPAL_CACHE", str(folder / "cache"))
            config = {**defaults(), **values, "runs": str(folder / "runs")}
            clients = values["min-clients"]
            configs = node_configs or [{"partition-id": k, "num-partitions": clients} for k in range(clients)]
            return run(InProcessGrid([Node(app, node_config) for node_config in configs], config), config)

    return make


def rounds_done(runs: Path) -> int:
    try:
        return max((line["round"] for line in read_lines(runs / "latest")), default=-1)
    except FileNotFoundError:
        return -1


def wait_for(condition, what: str, alive=lambda: True, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert alive() and time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


def wait_for_round(runs: Path, number: int, alive) -> None:
    wait_for(lambda: rounds_done(runs) >= number, f"the end of round {number}", alive)


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_simulation_that_is_killed_ends_as_if_it_never_was(tmp_path, uninterrupted, monkeypatch, kills):
    monkeypatch.delenv("TEPAL_CACHE")
    draw, rounds = random.Random(20), 3 + kills
    points = [(number, draw.uniform(0, 0.5)) for number in sorted(draw.sample(range(rounds - 1), kills))]
    print(f"killed after rounds and seconds {points}")
    runs = tmp_path / "runs"
    config = {**CONFIG, "num-server-rounds": rounds, "min-clients": 3, "runs": str(runs)}
    (tmp_path / "config.toml").write_text(to_toml(config))

    def simulation(*arguments: str):
        command = [sys.executable, "-m", "tepal.tools.cli.main", "simulate", str(ROOT)]
        command += ["--clients", "3", "-c", str(tmp_path / "config.toml"), *arguments]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return started(command, log=tmp_path / "simulation.log", cwd=tmp_path, env=environment)

    resume = ("-c", f'resume="{runs}"')
    for attempt, (number, seconds) in enumerate(points):
        with simulation(*(resume if attempt else ())) as process:
            wait_for_round(runs, number, lambda process=process: process.running)
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda process=process: not process.tree(), "the end of what it had started")
    with simulation(*resume) as process:
        assert process.wait(300) == 0, process.tail()
    assert len(list(runs.glob("*-fedfrozen"))) == 1, "it is one run"
    whole = uninterrupted(config)
    assert bits(runs / "latest") == bits(whole)
    assert measured(runs / "latest") == measured(whole)
    assert not list((runs / ".clients").glob("*/content")), "what clients held for the rounds is not needed any more"


@pytest.mark.deployment
@pytest.mark.parametrize("kills", ["SuperLink", pytest.param("ServerApp, SuperLink", marks=pytest.mark.long)])
def test_a_deployment_whose_server_is_killed_goes_on_and_ends_as_if_it_never_was(tmp_path, uninterrupted, kills):
    """The SuperLink is killed with all that it knew, or first the ServerApp alone; with TLS and registered nodes.

    That the ServerApp alone is killed, test_methods.py shows as well.
    """
    draw = random.Random(3)
    runs = tmp_path / "runs"
    config = {**CONFIG, "num-server-rounds": 5, "min-clients": 2, "runs": str(runs)}
    data = own_data(tmp_path, 2)
    with loopback([*map(pairs, data)], secure=True) as running:
        submitted = running.submit(ROOT, config)
        wait_for_round(runs, 1, lambda: submitted.running)
        time.sleep(draw.uniform(0, 0.3))
        if kills.startswith("ServerApp"):
            (server_app,) = running.server_apps()
            server_app.kill()
            before = rounds_done(runs)
            # All that is given now is which run shall go on. Flower does not know yet that the ServerApp is dead.
            submitted = running.submit(ROOT, {"resume": str(runs)})
            wait_for_round(runs, before + 1, lambda: submitted.running)
        running.kill_superlink()

        running.start_superlink()  # the nodes come back by themselves
        outcome = running.run(ROOT, {"resume": str(runs)})
        assert outcome.status == "completed", explain(outcome.log.read_text(), outcome.details)
    assert len(list(runs.glob("*-fedfrozen"))) == 1
    whole = uninterrupted(config, data)
    assert bits(runs / "latest") == bits(whole)
    assert measured(runs / "latest") == measured(whole)
