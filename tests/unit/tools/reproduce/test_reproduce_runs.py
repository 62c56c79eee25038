"""Experiments on real data: what they need, how their trials are run, and what is told of them."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tepal.client_app.app import app
from tepal.records.run_directory import CHECKPOINTS, find_run
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.cli.main import main
from tepal.tools.reproduce import runner, runs, selective
from tepal.tools.reproduce.data import Images, by_distribution, find_data, grouped, shuffled_images, write_images
from tepal.tools.reproduce.ensemble_images import EnsembleMnist
from tepal.tools.reproduce.experiment import MissingData, Reproduction, Trial, TrialInputs, table
from tepal.tools.reproduce.fedacs import METHODS as METHODS_OF_FEDACS
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.fedfrozen_vision import KINDS as FEDFROZEN
from tepal.tools.reproduce.fedfrozen_vision import METHODS, FedFrozenVision, unseen_classes
from tepal.tools.reproduce.machine import progress
from tepal.tools.reproduce.runner import EXPERIMENTS, OtherData, reproduce
from tepal.tools.reproduce.runs import mean_text, measured, slug
from tepal.tools.reproduce.selective import Selective
from tepal.tools.reproduce.selective_data import SUBJECTS
from tepal.tools.reproduce.versus import on_common_clients
from tests.lines import read_lines
from tests.packages import ROOT
from tests.quiet import quiet  # noqa: F401
from tests.unit.tools.reproduce import sums

pytestmark = pytest.mark.usefixtures("no_report")

FASHION = FedAcs("fashion-mnist", "Fashion-MNIST")
ON_DATA = {name: each for name, each in EXPERIMENTS.items() if each.data(full=False)}


# --- what is at hand ------------------------------------------------------------------------------------------------


def test_data_is_found_by_its_name_as_a_folder_or_a_file(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "cifar-10.npz").touch()
    (tmp_path / "20newsgroups.jsonl.xz").touch()
    found = find_data(tmp_path, ("mnist", "cifar-10", "20newsgroups"))
    assert {name: path.name for name, path in found.items()} == {
        "mnist": "mnist", "cifar-10": "cifar-10.npz", "20newsgroups": "20newsgroups.jsonl.xz",
    }  # fmt: skip
    assert find_data(tmp_path / "nowhere", ()) == {}


@pytest.mark.parametrize("name", ON_DATA)
@pytest.mark.parametrize("full", [False, True])
def test_missing_data_is_said_with_its_files_format_and_origin_and_nothing_is_computed(tmp_path, name, full):
    command = ["reproduce", name, "--folder", str(tmp_path / "out"), "--data", str(tmp_path)]
    ended = CliRunner().invoke(main, [*command, *(["--full"] if full else [])])
    assert ended.exit_code == 1 and not (tmp_path / "out").exists()
    for wanted in ON_DATA[name].data(full):
        line = next(line for line in ended.stderr.splitlines() if line.startswith(f"  {wanted}: "))
        assert str(tmp_path / wanted) in line and ".jsonl" in line and line.count("From ") == 1
    assert "name its folder by --data FOLDER" in ended.stderr


def test_only_what_is_missing_is_named(tmp_path):
    (tmp_path / "cifar-10").mkdir()
    with pytest.raises(MissingData) as error:
        find_data(tmp_path, ("cifar-10", "pacs"))
    assert "pacs" in str(error.value) and "cifar-10" not in str(error.value)


# --- stretches of data ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), st.integers(1, 12), st.sampled_from([0.1, 1.0, 100.0]), st.integers(0, 5))
def test_clients_of_a_distribution_have_as_many_examples_and_share_none(clients, each, alpha, seed):
    labels = np.repeat(np.arange(4), 30)
    parts = by_distribution(labels, clients, each, alpha, seed)
    drawn = np.concatenate(parts)
    assert [len(part) for part in parts] == [each] * clients and len(np.unique(drawn)) == len(drawn)
    again = by_distribution(labels, clients, each, alpha, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_small_alpha_gives_a_client_few_classes_and_a_large_one_all_alike():
    labels = np.repeat(np.arange(10), 500)

    def largest(alpha):
        parts = by_distribution(labels, 20, 100, alpha, seed=1)
        return np.mean([max(Counter(labels[part].tolist()).values()) for part in parts])

    assert largest(0.05) > 60 and largest(1000.0) < 20
    with pytest.raises(ValueError, match="40 examples are too few for 5 clients of 9"):
        by_distribution(np.repeat(np.arange(4), 10), 5, 9, 1.0, seed=0)


def images(count, classes=10, shape=(1, 28, 28), seed=0, names=None):
    """Images that can be learned: a class is a bright square at a place of its own."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = rng.integers(0, 60, (count, *shape), np.uint8)
    for k, label in enumerate(labels):
        row, column = divmod(int(label), 4)
        pixels[k, :, 2 + 6 * row : 7 + 6 * row, 2 + 6 * column : 7 + 6 * column] += 150
    return Images(pixels, labels, None if names is None else np.array([names[k % len(names)] for k in range(count)]))


def test_images_are_written_as_a_run_reads_them(tmp_path):
    train = images(60)
    path = write_images(tmp_path / "deep" / "mnist.npz", train, images(20, seed=1))
    read, test = shuffled_images("mnist", path, seed=3)
    assert len(read) == 60 and test is not None and len(test) == 20
    order = np.lexsort(read.images.reshape(60, -1).T)
    expected = np.lexsort(train.images.reshape(60, -1).T)
    assert np.array_equal(read.images[order], train.images[expected])
    assert np.array_equal(read.labels[order], train.labels[expected])
    assert not np.array_equal(read.labels, train.labels)
    assert len(read.first(25)) == 25 and np.array_equal(read.first(5, after=25).images, read.images[25:30])


