"""FedFrozen and six other methods on CIFAR-10 (arXiv 2605.06446), from pretrained weights, at three Dirichlet α."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tepal.tools.reproduce.data import shuffled_images, write_images
from tepal.tools.reproduce.experiment import Experiment, MissingData, Reproduction, Trial, TrialInputs, Values, table
from tepal.tools.reproduce.networks import VIT
from tepal.tools.reproduce.runs import by_setting, compared, curves, mean_text, slug, trained

ALPHAS = (0.1, 0.3, 0.5)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "FedProx": {"strategy": "fedprox", "fedprox.mu": 0.01},
    "FedAvgM": {"strategy": "fedavgm", "fedavgm.learning-rate": 1.0, "fedavgm.momentum": 0.9},
    "FedAdam": {"strategy": "fedadam", "fedadam.learning-rate": 0.001, "fedadam.tau": 0.001},
    "FedNova": {"strategy": "fednova"},
    "SCAFFOLD": {"strategy": "scaffold", "optimizer": "sgd", "learning-rate": 0.1, "weight-decay": 0.0},
    "FedFrozen": {"strategy": "fedfrozen", "fedfrozen.warmup-rounds": 5},
}
PAPER = {
    "FedAvg": (0.9070, 0.9270, 0.9385), "FedProx": (0.9150, 0.9395, 0.9510), "FedAvgM": (0.6015, 0.6540, 0.7030),
    "FedAdam": (0.7445, 0.8930, 0.9105), "FedNova": (0.9155, 0.9260, 0.9440), "SCAFFOLD": (0.9295, 0.9475, 0.9560),
    "FedFrozen": (0.9040, 0.9325, 0.9470),
}  # fmt: skip
"""Method → accuracy by α."""

_COMMON: Mapping[str, Any] = {
    "normalise": "cifar-10", "partitioner": "dirichlet", "num-server-rounds": 10, "evaluate-every": 1,
    "optimizer": "adamw", "weight-decay": 0.01, "schedule": "cosine", "batch-size": 32, "test-fraction": 0.02,
    "fraction-evaluate": 0.0, "score-in-training": False,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {"model": VIT, "local-epochs": 1, "learning-rate": 0.001}
_FULL: Mapping[str, Any] = {
    "model": "vit-b-32", "image-shape": "3x224x224", "local-epochs": 10, "learning-rate": 0.0001,
}  # fmt: skip
PRETRAIN: Mapping[str, Any] = {
    "model": VIT, "dataset": "pacs", "image-shape": "3x32x32", "normalise": "cifar-10", "partitioner": "iid",
    "strategy": "fedavg", "num-server-rounds": 8, "evaluate-every": 8, "local-epochs": 1, "batch-size": 32,
    "optimizer": "adamw", "learning-rate": 0.001, "held-out-fraction": 0.1, "test-fraction": 0.01,
    "fraction-evaluate": 0.0, "score-in-training": False, "seed": 42,
}  # fmt: skip
"""The run that pretrains the small model, on images of other classes."""
_TRAIN, _TEST = 5_000, 2_000
WEIGHTS = "weights"
"""Folder of pretrained weights; at the full scale the paper's are read from it."""
_SAME = f"{_TRAIN:,} training and {_TEST:,} test images, ten clients, ten rounds, seed 42"


