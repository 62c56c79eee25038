"""The papers' claims on settings of less than a minute, with the size of the effect as the threshold."""

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tepal.tools.reproduce.data import Images, by_distribution, grouped, write_images
from tepal.tools.reproduce.ensemble_images import EnsembleMnist
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.fedfrozen_vision import KINDS, WITHIN, FedFrozenVision
from tepal.tools.reproduce.runs import measured
from tests.quiet import quiet  # noqa: F401

pytestmark = pytest.mark.long
FASHION = FedAcs("fashion-mnist", "Fashion-MNIST")


def config_of(experiment, trial):
    return next(dict(each.options["config"]) for each in experiment.trials(False) if each.name == trial)


def on(dataset, config):
    """A few clients of an experiment's config, on a data set at hand."""
    if dataset == "digits":
        return {**config, "dataset": "digits", "image-shape": "", "normalise": "", "model": "cnn"}
    folder = os.environ.get("TEPAL_TEST_DATA")
    if not folder:
        pytest.skip("TEPAL_TEST_DATA names no folder with data sets")
    return {**config, "dataset": dataset, "dataset-path": str(Path(folder) / f"{dataset.replace('-', '_')}.npz")}


@pytest.mark.parametrize("dataset", ["digits", "mnist"])
def test_fed_ensemble_is_above_fedavg_with_two_labels_a_client(tmp_path, dataset):
    scores = {}
    for method in ("fedavg", "fedensemble"):
        config = on(dataset, config_of(EnsembleMnist(), f"{method}-two-labels-1"))
        config |= {"learning-rate": 0.1, "local-steps": 20}
        if dataset == "digits":
            config |= {"fedensemble.modes": 3, "num-server-rounds": 60, "evaluate-every": 6, "batch-size": 10,
                       "local-steps": 6}  # fmt: skip
        curve = measured(config, 40 if dataset == "digits" else 50, tmp_path / method)["curve"]
        scores[method] = np.mean([score for number, score in curve[-2:]])
    assert scores["fedensemble"] > scores["fedavg"] + 0.005, scores


@pytest.mark.parametrize("dataset", ["digits", "fashion-mnist"])
def test_fedacs_is_above_fedavg_with_two_classes_a_client(tmp_path, dataset):
    scores = {}
    for method in ("fedavg", "fedacs"):
        config = on(dataset, config_of(FASHION, f"two-classes-{method}-1"))
        config |= {"num-server-rounds": 8, "fedacs.quantile": 0.7, "learning-rate": 0.1}
        if dataset != "digits":
            config |= {"local-steps": 8}
        scores[method] = measured(config, 20, tmp_path / method)["clients"]
    assert scores["fedacs"] > scores["fedavg"] + 0.2, scores


def digits(examples=1797):
    """The digits in an order of their own, with the range of grey values of a file of images."""
    found, order = load_digits(), np.random.default_rng(0).permutation(1797)[:examples]
    return Images((found.images[order, None] * 255 / 16).astype(np.uint8), found.target[order].astype(np.int64))


def test_fedacs_is_above_local_training_with_few_examples_each(tmp_path):
    images, scores = digits(), {}
    path = write_images(tmp_path / "d.npz", grouped(images, by_distribution(images.labels, 10, 40, 0.5, seed=1)))
    for method in ("local", "fedacs"):
        config = config_of(FASHION, f"scarce-{method}-1") | {
            "dataset": str(path), "image-shape": "", "normalise": "", "model": "cnn", "batch-size": 10,
            "test-fraction": 0.5, "fedacs.quantile": 0.5, "learning-rate": 0.1,
        }  # fmt: skip
        scores[method] = measured(config, 10, tmp_path / method)["clients"]
    assert scores["fedacs"] > scores["local"] + 0.05, scores


def test_fedfrozen_is_as_accurate_as_fedavg_with_fewer_bytes(tmp_path):
    """From trained weights."""
    found = {}
    for method in ("fedavg", "fedfrozen"):
        config = config_of(FedFrozenVision(KINDS["cifar-10"]), f"{method}-0.3-1") | {
            "dataset": "digits", "model": "tiny-vit", "pretrained": "tiny-vit-digits", "normalise": "",
            "augment-flip": False, "learning-rate": 0.001, "held-out-fraction": 0.3,
        }  # fmt: skip
        found[method] = measured(config, 10, tmp_path / method)
    assert abs(found["fedfrozen"]["server"] - found["fedavg"]["server"]) <= WITHIN, found
    assert found["fedfrozen"]["server"] > 0.97 and found["fedfrozen"]["bytes"] < 0.95 * found["fedavg"]["bytes"]
