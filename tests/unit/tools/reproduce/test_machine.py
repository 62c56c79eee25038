"""What an experiment finds on this machine: weights and their digests, memory, devices, and the time that is left."""

import hashlib
import json
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tepal import models
from tepal.models.weights import card, folder_of
from tepal.records.run_directory import LATEST, METRICS, NOW
from tepal.strategies.in_process import InProcessGrid
from tepal.tools.cli.main import main
from tepal.tools.reproduce.experiment import MissingData, Trial, TrialInputs
from tepal.tools.reproduce.fedfrozen_vision import KINDS, FedFrozenVision
from tepal.tools.reproduce.machine import memory, progress
from tepal.tools.reproduce.machine.device import described, find_device
from tepal.tools.reproduce.machine.memory import TooLittleMemory, check_memory, least_memory
from tepal.tools.reproduce.machine.progress import Progress, TimeLeft
from tepal.tools.reproduce.machine.weights import digests
from tepal.tools.reproduce.runner import about, reproduce
from tepal.tools.reproduce.runs import trained
from tepal.tools.reproduce.selective import Selective
from tests.quiet import quiet  # noqa: F401

SMALL = {"dataset": "digits", "strategy": "fedavg", "num-server-rounds": 1, "local-steps": 1, "model": "cnn"}


# --- pretrained weights ---------------------------------------------------------------------------------------------


def test_weights_are_named_with_the_digests_of_their_files(tmp_path):
    (tmp_path / "weights" / "org" / "small").mkdir(parents=True)
    (tmp_path / "weights" / "org" / "small" / "pytorch_model.bin").write_bytes(b"weights")
    split = tmp_path / "split"
    split.mkdir()
    (split / "model.safetensors.index.json").write_text("{}")
    for name in ("one", "two"):
        (split / f"{name}.safetensors").write_bytes(name.encode())
    assert digests("", tmp_path) == {}
    folder = tmp_path / "weights" / "org" / "small"
    assert digests(f"tiny-vit-digits, {folder}", tmp_path) == {
        "tiny-vit-digits": card("tiny-vit-digits")["sha256"],
        "weights/org/small": hashlib.sha256(b"weights").hexdigest(),
    }
    assert digests(str(split), tmp_path / "elsewhere") == {
        f"{split}/{name}.safetensors": hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")
    }
    (folder / "pytorch_model.bin").write_bytes(b"others")
    assert digests(str(folder), tmp_path)["weights/org/small"] == hashlib.sha256(b"others").hexdigest()


def test_a_trial_keeps_the_digest_of_its_weights_and_the_page_says_it(tmp_path):
    config = {**SMALL, "model": "tiny-vit", "pretrained": "tiny-vit-digits"}
    values = trained(Trial("one", {"config": config, "clients": 2}), TrialInputs(tmp_path))
    file = folder_of("tiny-vit-digits") / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert values["weights"] == {"tiny-vit-digits": digest}
    kept = {"seconds": 1.0, "computed": "2026-11-26T00:00:00+00:00"}
    trials = {"earlier": {**kept, "values": {}}, "one": {**kept, "values": values}, "two": {**kept, "values": values}}
    said = about(FedFrozenVision(KINDS["cifar-10"]), False, trials)
    assert [line for line in said if "sha256" in line] == [
        f"Pretrained weights: tiny-vit-digits (sha256 {digest[:8]}…)."
    ]
    earlier = {"earlier": trials["earlier"]}
    assert not any("sha256" in line for line in about(FedFrozenVision(KINDS["cifar-10"]), False, earlier))


