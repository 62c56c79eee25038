"""`tepal.simulate`, `tepal.compare` and `tepal.load`, compared with the commands and with training by hand."""

import copy
import json
import logging
import os
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import tepal
from tepal.host.superlink import RunError
from tepal.server_app.config import ConfigError
from tepal.tools.api.own_training import Epochs
from tepal.tools.cli.main import main
from tepal.tools.compare.comparison import read_comparison
from tepal.tools.simulation.running import run_once
from tepal.training.loop import Batches

DIGITS = load_digits()
IMAGES, LABELS = (DIGITS.images / 16).astype(np.float32), DIGITS.target

pytestmark = pytest.mark.usefixtures("no_report")


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def sgd(model, batches, penalty):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, labels in batches:
        loss = cross_entropy(model(inputs), labels) + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@pytest.fixture
def small(tmp_path):
    """Settings of a run that takes a second."""
    return {
        "strategy": "fedavg", "model": net, "data": (IMAGES, LABELS), "clients": 3, "rounds": 2, "local_epochs": 2,
        "runs": tmp_path / "runs", "progress": False,
    }  # fmt: skip


def test_the_result_is_that_of_the_command_bit_for_bit(tmp_path):
    shared = {"strategy": "fedfrozen", "rounds": 2, "local_epochs": 1, "deterministic": True, "seed": 7}
    run = tepal.simulate(**shared, data="digits", clients=3, runs=tmp_path / "api", progress=False)
    config = (
        f'strategy="fedfrozen" num-server-rounds=2 local-epochs=1 deterministic=true seed=7 runs="{tmp_path / "cli"}"'
    )
    told = CliRunner().invoke(main, ["simulate", "--clients", "3", "-c", config])
    assert told.exit_code == 0, told.output
    theirs = load_file(tmp_path / "cli" / "latest" / "model.safetensors")
    assert theirs.keys() == run.weights.keys()
    assert all(torch.equal(theirs[name], value) for name, value in run.weights.items())
    command = tepal.load(tmp_path / "cli")
    compared = ["accuracy", "loss", "bytes_down", "bytes_up", "bytes_fedavg"]
    assert command.metrics[compared].equals(run.metrics[compared])


def test_a_run_has_its_figures_model_and_page(small):
    run = tepal.simulate(**small, wire_dtype="bfloat16")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics.index.tolist() == [0, 1, 2]
    assert run.metrics["loss"].tolist() == [line["loss"] for line in lines]
    assert run.bytes == sum(line["bytes_down"] + line["bytes_up"] for line in lines)
    # bfloat16 has half the bytes of float32 and short headers, and FedAvg saves nothing itself.
    assert run.bytes_vs_fedavg == pytest.approx(0.5, rel=0.03) and run.saved == pytest.approx((1, run.bytes_vs_fedavg))
    assert run.accuracy == lines[-1]["accuracy"] and run.config["wire-dtype"] == "bfloat16"
    assert not run.model.training
    with torch.no_grad():
        right = (run.model(torch.from_numpy(IMAGES)).argmax(1).numpy() == LABELS).mean()
    assert right > 0.2 and run.remarks == []
    curve = run.plot().data[0]
    assert curve.x[-1] == pytest.approx(run.bytes / 1e6) and curve.y[-1] == run.accuracy
    assert run.report() == run.path / "report.html" and run.report().is_file()
    assert "fedavg, 2 rounds, accuracy" in repr(run) and run.path.name in repr(run)
    assert tepal.load(small["runs"]) == run == tepal.load(run.path)


def test_a_best_model_has_its_own_accuracy(small):
    run = tepal.simulate(**{**small, "rounds": 3, "learning_rate": 0.5, "optimizer": "sgd", "deliver": "best"})
    best = run.metrics["accuracy"].max()
    assert run.accuracy == best and run.summary["delivered_round"] == run.metrics["accuracy"].idxmax()


