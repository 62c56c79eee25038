"""FedFrozen and six other methods (arXiv 2605.06446, Table 1) from pretrained weights, at three Dirichlet α.

The paper has three data sets; each is an experiment of its own. The settings of every method are searched on images
that the results do not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.tools.compare.answers import Paired, paired
from tepal.tools.reproduce.data import Images, shuffled_images, write_images
from tepal.tools.reproduce.experiment import (
    WEIGHTS,
    Claim,
    Experiment,
    MissingData,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
    joined,
)
from tepal.tools.reproduce.runs import by_setting, curves, slug, trained
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import Runs, Scores, ahead, as_good, by_seed, claimed, differences, on_server, versus
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
    "FedFrozen": {"strategy": "fedfrozen"},
}
DECIDING = ("FedAvg", "FedFrozen")
"""The methods of the paper's claim, which the small settings run at every α; the others only at `SEARCHED`."""
WITH_SGD = ("SCAFFOLD", "FedAvg, SGD")
WITHIN = 0.005
"""The difference to FedAvg's accuracy up to which the claim that nothing is lost counts as shown; chosen here."""


def spaces(adamw: Range) -> dict[str, dict[str, Space]]:
    """Method → the run config keys that are searched, and among which values; `adamw`: learning rates of AdamW."""
    rate, of_sgd = {"learning-rate": adamw}, {"learning-rate": Range(1e-3, 1.0, log=True)}
    return {
        "FedAvg": {**rate},
        "FedAvg, SGD": {**of_sgd},
        "FedProx": {**rate, "fedprox.mu": Range(1e-3, 1.0, log=True)},
        "FedAvgM": {**rate, "fedavgm.learning-rate": Range(0.1, 1.0, log=True), "fedavgm.momentum": Range(0.3, 0.9)},
        "FedAdam": {**rate, "fedadam.learning-rate": Range(1e-4, 1e-2, log=True)},
        "FedNova": {**rate},
        "SCAFFOLD": {**of_sgd},
        "FedFrozen": {**rate},
    }


SEARCH = {False: spaces(Range(1e-4, 1e-2, log=True)), True: spaces(Range(1e-5, 1e-3, log=True))}
"""What is searched in the small setting, and in the full one, whose models are larger."""


@dataclass(frozen=True)
class Scale:
    """A setting of a kind.

    Args:
        config: changes to the run config of all runs.
        train, test: numbers of images of the results; a search has as many training images.
        validation: number of images that score a search.
        methods: those that are run.
        searched: trials of each search.
        alike: whether the searches of all methods have the same rates at first, see `search_trials`.
        unseen: number of classes that the runs have; the others are what the weights are trained on first. 0: all.
        sgd: changes to the run config of the methods that train by SGD.
    """

    config: Mapping[str, Any]
    train: int
    test: int
    methods: Sequence[str] = tuple(METHODS)
    searched: int = 6
    validation: int = 1_000
    alike: bool = True
    unseen: int = 0
    sgd: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Kind:
    """A data set: T_warm by α, number of clients, Table 1 (method → accuracy by α) and the settings.

    `weights`: in words, what the full setting starts from; `small_scale`, `deviations`: sentences.
    """

    name: str
    data: str
    title: str
    warmups: tuple[int, int, int]
    clients: int
    batch: int
    paper: Mapping[str, tuple[float, float, float]]
    small: Scale
    full: Scale
    weights: str
    backbone: str
    small_scale: str
    deviations: Sequence[str] = ()

    def setting(self, full: bool) -> Scale:
        return self.full if full else self.small


