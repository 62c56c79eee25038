"""A command on a Ray cluster loses no run when its network is cut for a while, or when a machine is killed."""

import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tepal.host.processes import Process, started, wait_for_log
from tests.integration.networks import Machine, machines
from tests.integration.ray_cluster import RESENT, WATCHFUL
from tests.packages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow]

CUT = 20.0  # seconds
PORT = 6379
# How long the cluster waits for a machine before it takes it for dead: much longer than the cut, and not so long.
PATIENT = {"RAY_health_check_failure_threshold": "30", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
HASTY = {
    "RAY_health_check_failure_threshold": "3", "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
}  # fmt: skip
HEAD = ("--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false")
COMPARE = ("compare", ".", "--strategies", "fedavg,fedfrozen,selective", "--clients", "3", "-c", "num-server-rounds=8")
EIGHT = (
    "compare", ".", "--strategies", "fedavg,fedfrozen,selective,fedacs", "--seeds", "1,2", "--clients", "3", "-c",
    "num-server-rounds=5",
)  # fmt: skip
CONFIG = 'pretrained="tiny-vit-digits" local-epochs=1 deterministic=true'


@contextmanager
def ray_on_machines(settings: Mapping[str, str]) -> Iterator[list[Machine]]:
    """Ray on three machines: the head and another with one core each, and that of the command, which has none."""
    # A short name: Ray's sockets are below it.
    with tempfile.TemporaryDirectory(prefix="tn", ignore_cleanup_errors=True) as folder, ExitStack() as opened:
        made = opened.enter_context(machines(3, Path(folder)))
        head = opened.enter_context(_ray_on(made[0], settings, *HEAD))
        wait_for_log(head, "Ray runtime started", 90)
        address = f"--address={made[0].address}:{PORT}"
        joined = [
            opened.enter_context(_ray_on(machine, settings, address, f"--num-cpus={cores}"))
            for machine, cores in zip(made[1:], (1, 0), strict=True)
        ]
        for node in joined:
            wait_for_log(node, "Ray runtime started", 90)
        yield made


@contextmanager
def _ray_on(machine: Machine, settings: Mapping[str, str], *options: str) -> Iterator[Process]:
    command = machine.command(
        sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--node-ip-address={machine.address}",
        f"--temp-dir={machine.folder / 'r'}", f"--object-store-memory={200 * 2**20}", "--disable-usage-stats",
        "--block", cwd=machine.folder,
    )  # fmt: skip
    environment = machine.environment(**settings)
    with started(command, log=machine.folder / "ray.log", env=environment, name="Ray", grace=1) as process:
        yield process


def finished(process: Process, seconds: float = 300) -> str:
    """What a command prints, which ends well."""
    assert process.wait(seconds) == 0, process.tail(50)
    return process.log.read_text()


def scores_in(folder: Path, *left_out: str) -> list[dict[str, str]]:
    (file,) = folder.glob("runs/*-compare/runs.csv")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    # Random ids are in manifests and headers, and compress to any length.
    own = ("seconds", "overhead", *left_out)
    return [
        {key: value for key, value in row.items() if key != "run" and not any(each in key for each in own)}
        for row in rows
    ]


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


@contextmanager
def compare_in(
    folder: Path,
    cluster: list[Machine] | None,
    settings: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = COMPARE,
) -> Iterator[Process]:
    """Start a comparison: on a cluster, from its last machine; without one on this machine."""
    folder.mkdir()
    config = ("-c", CONFIG, "-c", f'runs="{folder / "runs"}"')
    address = f"{cluster[0].address}:{PORT}" if cluster else "none"
    command = [sys.executable, "-m", "tepal.tools.cli.main", *arguments, *config, "--ray", address]
    python = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    if cluster:
        command = cluster[-1].command(*command, cwd=ROOT)
        environment = cluster[-1].environment(**python, **(settings or {}))
    else:
        environment = {**os.environ, **python}
    with started(command, log=folder / "command.log", env=environment, cwd=ROOT) as process:
        yield process


def test_no_run_is_lost_when_the_commands_network_is_cut(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with ray_on_machines(PATIENT) as cluster, compare_in(there, cluster, PATIENT) as process:
        wait_for(lambda: len(rounds_in(there)) == 2, "the first rounds of two runs", process, 120)
        cluster[-1].set_cable("down")
        begun = time.monotonic()
        time.sleep(1)  # what had arrived is written
        before = rounds_in(there)
        time.sleep(begun + CUT - time.monotonic())
        assert process.running and rounds_in(there) == before, "nothing comes through a cable that is cut"
        cluster[-1].set_cable("up")
        wait_for(lambda: rounds_in(there) != before, "more rounds after the cut", process, 60)
        shown = finished(process)
    assert "2 machines with 2 cores" in shown and "goes on elsewhere" not in shown
    with compare_in(here, None) as process:
        finished(process)
    assert len(scores_in(there)) == 3 and scores_in(there) == scores_in(here)


def test_eight_runs_have_the_same_tables_although_a_machine_is_killed(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with ray_on_machines(WATCHFUL) as cluster, compare_in(there, cluster, WATCHFUL, EIGHT) as process:
        # Each machine has one run, whose first line is that of the initial model.
        wait_for(lambda: sorted(rounds_in(there).values())[-2:-1] >= [3], "two rounds of two runs", process, 120)
        cluster[1].kill()
        shown = finished(process, 500)
    assert "2 machines with 2 cores; 2 runs at once" in shown and "goes on elsewhere" in shown
    with compare_in(here, None, arguments=EIGHT) as process:
        finished(process)
    assert len(scores_in(there)) == 8 and scores_in(there, *RESENT) == scores_in(here, *RESENT)


def test_a_command_whose_machine_is_taken_for_dead_says_what_to_do(tmp_path):
    folder = tmp_path / "there"
    with ray_on_machines(HASTY) as cluster, compare_in(folder, cluster, HASTY) as process:
        wait_for(lambda: len(rounds_in(folder)) == 2, "the first rounds of two runs", process, 120)
        cluster[-1].set_cable("down")
        time.sleep(CUT)
        cluster[-1].set_cable("up")
        assert process.wait(120) == 1, process.tail(50)
    shown = " ".join((folder / "command.log").read_text().split())
    assert "this machine is no longer a part of the cluster" in shown and "Traceback" not in shown