def test_parts_become_groups():
    of = grouped(images(30), [np.array([3, 4]), np.array([7])])
    assert of.groups.tolist() == ["client-000", "client-000", "client-001"] and of.labels.tolist() == [3, 4, 7]


# --- a run as a trial ------------------------------------------------------------------------------------------------

SMALL = {
    "dataset": "digits", "model": "cnn", "optimizer": "sgd", "learning-rate": 0.1, "local-epochs": 1, "seed": 3,
    "schedule": "constant", "deterministic": True,
}  # fmt: skip


def test_a_trial_measures_what_the_run_itself_does(tmp_path):
    config = {**SMALL, "strategy": "fedavg", "num-server-rounds": 3}
    values = measured(config, 4, tmp_path / "cell", weights=tmp_path / "kept" / "model.safetensors")
    nodes = [Node(app, {"partition-id": k, "num-partitions": 4}) for k in range(4)]
    whole = defaults() | config | {"runs": str(tmp_path / "runs")}
    metrics = read_lines(run(InProcessGrid(nodes, whole), whole))
    assert values["server"] == metrics[-1]["accuracy"] and values["clients"] == metrics[-1]["clients_accuracy"]
    assert values["curve"] == [(line["round"], line["accuracy"]) for line in metrics]
    assert values["bytes"] == sum(line["bytes_down"] + line["bytes_up"] for line in metrics)
    assert (tmp_path / "kept" / "model.safetensors").exists() and not (tmp_path / "cell").exists()
    assert json.loads(json.dumps(values))["rounds"] == 3


def test_a_trial_that_was_stopped_goes_on_with_its_run(tmp_path, monkeypatch):
    config = {**SMALL, "strategy": "fedavg", "num-server-rounds": 4}
    expected = measured(config, 4, tmp_path / "whole")
    rounds = []

    class Stopped(InProcessGrid):
        def push_messages(self, messages):
            rounds.append(len(list(messages := list(messages))))
            if len(rounds) > 6:
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with monkeypatch.context() as patched:
        patched.setattr(runs, "InProcessGrid", Stopped)
        with pytest.raises(KeyboardInterrupt):
            measured(config, 4, tmp_path / "cell")
    before = len(read_lines(find_run(tmp_path / "cell" / "runs")))
    assert 0 < before < 5
    values = measured(config, 4, tmp_path / "cell")
    assert values["server"] == expected["server"] and len(values["curve"]) == len(expected["curve"])


def test_what_clients_keep_is_kept_apart_and_the_environment_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", "as-it-was")
    measured({**SMALL, "strategy": "fedacs", "num-server-rounds": 1}, 3, tmp_path / "cell")
    assert os.environ["TEPAL_CACHE"] == "as-it-was" and not Path("as-it-was").exists()


def test_means_are_written_with_their_spread():
    assert (mean_text([]), mean_text([0.5]), mean_text([0.4, 0.6])) == (None, "0.5000", "0.5000 ± 0.1414")


# --- trials that need others, several at once ------------------------------------------------------------------------


class Sums(sums.Sums):
    """`d` needs `b` and `c`, and both need `a`. There is no `c` if the folder says so."""

    needs = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ()}  # noqa: RUF012

    def compute(self, trial, inputs):
        if trial.name == "c" and (inputs.folder / "no-c").exists():
            raise MissingData("there is no c")
        threads = os.environ.get("OMP_NUM_THREADS")
        return {**super().compute(trial, inputs), "process": os.getpid(), "threads": threads}


@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_trial_is_computed_after_those_that_it_needs(tmp_path, monkeypatch, at_once):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    page = reproduce(Sums(), tmp_path, full=False, log=lambda text: None, at_once=at_once)
    assert (page.parent / "sums.csv").read_text() == "cell,sum\na,1\nb,2\nc,2\nd,5\ne,1\n"
    kept = [json.loads(path.read_text())["values"] for path in (page.parent / "cells").iterdir()]
    assert (os.getpid() in {of["process"] for of in kept}) == (at_once == 1)
    assert {of["threads"] for of in kept} == {"7" if at_once == 1 else "1"} and os.environ["OMP_NUM_THREADS"] == "7"


def test_trials_of_two_threads_leave_flowers_log_as_it_was(tmp_path):
    """The second begins before the first ends, and ends after it."""
    (tmp_path / "cells").mkdir()
    log, first, second = logging.getLogger("flwr"), threading.Event(), threading.Event()
    level, levels = log.level, []

    def compute(trial, inputs):
        if trial.name == "a":
            first.set()
            assert second.wait(60)
        else:
            second.set()
            ended.result(60)
        levels.append(log.level)
        return {"sum": 1}

    inputs = TrialInputs(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(runner._compute_one, compute, Trial("a", {}), inputs)
        assert first.wait(60)
        runner._compute_one(compute, Trial("b", {}), inputs)
    assert levels == [logging.ERROR] * 2 and log.level == level


@pytest.mark.parametrize("at_once", [1, pytest.param(2, marks=pytest.mark.long)])
def test_what_needs_a_trial_that_is_not_there_is_left_out(tmp_path, at_once):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "no-c").touch()
    lines = []
    page = reproduce(Sums(), tmp_path, full=False, log=lines.append, at_once=at_once)
    assert "4/5 d: left out: it needs c, which was not computed" in lines and "3/5 c: left out: there is no c" in lines
    assert (page.parent / "sums.csv").read_text() == "cell,sum\na,1\nb,2\ne,1\n"