def test_the_process_is_as_it_was_before(small, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", "/where/it/was")
    flower = logging.getLogger("flwr")
    before = [(handler, handler.level) for handler in flower.handlers], torch.get_num_threads()
    tepal.simulate(**small, deterministic=True)
    assert ([(handler, handler.level) for handler in flower.handlers], torch.get_num_threads()) == before
    assert os.environ["TEPAL_CACHE"] == "/where/it/was"


def test_rounds_are_shown_as_they_end(small, capsys):
    tepal.simulate(**{**small, "progress": True})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown] == [
        "Running with 3 clients in this process ...", "round 0/2", "round 1/2", "round 2/2"
    ]  # fmt: skip
    tepal.simulate(**small)
    assert capsys.readouterr().out == ""


def test_a_run_begins_with_the_weights_of_a_module(small):
    module = net()
    run = tepal.simulate(**{**small, "model": module, "learning_rate": 1e-9, "schedule": "constant"})
    for name, value in module.state_dict().items():
        torch.testing.assert_close(run.weights[name], value, rtol=0, atol=1e-5)


def test_each_client_trains_on_its_own_data_by_ones_own_function(small):
    """A round of one epoch in a single batch of each client is gradient descent, which is computed here by hand."""
    parts = [(IMAGES[k::3], LABELS[k::3]) for k in range(3)]
    module = net()
    seen = []

    def train(model, batches, penalty):
        assert float(penalty()) == 0.0
        seen.append(next(iter(batches)))
        return sgd(model, [seen[-1]], penalty)

    settings = {
        **small, "model": module, "data": parts, "clients": None, "rounds": 1, "train": train, "batch_size": 1000,
        "max_weight_share": 1.0,
    }  # fmt: skip
    run = tepal.simulate(**settings)
    expected = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    examples = sum(len(labels) for _, labels in seen)
    for (images, labels), (own, _) in zip(seen, parts, strict=True):
        assert {image.tobytes() for image in images.numpy()} <= {image.tobytes() for image in own}
        model = copy.deepcopy(module)
        cross_entropy(model(images), labels).backward()
        for name, parameter in model.named_parameters():
            expected[name] += (parameter.detach() - 0.1 * parameter.grad) * len(labels) / examples
    for name, value in expected.items():
        torch.testing.assert_close(run.weights[name], value, rtol=1e-4, atol=1e-6)


def test_a_client_has_its_own_settings(small):
    def train(model, batches, penalty):
        sizes.append(len(next(iter(batches))[1]))
        return sgd(model, batches, penalty)

    sizes = []
    tepal.simulate(**{**small, "rounds": 1, "train": train, "batch_size": 32, "client": {1: {"batch_size": 8}}})
    assert sizes == [32, 8, 32]
    with pytest.raises(ConfigError, match="numbered from 0 to 2"):
        tepal.simulate(**{**small, "client": {3: {"batch_size": 8}}})


def test_floats_are_targets_of_a_regression_and_rows_are_a_table(small):
    rows = IMAGES.reshape(-1, 64)
    sums = rows.sum(axis=1, keepdims=True) / 64

    def line(features, outputs=1):
        return nn.Linear(features, outputs)

    found = tepal.simulate(**{**small, "model": line, "data": (rows, sums), "rounds": 5, "partitioner": "iid"})
    assert found.accuracy is None and found.summary["rmse"] < sums.std() * 3
    table = tepal.simulate(**{**small, "model": lambda features, classes: nn.Linear(features, classes),
                              "data": (rows, LABELS), "rounds": 3})  # fmt: skip
    assert table.accuracy > 0.3 and table.config["task"] == "table-classification"


def test_fedprox_gives_ones_own_function_its_penalty(small):
    penalties = []

    def train(model, batches, penalty):
        loss = sgd(model, batches, penalty)
        with torch.no_grad():
            penalties.append(float(penalty()))
        return loss

    tepal.simulate(**{**small, "strategy": "fedprox", "train": train, "rounds": 1})
    assert len(penalties) == 3 and min(penalties) > 0


