"""FedACS, six other methods and local training on Fashion-MNIST and CIFAR-10 (arXiv 2312.15148).

Settings: two classes per client; Dirichlet .5; 50 examples each at five Dirichlet distributions (Table 2); 500 clients
of which a tenth participates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tepal.report.page import Figure
from tepal.tools.reproduce.data import Images, by_distribution, grouped, shuffled_images, write_images
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, joined, table
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import PAPER, by_setting, compared, curves, mean_text, seeds_of, slug, trained

DATA = ("fashion-mnist", "cifar-10")
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "Local": {"strategy": "local"},
    "Ditto": {"strategy": "ditto"},
    "Per-FedAvg": {"strategy": "perfedavg"},
    "pFedMe": {"strategy": "pfedme"},
    "APFL": {"strategy": "apfl"},
    "FedAMP": {"strategy": "fedamp", "fedamp.unit": "median"},
    "FedACS": {"strategy": "fedacs"},
}
ALPHAS = (0.1, 0.5, 1.0, 5.0, 10.0)
PAPER_ALPHAS = {
    "cifar-10": (0.8172, 0.8384, 0.8497, 0.8576, 0.8542),
    "fashion-mnist": (0.8426, 0.8433, 0.8557, 0.8613, 0.8842),
}
"""Table 2: accuracy of FedACS by α, with 50 training examples per client."""
QUANTILES = (0.5, 0.7, 0.9)
"""Values of p; each setting uses the best one on its validation clients."""
_DRAWN: Mapping[str, Any] = {"partitioner": "natural", "min-partition-size": 2, "test-fraction": 30 / 80}
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "two-classes": (
        "two classes per client", {"partitioner": "pathological", "classes-per-client": 2, "test-fraction": 0.3},
    ),
    "dirichlet": ("Dirichlet .5", {"partitioner": "dirichlet", "dirichlet-alpha": 0.5, "test-fraction": 0.3}),
    "scarce": ("50 examples each, Dirichlet .5", _DRAWN),
    "many": ("500 clients, a tenth participates", {**_DRAWN, "fraction-train": 0.1}),
}  # fmt: skip
"""Setting → its text in tables and titles, and its keys of the run config."""
_COMMON: Mapping[str, Any] = {
    "model": LENET, "optimizer": "sgd", "learning-rate": 0.1, "weight-decay": 0.0, "batch-size": 32,
    "schedule": "constant", "fraction-evaluate": 1.0, "held-out-fraction": 0.0, "local-steps": 10,
}  # fmt: skip
_SCARCE = 80  # examples per client, of which 50 are trained on
_MANY = 500  # clients
_FEWER = {"cifar-10": ("two-classes", "scarce")}
"""Data set → its settings at the small scale, if not all."""


class FedAcs(Experiment):
    """Mean over the clients of the accuracy of each one's model on its own test examples."""

    name = "fedacs"
    title = "FedACS and personalised methods on Fashion-MNIST and CIFAR-10"
    paper = "FedACS, Figure 1 and Table 2 (arXiv 2312.15148)"
    deviations = (
        "The paper does not give network, learning rate, local epochs and p: here LeNet-5, SGD with .1, ten batches of "
        "32 per round, and p chosen on other clients.",
        f"p is chosen among {', '.join(map(str, QUANTILES))} on separate clients, whose examples the other runs do not "
        "have. The runs with 500 clients are an exception: they use the p of the setting with 50 examples each, and "
        "all images, including those that it was chosen on. The other methods have this project's defaults and are not "
        "tuned.",
        "Figure 1 of the paper has no numbers; Table 2 has.",
    )
    datasets = DATA
    small_scale = (
        "8,000 images of each data set, resized to 20x20; 40 clients, or 50 with 80 images each, or 500 with 16 images "
        "each of which a tenth participates; 10 rounds (15 with 500 clients); one seed. CIFAR-10 with two classes per "
        "client and with 50 examples each only."
    )
    full_scale = (
        "Two thirds of 70,000 and 60,000 images, the rest to choose p on; 100 clients, or 500 with all images, of "
        "which a tenth participates; 100 rounds, five seeds."
    )

    def trials(self, full: bool) -> Sequence[Trial]:
        seeds = (1, 2, 3, 4, 5) if full else (1,)
        trials: list[Trial] = []
        for data in DATA:
            for setting in SETTINGS if full or data not in _FEWER else _FEWER[data]:
                if setting != "many":  # its clients have as few examples as those of "scarce", and use their p
                    trials += [_trial(data, setting, "FedACS", 0, full, p=p) for p in QUANTILES]
                trials += [_trial(data, setting, method, seed, full) for method in METHODS for seed in seeds]
            trials += [
                _trial(data, "scarce", method, seed, full, alpha)
                for alpha in ALPHAS if alpha != 0.5 for method in ("Local", "FedACS") for seed in seeds
            ]  # fmt: skip
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        files: dict[str, Any] = {"dataset": str(_file(trial.options, inputs))}
        p = trial.options["config"].get("fedacs.quantile")
        if trial.needs:
            p = files["fedacs.quantile"] = max(inputs.needed.values(), key=lambda of: of["clients"])["p"]
        return {**trained(trial, inputs, **files), "p": p}

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        return joined(*(_results(data, found) for data in DATA))