def test_a_trial_is_computed_again_when_one_that_it_needs_was(tmp_path):
    def left_out(trial):
        path = tmp_path / "sums" / "cells" / f"{trial}.json"
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({**kept, "options": {"other": 1}}))
        return [each.name for each in runner._missing(tmp_path / "sums", Sums().trials(False))]

    reproduce(Sums(), tmp_path, full=False, log=lambda text: None)
    assert left_out("c") == ["c", "d"] and left_out("a") == ["a", "b", "c", "d"]
    # Stopped between the two: what is there is of another `a` than before.
    trials = {trial.name: trial for trial in Sums().trials(False)}
    runner._keep(tmp_path / "sums", trials["c"], {"sum": 2}, 1.0)
    kept = json.loads((tmp_path / "sums" / "cells" / "a.json").read_text())
    again = {**kept, "options": {}, "computed": "2031-01-01T00:00:00+00:00"}
    (tmp_path / "sums" / "cells" / "a.json").write_text(json.dumps(again))
    assert [trial.name for trial in runner._missing(tmp_path / "sums", Sums().trials(False))] == ["b", "c", "d"]
    reproduce(Sums(), tmp_path, full=False, log=lambda text: None)
    assert runner._missing(tmp_path / "sums", Sums().trials(False)) == []


class OnDigits(Sums):
    """Sums that declare data sets."""

    name = "on-digits"

    def data(self, full):
        return ("mnist", "cifar-10")


def test_trials_of_two_data_sets_are_never_in_one_folder(tmp_path):
    data, lines = tmp_path / "data", []
    (data / "mnist").mkdir(parents=True)
    (data / "mnist" / "one").write_bytes(b"1234")
    (data / "cifar-10.npz").write_bytes(b"12")
    for _ in range(2):
        page = reproduce(OnDigits(), tmp_path, full=False, log=lines.append, data=data)
    moved = data.rename(tmp_path / "moved")
    reproduce(OnDigits(), tmp_path, full=False, log=lines.append, data=moved)
    before = {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()}
    (moved / "mnist" / "two").write_bytes(b"5")
    message = r"another mnist than .*moved/mnist is now \(bytes in files: 4 in 1, now 5 in 2\)"
    with pytest.raises(OtherData, match=message):
        reproduce(OnDigits(), tmp_path, full=False, log=lines.append, data=moved)
    assert before == {path: path.read_bytes() for path in page.parent.rglob("*") if path.is_file()}
    assert reproduce(OnDigits(), tmp_path / "elsewhere", full=False, log=lines.append, data=moved).exists()


def test_rounds_of_long_runs_are_said_while_they_go_on(tmp_path, monkeypatch):
    lines = []

    class Long(Sums):
        def trials(self, full):
            return [Trial("digits", {})]

        def compute(self, trial, inputs):
            config = {**SMALL, "strategy": "fedavg", "num-server-rounds": 3}
            values = measured(config, 3, inputs.folder / "runs" / trial.name)
            return {"sum": values["rounds"]}

    monkeypatch.setattr(progress, "SECONDS", 0.01)
    reproduce(Long(), tmp_path, full=False, log=lines.append)
    told = [line for line in lines if "at round" in line]
    assert told and set(told) <= {f"   digits at round {k} of 3" for k in range(4)} and len(set(told)) == len(told)


class Runs(Sums):
    """Short runs, two of which need the first."""

    name = "short-runs"

    def trials(self, full):
        config = {**SMALL, "strategy": "fedavg", "num-server-rounds": 12, "local-steps": 2}
        runs = {f"run-{k}": {"config": {**config, "seed": k}, "clients": 4} for k in range(4)}
        return [Trial(name, options, ("run-0",) * (name in ("run-2", "run-3"))) for name, options in runs.items()]

    def compute(self, trial, inputs):
        return runs.trained(trial, inputs)

    def results(self, found):
        rows = [(name, of["server"]) for name, of in sorted(found.items())]
        return Reproduction([table("Accuracies", ("trial", "accuracy"), rows)])


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_an_experiment_that_was_killed_with_all_its_processes_goes_on_to_the_same_results(tmp_path):
    code = (
        "from pathlib import Path; from tepal.tools.reproduce.runner import reproduce; "
        "from tests.unit.tools.reproduce.test_reproduce_runs import Runs\n"
        f"if __name__ == '__main__': "
        f"reproduce(Runs(), Path({str(tmp_path / 'killed')!r}), full=False, log=print, at_once=2)"
    )
    (tmp_path / "killed.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    parent = subprocess.Popen([sys.executable, tmp_path / "killed.py"], env=environment, start_new_session=True)
    place = tmp_path / "killed" / "short-runs"
    try:  # in mid-run: rounds of a run have ended, and the run has not
        until(lambda: any(place.glob(f"runs/*/runs/*/{CHECKPOINTS}/*")))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    missing = runner._missing(place, Runs().trials(False))
    assert missing and any(place.glob("runs/*"))
    pages = [reproduce(Runs(), tmp_path / of, full=False, log=print) for of in ("killed", "whole")]
    interrupted, whole = (page.with_name("accuracies.csv").read_text() for page in pages)
    assert interrupted == whole and whole.count("run-") == 4 and not any(place.glob("runs/*"))


class Killed(Sums):
    """Sums of which a process is killed at `c`, as by a system whose memory runs out, unless the folder says not to."""

    def compute(self, trial, inputs):
        if trial.name == "c" and not (inputs.folder / "enough").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute(trial, inputs)


@pytest.mark.long
def test_a_process_of_a_trial_that_is_killed_is_reported_and_the_same_command_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "EXPERIMENTS", {"sums": Killed()})
    command = ["reproduce", "sums", "--folder", str(tmp_path), "--at-once", "2"]
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 1 and isinstance(ended.exception, SystemExit), "no traceback"
    assert "lower --at-once, which is 2" in ended.stderr and "the same command goes on" in ended.stderr
    first = tmp_path / "sums" / "cells" / "a.json"
    before = first.read_bytes()
    (tmp_path / "sums" / "enough").touch()
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 0 and first.read_bytes() == before
    assert (tmp_path / "sums" / "sums.csv").read_text() == "cell,sum\na,1\nb,2\nc,2\nd,5\ne,1\n"


