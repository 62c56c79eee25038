"""FedFrozen and six other methods on CIFAR-10 (arXiv 2605.06446), from pretrained weights, at three Dirichlet α."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tepal.tools.reproduce.data import shuffled_images, write_images
from tepal.tools.reproduce.experiment import (
    WEIGHTS,
    Experiment,
    MissingData,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
    joined,
)
from tepal.tools.reproduce.runs import by_setting, curves, slug
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import Scores, by_seed, differences, on_server, versus
from tepal.tools.spaces import Range, Space

ALPHAS = (0.1, 0.3, 0.5)
SEARCHED = 0.3
"""The α at which the settings of every method are searched."""
_SGD = {"optimizer": "sgd", "weight-decay": 0.0}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "FedAvg, SGD": {"strategy": "fedavg", **_SGD},
    "FedProx": {"strategy": "fedprox"},
    "FedAvgM": {"strategy": "fedavgm"},
    "FedAdam": {"strategy": "fedadam", "fedadam.tau": 0.001},
    "FedNova": {"strategy": "fednova"},
    "SCAFFOLD": {"strategy": "scaffold", **_SGD},
    "FedFrozen": {"strategy": "fedfrozen", "fedfrozen.warmup-rounds": 5},
}
_ADAMW, _OF_SGD = Range(1e-4, 1e-2, log=True), Range(1e-3, 1.0, log=True)
SEARCH: Mapping[str, Mapping[str, Space]] = {
    "FedAvg": {"learning-rate": _ADAMW},
    "FedAvg, SGD": {"learning-rate": _OF_SGD},
    "FedProx": {"learning-rate": _ADAMW, "fedprox.mu": Range(1e-3, 1.0, log=True)},
    "FedAvgM": {"learning-rate": _ADAMW, "fedavgm.learning-rate": Range(0.1, 1.0, log=True),
                "fedavgm.momentum": Range(0.3, 0.9)},
    "FedAdam": {"learning-rate": _ADAMW, "fedadam.learning-rate": Range(1e-4, 1e-2, log=True)},
    "FedNova": {"learning-rate": _ADAMW},
    "SCAFFOLD": {"learning-rate": _OF_SGD},
    "FedFrozen": {"learning-rate": _ADAMW},
}  # fmt: skip
"""Method → the run config keys that are searched, and among which values."""
PAPER = {
    "FedAvg": (0.9070, 0.9270, 0.9385), "FedProx": (0.9150, 0.9395, 0.9510), "FedAvgM": (0.6015, 0.6540, 0.7030),
    "FedAdam": (0.7445, 0.8930, 0.9105), "FedNova": (0.9155, 0.9260, 0.9440), "SCAFFOLD": (0.9295, 0.9475, 0.9560),
    "FedFrozen": (0.9040, 0.9325, 0.9470),
}  # fmt: skip
"""Method → accuracy by α."""
DECIDING = ("FedAvg", "FedFrozen")
"""The methods of the paper's claim, which the small setting runs at every α; the others only at `SEARCHED`."""
WITHIN = 0.005
"""The difference to FedAvg's accuracy up to which the claim that nothing is lost counts as shown."""

_COMMON: Mapping[str, Any] = {
    "partitioner": "dirichlet", "num-server-rounds": 10, "optimizer": "adamw", "weight-decay": 0.01,
    "schedule": "cosine", "batch-size": 32, "test-fraction": 0.02, "fraction-evaluate": 0.0,
    "score-in-training": False,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "model": "compact-vit", "pretrained": "compact-vit-c100", "normalise": "cifar-100", "augment-flip": True,
    "local-epochs": 1, "evaluate-every": 2,
}  # fmt: skip
_FULL: Mapping[str, Any] = {
    "model": "vit-b-32", "image-shape": "3x224x224", "normalise": "cifar-10", "local-epochs": 10, "evaluate-every": 1,
}  # fmt: skip
_TRAIN, _TEST, _VALIDATION = 5_000, 2_000, 1_000
_SAME = f"{_TRAIN:,} training and {_TEST:,} test images, ten clients, ten rounds"
_CAPTION = "Accuracy of the global model on 2,000 test images that no client has."


