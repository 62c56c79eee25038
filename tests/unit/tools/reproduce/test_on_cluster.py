"""Trials on a cluster: their order, what is sent, and those that fail. The machines are threads."""

import contextlib
import json
import re
import threading
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tepal.strategies import RoundFailed
from tepal.tools.cli.main import main
from tepal.tools.cluster import inputs as inputs_module
from tepal.tools.cluster.inputs import Inputs
from tepal.tools.cluster.job import PROCESS, JobFailed, Place
from tepal.tools.reproduce import on_cluster, runner
from tepal.tools.reproduce.experiment import WEIGHTS, MissingData, TrialInputs
from tepal.tools.reproduce.on_cluster import compute_on, compute_there
from tepal.tools.reproduce.runner import reproduce
from tests.unit.tools.reproduce import sums

PLACE = Place("far", "/tmp/tepal-job-x", "/tmp/tepal-inputs-7")


class Sums(sums.Sums):
    """`c` needs `a` and `b`, and `e` needs `c`."""

    needs = {"a": (), "b": (), "c": ("a", "b"), "d": (), "e": ("c",)}  # noqa: RUF012


@pytest.fixture
def machines(monkeypatch):
    """A cluster of two machines; `begun` and `ended` trials, and `fails`: trial → an exception."""
    found = SimpleNamespace(at_once=2, stopped=threading.Event(), events=[], fails={}, most=0, running=0)
    lock = threading.Lock()

    def compute_on(cluster, experiment, full, log, trial, inputs):
        assert cluster is found and experiment.name == "sums" and not full
        with lock:
            found.events.append(("begun", trial.name))
            found.running += 1
            found.most = max(found.most, found.running)
        try:
            if trial.name in found.fails:
                raise found.fails[trial.name]
            return experiment.compute(trial, inputs)
        finally:
            with lock:
                found.running -= 1
                found.events.append(("ended", trial.name))

    monkeypatch.setattr(runner, "compute_on", compute_on)
    return found


def run(machines, folder, lines=None):
    log = (lambda _line: None) if lines is None else lines.append
    return reproduce(Sums(), folder, full=False, log=log, cluster=machines)


def sums_in(folder):
    return {path.stem: json.loads(path.read_text())["values"]["sum"] for path in (folder / "sums/cells").glob("*.json")}


def test_a_trial_begins_once_those_that_it_needs_have_ended(machines, tmp_path):
    run(machines, tmp_path)
    assert sums_in(tmp_path) == {"a": 1, "b": 1, "c": 3, "d": 1, "e": 4}
    for name, needs in Sums.needs.items():
        for needed in needs:
            assert machines.events.index(("ended", needed)) < machines.events.index(("begun", name))
    assert machines.most <= 2 and not machines.stopped.is_set() and len(machines.events) == 10
    run(machines, tmp_path)
    assert len(machines.events) == 10, "what is kept is not computed again"


def test_what_a_cluster_computes_is_what_is_computed_here(machines, tmp_path):
    there = run(machines, tmp_path / "there").parent / "results.md"
    here = reproduce(Sums(), tmp_path / "here", full=False, log=lambda _line: None).parent / "results.md"

    def numbers(file):
        return re.findall(r"^\| . \| .*$", file.read_text(), re.M)

    assert numbers(there) == numbers(here) and len(numbers(here)) == 5


@pytest.mark.parametrize("error", [RoundFailed("all clients diverged"), MissingData("get it there")])
def test_a_trial_that_fails_is_left_out_with_those_that_need_it(machines, tmp_path, error):
    machines.fails["b"] = error
    lines = []
    run(machines, tmp_path, lines)
    assert sums_in(tmp_path) == {"a": 1, "d": 1} and not machines.stopped.is_set()
    assert any(f"b: left out: {error}" in line for line in lines)
    assert any("c: left out: it needs b, which was not computed" in line for line in lines)
    machines.fails.clear()
    run(machines, tmp_path)
    assert sums_in(tmp_path) == {"a": 1, "b": 1, "c": 3, "d": 1, "e": 4}


@pytest.mark.parametrize("error", [JobFailed("'x'", "KeyError"), KeyboardInterrupt()])
def test_what_is_wrong_with_the_code_and_ctrl_c_stop_all_jobs(machines, tmp_path, error):
    machines.fails["c"] = error
    with pytest.raises(type(error)):
        run(machines, tmp_path)
    assert machines.stopped.is_set() and {"a", "b"} <= sums_in(tmp_path).keys() and machines.running == 0


# --- one trial ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch, tmp_path):
    """Compute the trial `c` on a cluster; `sent.job` is what was sent, `sent.ends` is called in its place."""
    monkeypatch.setattr(inputs_module, "_code", lambda _copy: {})
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "x").write_text("ten")
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "x").write_text("hundred")
    given = TrialInputs(
        tmp_path / "sums", {name: tmp_path / name for name in ("cifar10", "cifar100")}, {"a": {"sum": 1}}, "cpu"
    )
    made = SimpleNamespace(ends=lambda: {"sum": 3}, given=given, log=[])

    def done(cluster, job, tell):
        made.job = job
        tell("stage", "on far")
        tell("note", "far was lost; it goes on elsewhere")
        return made.ends()

    monkeypatch.setattr(on_cluster, "done", done)
    trial = next(trial for trial in Sums().trials(False) if trial.name == "c")
    with Inputs() as inputs:
        made.compute = lambda: compute_on(SimpleNamespace(inputs=inputs), Sums(), True, made.log.append, trial, given)
        yield made


