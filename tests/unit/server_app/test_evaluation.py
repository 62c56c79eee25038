"""The server's scores: the calibration of every classifier, and images of no class that are flagged as uncertain."""

import json
import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import read_metrics
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.evaluation import server_evaluation
from tepal.server_app.run import build_model, run
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.report import RoundReport
from tepal.training import tasks
from tepal.training.data.inputs import held_out_inputs
from tepal.training.foreign_images import foreign_images
from tests.packages import ROOT

FLAGGED = ("flagged_letters", "flagged_noise", "flagged_covered")


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from client_app.app import app

    def start(**values):
        given = {key.replace("_", "-"): value for key, value in values.items()}
        config = {
            **defaults(), "runs": str(tmp_path), "model": "cnn", "num-server-rounds": 2, "local-steps": 4, **given
        }  # fmt: skip
        nodes = [{"partition-id": k, "num-partitions": 3} for k in range(3)]
        with monkeypatch.context() as patched:
            patched.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
            return read_metrics(run(InProcessGrid([Node(app, node) for node in nodes], config), config))

    return start


def modes(count, config):
    """The arrays of a run with an ensemble, or with one model, and the models."""
    made = [build_model(config, seed)[0] for seed in range(count)]
    with torch.no_grad():
        for parameter in (each for model in made for each in model.parameters()):
            parameter *= 2  # untrained models are equally uncertain of everything
    states = [model.state_dict() for model in made]
    prefixed = {f"mode/{k}/{name}": array for k, state in enumerate(states) for name, array in state.items()}
    return ArrayRecord(states[0] if count == 1 else prefixed), made


@pytest.mark.parametrize("members", [1, 3])
def test_flagged_images_are_those_more_uncertain_than_all_but_a_twentieth_of_the_held_out_ones(members):
    config = read_run_config({"model": "cnn", "foreign-images": True, "seed": 5, "normalise": "0.3/0.5"})
    arrays, models = modes(members, config)
    metrics = server_evaluation(config, build_model(config)[0])(1, arrays)
    held_out = held_out_inputs(config.data).values

    def entropies(images):
        with torch.no_grad():
            each = [model.eval()(torch.from_numpy(images)).double().softmax(dim=1) for model in models]
        return [-sum(p * math.log(p) for p in row if p) for row in torch.stack(each).mean(dim=0).tolist()]

    known = sorted(entropies(held_out))
    threshold = known[len(known) - 1 - len(known) // 20]
    assert metrics["entropy-threshold"] == pytest.approx(threshold, rel=1e-4)
    shares = []
    for name, images in foreign_images(held_out, 5).items():
        shares.append(np.mean([entropy > threshold for entropy in entropies(images)]))
        assert metrics[f"flagged-{name}"] == pytest.approx(shares[-1], abs=0.011), "one or two may be at the threshold"
    assert len({*shares, 0.0, 1.0}) > 2, "these models show nothing"


def test_foreign_images_change_no_other_score():
    plain, foreign = (read_run_config({"model": "cnn", "foreign-images": asked}) for asked in (False, True))
    arrays, _ = modes(3, plain)
    one, other = (dict(server_evaluation(config, build_model(config)[0])(1, arrays)) for config in (plain, foreign))
    assert one == {name: other[name] for name in one}
    assert {*other} - {*one} == {"entropy-threshold", *(name.replace("_", "-") for name in FLAGGED)}


def test_an_ensemble_of_one_is_calibrated_as_a_single_model():
    config = read_run_config({"model": "cnn"})
    arrays, [model] = modes(1, config)
    twice = ArrayRecord({f"mode/{k}/{name}": array for k in (0, 1) for name, array in model.state_dict().items()})
    one, two = (server_evaluation(config, build_model(config)[0])(1, each) for each in (arrays, twice))
    assert one["calibration-error"] == pytest.approx(two["calibration-error"], rel=1e-9)
    assert one["calibration-examples"] == two["calibration-examples"]


@pytest.mark.parametrize("strategy", ["fedavg", "fedensemble"])
def test_a_run_records_calibration_and_flagged_images_of_every_scored_round(small_run, strategy):
    lines = small_run(strategy=strategy, foreign_images=True)
    assert [line.round for line in lines] == [0, 1, 2]
    examples = len(held_out_inputs(read_run_config({}).data))
    for line in lines:
        assert 0 <= line.calibration_error <= 1 and sum(line.calibration_examples) == examples
        bins = [*zip(line.calibration_examples, line.calibration_accuracy, line.calibration_probability, strict=True)]
        assert math.fsum(n * right for n, right, _ in bins) / examples == pytest.approx(line.accuracy)
        error = math.fsum(n * abs(right - sure) for n, right, sure in bins) / examples
        assert line.calibration_error == pytest.approx(error)
        assert 0 <= line.entropy_threshold <= math.log(10)
        assert all(0 <= line.value(name) <= 1 for name in FLAGGED)
    again = small_run(strategy=strategy, foreign_images=True, deterministic=True)
    assert [again[0].value(name) for name in FLAGGED] == [lines[0].value(name) for name in FLAGGED]


def test_without_foreign_images_or_without_held_out_examples_a_line_has_no_such_columns(small_run):
    assert not any(line.to_line().keys() & {*FLAGGED, "entropy_threshold"} for line in small_run(strategy="fedavg"))
    for line in small_run(strategy="fedavg", held_out_fraction=0.0):
        assert not any(name.startswith("calibration") for name in line.to_line())


def test_lists_of_a_round_are_in_its_line_and_not_among_its_scores():
    report = RoundReport(1, "train")
    report.add_server_metrics(
        {"accuracy": 0.5, "calibration-accuracy": [0.5, 1.0], "calibration-examples": [3, 4], "unknown-list": [1]}
    )
    assert report.server_metrics == {"accuracy": 0.5} and "0.5000" in report.in_a_line(1)
    line = json.loads(json.dumps(RoundRecord.of(report, 1, tasks.IMAGES).to_line()))
    assert (line["calibration_accuracy"], line["calibration_examples"]) == ([0.5, 1.0], [3, 4])
    assert "unknown_list" not in line and "calibration_probability" not in line
    assert RoundRecord.from_line(line).calibration_examples == [3, 4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "char-lstm", "dataset": "plays.txt"}, "is for image classification, but model='char-lstm' is for"),
        ({"dataset": "local", "image-shape": "1x8x8", "classes": 10}, "dataset='local' the server has no held-out im"),
        ({"dataset": "emnist"}, "letters are among the classes of dataset='emnist'"),
        ({"class-names": "0,1,2,3,4,5,6,7,8,a"}, "letters are among the classes"),
        ({"held-out-fraction": 0.0}, "held-out-fraction=0: the server has no held-out images"),
    ],
)
def test_images_of_no_class_that_cannot_be_made_are_refused_before_a_run(values, message):
    with pytest.raises(ConfigError, match=message):
        read_run_config({"foreign-images": True, **values})


@pytest.mark.parametrize("strategy", ["fedacs", "fedamp", "ditto", "local"])
def test_images_of_no_class_are_refused_where_the_server_predicts_nothing(small_run, strategy):
    with pytest.raises(ConfigError, match=f"strategy='{strategy}' trains a personal model for each client"):
        small_run(strategy=strategy, foreign_images=True)
