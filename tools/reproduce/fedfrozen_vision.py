"""CIFAR-10 of FedFrozen (arXiv 2605.06446): seven methods, ten clients, three Dirichlet distributions, from pretrained
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tepal.tools.reproduce.data import shuffled_images, write_images
from tepal.tools.reproduce.experiment import Cell, NotAtHand, Outcome, Place, Table, Values
from tepal.tools.reproduce.networks import VIT
from tepal.tools.reproduce.runs import by_setting, curves, mean_text, measured, trained

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
"""A run of this project whose model others start from: other images, with other classes."""
_TRAIN, _TEST = 5_000, 2_000
WEIGHTS = "weights"
"""Folder of what is pretrained; of the full scale, where the paper's weights are looked for."""


class FedFrozenVision:
    """Accuracy by method and α."""

    name = "fedfrozen-vision"
    title = "FedFrozen and its rivals on CIFAR-10"
    paper = "FedFrozen, table of accuracies, CIFAR-10 (arXiv 2605.06446)"
    deviations = (
        "The small setting's weights are from eight rounds of FedAvg on PACS, with other images and classes, not from "
        "ImageNet; --full starts from the paper's ImageNet weights of ViT-B/32, put at weights/vit-b-32.",
    )

    def data(self, full: bool) -> Sequence[str]:
        return ("cifar-10",) if full else ("cifar-10", "pacs")

    def scale(self, full: bool) -> str:
        same = f"{_TRAIN:,} training and {_TEST:,} test images, ten clients, ten rounds, seed 42"
        if full:
            return f"{same}, ViT-B/32 on images of 224x224, ten epochs a round: nothing is scaled."
        return (
            f"{same} as in the paper, but a ViT of 314,186 parameters on images of 32x32, one epoch a round instead of "
            "ten, and a learning rate of .001 instead of .0001."
        )

    def cells(self, full: bool) -> Sequence[Cell]:
        first = [] if full else [Cell("pretrained", {"config": PRETRAIN, "clients": 2})]
        return first + [
            Cell(
                f"{method.lower()}-{alpha}",
                {
                    "config": {
                        **_COMMON, **(_FULL if full else _SMALL), **keys, "dirichlet-alpha": alpha, "seed": 42
                    },
                    "clients": 10,
                },
                needs=() if full else ("pretrained",),
            )
            for alpha in ALPHAS for method, keys in METHODS.items()
        ]  # fmt: skip

    def compute(self, cell: Cell, place: Place) -> Values:
        weights = place.folder / WEIGHTS / "vit.safetensors"
        if cell.name == "pretrained":
            config = {**cell.options["config"], "dataset-path": str(place.data["pacs"])}
            return measured(config, cell.options["clients"], place.folder / "runs" / cell.name, weights=weights)
        if not cell.needs:
            weights = place.folder / WEIGHTS / "vit-b-32"
            if not weights.exists():
                raise NotAtHand(
                    f"put torchvision's ImageNet weights of ViT-B/32 (vit_b_32, IMAGENET1K_V1) into {weights}, as "
                    "model.safetensors or pytorch_model.bin"
                )
        images = place.folder / "images" / "cifar-10.npz"
        if not images.exists():
            train, test = shuffled_images("cifar-10", place.data["cifar-10"], seed=42)
            if test is None or len(train) < _TRAIN or len(test) < _TEST:
                raise NotAtHand(f"{place.data['cifar-10']} has fewer than {_TRAIN} and {_TEST} images")
            write_images(images, train.first(_TRAIN), test.first(_TEST))
        return trained(cell, place, dataset=str(images), pretrained=str(weights))

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        def of(method: str, alpha: float) -> list[Values]:
            return [found[name] for name in (f"{method.lower()}-{alpha}",) if name in found]

        def score(method: str, alpha: float) -> list[float]:
            return [values["server"] for values in of(method, alpha)]

        rows = []
        for method in METHODS:
            theirs = PAPER[method]
            ours = [mean_text(score(method, alpha)) for alpha in ALPHAS]
            megabytes = [values["bytes"] / 1e6 for alpha in ALPHAS for values in of(method, alpha)]
            moved = sum(megabytes) / len(megabytes) if megabytes else None
            rows.append((method, *(each for pair in zip(ours, theirs, strict=True) for each in pair), moved))
        headings = ("method", *(each for alpha in ALPHAS for each in (f"α = {alpha}", "paper")), "MB moved")
        figures = [
            curves({method: of(method, alpha) for method in METHODS}, f"alpha-{k}", f"CIFAR-10, α = {alpha}", _CAPTION)
            for k, alpha in enumerate(ALPHAS) if any(of(method, alpha) for method in METHODS)
        ]  # fmt: skip
        if figures:
            lines = {method: {alpha: score(method, alpha) for alpha in ALPHAS} for method in METHODS}
            figures.append(by_setting(lines, "alphas", "After ten rounds", "α of the Dirichlet distribution", _CAPTION))
        findings = []
        if "pretrained" in found:
            findings.append(f"Pretraining reached {found['pretrained']['server']:.4f} on held-out images of PACS.")
        for alpha in ALPHAS:
            frozen, whole = score("FedFrozen", alpha), score("FedAvg", alpha)
            if frozen and whole:
                k = ALPHAS.index(alpha)
                gain = PAPER["FedFrozen"][k] - PAPER["FedAvg"][k]
                findings.append(
                    f"α = {alpha}: FedFrozen is {abs(frozen[0] - whole[0]):.4f} "
                    f"{'above' if frozen[0] > whole[0] else 'below'} FedAvg (paper: {abs(gain):.4f} "
                    f"{'above' if gain > 0 else 'below'})."
                )
        return Outcome([Table("Accuracy by method", headings, rows)], figures, findings)


_CAPTION = "On 2,000 test images, which no client has."