def test_epochs_are_counted_and_differ():
    batches = Epochs(Batches(torch.arange(10.0), torch.arange(10), 4, seed=1))
    first, second = ([labels.tolist() for _, labels in batches] for _ in range(2))
    assert [len(part) for part in first] == [4, 4, 2] and batches.steps == 6 and len(batches) == 3
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10)) and first != second


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lokal_epochs": 3, "rounds": 0}, ["lokal-epochs", "local-epochs", "num-server-rounds"]),
        ({"strategy": "fedavgg"}, ["fedavg"]),
        ({"strategy": "ditto", "train": sgd}, ["ditto", "prescribes how clients train"]),
        ({"strategy": "fednova", "train": sgd}, ["fednova", "prescribes"]),
        ({"strategy": "fedensemble", "model": nn.Linear(2, 2)}, ["same weights", "function"]),
        ({"fedprox": {"muu": 1.0}}, ["fedprox.muu"]),
        ({"data": [(IMAGES, LABELS)] * 2}, ["clients is 3", "a list of 2"]),
        ({"clients": 3000}, ["3000 clients"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(small, settings, said):
    with pytest.raises(ConfigError) as refused:
        tepal.simulate(**{**small, **settings})
    assert all(each in str(refused.value) for each in said), refused.value
    assert not list(small["runs"].glob("2*"))


@pytest.mark.parametrize("result", [None, float("nan")])
def test_a_function_that_returns_no_loss_fails_the_run_with_its_reason(small, result):
    with pytest.raises(RunError) as failed:
        tepal.simulate(**{**small, "train": lambda model, batches, penalty: result})
    assert "train returned" in str(failed.value)


def test_strategies_and_variants_are_compared(small):
    del small["strategy"]
    slow = {"name": "slow", "strategy": "fedavg", "learning_rate": 1e-5}
    compared = tepal.compare(["fedavg", slow], seeds=(1, 2), **small)
    scores = {name: [run.accuracy for run in compared.runs if run.config["learning-rate"] == rate]
              for name, rate in (("fedavg", 0.003), ("slow", 1e-5))}  # fmt: skip
    for name, found in scores.items():
        assert compared.table.loc[name, "server_accuracy"] == pytest.approx(np.mean(found))
        assert compared.table.loc[name, "server_accuracy_sd"] == pytest.approx(np.std(found, ddof=1))
    assert compared.report().is_file() and [trace.name for trace in compared.plot().data] == ["fedavg", "slow"]
    names = tepal.compare(["fedavg", "fedprox"], **small)
    assert names.table.index.tolist() == ["fedavg", "fedprox"] and "fedavg, fedprox; 2 runs" in repr(names)


def test_a_run_that_fails_in_any_way_does_not_end_the_comparison(small, monkeypatch, capsys):
    """It is shown, also without progress."""
    del small["strategy"]

    def evaluation(config, model):
        def evaluate(*_):
            if config.rounds.strategy == "fedavg":
                raise IndexError("no such class")

        return evaluate

    monkeypatch.setattr("tepal.server_app.run.server_evaluation", evaluation)
    compared = tepal.compare(["fedavg", "fedprox"], **small)
    assert "fedavg" in (shown := capsys.readouterr().err) and "IndexError: no such class" in shown
    first, second = read_comparison(compared.path).runs
    assert (first.outcome, first.reason, second.outcome) == ("failed", "IndexError: no such class", "finished")
    assert "Traceback" in (first.directory / "flower.log").read_text()


@pytest.mark.parametrize("ended", [0, 1])
def test_a_comparison_that_is_stopped_raises_after_its_files_are_written(small, monkeypatch, ended):
    del small["strategy"]
    runs = []

    def run_or_stop(*arguments):
        runs.append(arguments)
        if len(runs) > ended:
            raise KeyboardInterrupt
        return run_once(*arguments)

    monkeypatch.setattr("tepal.tools.api.comparing.run_once", run_or_stop)
    with pytest.raises(KeyboardInterrupt, match="was stopped") as stopped:
        tepal.compare(["fedavg", "fedprox", "fedavgm"], **small)
    folder = Path(str(stopped.value).rpartition(": ")[2])
    outcomes = ["finished", "stopped", "not run", "not run"][1 - ended :][:3]
    assert [run.outcome for run in read_comparison(folder).runs] == outcomes
    assert (folder / "comparison.html").is_file()


def test_names_that_pandas_takes_for_none_and_a_seed_of_numpy(small):
    del small["strategy"]
    what = [{"name": name, "strategy": "fedavg"} for name in ("NA", "null")]
    compared = tepal.compare(what, seeds=np.int64(3), **{**small, "rounds": 1})
    assert compared.table.index.tolist() == ["NA", "null"] and compared.table["server_accuracy"].dtype == float
    assert [run.config["seed"] for run in compared.runs] == [3, 3]


def test_a_comparison_counts_the_bytes_until_a_target(small):
    del small["strategy"]
    slow = {"name": "slow", "strategy": "fedavg", "learning_rate": 1e-5}
    table = tepal.compare(["fedavg", slow], target="fedavg-0", **small).table
    final = table.loc["fedavg", "server_accuracy"]
    assert table["target_accuracy"].tolist() == [final, final] and table.loc["fedavg", "reached_target"] == 1
    assert table.loc["slow", "server_accuracy"] < final and table.loc["slow", "reached_target"] == 0
    assert tepal.compare(["fedavg"], target=np.float64(0), **small).table.loc["fedavg", "bytes_to_target"] == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("fedprox-0.1", r"^target fedprox-0\.1: 'fedprox' is not compared\. Allowed are fedavg\. Add the strategy, or"),
        ("half", "^target is 'half': expected a score of at least 0, such as 0.9, or a final score"),
        (2, "^target is 2, expected an accuracy from 0 to 1"),
    ],
)
def test_a_comparison_with_a_wrong_target_does_not_begin(small, target, said):
    del small["strategy"]
    with pytest.raises(ConfigError, match=said):
        tepal.compare(["fedavg"], target=target, **small)
    assert not list(small["runs"].glob("2*"))


