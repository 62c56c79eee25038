"""Fashion-MNIST and CIFAR-10 of FedACS (arXiv 2312.15148): two classes a client, Dirichlet .5, 50 examples each at five
Dirichlet distributions (Table 2), and 500 clients of whom some take part; beside six other methods and local training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepal.report.page import Figure
from tepal.tools.reproduce import runs
from tepal.tools.reproduce.data import Images, by_distribution, grouped, shuffled_images, write_images
from tepal.tools.reproduce.experiment import Cell, Outcome, Place, Table, Values
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import by_setting, curves, mean_text, trained

DATA = ("fashion-mnist", "cifar-10")
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "Local": {"strategy": "local"},
    "Ditto": {"strategy": "ditto"},
    "Per-FedAvg": {"strategy": "perfedavg"},
    "pFedMe": {"strategy": "pfedme"},
    "APFL": {"strategy": "apfl"},
    "FedAMP": {"strategy": "fedamp"},
    "FedACS": {"strategy": "fedacs"},
}
ALPHAS = (0.1, 0.5, 1.0, 5.0, 10.0)
PAPER = {
    "cifar-10": (0.8172, 0.8384, 0.8497, 0.8576, 0.8542),
    "fashion-mnist": (0.8426, 0.8433, 0.8557, 0.8613, 0.8842),
}
"""Table 2: FedACS by α, 50 training examples a client."""
QUANTILES = (0.5, 0.7, 0.9)
"""p, of which each setting takes the one that is best on its validation clients."""
SETTINGS = {
    "two-classes": "two classes a client",
    "dirichlet": "Dirichlet .5",
    "scarce": "50 examples each, Dirichlet .5",
    "many": "500 clients, a tenth takes part",
}
_COMMON: Mapping[str, Any] = {
    "model": LENET, "optimizer": "sgd", "learning-rate": 0.1, "weight-decay": 0.0, "batch-size": 32,
    "schedule": "constant", "fraction-evaluate": 1.0,
    "held-out-fraction": 0.0, "local-steps": 10,
}  # fmt: skip
_SCARCE = 80  # examples of a client: 50 are trained on
_MANY = 500
_FEWER = {"cifar-10": ("two-classes", "scarce")}
"""Settings of a data set, of the small scale."""


class FedAcs:
    """Mean over the clients of the accuracy of each one's model on its own test examples."""

    name = "fedacs"
    title = "FedACS and personalised methods on Fashion-MNIST and CIFAR-10"
    paper = "FedACS, figure 1 and Table 2 (arXiv 2312.15148)"
    deviations = (
        "Network, learning rate, local epochs and p are not in the paper: LeNet-5, SGD .1, ten batches of 32 a "
        "round, and p as found on other clients.",
        f"p is chosen among {', '.join(map(str, QUANTILES))} on clients of their own, with examples that the other "
        "runs do not have; but for those of 500 clients, which take the p of 50 examples each, and all images, those "
        "that it was chosen on among them. The rivals have this project's defaults and are not tuned.",
        "Figure 1 of the paper has no numbers to read; Table 2 has.",
    )

    def data(self, full: bool) -> Sequence[str]:
        return DATA

    def scale(self, full: bool) -> str:
        if full:
            return (
                "Two thirds of 70,000 and 60,000 images, the rest to choose p on; 100 clients, or of all images 500 of "
                "whom a tenth takes part; 100 rounds, five seeds."
            )
        return (
            "8,000 images of each data set, 40 clients where data suffices, 50 of 80 images where it is scarce, 500 of "
            "16 images where a tenth takes part; images of 20x20, 10 rounds (15 of 500 clients); one "
            "seed. Of CIFAR-10 two classes a client, and scarce data alone."
        )

    def cells(self, full: bool) -> Sequence[Cell]:
        seeds = (1, 2, 3, 4, 5) if full else (1,)
        cells: list[Cell] = []
        for data in DATA:
            for setting in SETTINGS if full or data not in _FEWER else _FEWER[data]:
                if setting != "many":  # whose clients are as scarce of data as the others'
                    cells += [_cell(data, setting, "FedACS", 0, full, p=p, part="validation") for p in QUANTILES]
                cells += [_cell(data, setting, method, seed, full) for method in METHODS for seed in seeds]
            cells += [
                _cell(data, "scarce", method, seed, full, alpha)
                for alpha in ALPHAS if alpha != 0.5 for method in ("Local", "FedACS") for seed in seeds
            ]  # fmt: skip
        return cells

    def compute(self, cell: Cell, place: Place) -> Values:
        options = cell.options
        keys: dict[str, Any] = {"dataset": str(_file(options, place))}
        p = options["config"].get("fedacs.quantile")
        if cell.needs:
            p = keys["fedacs.quantile"] = max(place.found.values(), key=lambda of: of["clients"])["p"]
        return {**trained(cell, place, **keys), "p": p}

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        each = [_outcome(data, found) for data in DATA]
        return Outcome(
            [table for of in each for table in of.tables],
            [figure for of in each for figure in of.figures],
            [finding for of in each for finding in of.findings],
        )


_CAPTION = "The mean over the clients, of each one's model on its own test examples."


