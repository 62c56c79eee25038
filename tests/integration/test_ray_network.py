"""A command on a Ray cluster loses no run when its network is cut for a while."""

import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tepal.host.processes import Process, started, wait_for_log
from tests.integration.networks import Machine, machines
from tests.packages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow]

CUT = 20.0  # seconds
PORT = 6379
# Ray shall declare no machine dead during a cut.
PATIENT = {"RAY_health_check_failure_threshold": "30", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
HEAD = ("--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false")
COMPARE = ("compare", ".", "--strategies", "fedavg,fedfrozen", "--seeds", "1,2", "--clients", "3")
CONFIG = 'pretrained="tiny-vit-digits" local-epochs=1 deterministic=true num-server-rounds=8'


@pytest.fixture
def cluster() -> Iterator[list[Machine]]:
    """Ray on three machines: the head and another with one core each, and that of the command, which has none."""
    # A short name: Ray's sockets are below it.
    with tempfile.TemporaryDirectory(prefix="tn", ignore_cleanup_errors=True) as folder, ExitStack() as opened:
        made = opened.enter_context(machines(3, Path(folder)))
        head = opened.enter_context(_ray_on(made[0], *HEAD))
        wait_for_log(head, "Ray runtime started", 90)
        joined = [
            opened.enter_context(_ray_on(machine, f"--address={made[0].address}:{PORT}", f"--num-cpus={cores}"))
            for machine, cores in zip(made[1:], (1, 0), strict=True)
        ]
        for node in joined:
            wait_for_log(node, "Ray runtime started", 90)
        yield made


@contextmanager
def _ray_on(machine: Machine, *options: str) -> Iterator[Process]:
    command = machine.command(
        sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--node-ip-address={machine.address}",
        f"--temp-dir={machine.folder / 'r'}", f"--object-store-memory={200 * 2**20}", "--disable-usage-stats",
        "--block", cwd=machine.folder,
    )  # fmt: skip
    log, environment = machine.folder / "ray.log", machine.environment(**PATIENT)
    with started(command, log=log, env=environment, name="Ray", grace=1) as process:
        yield process


def finished(process: Process, seconds: float = 300) -> str:
    """What a command prints, which ends well."""
    assert process.wait(seconds) == 0, process.tail(50)
    return process.log.read_text()


def scores_in(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.glob("runs/*-compare/runs.csv")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [{key: value for key, value in row.items() if key != "run" and "seconds" not in key} for row in rows]


def rounds_in(folder: Path) -> dict[str, int]:
    """How many rounds of each run are here."""
    files = folder.glob("runs/*-compare/*/metrics.jsonl")
    return {file.parent.name: file.read_text().count("\n") for file in files}


def wait_for(condition: Callable[[], object], what: str, process: Process, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.running, f"the command has ended before {what}:\n{process.tail(50)}"
        assert time.monotonic() < end, f"waited in vain for {what}:\n{process.tail(50)}"
        time.sleep(0.1)


def command_in(folder: Path, ray: str) -> list[str]:
    config = ("-c", CONFIG, "-c", f'runs="{folder / "runs"}"')
    return [sys.executable, "-m", "tepal.tools.cli.main", *COMPARE, *config, "--ray", ray]


def test_no_run_is_lost_when_the_commands_network_is_cut(cluster, tmp_path):
    head, _, own = cluster
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    python = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = own.command(*command_in(there, f"{head.address}:{PORT}"), cwd=ROOT)
    with started(command, log=there / "command.log", env=own.environment(**PATIENT, **python)) as process:
        wait_for(lambda: len(rounds_in(there)) == 2, "the first rounds of two runs", process, 120)
        own.set_cable("down")
        begun = time.monotonic()
        time.sleep(1)  # what had arrived is written
        before = rounds_in(there)
        time.sleep(begun + CUT - time.monotonic())
        assert process.running and rounds_in(there) == before, "nothing comes through a cable that is cut"
        own.set_cable("up")
        wait_for(lambda: rounds_in(there) != before, "more rounds after the cut", process, 60)
        shown = finished(process)
    assert "2 machines with 2 cores" in shown and "goes on elsewhere" not in shown

    environment = {**os.environ, **python, "OMP_NUM_THREADS": "1"}
    with started(command_in(here, "none"), log=here / "command.log", env=environment, cwd=ROOT) as process:
        finished(process)
    assert len(scores_in(there)) == 4 and scores_in(there) == scores_in(here)