class Slow(Sums):
    """Cells that take a minute, and say in which process."""

    name = "slow"

    def trials(self, full):
        return [Trial("a", {}), Trial("b", {})]

    def compute(self, trial, inputs):
        (inputs.folder / f"{os.getpid()}.pid").touch()
        time.sleep(60)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_processes_of_trials_end_with_the_one_that_started_them(tmp_path):
    code = (
        "from pathlib import Path; from tepal.tools.reproduce.runner import reproduce; "
        "from tests.unit.tools.reproduce.test_reproduce_runs import Slow\n"
        f"if __name__ == '__main__': reproduce(Slow(), Path({str(tmp_path)!r}), full=False, log=print, at_once=2)"
    )
    (tmp_path / "slow.py").write_text(code)
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))}
    parent = subprocess.Popen([sys.executable, tmp_path / "slow.py"], env=environment)
    try:
        until(lambda: len(list((tmp_path / "slow").glob("*.pid"))) == 2)
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not any(_runs(int(path.stem)) for path in (tmp_path / "slow").glob("*.pid")))


def until(holds):
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the experiments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("full", [False, True])
def test_trials_have_names_of_their_own_and_stand_after_those_that_they_need(name, full):
    trials, before = EXPERIMENTS[name].trials(full), set()
    for trial in trials:
        assert trial.name not in before and before.issuperset(trial.needs)
        assert Path(trial.name).name == trial.name
        before.add(trial.name)
        assert trial.options.get("config", {}).keys() <= defaults().keys()
    assert EXPERIMENTS[name].scale(full) and EXPERIMENTS[name].deviations


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_of_which_nothing_is_computed_yet_has_a_page(tmp_path, name):
    results = EXPERIMENTS[name].results({})
    text, html = runner._markdown(EXPERIMENTS[name], results, []), runner._page(EXPERIMENTS[name], results, [])
    assert EXPERIMENTS[name].title in text and "</html>" in html


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small files of the formats in which the data sets come."""
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist.npz", images(6000), images(50, seed=1))
    write_images(folder / "fashion-mnist.npz", images(1900), images(50, seed=1))
    write_images(folder / "cifar-10.npz", images(7200, shape=(3, 32, 32)), images(2000, shape=(3, 32, 32), seed=1))
    of = images(2600, 7, (3, 32, 32), names=("art", "cartoon", "photo", "sketch"))
    np.savez(folder / "pacs.npz", images=of.images, labels=of.labels, domain=of.groups)
    names = sorted({name for subject in SUBJECTS.values() for name in subject} | {"misc.forsale"})
    rows = [
        {"text": f"Of {name.replace('.', ' ')} and number {k}, said {k % 7} times.", "label": name, "split": split}
        for split, count in (("train", 96), ("test", 4)) for name in names for k in range(count)
    ]  # fmt: skip
    (folder / "20newsgroups.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rng = np.random.default_rng(0)
    lines = [
        {"play": f"play-{k % 4}", "role": f"role-{k}", "text": "".join(rng.choice(list("to be or not "), 5000))}
        for k in range(120)
    ]
    (folder / "shakespeare.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def cut(trial):
    """The trial with two rounds, and as little work."""
    config = {**trial.options["config"], "num-server-rounds": 2, "local-steps": 1, "evaluate-every": 2}
    return replace(trial, options={**trial.options, "config": config})


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("ensemble-mnist", ("fedbe-two-labels-search-0", "fedensemble-iid-search-0", "fedensemble-iid-1", "modes-3-1")),
        ("ensemble-mnist", ("pooled-search-0", "pooled-1", "fedensemble-iid-search-0", "fedensemble-iid-1")),
        ("ensemble-cifar-10", ("fedensemble-two-labels-search-0", "fedensemble-two-labels-1")),
        ("ensemble-shakespeare", ("fedensemble-search-0", "fedensemble-11")),
        ("fedfrozen-vision", ("fedfrozen-search-0", "scaffold-search-0")),
        ("selective-domains", ("gradient-search-0", "gradient-1-1")),
        ("selective-texts", ("pretrained", "gradient-search-0", "gradient-1-4-2")),
    ],
)  # fmt: skip
def test_trials_run_on_data_in_its_own_format(tmp_path, data, name, asked):
    experiment = EXPERIMENTS[name]
    trials = {trial.name: trial for trial in experiment.trials(False)}
    found, inputs = {}, TrialInputs(tmp_path, find_data(data, experiment.data(False)))
    for each in asked:
        needs = tuple(name for name in trials[each].needs if name in found)
        trial = replace(cut(trials[each]), needs=needs)
        found[each] = experiment.compute(trial, replace(inputs, needed={name: found[name] for name in needs}))
        assert 0 <= found[each]["server"] <= 1 and found[each]["rounds"] == 2
    results = experiment.results(json.loads(json.dumps(found)))
    assert bool(results.tables) == ("search" not in asked[-1]) and runner._page(experiment, results, [])
    if name.startswith("selective"):
        layers = np.array(found[asked[-1]]["layers"])
        assert layers.shape == (2, 5 if "domains" in name else 4) and (layers.sum(axis=1) > 0.999).all()
        assert "domains" not in name or np.allclose(layers.sum(axis=1), 1)  # one layer a client


def test_a_method_is_searched_on_other_clients_and_run_with_the_best_settings(tmp_path, data):
    experiment = FASHION
    trials = {trial.name: trial for trial in experiment.trials(False)}
    trial, inputs = trials["two-classes-fedacs-1"], TrialInputs(tmp_path, find_data(data, experiment.data(False)))
    searched = [trials[name] for name in trial.needs]
    assert len(searched) == 8 and all(each.options["part"] == "validation" for each in searched)
    counts = Counter(name.rpartition("-search-")[0] for name in trials if "-search-" in name)
    assert set(counts.values()) == {8} and len(counts) == 2 * len(METHODS_OF_FEDACS)
    found, few = {}, {"clients": 10}
    for each in searched[:2]:
        of = replace(cut(each), options={**cut(each).options, **few})
        found[each.name] = experiment.compute(of, replace(inputs, needed=dict(found)))
    first, second = (values["drawn"] for values in found.values())
    scores = [score for score, _ in found[searched[0].name]["of_clients"].values()]
    assert found[searched[0].name]["score"] == pytest.approx(sum(scores) / 10)
    assert first.keys() == {"learning-rate", "fedacs.quantile"} and first != second
    found[searched[1].name] = {**found[searched[1].name], "score": 2.0}
    main = replace(cut(trial), options={**cut(trial).options, **few})
    values = experiment.compute(main, replace(inputs, needed=found))
    assert values["settings"] == second and values["server"] is None and len(values["of_clients"]) == 10
    assert values["clients"] == pytest.approx(np.mean([score for score, _ in values["of_clients"].values()]))


def test_what_fedacs_trains_on_and_what_p_is_chosen_on_share_no_image(tmp_path, data):
    experiment = FedAcs("cifar-10", "CIFAR-10")
    inputs = TrialInputs(tmp_path, find_data(data, experiment.data(False)))
    trials = {trial.name: trial for trial in experiment.trials(False)}
    best = {"best": {"clients": 0.5, "drawn": {"learning-rate": 0.1}}}
    for name, needed in (("scarce-local-1", best), ("scarce-fedacs-search-0", {})):
        trial = trials[name]
        with pytest.MonkeyPatch.context() as patched:
            where = "tepal.tools.reproduce.tuning.trained"
            patched.setattr(where, lambda *given, **keys: {"file": keys["dataset"]})
            values = experiment.compute(trial, replace(inputs, needed=needed))
        file = values["file"]
        with np.load(file) as arrays:
            clients = trial.options["clients"]
            assert len(np.unique(arrays["group"])) == clients and len(arrays["x_train"]) % clients == 0
    one, other = (
        {image.tobytes() for image in np.load(path)["x_train"]} for path in (tmp_path / "images").glob("*.npz")
    )
    assert one.isdisjoint(other) and one and other


def test_newsgroups_are_divided_by_subject_and_domain(tmp_path, data):
    folder = selective.newsgroups(tmp_path / "texts", data / "20newsgroups.jsonl")
    main, search, pretraining = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("main", "search", "pretraining")
    )
    for rows in (main, search):
        assert {row["label"] for row in rows} == set(range(5)) and len({row["group"] for row in rows}) == 16
        of_domain = {row["text"].split(" and ")[0] for row in rows if row["group"].startswith("0-")}
        assert of_domain == {f"Of {names[0].replace('.', ' ')}" for names in SUBJECTS.values()}
        assert {row["split"] for row in rows} == {"train", "test"}
    trained = [row["text"] for row in main if row["split"] == "train"]
    assert {*trained}.isdisjoint(row["text"] for row in search) and len(search) * 2 == len(trained)
    others = {row["text"].split(" and ")[0] for row in pretraining}
    assert len(others) == 9 and others.isdisjoint({row["text"].split(" and ")[0] for row in (*main, *search)})
    assert (folder / "model" / "tokenizer.json").exists()
    changed = (folder / "main.jsonl").stat().st_mtime_ns
    selective.newsgroups(tmp_path / "texts", data / "20newsgroups.jsonl")
    assert (folder / "main.jsonl").stat().st_mtime_ns == changed


def test_tables_have_the_papers_numbers_beside_ours():
    settings = {"settings": {"learning-rate": 0.001}}
    found = {
        f"{slug(method)}-{alpha}-{seed}": values(0.5 + 0.001 * (seed + (method == "FedFrozen")), **settings)
        for alpha in (0.1, 0.3) for method in METHODS for seed in (1, 2, 3)
    }  # fmt: skip
    found |= {f"fedavg-0.1-{seed}": values(0.5 + 0.02 * seed, **settings) for seed in (1, 2, 3)}
    found["fedfrozen-0.3-1"] |= {"bytes": 930_000}
    of_sgd = found["fedavgsgd-0.3-1"] = values(0.4, **settings)
    found |= {f"scaffold-0.3-{seed}": values(0.45, **settings) for seed in (1, 2, 3)}
    found["fedavgsgd-0.3-2"] = found["fedavgsgd-0.3-3"] = of_sgd
    kind = FEDFROZEN["cifar-10"]
    results = FedFrozenVision(kind).results(found)
    tables = {table.title: table for table in results.tables}
    assert [*tables] == [
        "Accuracy at α = 0.1, 3 seeds", "SCAFFOLD and FedAvg, both with SGD, at α = 0.1",
        "Accuracy at α = 0.3, 3 seeds", "SCAFFOLD and FedAvg, both with SGD, at α = 0.3",
    ]  # fmt: skip
    rows = {row[0]: list(row) for row in tables["SCAFFOLD and FedAvg, both with SGD, at α = 0.3"].rows}
    assert rows.keys() == {"SCAFFOLD", "FedAvg, SGD"}
    assert rows["FedAvg, SGD"][2:4] == ["+0.0500 (+0.0500 to +0.0500)", "ahead of"]
    assert "α = 0.3, with SGD: SCAFFOLD is ahead of FedAvg, SGD." in results.findings
    assert "α = 0.3: FedFrozen sends 0.9300 of FedAvg's bytes, up and down." in results.findings
    of_one = FedFrozenVision(kind).results({name: of for name, of in found.items() if "-0.3-" in name})
    assert not any("over all" in claim.text for claim in of_one.claims)
    for place, alpha in enumerate((0.1, 0.3)):
        shown = tables[f"Accuracy at α = {alpha}, 3 seeds"]
        rows = {row[0]: list(row) for row in shown.rows}
        assert [column.heading for column in shown.columns][4] == "paper"
        assert {method: rows[method][4] for method in kind.paper} == {
            method: of[place] for method, of in kind.paper.items()
        }  # fmt: skip
    assert rows["FedProx"][1:4] == ["0.5020 ± 0.0010", "+0.0010 (+0.0010 to +0.0010)", "ahead of"]
    claims = {claim.text: claim for claim in results.claims}
    within = "FedFrozen's accuracy is FedAvg's, within 0.005."
    below = "FedFrozen's accuracy is at most 0.005 below FedAvg's."
    far, near, over_all = (claims[f"{what}: {within}"] for what in ("α = 0.1", "α = 0.3", "The mean over all α"))
    gains = [0.501 + 0.001 * seed - (0.5 + 0.02 * seed + 0.5 + 0.001 * seed) / 2 for seed in (1, 2, 3)]
    mean, half = np.mean(gains), 4.302653 * np.std(gains, ddof=1) / 3**0.5  # Student's t of two degrees of freedom
    assert over_all.measured.startswith(f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}")
    assert near.measured.startswith("+0.0010")
    assert [each.verdict for each in (far, near, over_all)] == ["undecided", "holds", "undecided"]
    assert claims[f"α = 0.3: {below}"].measured == near.measured and len(results.claims) == 10
    best = claims["α = 0.3: SCAFFOLD is better than each other method."]
    assert best.verdict == "does not hold" and "FedAvg, SGD" not in best.measured
    as_the_best = claims["α = 0.3: FedFrozen is at most 0.0150 below each other method, as in the paper."]
    assert as_the_best.verdict == "holds" and "SCAFFOLD: +0.0530" in as_the_best.measured
    better = {name: of | {"server": of["server"] + 0.1} if "fedfrozen" in name else of for name, of in found.items()}
    verdicts = {claim.text: claim.verdict for claim in FedFrozenVision(kind).results(better).claims}
    assert [verdicts[f"α = 0.3: {each}"] for each in (within, below)] == ["does not hold", "holds"], "ahead by a tenth"
    of_cifar_100 = {claim.text for claim in FedFrozenVision(FEDFROZEN["cifar-100"]).results(found).claims}
    assert "α = 0.3: FedFrozen is better than each other method." in of_cifar_100
    assert len(of_cifar_100) == 8, "of the best one there is one claim"


def test_selections_of_the_same_layers_are_no_test_and_the_layers_are_compared_with_the_papers():
    drawn = np.random.default_rng(3).uniform(0, 0.2, (5, 6, 4))  # (seeds, rounds, layers)
    lowest = [[1.0, 0.0, 0.0, 0.0]] * 6

    def of(method, score, layers):
        return {f"{method}-{seed}": values(score + 0.001 * seed, settings={}, layers=layers[seed - 1])
                for seed in (1, 2, 3, 4, 5)}  # fmt: skip

    found = of("gradient-1", 0.5, [lowest] * 5) | of("rgn-1", 0.4, [lowest] * 5) | of("bottom-1", 0.3, [lowest] * 5)
    found |= of("top-1", 0.45, [[[0.0, 0.0, 0.0, 1.0]] * 6] * 5)
    falling = drawn + np.eye(4)[[3, 3, 2, 1, 0, 0]]
    found |= of("gradient-1-4", 0.5, falling.tolist()) | of("rgn-1-4", 0.4, drawn.tolist())
    for kind, expected in (
        ("texts", {
            "R = 1: selection by gradients is as good as RGN, within 0.01.": "not tested",
            "R = 1: selection by gradients is better than each other selection but RGN.": "holds",
            "R = 1: training the layers next to the input is the worst selection.": "holds",
            "R = 1-4: selection by gradients is better than each other selection.": "holds",
            "R = 1-4: the layers that gradients select move towards the input: their mean number falls from the first "
            "third of the rounds to the last (Figure 2).": "holds",
        }),
        ("labels", {
            "R = 1: selection by gradients is better than each other selection.": "holds",
            "R = 1: training the layers next to the input is the worst selection.": "holds",
            "R = 1-4: selection by gradients is better than each other selection.": "holds",
            "R = 1-4: the layers that gradients select are mostly those next to the output (Figure 2).": "undecided",
        }),
    ):  # fmt: skip
        results = Selective(kind).results(found)
        assert {claim.text: claim.verdict for claim in results.claims} == expected
        assert any("R = 1: bottom, rgn trained the same layers as gradient" in each for each in results.findings)
        measured = {claim.text: claim.measured for claim in results.claims}
        best = next(text for text in measured if text.startswith("R = 1: selection by gradients is better"))
        assert measured[best].startswith("+0.0500") and "same layers" in measured[best]
        assert "rgn: " not in measured[best]
    first, last = (falling[:, part] for part in (slice(0, 2), slice(4, 6)))
    depth = [(of.sum(axis=1) @ [1, 2, 3, 4]) / of.sum(axis=(1, 2)) for of in (first, last)]
    assert f"{np.mean(depth[0] - depth[1]):+.4f}" in next(
        claim.measured for claim in Selective("texts").results(found).claims if "Figure 2" in claim.text
    )


def test_the_papers_accuracies_are_those_of_its_table_1():
    for data, fedavg, fedfrozen in (
        ("cifar-10", (0.9070, 0.9270, 0.9385), (0.9040, 0.9325, 0.9470)),
        ("cifar-100", (0.6450, 0.6725, 0.6860), (0.6690, 0.6790, 0.6955)),
        ("femnist", (0.7880, 0.8070, 0.8100), (0.7890, 0.8100, 0.8120)),
    ):
        paper = FEDFROZEN[data].paper
        assert (paper["FedAvg"], paper["FedFrozen"]) == (fedavg, fedfrozen)
        assert paper.keys() == METHODS.keys() - {"FedAvg, SGD"}


@pytest.mark.parametrize("data", FEDFROZEN)
def test_the_papers_settings_of_each_data_set_are_those_at_full_scale(data):
    """Its Tables 4 and 5; SCAFFOLD's momentum, and T_warm by α."""
    clients, batch, warmups, momentum, model = {
        "cifar-10": (10, 32, {0.1: 5, 0.3: 5, 0.5: 5}, 0, "vit-b-32"),
        "cifar-100": (20, 32, {0.1: 3, 0.3: 3, 0.5: 3}, 0.9, "vit-b-32"),
        "femnist": (10, 64, {0.1: 2, 0.3: 5, 0.5: 5}, 0.9, "facebook/deit-small-patch16-224"),
    }[data]
    trials = [trial.options for trial in FedFrozenVision(FEDFROZEN[data]).trials(full=True)]
    assert {of["clients"] for of in trials} == {clients} and {of["config"]["batch-size"] for of in trials} == {batch}
    assert {of["config"]["model"] for of in trials} == {model} and {tuple(of["images"]) for of in trials} == {
        (5000, 2000)
    }  # fmt: skip
    for of in trials:
        config, sgd = of["config"], of["method"] in ("SCAFFOLD", "FedAvg, SGD")
        assert config["num-server-rounds"] == config["local-epochs"] == 10
        assert config["optimizer"] == ("sgd" if sgd else "adamw")
        assert config.get("momentum", 0) == (momentum if sgd else 0)
        frozen = of["method"] == "FedFrozen"
        assert config.get("fedfrozen.warmup-rounds") == (warmups[config["dirichlet-alpha"]] if frozen else None)