def test_every_combination_of_varied_values_is_run(small):
    del small["strategy"]
    compared = tepal.compare(["fedavg"], vary={"learning_rate": [1e-5, 0.01], "local_epochs": [1, 2]},
                             **{**small, "local_epochs": 3})  # fmt: skip
    ran = {(run.config["learning-rate"], run.config["local-epochs"]): run.accuracy for run in compared.runs}
    assert sorted(ran) == [(1e-5, 1), (1e-5, 2), (0.01, 1), (0.01, 2)]
    assert compared.plot().data[0].name != "fedavg-1" and "learning-rate=" in repr(compared)
    table = compared.table.set_index(["learning-rate", "local-epochs"])["server_accuracy"]
    assert all(table[key] == pytest.approx(score) for key, score in ran.items())
    with pytest.raises(ConfigError, match=r"vary: learning-rate=.*expected at least two"):
        tepal.compare(["fedavg"], vary={"learning_rate": [0.1]}, **small)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (["fedavg", "fedfroze"], ["fedfrozen"]),
        ([{"name": "a"}, {"strategy": "fedavg", "name": "a b"}], ["variant 1: strategy", "variant 2: name"]),
        ([{"strategy": "fedavg"}, {"strategy": "fedavg"}], ["second variant has the name 'fedavg'"]),
        ([{"strategy": "fedavg", "lokal_epochs": 1}, "fedprox"], ["local-epochs"]),
        (
            ["fedprox", {"strategy": "fedavg", "seed": 7, "runs": "elsewhere", "resume": ""}],
            ["variant 2: seed=7: a comparison has seeds", "variant 2: runs='elsewhere': ", "variant 2: resume='': "],
        ),
        ([], ["expected a list"]),
    ],
)
def test_a_comparison_with_mistakes_does_not_begin(small, what, said):
    del small["strategy"]
    with pytest.raises(ConfigError) as refused:
        tepal.compare(what, **small)
    assert all(each in str(refused.value) for each in said), refused.value
    assert not list(small["runs"].glob("2*"))