def test_a_trial_is_a_job_with_its_data_and_what_it_needs(sent, tmp_path):
    assert sent.compute() == {"sum": 3} and sent.log == ["c: far was lost; it goes on elsewhere"]
    job, arguments = sent.job, sent.job.arguments(PLACE)
    store = {each.what: f"{PLACE.store}/{each.digest}/{each.what}" for each in job.inputs}
    assert job.function == "tepal.tools.reproduce.on_cluster:compute_there" and store.keys() == {"cifar10", "cifar100"}
    assert arguments == {
        "experiment": "sums", "full": True, "trial": "c", "data": store, "needed": {"a": {"sum": 1}}, "device": "cpu",
    }  # fmt: skip
    assert json.loads(json.dumps(arguments)) == arguments
    assert job.folders == {"trial": tmp_path / "sums"}
    files = [f"trial/{WEIGHTS}/cnn", "trial/runs/c/clients/a/personal/0/x", "trial/runs/c/runs/1-fedavg/checkpoint/x"]
    order = [[number for number, pattern in enumerate(job.files) if fnmatchcase(file, pattern)] for file in files]
    assert [len(each) for each in order] == [1, 1, 1] and order == sorted(order), "the state comes before a checkpoint"
    assert not any(fnmatchcase("trial/runs/another/runs/1/x", pattern) for pattern in job.files)


def test_the_settings_of_its_run_have_the_paths_of_where_it_is(sent, tmp_path):
    sent.compute()
    ten, hundred = (next(each for each in sent.job.inputs if each.what == name) for name in ("cifar10", "cifar100"))
    here = {"dataset": f"{tmp_path}/cifar100/x", "other": f"{tmp_path}/cifar10/x", "runs": f"{tmp_path}/sums/runs/c"}
    there = {
        "dataset": f"{hundred.on(PLACE.store)}/x", "other": f"{ten.on(PLACE.store)}/x",
        "runs": f"{PLACE.folder}/trial/runs/c",
    }  # fmt: skip
    for name in ("trial/runs/c/config.json", "trial/runs/c/runs/1-fedavg/config.toml"):
        assert json.loads(sent.job.sent(PLACE, name, json.dumps(here).encode())) == there
        assert json.loads(sent.job.returned(PLACE, name, json.dumps(there).encode())) == here
    text = json.dumps(here).encode()
    assert sent.job.sent(PLACE, "trial/runs/c/runs/1/metrics.jsonl", text) == text


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (JobFailed("get it there", "MissingData"), MissingData),
        (JobFailed("all clients diverged", "RoundFailed"), RoundFailed),
        (JobFailed("its process on far was killed by signal 9", PROCESS), RoundFailed),
        (JobFailed("its machine was lost 3 times in a row: far"), RoundFailed),
        (JobFailed("'x'", "KeyError"), JobFailed),
    ],
)
def test_failures_are_of_the_trial_or_of_the_code(sent, error, raised):
    def ends():
        raise error

    sent.ends = ends
    with pytest.raises(raised, match=f"^{error}$"):
        sent.compute()


def test_there_the_trial_is_computed_from_what_was_sent(monkeypatch, tmp_path):
    got = []

    class There(Sums):
        def compute(self, trial, inputs):
            got.append((trial, inputs))
            return {"sum": float("nan"), "pair": (1, 2)}

    monkeypatch.setattr(runner, "EXPERIMENTS", {"sums": There()})
    given = {"experiment": "sums", "full": False, "trial": "c", "data": {"x": "/store/x"}, "needed": {"a": {"sum": 1}}}
    values = compute_there(tmp_path, **given, device="cuda")
    assert json.loads(json.dumps(values, allow_nan=False)) == values and values["pair"] == [1, 2]
    trial = next(each for each in Sums().trials(False) if each.name == "c")
    expected = TrialInputs(tmp_path / "trial", {"x": Path("/store/x")}, {"a": {"sum": 1}}, "cuda")
    assert got == [(replace(trial), expected)] and (tmp_path / "trial").is_dir()


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_computes_on_the_cluster_that_is_named(machines, monkeypatch, tmp_path):
    asked = []

    def connected(*given):
        asked.append(given)
        machines.description = "Engine: far"
        return contextlib.nullcontext(machines)

    monkeypatch.setattr("tepal.tools.cluster.connection.connected", connected)
    monkeypatch.setattr(runner, "EXPERIMENTS", {"sums": Sums()})
    given = ["reproduce", "sums", "--folder", str(tmp_path)]
    done = CliRunner().invoke(main, [*given, "--ray", "far:1", "--cpus", "2", "--gpus", "0.5", "--memory", "3"])
    assert done.exit_code == 0 and done.stdout.startswith("Engine: far\n") and "Device:" not in done.stdout
    assert asked == [("far:1", 2.0, 0.5, 3.0)] and len(machines.events) == 10
    machines.fails["a"] = JobFailed("'x'", "KeyError")
    failed = CliRunner().invoke(main, [*given[:-1], str(tmp_path / "b"), "--ray", "far:1"])
    assert failed.exit_code == 1 and "'x'" in failed.stderr
