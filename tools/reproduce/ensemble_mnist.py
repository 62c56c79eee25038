"""MNIST of Fed-ensemble (arXiv 2107.10663): its table of methods, iid and with two labels a client, and Table 4, which
goes through numbers of modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tepal.tools.reproduce import runs
from tepal.tools.reproduce.experiment import Cell, Outcome, Place, Table, Values
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import by_setting, curves, mean_text, trained

METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "FedProx": {"strategy": "fedprox"},
    "FedBE": {"strategy": "fedbe"},
    "Fed-ensemble": {"strategy": "fedensemble", "fedensemble.modes": 5},
}
SPLITS: Mapping[str, Mapping[str, Any]] = {
    "iid": {"partitioner": "iid"},
    "two-labels": {"partitioner": "pathological", "classes-per-client": 2},
}
PAPER = {
    ("FedAvg", "iid"): 0.9508, ("FedAvg", "two-labels"): 0.9017,
    ("FedProx", "iid"): 0.9576, ("FedProx", "two-labels"): 0.9075,
    ("FedBE", "iid"): 0.9521,
    ("Fed-ensemble", "iid"): 0.9775, ("Fed-ensemble", "two-labels"): 0.9544,
}  # fmt: skip
PAPER_MODES = {
    3: (0.9749, 0.9497, 0.9550, 0.16), 5: (0.9785, 0.9500, 0.9560, 0.15), 20: (0.9819, 0.9413, 0.9557, 0.16),
    40: (0.9817, 0.9353, 0.9553, 0.18), 80: (0.9798, 0.9274, 0.9484, 0.20),
}  # fmt: skip
"""K → of Table 4: the ensemble's accuracy, the worst and the best mode's, entropy in nats."""

_COMMON: Mapping[str, Any] = {
    "dataset": "mnist", "normalise": "mnist", "schedule": "constant", "optimizer": "sgd",
    "batch-size": 32, "weight-decay": 0.0, "test-fraction": 0.1, "fraction-evaluate": 0.0,
    "score-in-training": False, "fedprox.mu": 0.01,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "model": LENET, "image-shape": "1x20x20", "num-server-rounds": 40, "evaluate-every": 8, "local-steps": 20,
    "learning-rate": 0.1,
}  # fmt: skip
_FULL: Mapping[str, Any] = {
    "model": "cnn", "num-server-rounds": 400, "evaluate-every": 20, "local-epochs": 1, "learning-rate": 0.05,
}  # fmt: skip
# FedBE distils on unlabelled examples of the server's: .5 % of 60,000 in the small setting.
_FEDBE: Mapping[bool, Mapping[str, Any]] = {
    False: {"server-share": 0.005, "fedbe.samples": 5, "fedbe.epochs": 2},
    True: {"server-share": 0.05},
}


class EnsembleMnist:
    """Accuracy of an ensemble, and of single models."""

    name = "ensemble-mnist"
    title = "Fed-ensemble on MNIST, iid and with two labels a client"
    paper = "Fed-ensemble, tables 2 and 4 (arXiv 2107.10663)"
    deviations = (
        "All clients train in every round. Where a fifth of 100 do, and have two labels each, a mode gets four of them "
        "a round, which is too few: after 80 rounds FedAvg was ahead by .006.",
        "Clients, learning rate, local work, batch size and rounds are chosen here, as the paper does not give them; "
        "the rate is constant, where the paper's falls by 1 % in ten rounds.",
        "FedBE's unlabelled examples, which the server has, are taken from the training images; the paper has no "
        "number of it with two labels.",
    )

    def data(self, full: bool) -> Sequence[str]:
        return ("mnist",)

    def scale(self, full: bool) -> str:
        if full:
            return "60,000 images of 28x28, 100 clients, 400 rounds of one epoch, three seeds."
        return (
            "LeNet-5 on images of 20x20, 50 clients, 40 rounds of 20 steps of 32 images; two seeds with two labels, "
            "one of all else."
        )

    def cells(self, full: bool) -> Sequence[Cell]:
        seeds = {split: (1, 2, 3) if full else (1, 2) if split == "two-labels" else (1,) for split in SPLITS}
        cells = [
            _cell(f"{_slug(method)}-{split}-{seed}", method, split, seed, full)
            for split in SPLITS for method in METHODS for seed in seeds[split]
        ]  # fmt: skip
        return cells + [
            _cell(f"modes-{modes}-{seed}", "Fed-ensemble", "iid", seed, full, {"fedensemble.modes": modes})
            for modes in _modes(full) for seed in seeds["iid"][:1] if modes != 5
        ]  # fmt: skip

    def compute(self, cell: Cell, place: Place) -> Values:
        return trained(cell, place)

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        def of(method: str, split: str) -> list[Values]:
            start = f"{_slug(method)}-{split}-"
            return [values for name, values in found.items() if name.startswith(start)]

        def scores(method: str, split: str) -> list[float]:
            return [values["server"] for values in of(method, split)]

        rows = []
        for method in METHODS:
            beside = ((mean_text(scores(method, split)), PAPER.get((method, split))) for split in SPLITS)
            rows.append((method, *chain.from_iterable(beside)))
        headings = ("method", *(each for split in SPLITS for each in (split.replace("-", " "), "paper")))
        by_modes = {
            modes: [values for name, values in found.items() if name.startswith(f"modes-{modes}-")]
            for modes in {*_modes(True), *_modes(False)}
        } | {5: of("Fed-ensemble", "iid")}
        sweep = {modes: by_modes[modes] for modes in sorted(by_modes) if by_modes[modes]}
        tables = [
            Table("Accuracy by method", headings, rows),
            Table(
                "Accuracy by modes, iid",
                ("K", "ours", "paper", "worst mode", "paper", "best mode", "paper", "entropy", "paper"),
                [(modes, *_beside(modes, each)) for modes, each in sweep.items()],
            ),
        ]  # fmt: skip
        figures = [
            curves(methods, split, f"MNIST, {split.replace('-', ' ')}", _CAPTION)
            for split in SPLITS if any((methods := {method: of(method, split) for method in METHODS}).values())
        ]  # fmt: skip
        if sweep:
            lines = {
                "Fed-ensemble": {modes: [values["server"] for values in each] for modes, each in sweep.items()},
                runs.PAPER: {modes: [each[0]] for modes, each in PAPER_MODES.items() if modes in sweep},
            }
            figures.append(by_setting(lines, "modes", "Accuracy by modes, iid", "modes K", _CAPTION))
        findings = []
        for split in SPLITS:
            ensemble, single = scores("Fed-ensemble", split), scores("FedAvg", split)
            if ensemble and single:
                gain = sum(ensemble) / len(ensemble) - sum(single) / len(single)
                theirs = PAPER["Fed-ensemble", split] - PAPER["FedAvg", split]
                findings.append(
                    f"{split.replace('-', ' ').capitalize()}: Fed-ensemble is {abs(gain):.4f} "
                    f"{'above' if gain > 0 else 'below'} FedAvg (paper: {theirs:.4f} above)."
                )
        return Outcome(tables, figures, findings)


_CAPTION = "On the 10,000 test images, which no client has; the mean over the seeds."


def _beside(modes: int, ours: Sequence[Values]) -> list[str | float | None]:
    """Ours and the paper's by turns."""
    keys = ("server", "lowest_accuracy", "highest_accuracy", "entropy")
    theirs = PAPER_MODES.get(modes, (None,) * len(keys))
    means = [mean_text([values[key] for values in ours if values[key] is not None]) for key in keys]
    return [each for pair in zip(means, theirs, strict=True) for each in pair]


def _slug(method: str) -> str:
    return method.lower().replace("-", "")


def _modes(full: bool) -> tuple[int, ...]:
    return (3, 5, 20, 40, 80) if full else (3, 5, 10)


def _cell(
    name: str, method: str, split: str, seed: int, full: bool, more: Mapping[str, Any] | None = None
) -> Cell:
    scale = _FULL if full else _SMALL
    config = {**_COMMON, **scale, **SPLITS[split], **METHODS[method], "seed": seed, **(more or {})}
    if method == "FedBE":
        config |= _FEDBE[full]
    return Cell(name, {"config": config, "clients": 100 if full else 50})