@pytest.mark.parametrize("experiment", [FedFrozenVision(KINDS["cifar-10"]), Selective("labels")])
def test_all_that_the_full_setting_lacks_is_named_before_anything_is_computed(tmp_path, experiment):
    place, data = tmp_path / "out" / f"{experiment.name}-full", tmp_path / "data"
    (name,) = experiment.weights(full=True)
    with pytest.raises(MissingData) as error:
        reproduce(experiment, tmp_path / "out", full=True, log=print, data=data)
    assert "  cifar-10: " in str(error.value) and f"  {place / 'weights' / name}/: " in str(error.value)
    assert not place.exists() and experiment.weights(full=False) == {}
    (data / "cifar-10").mkdir(parents=True)
    (place / "weights" / name).mkdir(parents=True)  # without a file of weights in it
    with pytest.raises(MissingData) as error:
        reproduce(experiment, tmp_path / "out", full=True, log=print, data=data)
    assert "cifar-10: " not in str(error.value) and str(place / "weights" / name) in str(error.value)


# --- memory ---------------------------------------------------------------------------------------------------------


def of_config(name="one", **config):
    return Trial(name, {"config": {"dataset": "mnist", **config}, "clients": 2})


def test_the_least_memory_is_that_of_weights_gradients_and_what_is_kept_of_them():
    network = models.build("cnn", seed=0, image_shape=(1, 28, 28), classes=2)
    size = 4 * sum(parameter.numel() for parameter in network.parameters())
    plain = least_memory(of_config(model="cnn", optimizer="sgd"))
    assert (plain.training, plain.server) == (2 * size, 2 * size)
    assert least_memory(of_config(model="cnn", optimizer="sgd", momentum=0.9)).training == 3 * size
    assert least_memory(of_config(model="cnn", optimizer="adamw")).training == 4 * size
    modes = {"strategy": "fedensemble", "fedensemble.modes": 5}
    assert least_memory(of_config(model="cnn", **modes)).server == 6 * size
    assert least_memory(Trial("no run", {})).total == least_memory(of_config()).total == 0


def test_too_little_memory_is_said_before_anything_is_computed(monkeypatch):
    large, little = of_config("large", model="cnn", optimizer="sgd"), of_config("little", model="resnet-20")
    most, least = least_memory(large).total, least_memory(little).total
    monkeypatch.setattr(memory, "_free", lambda: most + least)
    check_memory([large, little], 4, torch.device("cpu"))
    check_memory([large, large, little], 1, torch.device("cpu"))
    with pytest.raises(TooLittleMemory, match=r"the 2 largest trials need at least 0\.1 GB.*lower --at-once"):
        check_memory([large, little, large], 2, torch.device("cpu"))
    monkeypatch.setattr(memory, "_free", lambda: most - 1)
    with pytest.raises(TooLittleMemory, match=r"the largest trial needs at least 0\.0 GB"):
        check_memory([large], 2, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10**9))
    monkeypatch.setattr(memory, "_free", lambda: least_memory(large).server)
    with pytest.raises(TooLittleMemory, match="0 GB of memory of cuda:1 are free"):
        check_memory([large], 1, torch.device("cuda:1"))


# --- devices --------------------------------------------------------------------------------------------------------


def test_clients_train_on_the_device_that_is_named(tmp_path):
    configs = []

    def grid(nodes, values):
        configs.extend(node.config for node in nodes)
        return InProcessGrid(nodes, values)

    for device in ("cpu", ""):
        trial = Trial(f"on-{device}", {"config": SMALL, "clients": 2})
        trained(trial, TrialInputs(tmp_path, device=device), grid=grid)
    assert [config.get("device") for config in configs] == ["cpu", "cpu", None, None]


def test_a_device_that_is_not_there_is_refused_with_those_that_are(tmp_path, monkeypatch):
    assert find_device("cpu") == torch.device("cpu") and described(find_device("cpu"), 2) == "cpu"
    for name in ("cuda:77", "gpu"):
        ended = CliRunner().invoke(main, ["reproduce", "ensemble-toy", "--folder", str(tmp_path), "--device", name])
        assert ended.exit_code == 1
        assert f"--device {name} is not on this machine: choose one of auto, cpu" in ended.stderr
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    assert described(torch.device("cuda"), 1) == "cuda (Card)"
    assert described(torch.device("cuda"), 3) == "cuda (Card); 3 trials at once share its memory and its time"


# --- the time that is left ------------------------------------------------------------------------------------------