_COMMON: Mapping[str, Any] = {
    "partitioner": "dirichlet", "num-server-rounds": 10, "optimizer": "adamw", "weight-decay": 0.01,
    "schedule": "cosine", "test-fraction": 0.02, "fraction-evaluate": 0.0, "score-in-training": False,
}  # fmt: skip
_COMPACT: Mapping[str, Any] = {"model": "compact-vit", "normalise": "cifar-100", "local-epochs": 1, "evaluate-every": 5}
_SMALL: Mapping[str, Any] = {**_COMPACT, "pretrained": "compact-vit-c100"}
_FULL: Mapping[str, Any] = {"image-shape": "3x224x224", "local-epochs": 10, "evaluate-every": 1}
_VIT_B_32 = "torchvision's ImageNet weights of ViT-B/32 (vit_b_32, IMAGENET1K_V1)"
_SEEN = (
    "a vision transformer of 32x32 pixels that was trained on CIFAR-100 (compact-vit-c100) and one epoch per round "
    "instead of ten"
)
_OTHERS_AT = f"α = .1 and .5 for FedAvg and FedFrozen only, the other methods at {SEARCHED}."
_ALIKE = (
    " The first five trials of a search are spread evenly over the ranges, with the same rates for all methods of one "
    "optimizer."
)
_MOMENTUM = (
    "As in the paper, --full trains SCAFFOLD with momentum .9, with which its control variates are weighted means of "
    "the steps' gradients, and in its own paper plain means; FedAvg with SGD has it, too. The small setting has none."
)
KINDS: Mapping[str, Kind] = {
    "cifar-10": Kind(
        "fedfrozen-vision", "cifar-10", "CIFAR-10", (5, 5, 5), 10, 32,
        {"FedAvg": (0.9070, 0.9270, 0.9385), "FedProx": (0.9150, 0.9395, 0.9510), "FedAvgM": (0.6015, 0.6540, 0.7030),
         "FedAdam": (0.7445, 0.8930, 0.9105), "FedNova": (0.9155, 0.9260, 0.9440),
         "SCAFFOLD": (0.9295, 0.9475, 0.9560), "FedFrozen": (0.9040, 0.9325, 0.9470)},
        Scale({**_SMALL, "augment-flip": True}, 2_500, 2_000, alike=False),
        Scale({**_FULL, "model": "vit-b-32", "normalise": "cifar-10"}, 5_000, 2_000, searched=12),
        _VIT_B_32, "ViT-B/32",
        f"2,500 training and 2,000 test images, ten clients, ten rounds, {_SEEN}; five seeds, six trials of a search. "
        f"{_OTHERS_AT}",
    ),
    "cifar-100": Kind(
        "fedfrozen-cifar-100", "cifar-100", "CIFAR-100", (3, 3, 3), 20, 32,
        {"FedAvg": (0.6450, 0.6725, 0.6860), "FedProx": (0.6160, 0.6545, 0.6580), "FedAvgM": (0.4875, 0.4865, 0.4905),
         "FedAdam": (0.4135, 0.5015, 0.4870), "FedNova": (0.6380, 0.6735, 0.6835),
         "SCAFFOLD": (0.3880, 0.4480, 0.4730), "FedFrozen": (0.6690, 0.6790, 0.6955)},
        Scale({**_COMPACT, "augment-flip": True}, 2_500, 1_000,
              ("FedAvg", "FedAvg, SGD", "FedProx", "SCAFFOLD", "FedFrozen"), searched=5, unseen=20),
        Scale({**_FULL, "model": "vit-b-32", "normalise": "cifar-100", "classes": 100}, 5_000, 2_000, searched=12,
              sgd={"momentum": 0.9}),
        _VIT_B_32, "ViT-B/32",
        "A vision transformer of 32x32 pixels (compact-vit) is trained for six epochs on 80 of the 100 classes; 20 "
        "clients then have 2,500 images of the other 20 (drawn by seed 42), tested on 1,000; ten rounds of one epoch; "
        f"five seeds, five trials of a search; without FedAvgM, FedAdam and FedNova. {_OTHERS_AT}",
        ("The paper's accuracies are of 100 classes, those of the small setting of 20.", _MOMENTUM),
    ),
    "femnist": Kind(
        "fedfrozen-femnist", "femnist", "FEMNIST", (2, 5, 5), 10, 64,
        {"FedAvg": (0.7880, 0.8070, 0.8100), "FedProx": (0.7900, 0.8100, 0.8080), "FedAvgM": (0.7540, 0.7700, 0.7930),
         "FedAdam": (0.7580, 0.7710, 0.7860), "FedNova": (0.8060, 0.8070, 0.8160),
         "SCAFFOLD": (0.7300, 0.7580, 0.7700), "FedFrozen": (0.7890, 0.8100, 0.8120)},
        Scale({**_SMALL, "image-shape": "3x32x32", "classes": 62}, 2_500, 2_000),
        Scale({**_FULL, "model": "facebook/deit-small-patch16-224", "normalise": "0.1736/0.3317", "classes": 62},
              5_000, 2_000, searched=12, sgd={"momentum": 0.9}),
        "the ImageNet weights facebook/deit-small-patch16-224 of the Hugging Face hub", "ViT-S/16",
        "2,500 training and 2,000 test images, from grey to colour and resized to 32x32 pixels, ten clients, ten "
        f"rounds, {_SEEN}; five seeds, six trials of a search. {_OTHERS_AT}",
        ("The paper does not say which ImageNet weights of ViT-S/16 it has: --full has DeiT's. It does not print "
         "EMNIST's mean and standard deviation: .1736 and .3317 here.",
         "Images are drawn without regard to writers, and divided by labels, as in the paper.", _MOMENTUM),
    ),
}  # fmt: skip
"""Data set → its experiment."""
PRETRAIN: Mapping[str, Any] = {
    **_COMPACT, "strategy": "fedavg", "partitioner": "iid", "num-server-rounds": 6, "evaluate-every": 6,
    "optimizer": "adamw", "learning-rate": 0.002, "weight-decay": 0.05, "schedule": "cosine", "batch-size": 64,
    "augment-flip": True, "test-fraction": 0.001, "fraction-evaluate": 0.0, "score-in-training": False,
    "min-clients": 1, "seed": 42,
}  # fmt: skip
"""The run that trains the weights of a setting with unseen classes: one client, an epoch a round."""
_PRETRAINED = "pretrained"


