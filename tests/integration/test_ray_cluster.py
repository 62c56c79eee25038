"""Commands whose runs are on the machines of a Ray cluster find what they find on this machine, whatever is killed."""

import csv
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tepal.host.processes import Process, free_port, started
from tests.integration.ray_cluster import RESENT, RayCluster, RayNode, ray_cluster, seen_nodes
from tests.lines import read_lines
from tests.packages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow]

ROUNDS = 20  # some seconds of a run on a free machine: enough to kill its node in the middle
SHORT = 'pretrained="tiny-vit-digits" local-epochs=1 deterministic=true'
COMPARE = ("compare", ".", "--strategies", "fedacs,fedfrozen", "--seeds", "1,2", "--clients", "3", "--target", "0.9")
SEARCH = """
clients = 2
[common]
model = "tiny-vit"
pretrained = "tiny-vit-digits"
num-server-rounds = 1
local-epochs = 1
deterministic = true
[common.search]
learning-rate = { from = 1e-4, to = 1e-2, log = true }
[[variant]]
name = "FedAvg"
strategy = "fedavg"
[[variant]]
name = "FedFrozen"
strategy = "fedfrozen"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(workers=2) as running:
        yield running


@pytest.fixture(autouse=True)
def _all_nodes(request):
    """Every test finds two workers, whatever the one before it has killed."""
    yield
    if "cluster" in request.fixturenames:
        running = request.getfixturevalue("cluster")
        while len(running.nodes) < 2:
            running.add()


@contextmanager
def tepal(folder: Path, *arguments: str, ray: str | None = None) -> Iterator[Process]:
    """Start `tepal …` in the project's folder; with `ray` on that cluster, else on this machine."""
    module = ("tepal.tools.search",) if arguments[0] == "search" else ("tepal.tools.cli.main", arguments[0])
    environment = {name: value for name, value in os.environ.items() if name != "TEPAL_CACHE"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    environment["TMPDIR"] = str(folder / "temporary")
    environment["RAY_ADDRESS"] = f"127.0.0.1:{free_port()}"  # not asked: --ray takes precedence
    command = [sys.executable, "-m", *module, *arguments[1:], "--ray", ray or "none"]
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    with started(command, log=folder / "command.log", env=environment, cwd=ROOT) as process:
        yield process


def ended(
    folder: Path, *arguments: str, ray: str | None = None, status: int = 0, look: Callable[[], None] = lambda: None
) -> str:
    """What `tepal …` prints, which ends with this status. `look` is called again and again meanwhile."""
    log = folder / "command.log"
    log.unlink(missing_ok=True)
    with tepal(folder, *arguments, ray=ray) as process:
        end = time.monotonic() + 300
        while process.running and time.monotonic() < end:
            look()
            time.sleep(0.1)
        got = process.wait(1)
    shown = log.read_text()
    assert got == status, shown
    assert not list((folder / "temporary").glob("tepal-app-*"))
    assert ("Engine: Ray cluster" in shown) == (ray is not None) or status == 1, shown
    return shown


def runs_in(folder: Path) -> str:
    return f'runs="{folder / "runs"}"'


def compared(folder: Path) -> Path:
    (found,) = (folder / "runs").glob("*-compare")
    return found


def rows_of(file: Path, *left_out: str) -> list[dict[str, str]]:
    """The rows of a table, without times, names of folders, and what else is left out."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    return [
        {key: value for key, value in row.items() if key != "run" and not any(each in key for each in left_out)}
        for row in rows
    ]


def tables_of(folder: Path, *left_out: str) -> dict[str, list[dict[str, str]]]:
    own = ("seconds", "overhead", *left_out)  # random ids are in manifests and headers, and compress to any length
    return {name: rows_of(folder / name, *own) for name in ("runs.csv", "comparison.csv")}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set in a file, by a symbolic link."""
    folder, digits = tmp_path_factory.mktemp("data"), load_digits()
    (folder / "elsewhere").mkdir()
    images = (digits.images[:600] * 15).astype(np.uint8)
    np.savez(folder / "elsewhere" / "digits.npz", images=images, labels=digits.target[:600])
    (folder / "mine.npz").symlink_to(folder / "elsewhere" / "digits.npz")
    return folder / "mine.npz"


@pytest.fixture(scope="module")
def compare(data) -> Callable[[Path], tuple[str, ...]]:
    """The arguments of the comparison with its runs below a folder."""

    def arguments(folder: Path) -> tuple[str, ...]:
        own = f'dataset="{data}" num-server-rounds={ROUNDS} {runs_in(folder)}'
        return (*COMPARE, "-c", f"{SHORT} {own}")

    return arguments


@pytest.fixture(scope="module")
def here(tmp_path_factory, compare) -> Path:
    """The comparison on this machine."""
    folder = tmp_path_factory.mktemp("here")
    ended(folder, *compare(folder))
    return compared(folder)


def wait_for(condition, what: str, process: Process, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.running, f"{process.name} has ended before {what}:\n{process.tail(50)}"
        assert time.monotonic() < end, f"waited in vain for {what}:\n{process.tail(50)}"
        time.sleep(0.05)


def under_way(folder: Path) -> list[Path]:
    """The runs that have a whole checkpoint here, as another one has begun after it, and are not finished."""
    runs = [path for path in (folder / "runs").glob("*-compare/2*") if len(list(path.glob("checkpoint/round-*"))) > 1]
    return [path for path in runs if not (path / "summary.json").exists()]


def test_the_cluster_of_these_tests_has_a_head_and_two_workers(cluster):
    assert seen_nodes(cluster.address).count("(True, 1.0)") == 2


def test_a_comparison_on_a_cluster_has_the_tables_of_one_here(cluster, here, compare, data, tmp_path):
    before, seen = set(cluster.job_processes()), set[str]()
    shown = ended(tmp_path, *compare(tmp_path), ray=cluster.address, look=lambda: seen.update(cluster.job_processes()))
    assert "2 machines with 2 cores; 2 runs at once" in shown
    # Their command lines have the job's folder and the actor's process.
    processes = [line for line in seen - before if "tepal.tools.cluster.process" in line]
    assert len(processes) == 2, "four runs, of which each machine does one after the other"
    folder = compared(tmp_path)
    assert tables_of(folder) == tables_of(here)
    for cell in json.loads((folder / "comparison.json").read_text())["cells"]:
        run = folder / cell["run"]
        assert (run / "report.html").is_file() and read_lines(run)[-1]["round"] == ROUNDS
        assert str(data) in (run / "config.toml").read_text()
        for text in (run / "config.toml", run / "report.html", run / "flower.log"):
            assert "tepal-job-" not in text.read_text(), f"{text} names a folder on another machine"
    assert cluster.jobs() == [], "folders of jobs are removed"
    cluster.wait_until_idle(5)


def test_runs_of_a_node_that_dies_go_on_elsewhere(cluster, here, compare, tmp_path):
    with tepal(tmp_path, *compare(tmp_path), ray=cluster.address) as process:

        def nodes() -> list[RayNode]:
            runs = [run.name for run in under_way(tmp_path) if run.name.endswith("-fedacs")]
            return [
                node for node in cluster.nodes for job in node.jobs()
                if any((job / "runs" / run / "checkpoint").exists() for run in runs)
            ]  # fmt: skip

        wait_for(nodes, "a checkpoint here of a run with personal models", process)
        cluster.remove(nodes()[0])
        cluster.add()
        assert process.wait(300) == 0, process.tail(50)
        shown = process.log.read_text()
    assert "goes on elsewhere" in shown
    logs = [log.read_text() for log in compared(tmp_path).glob("2*/flower.log")]
    assert len(logs) == 4 and any("Resumed after round" in log for log in logs), "it began again"
    assert tables_of(compared(tmp_path), *RESENT) == tables_of(here, *RESENT)
    assert cluster.jobs() == []


@pytest.fixture
def _hears_ctrl_c():
    """What runs in the background hands an ignored SIGINT on to its children, but no handler of Python's."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
def test_ctrl_c_ends_all_runs_and_the_comparison_can_be_resumed(cluster, here, compare, tmp_path):
    with tepal(tmp_path, *compare(tmp_path), ray=cluster.address) as process:
        wait_for(lambda: under_way(tmp_path), "a checkpoint", process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, process.tail(50)
    folder = compared(tmp_path)
    states = [run["outcome"] for run in json.loads((folder / "comparison.json").read_text())["cells"]]
    assert "stopped" in states and "running" not in states
    cluster.wait_until_idle(5)
    assert cluster.jobs() == []

    ended(tmp_path, "compare", ".", "--resume", str(folder), ray=cluster.address)
    assert tables_of(folder, *RESENT) == tables_of(here, *RESENT)


@pytest.mark.usefixtures("_hears_ctrl_c")
@pytest.mark.parametrize("why", ["a mistake in the settings", "Ctrl-C"])
def test_places_that_were_made_ready_are_free_again_if_no_run_begins(cluster, compare, tmp_path, why):
    if why == "Ctrl-C":
        with tepal(tmp_path, *compare(tmp_path), ray=cluster.address) as process:
            wait_for(cluster.job_processes, "an actor that was taken ahead", process)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(60) not in (None, 0), process.tail(50)
    else:
        shown = ended(tmp_path, *compare(tmp_path), "-c", "min-clients=9", ray=cluster.address, status=1)
        assert "--clients is 3, expected at least 9" in " ".join(shown.split()) and "Traceback" not in shown
        assert not (tmp_path / "runs").exists()
    cluster.wait_until_idle(5)
    assert cluster.jobs() == []


def test_nothing_goes_on_after_the_command_was_killed(cluster, compare, tmp_path):
    with tepal(tmp_path, *compare(tmp_path), ray=cluster.address) as process:
        wait_for(lambda: under_way(tmp_path), "a checkpoint", process)
        assert cluster.job_processes()
        os.kill(process.pid, signal.SIGKILL)
        cluster.wait_until_idle(30)


def test_a_search_on_a_cluster_has_the_scores_of_one_here(cluster, tmp_path):
    (tmp_path / "search.toml").write_text(SEARCH)
    found = []
    for name, ray in (("here", None), ("there", cluster.address)):
        folder = tmp_path / name
        ended(tmp_path, "search", str(tmp_path / "search.toml"), "--trials", "2", "--folder", str(folder), ray=ray)
        rows = rows_of(folder / "trials.csv", "seconds")
        found.append(sorted(rows, key=lambda row: (row["trial"], row["variant"])))
        assert (folder / "found.toml").is_file()
    assert found[0] == found[1] and len(found[0]) == 4


def test_a_simulation_of_personal_models_on_a_cluster_ends_as_one_here(cluster, tmp_path):
    config = f'{SHORT} num-server-rounds=2 strategy="fedacs"'
    summaries = []
    for name, ray in (("here", None), ("there", cluster.address)):
        folder = tmp_path / name
        ended(folder, "simulate", ".", "--clients", "3", "-c", config, "-c", runs_in(folder), ray=ray)
        summary = json.loads((folder / "runs" / "latest" / "summary.json").read_text())
        summaries.append({key: value for key, value in summary.items() if "seconds" not in key})
    assert summaries[0] == summaries[1] and summaries[0]["rounds"] == 2


SPREAD = ("simulate", ".", "--clients", "4", "--spread", "-c", f'{SHORT} strategy="ditto"')
"""A run with personal state."""


def spread(folder: Path, rounds: int, data: Path) -> tuple[str, ...]:
    return (*SPREAD, "-c", f'num-server-rounds={rounds} dataset="{data}" {runs_in(folder)}')


@pytest.fixture(scope="module")
def in_one_place(tmp_path_factory, data) -> Path:
    """The run with clients in this machine's one process."""
    folder = tmp_path_factory.mktemp("one")
    ended(folder, *(each for each in spread(folder, ROUNDS, data) if each != "--spread"))
    return folder / "runs" / "latest"


def rounds_of(run: Path, *left_out: str) -> list[dict[str, object]]:
    """What is recorded of a run's rounds, without times, and without the bytes of metrics, which have some."""
    others = ("seconds", "overhead", *left_out)
    return [{key: line[key] for key in line if not any(each in key for each in others)} for line in read_lines(run)]


def test_a_run_whose_clients_are_on_two_machines_has_the_rounds_of_one_here(cluster, in_one_place, data, tmp_path):
    shown = ended(tmp_path, *spread(tmp_path, ROUNDS, data), ray=cluster.address)
    assert "the server here, 2 clients at once, each with 1 core" in shown
    run = tmp_path / "runs" / "latest"
    assert rounds_of(run) == rounds_of(in_one_place) and len(rounds_of(run)) == ROUNDS
    kept = [path.relative_to(tmp_path).parts[2:] for path in (tmp_path / "runs").rglob("personal/*/*.safetensors")]
    assert len({names[-2] for names in kept}) == 4, "the personal models are here"
    assert cluster.jobs() == [] and not list((tmp_path / "temporary").glob("tepal-spread-*"))
    cluster.wait_until_idle(5)


def test_clients_whose_machine_dies_go_on_on_the_other_one(cluster, in_one_place, data, tmp_path):
    with tepal(tmp_path, *spread(tmp_path, ROUNDS, data), ray=cluster.address) as process:
        run = tmp_path / "runs" / "latest"
        wait_for(lambda: run.exists() and len(read_lines(run)) > 4, "some rounds", process)
        cluster.remove(cluster.nodes[0])
        assert process.wait(300) == 0, process.tail(50)
        shown = process.log.read_text()
    assert "was lost" in shown
    assert rounds_of(run, *RESENT, "bytes") == rounds_of(in_one_place, *RESENT, "bytes")
    assert "personal state is lost" not in (run / "flower.log").read_text()


@pytest.mark.usefixtures("_hears_ctrl_c")
def test_ctrl_c_ends_a_spread_run_and_it_is_resumed_with_its_personal_models(cluster, in_one_place, data, tmp_path):
    with tepal(tmp_path, *spread(tmp_path, ROUNDS, data), ray=cluster.address) as process:
        run = tmp_path / "runs" / "latest"
        wait_for(lambda: run.exists() and len(read_lines(run)) > 4, "some rounds", process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, process.tail(50)
    cluster.wait_until_idle(5)
    assert cluster.jobs() == [] and not list((tmp_path / "temporary").glob("tepal-spread-*"))
    ended(tmp_path, *spread(tmp_path, ROUNDS, data), "-c", f'resume="{run.resolve()}"', ray=cluster.address)
    assert rounds_of(run, *RESENT, "bytes") == rounds_of(in_one_place, *RESENT, "bytes")
    assert "personal state is lost" not in (run / "flower.log").read_text()


def test_an_experiment_on_a_cluster_has_the_tables_of_one_here(cluster, tmp_path):
    pytest.importorskip("transformers")
    command = ("reproduce", "fedfrozen-costs", "--folder")
    ended(tmp_path, *command, str(tmp_path / "here"))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    cells = sorted((tmp_path / "there" / "fedfrozen-costs" / "cells").iterdir())
    for cell in cells[::12]:  # each takes longer to start than to compute
        cell.unlink()
    for table in (tmp_path / "there").glob("*/*.csv"):
        table.unlink()
    shown = ended(tmp_path, *command, str(tmp_path / "there"), ray=cluster.address)
    for cell in cells:
        assert (f" {cell.stem}: " in shown) == (cell in cells[::12])
    here, there = (
        {table.name: table.read_bytes() for table in (tmp_path / name).glob("*/*.csv")} for name in ("here", "there")
    )
    assert here == there != {}


def test_an_address_without_a_cluster_is_an_error_that_names_it(tmp_path):
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()
    shown = ended(tmp_path, "simulate", ".", "-c", runs_in(tmp_path), ray=address, status=1)
    assert f"--ray {address}: no cluster answers there" in " ".join(shown.split())
    assert time.monotonic() - begun < 60 and not (tmp_path / "runs").exists() and "Traceback" not in shown


def test_runs_that_no_machine_has_room_for_are_refused(cluster, tmp_path):
    command = ("compare", ".", "--strategies", "fedavg", "--cpus", "64", "-c", runs_in(tmp_path))
    shown = ended(tmp_path, *command, ray=cluster.address, status=1)
    said = " ".join(shown.split())
    assert "no machine of this cluster has room for a run with --cpus 64" in said
    assert "The largest have 1 core" in said
    assert not (tmp_path / "runs").exists()