def few(data, **small):
    """An experiment with few images in its small setting."""
    kind = FEDFROZEN[data]
    return FedFrozenVision(replace(kind, small=replace(kind.small, train=120, test=20, validation=30, **small)))


def computed(experiment, inputs, asked):
    """The values of trials with three clients and two rounds of one step."""
    trials, found = {trial.name: trial for trial in experiment.trials(False)}, {}
    for name in asked:
        clients = min(3, trials[name].options["clients"])
        config = {**cut(trials[name]).options["config"], "batch-size": 8, "min-partition-size": 2}
        trial = replace(trials[name], options={**trials[name].options, "config": config, "clients": clients})
        trial = replace(trial, needs=tuple(each for each in trial.needs if each in found))
        needed = {each: found[each] for each in trial.needs}
        found[name] = experiment.compute(trial, replace(inputs, needed=needed))
        assert 0 <= found[name]["server"] <= 1 and found[name]["rounds"] == 2
    return found


def test_the_weights_have_not_seen_the_classes_of_cifar_100_that_clients_have(tmp_path):
    labels = np.repeat(np.arange(100), 15)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    pixels[:, 0, 0, 0] = labels
    write_images(tmp_path / "cifar-100.npz", Images(pixels, labels), Images(pixels[::5] // 2, labels[::5]))
    experiment, inputs = few("cifar-100"), TrialInputs(tmp_path, {"cifar-100": tmp_path / "cifar-100.npz"})
    found = computed(experiment, inputs, ("pretrained", "fedfrozen-search-0", "fedfrozen-0.3-1"))
    assert (tmp_path / "weights" / "cifar-100.safetensors").exists()
    assert found["fedfrozen-0.3-1"]["settings"] == found["fedfrozen-search-0"]["drawn"]
    results = experiment.results(json.loads(json.dumps(found)))
    assert results.tables and any(finding.startswith("The weights have") for finding in results.findings)
    unseen, files = set(unseen_classes(100, 20).tolist()), {}
    for path in (tmp_path / "images").glob("*.npz"):
        with np.load(path) as arrays:
            part = path.stem.split("-")[2]
            files[part] = {image.tobytes() for image in arrays["x_train"]}
            images, own = arrays["x_train"], arrays["y_train"]
            classes = {int(image[0, 0, 0]) for image in images}
            pairs = {(int(image[0, 0, 0]), int(label)) for image, label in zip(images, own, strict=True)}
            count = 80 if part == "pretraining" else 20
            assert sorted(label for _, label in pairs) == [*range(count)]
            assert classes == (set(range(100)) - unseen if part == "pretraining" else unseen)
            assert len(images) == (1200 if part == "pretraining" else 120)
            assert len(arrays["x_test"]) == (30 if part == "search" else 20)
    assert files["main"].isdisjoint(files["search"]) and len(files) == 3


def test_grey_letters_of_leaf_s_json_are_trained_in_colour(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 300), ("test", 20)):
        users = {
            f"f{k}": {
                "x": rng.random((count // 2, 784)).round(2).tolist(),
                "y": rng.integers(0, 62, count // 2).tolist(),
            }
            for k in range(2)
        }
        (tmp_path / "femnist" / part).mkdir(parents=True)
        leaf = {"users": [*users], "num_samples": [count // 2] * 2, "user_data": users}
        (tmp_path / "femnist" / part / "all.json").write_text(json.dumps(leaf))
    inputs = TrialInputs(tmp_path, {"femnist": tmp_path / "femnist"})
    found = computed(few("femnist"), inputs, ("scaffold-search-0", "fedfrozen-search-0", "fedfrozen-0.1-1"))
    assert found["fedfrozen-0.1-1"]["correct"].startswith("20:")
    assert np.load(tmp_path / "images" / "femnist-main-120.npz")["x_train"].shape == (120, 1, 28, 28)


def test_too_few_images_are_said(tmp_path):
    write_images(tmp_path / "cifar-10.npz", images(200, shape=(3, 32, 32)), images(20, shape=(3, 32, 32)))
    experiment, inputs = few("cifar-10"), TrialInputs(tmp_path, {"cifar-10": tmp_path / "cifar-10.npz"})
    with pytest.raises(MissingData, match="has 200 training and 20 test images; 270 and 20 are needed"):
        experiment.compute(experiment.trials(False)[0], inputs)


def values(score, **more):
    return {
        "server": score, "clients": score, "spread": 0.1, "curve": [(0, 0.1), (2, score)], "bytes": 10**6, "rounds": 2,
        "lowest_accuracy": None, "highest_accuracy": None, "entropy": None, "mode_entropy": None, "layers": [], **more,
    }  # fmt: skip


def test_the_papers_entropy_is_next_to_the_mean_of_the_modes_entropies():
    """Values of trials that an earlier version has computed do not have it."""
    of_three = values(0.9, lowest_accuracy=0.7, highest_accuracy=0.8, entropy=0.25, mode_entropy=0.125)
    earlier = {key: value for key, value in values(0.9, entropy=0.5).items() if key != "mode_entropy"}
    table = EnsembleMnist().results({"modes-3-1": of_three, "modes-10-1": of_three}).tables[0]
    headings = [column.heading for column in table.columns]
    own, mean = headings.index("mean of the modes' entropies"), headings.index("entropy of the mean prediction")
    three, ten = (next(row for row in table.rows if row[0] == modes) for modes in (3, 10))
    assert three[own : own + 2] == ["0.1250", 0.16] and three[mean : mean + 2] == ["0.2500", None]
    assert ten[own : own + 2] == ["0.1250", None]
    earlier_only = EnsembleMnist().results({"fedensemble-iid-1": earlier | {"settings": {}}}).tables[1].rows
    assert earlier_only[0][own : own + 2] == [None, 0.15] and earlier_only[0][mean] == "0.5000"


def test_findings_say_what_came_out_also_where_it_is_not_the_papers():
    accuracies = {"fedavg": (0.9, 0.901, 0.899), "fedprox": (0.7, 0.9, 0.8), "fedensemble": (0.8, 0.801, 0.802)}
    found = {
        f"{method}-iid-{seed}": values(score, settings={})
        for method, scores in accuracies.items() for seed, score in enumerate(scores, 1)
    }  # fmt: skip
    assert EnsembleMnist().results(found).findings == [
        "Iid: Fed-ensemble is behind FedAvg.", "Iid: Fed-ensemble is undecided against FedProx."
    ]  # fmt: skip
    layers = {"settings": {}, "layers": [[0.0, 1.0, 0.0, 0.0], [0.3, 0.5, 0.2, 0.0]]}
    found = {"gradient-1-1": values(0.4, **layers), "top-1-1": values(0.3, settings={})}
    results = Selective("domains").results(found)
    (finding,) = results.findings
    assert finding == "R = 1: gradients select 1.00 layers per client; of 4 layers 2 (75%), 1 (15%), 3 (10%)."
    assert [list(row)[:2] for row in results.tables[0].rows] == [["top", "0.3000"], ["gradient", "0.4000"]]


def scored(**of_clients):
    return {"clients": 0.5, "spread": 0.1, "curve": [], "rounds": 1, "settings": {"learning-rate": 0.05},
            "of_clients": {client.removeprefix("c"): [score, 10] for client, score in of_clients.items()}}  # fmt: skip


def test_methods_are_compared_on_the_clients_that_all_runs_scored():
    runs = {"FedACS": {1: scored(c0=0.5, c1=0.7), 2: scored(c0=0.6, c1=0.8, c2=0.0)},
            "Local": {1: scored(c0=0.4, c1=0.4, c2=1.0), 2: scored(c0=0.2, c1=0.6)}}  # fmt: skip
    means, count = on_common_clients(runs)
    assert count == 2 and {method: list(of.values()) for method, of in means.items()} == {
        "FedACS": pytest.approx([0.6, 0.7]), "Local": pytest.approx([0.4, 0.4])
    }  # fmt: skip


def test_findings_name_who_is_behind_and_where_it_is_undecided():
    ours, near, far = (0.80, 0.82, 0.81, 0.83, 0.79), (0.81, 0.80, 0.83, 0.80, 0.82), (0.30, 0.31, 0.30, 0.33, 0.30)
    found = {
        f"scarce-{method}-{seed}": scored(c0=score, c1=score)
        for method, scores in (("fedacs", ours), ("local", near), ("fedavg", far))
        for seed, score in enumerate(scores, 1)
    }
    results = FASHION.results(found)
    assert results.findings == [
        "50 examples each, Dirichlet .5: FedACS is ahead of FedAvg.",
        "50 examples each, Dirichlet .5: FedACS is undecided against Local.",
    ]
    assert {claim.text.partition(" (")[0]: claim.verdict for claim in results.claims} == {
        "50 examples each, Dirichlet .5: FedACS is better than local training": "undecided",
        "50 examples each, Dirichlet .5: FedACS is better than every other method": "undecided",  # others are missing
    }
    rows = {row[0]: row for row in results.tables[0].rows}
    assert rows["FedAvg"][1].startswith("0.3080 ± ") and "2 clients, 5 seeds" in results.tables[0].title
    mean, half = 0.502, 2.776 * np.std(np.subtract(ours, far), ddof=1) / 5**0.5  # Student's t, four degrees of freedom
    assert rows["FedAvg"][2] == f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"
    assert rows["Local"][4] == 0.7598 and rows["Local"][5] == "learning-rate 0.05"