def rounds_of(name, rounds, strategy="fedavg"):
    return Trial(name, {"config": {"num-server-rounds": rounds, "strategy": strategy}})


def test_the_time_left_is_that_of_the_rounds_of_the_trials_to_come():
    trials = [rounds_of("a", 10), rounds_of("b", 40), rounds_of("c", 20, "fedacs"), rounds_of("d", 10, "fedacs")]
    left = TimeLeft(trials, {}, list("abcd"), at_once=1)
    assert left.seconds() is None and left.text() == ""
    left.begun("a", 30.0)
    assert left.seconds() == pytest.approx(30 * 80) and left.text() == "about 40 minutes left (4 trials)"
    left.ended("a", 600.0)  # a minute a round
    assert left.seconds() == pytest.approx(60 * 70)
    left.ended("c", 4_000.0)  # 200 seconds a round, of this strategy alone
    assert left.seconds() == pytest.approx(60 * 40 + 200 * 10)
    left.ended("b", None)
    assert left.seconds() == pytest.approx(2_000) and left.text() == "about 33 minutes left (1 trial)"
    left.ended("d", 2_000.0)
    assert left.text() == ""


def test_trials_that_were_kept_count_and_others_run_beside_each_other():
    trials = [rounds_of(f"t{k}", 10) for k in range(9)] + [Trial("no run", {})]
    left = TimeLeft(trials, {"t0": 7_200.0}, [f"t{k}" for k in range(1, 9)], at_once=2)
    assert left.text() == "about 8.0 hours left (8 trials)"
    few = TimeLeft(trials, {"t0": 7_200.0}, ["t1"], at_once=4)
    assert few.seconds() == pytest.approx(7_200)
    assert TimeLeft(trials, {"t0": 30.0}, ["t1"], at_once=1).text() == "", "below a minute"


@pytest.mark.parametrize("needed_by", [3, 2])
def test_a_pretraining_that_all_others_need_tells_nothing_about_them(needed_by):
    others = [replace(rounds_of(f"t{k}", 10), needs=("first",) * (k < needed_by)) for k in range(3)]
    left = TimeLeft([rounds_of("first", 6), *others], {}, ["first", "t0", "t1", "t2"], at_once=1)
    left.begun("first", 300.0)
    assert left.known == (needed_by < 3)
    left.ended("first", 1_800.0)
    assert left.known == bool(left.text()) == (needed_by < 3)
    left.begun("t0", 12.0)
    left.ended("t1", 120.0)
    assert left.known and (left.text() == "about 4 minutes left (2 trials)") == (needed_by == 3)


@pytest.mark.parametrize("linked", [True, False])
def test_an_estimate_is_logged_after_two_rounds_and_then_at_intervals(tmp_path, monkeypatch, linked):
    """By the newest run of a trial, here and on a cluster, whose machines send no link to it."""
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    for name, seconds in (("20261129-101500-fedavg", 30.0), ("20261129-101000-fedavg", 900.0)):
        run = tmp_path / "runs" / "a" / "runs" / name
        run.mkdir(parents=True)
        (run / METRICS).write_text("".join(json.dumps({"round": k, "seconds": seconds}) + "\n" for k in (1, 2)))
        (run / NOW).write_text(json.dumps({"round": 3, "rounds": 100}))
    if linked:
        (run.parent / LATEST).symlink_to("20261129-101500-fedavg")
    lines, trials = [], [rounds_of(name, 100) for name in ("a", "b", "c", "d")]
    with Progress(tmp_path, TimeLeft(trials, {}, list("abcd"), at_once=1), lines.append) as said:
        give_up = time.monotonic() + 30
        while not lines:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert lines == ["   about 3.3 hours left (4 trials)"]
        said.ended("a", 3_600.0)
        assert len(lines) == 1, "within a minute of the one before"
        monkeypatch.setattr(progress, "SECONDS", 0.0)
        said.ended("b", 3_600.0)
    assert lines[1] == "   about 2.0 hours left (2 trials)"