_CAPTION = "Mean over the clients of the accuracy of each one's model on its own test examples."


def _results(data: str, found: Mapping[str, Values]) -> Reproduction:
    """The results on one data set."""

    def of(setting: str, method: str, alpha: float = 0.5) -> list[Values]:
        return seeds_of(found, _name(data, setting, method, alpha))

    def accuracies(runs: Sequence[Values]) -> list[float]:
        return [values["clients"] for values in runs]

    rows = []
    for method in METHODS:
        runs = [of(setting, method) for setting in SETTINGS]
        pairs = [(mean_text(accuracies(each)), mean_text([values["spread"] for values in each])) for each in runs]
        rows.append((method, *chain(*pairs)))
    headings = ("method", *(each for text, _ in SETTINGS.values() for each in (text, "std over clients")))
    figures, findings = list[Figure](), list[str]()
    for setting, (text, _) in SETTINGS.items():
        methods, where = {method: of(setting, method) for method in METHODS}, f"{data}, {text}"
        if any(values["curve"] for runs in methods.values() for values in runs):
            figures.append(curves(methods, f"{data}-{setting}", where, _CAPTION))
        if methods["FedACS"] and methods["FedAvg"]:
            scores = {method: accuracies(runs) for method, runs in methods.items() if runs}
            ahead = [method for method in scores if np.mean(scores[method]) > np.mean(scores["FedACS"])]
            chosen = ", ".join(map(str, sorted({values["p"] for values in methods["FedACS"]})))
            findings.append(
                f"{where}: FedACS (p = {chosen}) is {compared(scores['FedACS'], scores['FedAvg'])} FedAvg; more "
                f"accurate than FedACS: {', '.join(ahead) or 'none'}."
            )
    paper = dict(zip(ALPHAS, PAPER_ALPHAS[data], strict=True))
    scarce = {
        method: {alpha: accuracies(of("scarce", method, alpha)) for alpha in ALPHAS} for method in ("FedACS", "Local")
    }
    by_alpha = [(f"{alpha:g}", *(mean_text(by[alpha]) for by in scarce.values()), paper[alpha]) for alpha in ALPHAS]
    tables = [
        table(f"Accuracy on {data}", headings, rows),
        table(f"Table 2 {data}, 50 examples each", ("α", "FedACS", "local", "FedACS in the paper"), by_alpha),
    ]
    lines = {**scarce, PAPER: {alpha: [score] for alpha, score in paper.items()}}
    title = f"{data}, 50 examples each"
    figures.append(by_setting(lines, f"{data}-alphas", title, "α of the Dirichlet distribution", _CAPTION))
    return Reproduction(tables, figures, findings)


def _name(data: str, setting: str, method: str, alpha: float) -> str:
    return f"{data}-{setting}-{slug(method)}" + (f"-alpha{alpha}" if alpha != 0.5 else "")


def _trial(
    data: str, setting: str, method: str, seed: int, full: bool, alpha: float = 0.5, *, p: float | None = None
) -> Trial:
    """One run; with `p`, FedACS with that quantile on the validation clients."""
    clients = _MANY if setting == "many" else 100 if full else 50 if setting == "scarce" else 40
    rounds = 100 if full else 15 if setting == "many" else 10
    config: dict[str, Any] = {
        **_COMMON, **METHODS[method], "normalise": data, "num-server-rounds": rounds, "seed": seed,
    }  # fmt: skip
    if not full:
        config["image-shape"] = "1x20x20" if data == "fashion-mnist" else "3x20x20"
    config |= SETTINGS[setting][1]
    options = {"data": data, "setting": setting, "alpha": alpha, "full": full, "config": config}
    if p is not None:
        config["fedacs.quantile"] = p
        return Trial(f"{data}-{setting}-p-{p}", {**options, "part": "validation", "clients": clients // 2})
    of = "scarce" if setting == "many" else setting
    needs = tuple(f"{data}-{of}-p-{each}" for each in QUANTILES) if method == "FedACS" else ()
    name = f"{_name(data, setting, method, alpha)}-{seed}"
    return Trial(name, {**options, "part": "main", "clients": clients}, needs)


def _file(options: Mapping[str, Any], inputs: TrialInputs) -> Path:
    """A file of the images of a setting, written once; p is chosen on a third of all images."""
    data, setting, part, alpha = options["data"], options["setting"], options["part"], options["alpha"]
    drawn = setting in ("scarce", "many")  # each client's images are drawn here, not by the run's partitioner
    path = inputs.folder / "images" / f"{data}-{setting if drawn else 'all'}-{part}{alpha if drawn else ''}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, inputs.data[data])
    images = train if test is None else Images(
        np.concatenate([train.images, test.images]), np.concatenate([train.labels, test.labels])
    )  # fmt: skip
    clients = int(options["clients"])
    most = len(images) if options["full"] else min(len(images), 12_000)
    share = most if setting == "many" else most * 2 // 3
    chosen = images.first(share) if part == "main" else images.first(most - share, after=share)
    if drawn:  # a third of the examples is left over, so that the last clients get their distribution, too
        each = min(_SCARCE, share * 2 // 3 // clients)
        chosen = grouped(chosen, by_distribution(chosen.labels, clients, each, alpha, seed=1))
    return write_images(path, chosen)
