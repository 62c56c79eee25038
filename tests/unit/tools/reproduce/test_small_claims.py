"""The papers' claims on settings of less than a minute, with the size of the effect as the threshold."""

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tepal.tools.reproduce.data import Images, by_distribution, grouped, write_images
from tepal.tools.reproduce.ensemble_images import EnsembleMnist
from tepal.tools.reproduce.ensemble_shakespeare import EnsembleShakespeare, texts_by_role, write_roles
from tepal.tools.reproduce.fedacs import FedAcs
from tepal.tools.reproduce.fedfrozen_vision import KINDS, WITHIN, FedFrozenVision
from tepal.tools.reproduce.runs import measured, slug
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


@pytest.mark.parametrize("dataset", ["digits", "shakespeare"])
def test_fed_ensemble_is_above_fedavg_where_fedavg_overfits(tmp_path, dataset):
    """Little data: characters of five roles; or digits, four of ten training labels of which are drawn at random."""
    configs = few_roles(tmp_path) if dataset == "shakespeare" else doubtful_digits(tmp_path)
    ends, falls = {}, {}
    for method, config in configs.items():
        curve = measured(config, 5 if dataset == "shakespeare" else 10, tmp_path / method)["curve"]
        ends[method], falls[method] = curve[-1][1], max(score for _, score in curve) - curve[-1][1]
    assert falls["fedavg"] > (0.01 if dataset == "shakespeare" else 0.05), falls
    assert ends["fedensemble"] > ends["fedavg"] + (0.01 if dataset == "shakespeare" else 0.02), ends


def doubtful_digits(folder):
    images, random = digits(), np.random.default_rng(1)
    labels, drawn = images.labels[:300].copy(), random.random(300) < 0.4
    labels[drawn] = random.integers(0, 10, drawn.sum())
    np.savez(
        folder / "digits.npz",
        x_train=images.images[:300], y_train=labels, x_test=images.images[800:], y_test=images.labels[800:],
    )  # fmt: skip
    own = {"dataset": str(folder / "digits.npz"), "image-shape": "", "normalise": "", "model": "cnn", "batch-size": 10,
           "partitioner": "iid", "learning-rate": 0.1, "local-steps": 15, "num-server-rounds": 60,
           "evaluate-every": 10}  # fmt: skip
    found = {}
    for method, modes in (("fedavg", {}), ("fedensemble", {"fedensemble.modes": 5})):
        config = config_of(EnsembleMnist(), f"{method}-two-labels-1") | own | modes
        found[method] = {key: value for key, value in config.items() if key != "classes-per-partition"}
    return found


def few_roles(folder):
    if not (data := os.environ.get("TEPAL_TEST_DATA")):
        pytest.skip("TEPAL_TEST_DATA names no folder with data sets")
    write_roles(folder / "roles.jsonl", texts_by_role(Path(data) / "shakespeare_roles.jsonl.xz"), 1, full=False)
    rows = (folder / "roles.jsonl").read_text().splitlines(keepends=True)
    (folder / "roles.jsonl").write_text("".join(rows[:10]))  # each role has two
    own = {"dataset": str(folder / "roles.jsonl"), "learning-rate": 0.02, "num-server-rounds": 40}
    return {
        method: config_of(EnsembleShakespeare(), f"{slug(name)}-11") | own
        for method, name in (("fedavg", "FedAvg"), ("fedensemble", "Fed-ensemble"))
    }


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


def test_fedfrozen_is_above_scaffold_from_trained_weights(tmp_path):
    """Both at the best of three rates, on other images than those of the weights: turned digits in negative."""
    images = digits()
    turned = 255 - images.images.transpose(0, 1, 3, 2)
    np.savez(
        tmp_path / "turned.npz",
        x_train=turned[:600], y_train=images.labels[:600], x_test=turned[800:], y_test=images.labels[800:],
    )  # fmt: skip
    best = {}
    for method, rates in (("fedfrozen", (0.0003, 0.001, 0.003)), ("scaffold", (0.01, 0.03, 0.1))):
        config = config_of(FedFrozenVision(KINDS["cifar-10"]), f"{method}-0.3-1") | {
            "dataset": str(tmp_path / "turned.npz"), "model": "tiny-vit", "pretrained": "tiny-vit-digits",
            "normalise": "", "augment-flip": False, "batch-size": 10,
        }  # fmt: skip
        best[method] = max(
            measured({**config, "learning-rate": rate}, 10, tmp_path / f"{method}-{rate}")["server"] for rate in rates
        )
    assert best["fedfrozen"] > best["scaffold"] + 0.1, best