class FedFrozenVision(Experiment):
    """Accuracy by method and α.

    Args:
        kind: the data set and its settings, one of `KINDS`.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name, self.datasets = kind.name, (kind.data,)
        self.title = f"FedFrozen and other methods on {kind.title}"
        self.paper = f"FedFrozen, Table 1, {kind.title} (arXiv 2605.06446)"
        self.deviations = (
            "The learning rate of every method, and its own options, are found by the same number of trials of "
            f"Optuna's TPE sampler at α = {SEARCHED}, on training images that the results do not have, and scored on "
            f"{kind.small.validation:,} further ones. The paper has one rate for all, and does not say how it was "
            f"found.{_ALIKE * kind.small.alike}",
            "Differences are paired by seed; intervals are Student's at 95 %. Over all α, the difference of a "
            "seed is its mean over the values of α. The paper has one seed.",
            f"T_warm is {', '.join(map(str, kind.warmups))} of 10 rounds by α, as in the paper. The margin of {WITHIN} "
            f"is chosen here; in the paper FedFrozen's accuracy less FedAvg's is {_said(kind.paper)} by α.",
            "FedAvg with SGD is not in the paper: SCAFFOLD needs SGD, and this is what it is to be compared with.",
            *kind.deviations,
        )
        self.small_scale = kind.small_scale
        self.full_scale = (
            f"{kind.full.train:,} training and {kind.full.test:,} test images, {kind.clients} clients, ten rounds of "
            f"ten epochs, batches of {kind.batch}, T_warm {', '.join(map(str, kind.warmups))} by α, as in the paper; "
            f"{kind.backbone} on images of 224x224, from weights/{kind.full.config['model']}; five seeds (the paper "
            "has one), twelve trials of a search."
        )

    def weights(self, full: bool) -> Mapping[str, str]:
        return {str(self.kind.full.config["model"]): self.kind.weights} if full else {}

    def trials(self, full: bool) -> Sequence[Trial]:
        of, trials, before = self.kind.setting(full), list[Trial](), tuple[str, ...]()
        if of.unseen:
            before = (_PRETRAINED,)
            trials.append(Trial(_PRETRAINED, {"part": "pretraining", "full": full, "config": PRETRAIN, "clients": 1}))
        for method in of.methods:
            options = self._options(method, SEARCHED, SEED, full, "search")
            search = search_trials(slug(method), options, SEARCH[full][method], of.searched, alike=of.alike)
            trials += [replace(trial, needs=(*before, *trial.needs)) for trial in search]
            needs = (*before, *(trial.name for trial in search))
            trials += [
                Trial(f"{_name(method, alpha)}-{seed}", self._options(method, alpha, seed, full, "main"), needs)
                for alpha in ALPHAS if full or alpha == SEARCHED or method in DECIDING
                for seed in (1, 2, 3, 4, 5)
            ]  # fmt: skip
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        part, full = trial.options["part"], trial.options["full"]
        files, own = dict[str, Any](), inputs.folder / WEIGHTS / f"{self.kind.data}.safetensors"
        if full:
            files["pretrained"] = str(inputs.folder / WEIGHTS / str(self.kind.full.config["model"]))
        files["dataset"] = str(self._images(inputs, part, self.kind.setting(full)))
        if part == "pretraining":
            return trained(trial, inputs, weights=own, **files)
        if _PRETRAINED in trial.needs:
            files["pretrained"] = str(own)
        needed = {name: of for name, of in inputs.needed.items() if name != _PRETRAINED}
        searched = replace(trial, needs=tuple(name for name in trial.needs if name in needed))
        return tuned(searched, replace(inputs, needed=needed), SEARCH[full][trial.options["method"]], **files)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        parts, lines = list[Reproduction](), dict[str, dict[float, list[float]]]()
        gains = list[Mapping[int, float]]()
        for place, alpha in enumerate(ALPHAS):
            runs = {method: of for method in METHODS if (of := by_seed(found, _name(method, alpha)))}
            scores, what = on_server(runs), f"α = {alpha}"
            if "FedFrozen" not in scores:
                continue
            for method, seeds in scores.items():
                lines.setdefault(method, {})[alpha] = [*seeds.values()]
            paper = {method: of_alpha[place] for method, of_alpha in self.kind.paper.items()}
            title = f"Accuracy at {what}, {len(scores['FedFrozen'])} seeds"
            parts.append(versus("FedFrozen", runs, scores, title, what=what, paper=paper))
            shown = {method: [*of.values()] for method, of in runs.items()}
            figure = curves(shown, f"alpha-{place}", f"{self.kind.title}, {what}", _CAPTION)
            gain = differences("FedFrozen", {method: scores[method] for method in DECIDING if method in scores})
            claims = [*_as_accurate(gain.get("FedAvg"), what), *_as_the_best(scores, paper, what)]
            parts.append(Reproduction([], [figure], [*_cost(runs, what)], claims))
            of_sgd = {method: runs[method] for method in WITH_SGD if method in runs}
            if len(of_sgd) == len(WITH_SGD):
                title = f"SCAFFOLD and FedAvg, both with SGD, at {what}"
                parts.append(versus("SCAFFOLD", of_sgd, on_server(of_sgd), title, what=f"{what}, with SGD"))
            gains.append(_differences(scores))
        if parts:
            figure = by_setting(lines, "alphas", "After ten rounds", "α of the Dirichlet distribution", _CAPTION)
            means = {seed: float(np.mean([of[seed] for of in gains])) for seed in set.intersection(*map(set, gains))}
            together = paired(means, dict.fromkeys(means, 0.0), len(means)) if len(gains) > 1 else None
            claims = _as_accurate(together, "The mean over all α")
            parts.append(Reproduction([], [figure], [*_pretrained(found)], claims))
        return joined(*parts)

    def _options(self, method: str, alpha: float, seed: int, full: bool, part: str) -> dict[str, Any]:
        of, kind = self.kind.setting(full), self.kind
        config: dict[str, Any] = {
            **_COMMON, **of.config, **METHODS[method], **((of.sgd or {}) if method in WITH_SGD else {}),
            "batch-size": kind.batch, "dirichlet-alpha": alpha, "seed": seed,
        }  # fmt: skip
        if method == "FedFrozen":
            config["fedfrozen.warmup-rounds"] = kind.warmups[ALPHAS.index(alpha)]
        return {
            "method": method, "part": part, "full": full, "config": config, "clients": kind.clients,
            "images": [of.train, of.test],
        }  # fmt: skip

    def _images(self, inputs: TrialInputs, part: str, of: Scale) -> Path:
        """A file of the images of the results, of the search or of the pretraining, written once; they share none."""
        name, path = self.kind.data, inputs.data[self.kind.data]
        file = inputs.folder / "images" / f"{name}-{part}-{of.train}.npz"
        if file.exists():
            return file
        train, test = shuffled_images(name, path, seed=42, grouped=False)
        if test is None:
            test, train = train.first(of.test), train.first(len(train), after=of.test)
        if of.unseen:
            classes = unseen_classes(int(train.labels.max()) + 1, of.unseen)
            if part == "pretraining":
                others = np.setdiff1d(train.labels, classes)
                return write_images(file, of_classes(train, others), of_classes(test, others).first(of.test))
            train, test = of_classes(train, classes), of_classes(test, classes)
        needed = 2 * of.train + of.validation
        if len(train) < needed or len(test) < of.test:
            raise MissingData(
                f"{path} has {len(train):,} training and {len(test):,} test images"
                f"{' of the unseen classes' if of.unseen else ''}; {needed:,} and {of.test:,} are needed"
            )
        if part == "main":
            return write_images(file, train.first(of.train), test.first(of.test))
        searched, scored = train.first(of.train, after=of.train), train.first(of.validation, after=2 * of.train)
        return write_images(file, searched, scored)


_CAPTION = "Accuracy of the global model on test images that no client has."


def unseen_classes(classes: int, count: int) -> NDArray[np.int64]:
    """The classes, ascending, on which no weights are trained first: `count` of 0 … classes − 1, drawn by seed 42."""
    return np.sort(np.random.default_rng(42).choice(classes, count, replace=False))


def of_classes(images: Images, classes: NDArray[np.int64]) -> Images:
    """The images of some classes, without groups; the labels are the positions in `classes`, which ascend."""
    taken = images.take(np.flatnonzero(np.isin(images.labels, classes)))
    return Images(taken.images, np.searchsorted(classes, taken.labels))


def _name(method: str, alpha: float) -> str:
    return f"{slug(method)}-{alpha}"


def _differences(scores: Scores) -> dict[int, float]:
    """FedFrozen's accuracy less FedAvg's, for each seed that both have."""
    ours, others = scores["FedFrozen"], scores.get("FedAvg", {})
    return {seed: ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())}


def _said(paper: Mapping[str, Sequence[float]]) -> str:
    """The paper's FedFrozen less its FedAvg, by α."""
    fedavg, ours = (paper[method] for method in DECIDING)
    return ", ".join(f"{a - b:+.4f}" for a, b in zip(ours, fedavg, strict=True))