class FedFrozenVision(Experiment):
    """Accuracy by method and α."""

    name = "fedfrozen-vision"
    title = "FedFrozen and other methods on CIFAR-10"
    paper = "FedFrozen, table of accuracies, CIFAR-10 (arXiv 2605.06446)"
    datasets = ("cifar-10",)
    deviations = (
        "The learning rate of every method, and its own options, are found by the same number of trials of Optuna's "
        f"TPE sampler at α = {SEARCHED}, on training images that the results do not have, and scored on "
        f"{_VALIDATION:,} further ones. The paper has one rate for all, and does not say how it was found.",
        "Differences are paired by seed; intervals are Student's at 95 %. The paper has one seed.",
        "FedAvg with SGD is not in the paper: SCAFFOLD needs SGD, and this is what it is to be compared with.",
    )
    small_scale = (
        f"{_SAME} as in the paper, but a vision transformer of 32x32 pixels that was trained on CIFAR-100 "
        "(compact-vit-c100), one epoch per round instead of ten; five seeds, six trials of a search. α = .1 and .5 for "
        "FedAvg and FedFrozen only."
    )
    full_scale = (
        f"{_SAME}, ViT-B/32 on images of 224x224 from the paper's ImageNet weights in weights/vit-b-32, ten epochs per "
        "round; five seeds (the paper has one), twelve trials of a search."
    )

    def weights(self, full: bool) -> Mapping[str, str]:
        of_imagenet = "torchvision's ImageNet weights of ViT-B/32 (vit_b_32, IMAGENET1K_V1)"
        return {_FULL["model"]: of_imagenet} if full else {}

    def trials(self, full: bool) -> Sequence[Trial]:
        searched, trials = 12 if full else 6, list[Trial]()
        for method, search in SEARCH.items():
            trials += search_trials(slug(method), _options(method, SEARCHED, SEED, full, "search"), search, searched)
            needs = tuple(f"{slug(method)}-search-{number}" for number in range(searched))
            trials += [
                Trial(f"{_name(method, alpha)}-{seed}", _options(method, alpha, seed, full, "main"), needs)
                for alpha in ALPHAS if full or alpha == SEARCHED or method in DECIDING
                for seed in (1, 2, 3, 4, 5)
            ]  # fmt: skip
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        part, files = trial.options["part"], dict[str, Any]()
        if trial.options["full"]:
            files["pretrained"] = str(inputs.folder / WEIGHTS / _FULL["model"])
        files["dataset"] = str(_images(inputs, part))
        return tuned(trial, inputs, SEARCH[trial.options["method"]], **files)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        parts, lines = list[Reproduction](), dict[str, dict[float, list[float]]]()
        for place, alpha in enumerate(ALPHAS):
            runs = {method: of for method in METHODS if (of := by_seed(found, _name(method, alpha)))}
            scores, what = on_server(runs), f"α = {alpha}"
            if "FedFrozen" not in scores:
                continue
            for method, seeds in scores.items():
                lines.setdefault(method, {})[alpha] = [*seeds.values()]
            paper = {method: of_alpha[place] for method, of_alpha in PAPER.items()}
            title = f"Accuracy at {what}, {len(scores['FedFrozen'])} seeds"
            parts.append(versus("FedFrozen", runs, scores, title, what=what, paper=paper))
            shown = {method: [*of.values()] for method, of in runs.items()}
            figure = curves(shown, f"alpha-{place}", f"CIFAR-10, {what}", _CAPTION)
            parts.append(Reproduction([], [figure], [*_as_accurate(scores, what)]))
        if parts:
            figure = by_setting(lines, "alphas", "After ten rounds", "α of the Dirichlet distribution", _CAPTION)
            parts.append(Reproduction([], [figure]))
        return joined(*parts)


def _name(method: str, alpha: float) -> str:
    return f"{slug(method)}-{alpha}"


def _options(method: str, alpha: float, seed: int, full: bool, part: str) -> dict[str, Any]:
    config = {**_COMMON, **(_FULL if full else _SMALL), **METHODS[method], "dirichlet-alpha": alpha, "seed": seed}
    return {"method": method, "part": part, "full": full, "config": config, "clients": 10}


def _images(inputs: TrialInputs, part: str) -> Path:
    """A file of the images of the results or of the search, written once; they share none."""
    path = inputs.folder / "images" / f"cifar-10-{part}.npz"
    if not path.exists():
        train, test = shuffled_images("cifar-10", inputs.data["cifar-10"], seed=42)
        if test is None or len(train) < _TRAIN + 2 * _VALIDATION or len(test) < _TEST:
            raise MissingData(f"{inputs.data['cifar-10']} has fewer than {_TRAIN + 2 * _VALIDATION} and {_TEST} images")
        if part == "main":
            return write_images(path, train.first(_TRAIN), test.first(_TEST))
        others = train.first(min(_TRAIN, len(train) - _TRAIN), after=_TRAIN)
        count = len(others) - _VALIDATION
        write_images(path, others.first(count), others.first(_VALIDATION, after=count))
    return path


def _as_accurate(scores: Scores, what: str) -> Iterator[str]:
    """Whether FedFrozen's accuracy is shown to be FedAvg's, up to `WITHIN`."""
    gain = differences("FedFrozen", {method: scores[method] for method in DECIDING if method in scores}).get("FedAvg")
    if gain and gain.interval:
        shown = "is" if gain.interval[0] >= -WITHIN and gain.interval[1] <= WITHIN else "is not shown to be"
        yield f"{what}: FedFrozen's accuracy {shown} within {WITHIN} of FedAvg's: {gain.text}."