def test_settings_may_be_paths_and_numbers_of_numpy(small):
    begun = tepal.simulate(**{**small, "learning_rate": np.float32(0.5), "rounds": np.int64(1)})
    assert begun.config["learning-rate"] == 0.5
    again = tepal.simulate(resume=begun.path, rounds=2, progress=False)
    assert again.path == begun.path and len(again.metrics) == 3
    assert len(tepal.simulate(resume=begun.path, clients=3, progress=False).metrics) == 3
    assert len(tepal.simulate(resume=begun.path, rounds=20, progress=False).metrics) == 21


def test_a_run_that_is_resumed_keeps_its_number_of_clients(tmp_path):
    short = {"strategy": "fedavg", "rounds": 1, "local_epochs": 1, "clients": 3}
    begun = tepal.simulate(**short, runs=tmp_path / "runs", progress=False)
    resumed = ["simulate", "-c", f'resume="{begun.path}" num-server-rounds=2']
    told = CliRunner().invoke(main, resumed)
    assert told.exit_code == 0, told.output
    assert tepal.load(begun.path).metrics["clients_replied"].tolist() == [0, 3, 3]
    told = CliRunner().invoke(main, [*resumed, "--clients", "4"])
    assert told.exit_code == 1 and f"the run in {begun.path} has 3 clients" in " ".join(told.stderr.split())
    with pytest.raises(ConfigError, match="has 3 clients, among which its data is divided: give --clients 3"):
        tepal.simulate(resume=begun.path, clients=4, progress=False)
    (begun.path / "simulation.json").unlink()  # as of an earlier version: the number is not known
    with_another = tepal.simulate(resume=begun.path, clients=4, rounds=3, progress=False)
    assert with_another.metrics["clients_replied"].tolist() == [0, 3, 3, 4]
    assert not (begun.path / "simulation.json").exists(), "what was only assumed is not recorded"


def test_a_log_that_was_silenced_does_not_matter(small):
    flower = logging.getLogger("flwr")
    before = flower.level
    flower.setLevel(logging.ERROR)
    logging.disable(logging.CRITICAL)
    try:
        assert len(tepal.simulate(**small).metrics) == 3
        assert (flower.level, logging.root.manager.disable) == (logging.ERROR, logging.CRITICAL)
    finally:
        logging.disable(logging.NOTSET)
        flower.setLevel(before)


def test_an_error_of_ones_own_function_leads_to_it(small):
    def train(model, batches, penalty):
        raise RuntimeError("my mistake")

    with pytest.raises(RunError, match="my mistake") as failed:
        tepal.simulate(**{**small, "train": train})
    assert str(failed.value.__cause__) == "my mistake"
    assert failed.traceback and "raise RuntimeError" in failed.value.log.read_text()


def test_a_function_that_leaves_the_interpreter_fails_as_others_do(small):
    def train(model, batches, penalty):
        raise SystemExit(3)

    with pytest.raises(RunError, match="SystemExit"):
        tepal.simulate(**{**small, "train": train})


def test_a_model_of_another_process_is_not_taken_for_one_of_this(small, monkeypatch):
    run = tepal.simulate(**small)
    module, _, name = run.config["model"].partition(":")
    monkeypatch.delattr(f"{module}.{name}")
    with pytest.raises(ValueError, match=r"object of another Python process.*run\.weights"):
        run.model  # noqa: B018
    assert set(run.weights) == set(net().state_dict())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 7}, "a comparison has seeds"),
        ({"strategy": "fedprox"}, "its first argument"),
        ({"train": sgd}, "`simulate` alone"),
        ({"strategies": "fedavg"}, "strategies is 'fedavg', expected a list"),
        ({"strategies": ["fedensemble"], "model": nn.Linear(2, 2)}, "same weights"),
        ({"vary": {"optimizer": "sgd"}}, "expected a list of values"),
        ({"clients": 0}, "clients is 0, expected a whole number of at least 2"),
    ],
)
def test_what_a_comparison_does_not_take_is_said(small, settings, said):
    del small["strategy"]
    with pytest.raises(ConfigError, match=re.escape(said)):
        tepal.compare(**{"strategies": ["fedavg"], **small, **settings})


def test_the_public_names_are_listed():
    assert {"simulate", "compare", "load"} <= set(dir(tepal))


def test_there_are_no_other_names():
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        tepal.simulat  # noqa: B018