def _as_the_best(scores: Scores, paper: Mapping[str, float], what: str) -> list[Claim]:
    """The claims of the paper's table on the best method, and on FedFrozen beside it."""
    known = {method: of for method, of in scores.items() if method in paper}
    if len(known) <= len(DECIDING):
        return []
    best = max(paper, key=lambda method: paper[method])
    below = paper[best] - paper["FedFrozen"]
    claim = ahead(f"{what}: {best} is better than each other method.", differences(best, known))
    if not below:
        return claimed(claim) if best == "FedFrozen" else []
    text = f"{what}: FedFrozen is at most {below:.4f} below each other method, as in the paper."
    return claimed(claim, ahead(text, differences("FedFrozen", known), -below))


def _as_accurate(gain: Paired | None, what: str) -> list[Claim]:
    """The claims that FedFrozen's accuracy is FedAvg's, and that it is not lower."""
    gains = {"FedAvg": gain} if gain else {}
    return claimed(
        as_good(f"{what}: FedFrozen's accuracy is FedAvg's, within {WITHIN}.", gains, WITHIN),
        ahead(f"{what}: FedFrozen's accuracy is at most {WITHIN} below FedAvg's.", gains, -WITHIN),
    )


def _cost(runs: Runs, what: str) -> Iterator[str]:
    """What FedFrozen sends, both ways, relative to FedAvg. It is the same with every seed."""
    sent = [next(iter(runs[method].values()))["bytes"] for method in DECIDING if method in runs]
    if len(sent) == len(DECIDING):
        yield f"{what}: FedFrozen sends {sent[1] / sent[0]:.4f} of FedAvg's bytes, up and down."


def _pretrained(found: Mapping[str, Values]) -> Iterator[str]:
    if of := found.get(_PRETRAINED):
        yield f"The weights have an accuracy of {of['server']:.4f} on test images of the classes they were trained on."
