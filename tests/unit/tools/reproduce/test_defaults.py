"""The experiment that chooses defaults: what it compares, on which examples, and what it finds."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tepal.server_app.config import defaults
from tepal.tools.reproduce.data import Images, write_images
from tepal.tools.reproduce.defaults import SEEDS, Defaults
from tepal.tools.reproduce.experiment import TrialInputs
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.selective import Selective

TRIALS = {trial.name: trial for trial in Defaults().trials(False)}


def test_runs_differ_by_one_key_and_the_default_is_among_its_values():
    for key in ("fedacs.follow-rate", "fedamp.lambda", "selective.coupling"):
        of_seed = [trial.options for trial in TRIALS.values() if key in trial.options["config"]]
        values = {of["config"][key] for of in of_seed}
        assert defaults()[key] in values
        others = Counter(
            str([(name, value) for name, value in of["config"].items() if name not in (key, "seed")]) for of in of_seed
        )
        settings = 2 if key.startswith("selective") else 4
        assert len(of_seed) == settings * len(values) * len(SEEDS)
        assert set(others.values()) <= {len(values) * len(SEEDS) * k for k in (1, 2)} and 1 < len(others) <= settings


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Images whose labels are their brightness."""
    folder = tmp_path_factory.mktemp("data")
    labels = np.arange(7_200) % 10
    pixels = np.random.default_rng(0).integers(0, 25, (7_200, 1, 28, 28)) + 25 * labels[:, None, None, None]
    return TrialInputs(
        folder, {"fashion-mnist": write_images(folder / "fashion-mnist.npz", Images(pixels.astype(np.uint8), labels))}
    )


@pytest.mark.parametrize("setting", ["two-classes", "scarce"])
def test_values_are_compared_on_the_images_of_the_searches(inputs, setting, monkeypatch):
    files = []
    monkeypatch.setattr("tepal.tools.reproduce.defaults.trained", lambda *_, dataset: files.append(dataset))
    monkeypatch.setattr("tepal.tools.reproduce.tuning.trained", lambda *_, dataset, **__: files.append(dataset) or {})
    Defaults().compute(TRIALS[f"fedamplambda-fashion-mnist-{setting}-0.1-1003"], inputs)
    of = {trial.name: trial for trial in FedAcs("fashion-mnist", "").trials(False)}
    FedAcs("fashion-mnist", "").compute(of[f"{setting}-fedamp-search-0"], inputs)
    assert files[0] == files[1]
    searched = {trial.name: trial for trial in Selective("domains").trials(False)}["gradient-search-0"].options
    compared = TRIALS["selectivecoupling-domains-0.4-1005"].options
    assert (compared["part"], compared["clients"]) == (searched["part"], searched["clients"]) == ("search", 20)


def test_a_run_is_scored_on_the_clients_own_tests(inputs):
    trial = TRIALS["fedacsfollowrate-fashion-mnist-two-classes-true-1001"]
    config = {**trial.options["config"], "num-server-rounds": 2, "local-steps": 1}
    values = Defaults().compute(replace(trial, options={**trial.options, "config": config}), inputs)
    assert values["rounds"] == 2 and len(values["of_clients"]) == 12 and 0 <= values["clients"] <= 1


def found(key, scores):
    """Trials of settings → values → the accuracies by seed."""
    return {
        f"{key}-{setting}-{value}-{seed}": {"clients": score, "server": None}
        for setting, of in scores.items() for value, by_seed in of.items()
        for seed, score in zip(SEEDS, by_seed, strict=False)
    }  # fmt: skip


def test_the_best_value_is_named_with_its_difference_to_the_default_over_all_settings():
    zero, small = np.array([[0.50, 0.52, 0.51], [0.70, 0.71, 0.75]]), np.array([[0.53, 0.54, 0.52], [0.71, 0.73, 0.75]])
    settings = ("fashion-mnist-scarce", "cifar-10-scarce")
    scores = {setting: {"0.0": zero[k], "0.01": small[k]} for k, setting in enumerate(settings)}
    results = Defaults().results(found("fedamplambda", scores))
    gains = (small - zero).mean(axis=0)
    half = 4.302653 * np.std(gains, ddof=1) / 3**0.5  # Student's t, two degrees of freedom
    text = f"{gains.mean():+.4f} ({gains.mean() - half:+.4f} to {gains.mean() + half:+.4f}, undecided)"
    assert results.findings == [
        f"fedamp.lambda: 0.01 is best, {small.mean():.4f} over all settings; less that with 0.0, the default: {text}."
    ]
    rows = [list(row) for row in results.tables[0].rows]
    assert [row[:2] for row in rows][-2:] == [["all", "0.0"], ["all", "0.01"]] and len(rows) == 6
    assert rows[-1][3] == text and rows[-2][3] is None
    kept = Defaults().results(found("fedacsfollowrate", {"cifar-10-scarce": {"true": [0.9], "false": [0.8]}}))
    assert kept.findings == ["fedacs.follow-rate: true is best, 0.9000 over all settings; it is the default."]