class FedFrozenVision(Experiment):
    """Accuracy by method and α."""

    name = "fedfrozen-vision"
    title = "FedFrozen and six other methods on CIFAR-10"
    paper = "FedFrozen, table of accuracies, CIFAR-10 (arXiv 2605.06446)"
    deviations = (
        "The small setting starts from weights of eight rounds of FedAvg on PACS, which has other images and classes, "
        "not from ImageNet weights; --full starts from the paper's ImageNet weights of ViT-B/32 in weights/vit-b-32.",
    )
    small_scale = (
        f"{_SAME} as in the paper, but a ViT of 314,186 parameters on images of 32x32, one epoch per round instead "
        "of ten, and a learning rate of .001 instead of .0001."
    )
    full_scale = f"{_SAME}, ViT-B/32 on images of 224x224, ten epochs per round: nothing is reduced."

    def data(self, full: bool) -> Sequence[str]:
        return ("cifar-10",) if full else ("cifar-10", "pacs")

    def trials(self, full: bool) -> Sequence[Trial]:
        common, needs = {**_COMMON, **(_FULL if full else _SMALL)}, () if full else ("pretrained",)
        pretraining = [] if full else [Trial("pretrained", {"config": PRETRAIN, "clients": 2})]
        return pretraining + [
            Trial(
                _name(method, alpha),
                {"config": {**common, **keys, "dirichlet-alpha": alpha, "seed": 42}, "clients": 10},
                needs,
            )
            for alpha in ALPHAS for method, keys in METHODS.items()
        ]  # fmt: skip

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        weights = inputs.folder / WEIGHTS / "vit.safetensors"
        if trial.name == "pretrained":
            return trained(trial, inputs, weights=weights)
        if not trial.needs:
            weights = inputs.folder / WEIGHTS / "vit-b-32"
            if not weights.exists():
                raise MissingData(
                    f"put torchvision's ImageNet weights of ViT-B/32 (vit_b_32, IMAGENET1K_V1) into {weights}, as "
                    "model.safetensors or pytorch_model.bin"
                )
        images = inputs.folder / "images" / "cifar-10.npz"
        if not images.exists():
            train, test = shuffled_images("cifar-10", inputs.data["cifar-10"], seed=42)
            if test is None or len(train) < _TRAIN or len(test) < _TEST:
                raise MissingData(f"{inputs.data['cifar-10']} has fewer than {_TRAIN} and {_TEST} images")
            write_images(images, train.first(_TRAIN), test.first(_TEST))
        return trained(trial, inputs, dataset=str(images), pretrained=str(weights))

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        runs = {
            (method, alpha): [found[name] for name in (_name(method, alpha),) if name in found]
            for method in METHODS for alpha in ALPHAS
        }  # fmt: skip
        scores = {key: [values["server"] for values in each] for key, each in runs.items()}
        rows = []
        for method in METHODS:
            pairs = [(mean_text(scores[method, alpha]), PAPER[method][k]) for k, alpha in enumerate(ALPHAS)]
            megabytes = [values["bytes"] / 1e6 for alpha in ALPHAS for values in runs[method, alpha]]
            rows.append((method, *chain(*pairs), sum(megabytes) / len(megabytes) if megabytes else None))
        headings = ("method", *(each for alpha in ALPHAS for each in (f"α = {alpha}", "paper")), "MB transferred")
        figures = []
        for k, alpha in enumerate(ALPHAS):
            if any((methods := {method: runs[method, alpha] for method in METHODS}).values()):
                figures.append(curves(methods, f"alpha-{k}", f"CIFAR-10, α = {alpha}", _CAPTION))
        if figures:
            lines = {method: {alpha: scores[method, alpha] for alpha in ALPHAS} for method in METHODS}
            figures.append(by_setting(lines, "alphas", "After ten rounds", "α of the Dirichlet distribution", _CAPTION))
        findings = []
        if "pretrained" in found:
            findings.append(
                f"Pretraining reached an accuracy of {found['pretrained']['server']:.4f} on held-out images of PACS."
            )
        for k, alpha in enumerate(ALPHAS):
            frozen, whole = scores["FedFrozen", alpha], scores["FedAvg", alpha]
            if frozen and whole:
                theirs = compared([PAPER["FedFrozen"][k]], [PAPER["FedAvg"][k]])
                findings.append(f"α = {alpha}: FedFrozen is {compared(frozen, whole)} FedAvg (paper: {theirs}).")
        return Reproduction([table("Accuracy by method", headings, rows)], figures, findings)


_CAPTION = "Accuracy of the global model on 2,000 test images that no client has."


def _name(method: str, alpha: float) -> str:
    return f"{slug(method)}-{alpha}"