def _outcome(data: str, found: Mapping[str, Values]) -> Outcome:
    """What is told of a data set."""

    def of(setting: str, method: str, alpha: float = 0.5) -> list[Values]:
        start = _name(data, setting, method, alpha)
        return [values for name, values in found.items() if name.rpartition("-")[0] == start]

    rows = [(method, *(each for setting in SETTINGS for each in _row(of(setting, method)))) for method in METHODS]
    headings = ("method", *(each for text in SETTINGS.values() for each in (text, "over clients")))
    tables, figures, findings = [Table(f"Accuracy on {data}", headings, rows)], list[Figure](), list[str]()
    for setting, text in SETTINGS.items():
        methods = {method: of(setting, method) for method in METHODS}
        if any(values["curve"] for cells in methods.values() for values in cells):
            figures.append(curves(methods, f"{data}-{setting}", f"{data}, {text}", _CAPTION))
        if methods["FedACS"] and methods["FedAvg"]:
            findings.append(_finding(f"{data}, {text}", methods))
    paper = dict(zip(ALPHAS, PAPER[data], strict=True))
    scarce = {
        method: {alpha: [values["clients"] for values in of("scarce", method, alpha)] for alpha in ALPHAS}
        for method in ("FedACS", "Local")
    }
    by_alpha = [(f"{alpha:g}", *(mean_text(by[alpha]) for by in scarce.values()), paper[alpha]) for alpha in ALPHAS]
    headings = ("α", "FedACS", "local", "FedACS in the paper")
    tables.append(Table(f"Table 2 {data}, 50 examples each", headings, by_alpha))
    lines = {**scarce, runs.PAPER: {alpha: [score] for alpha, score in paper.items()}}
    title = f"{data}, 50 examples each"
    figures.append(by_setting(lines, f"{data}-alphas", title, "α of the Dirichlet distribution", _CAPTION))
    return Outcome(tables, figures, findings)


def _finding(where: str, methods: Mapping[str, Sequence[Values]]) -> str:
    """FedACS beside FedAvg, and who is ahead of it."""
    means = {method: np.mean([of["clients"] for of in cells]) for method, cells in methods.items() if cells}
    ahead = ", ".join(method for method, mean in means.items() if mean > means["FedACS"])
    gain = means["FedACS"] - means["FedAvg"]
    chosen = ", ".join(map(str, sorted({of["p"] for of in methods["FedACS"]})))
    return (
        f"{where}: FedACS (p = {chosen}) is {abs(gain):.4f} {'above' if gain > 0 else 'below'} FedAvg; ahead of it: "
        f"{ahead or 'none'}."
    )


def _row(cells: Sequence[Values]) -> tuple[str | None, str | None]:
    """Accuracy, and its standard deviation over the clients."""
    return mean_text([of["clients"] for of in cells]), mean_text([of["spread"] for of in cells])


def _name(data: str, setting: str, method: str, alpha: float) -> str:
    return f"{data}-{setting}-{method.lower().replace('-', '')}" + (f"-alpha{alpha}" if alpha != 0.5 else "")


def _cell(
    data: str,
    setting: str,
    method: str,
    seed: int,
    full: bool,
    alpha: float = 0.5,
    *,
    p: float = 0.0,
    part: str = "main",
) -> Cell:
    """One run. `part`: the clients that p is chosen on, or the others."""
    clients = _MANY if setting == "many" else 100 if full else 50 if setting == "scarce" else 40
    rounds = 100 if full else 15 if setting == "many" else 10
    config: dict[str, Any] = {
        **_COMMON, **METHODS[method], "normalise": data, "num-server-rounds": rounds, "seed": seed,
    }  # fmt: skip
    if not full:
        config["image-shape"] = "1x20x20" if data == "fashion-mnist" else "3x20x20"
    if setting == "two-classes":
        config |= {"partitioner": "pathological", "classes-per-client": 2, "test-fraction": 0.3}
    elif setting == "dirichlet":
        config |= {"partitioner": "dirichlet", "dirichlet-alpha": 0.5, "test-fraction": 0.3}
    else:
        config |= {"partitioner": "natural", "min-partition-size": 2, "test-fraction": 30 / 80}
    if setting == "many":
        config["fraction-train"] = 0.1
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = {"data": data, "setting": setting, "alpha": alpha, "part": part, "full": full}
    if part == "validation":
        config["fedacs.quantile"] = p
        name = f"{_name(data, setting, 'p', alpha)}-{p}"
        clients //= 2
    else:
        of = "scarce" if setting == "many" else setting
        name = f"{_name(data, setting, method, alpha)}-{seed}"
        needs = tuple(f"{data}-{of}-p-{each}" for each in QUANTILES) if method == "FedACS" else ()
    return Cell(name, {**options, "config": config, "clients": clients}, needs)


def _file(options: Mapping[str, Any], place: Place) -> Path:
    """The images of a setting, written once. Where p is chosen, it is on a third of all images."""
    data, setting, part, alpha = options["data"], options["setting"], options["part"], options["alpha"]
    grown = setting in ("scarce", "many")
    path = place.folder / "images" / f"{data}-{setting if grown else 'all'}-{part}{alpha if grown else ''}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, place.data[data])
    images = train if test is None else Images(
        np.concatenate([train.images, test.images]), np.concatenate([train.labels, test.labels])
    )  # fmt: skip
    clients = int(options["clients"])
    most = len(images) if options["full"] else min(len(images), 12_000)
    share = most if setting == "many" else most * 2 // 3
    chosen = images.first(share) if part == "main" else images.first(most - share, after=share)
    if grown:  # a third of the examples is left over, so that the last clients get what they drew, too
        each = min(_SCARCE, share * 2 // 3 // clients)
        chosen = grouped(chosen, by_distribution(chosen.labels, clients, each, alpha, seed=1))
    return write_images(path, chosen)
