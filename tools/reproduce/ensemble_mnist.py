"""Fed-ensemble on MNIST (arXiv 2107.10663): methods compared (Table 2), iid and with two labels per client, and the
number of modes varied (Table 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import (
    PAPER,
    by_setting,
    compared,
    curves,
    mean_text,
    paper_table,
    seeds_of,
    slug,
    trained,
)

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
PAPER_METHODS = {
    ("FedAvg", "iid"): 0.9508, ("FedAvg", "two-labels"): 0.9017,
    ("FedProx", "iid"): 0.9576, ("FedProx", "two-labels"): 0.9075,
    ("FedBE", "iid"): 0.9521,
    ("Fed-ensemble", "iid"): 0.9775, ("Fed-ensemble", "two-labels"): 0.9544,
}  # fmt: skip
"""Table 2: (method, split) → accuracy."""
PAPER_MODES = {
    3: (0.9749, 0.9497, 0.9550, 0.16), 5: (0.9785, 0.9500, 0.9560, 0.15), 20: (0.9819, 0.9413, 0.9557, 0.16),
    40: (0.9817, 0.9353, 0.9553, 0.18), 80: (0.9798, 0.9274, 0.9484, 0.20),
}  # fmt: skip
"""Table 4: K → accuracy of the ensemble, of its worst and of its best mode, mean of the modes' entropies in nats."""
_PUBLISHED = {
    "server": "ours", "lowest_accuracy": "worst mode", "highest_accuracy": "best mode",
    "mode_entropy": "mean of the modes' entropies",
}  # fmt: skip
"""What is measured of an ensemble, in the order of `PAPER_MODES` → column."""
_MEASURED = {**_PUBLISHED, "entropy": "entropy of the mean prediction"}
"""All that is measured of an ensemble → column."""

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
# FedBE distils on the server's unlabelled examples: .5 % of 60,000 in the small setting.
_FEDBE: Mapping[bool, Mapping[str, Any]] = {
    False: {"server-share": 0.005, "fedbe.samples": 5, "fedbe.epochs": 2},
    True: {"server-share": 0.05},
}


class EnsembleMnist(Experiment):
    """Accuracy of an ensemble, and of single models."""

    name = "ensemble-mnist"
    title = "Fed-ensemble on MNIST, iid and with two labels per client"
    paper = "Fed-ensemble, Tables 2 and 4 (arXiv 2107.10663)"
    deviations = (
        "All clients participate in every round. If only a fifth of 100 do, with two labels each, a mode is trained by "
        "four clients per round, which is too few: after 80 rounds the accuracy of FedAvg was .006 higher.",
        "Clients, learning rate, local work, batch size and rounds are chosen here, as the paper does not give them; "
        "the learning rate is constant, while the paper's decreases by 1 % every ten rounds.",
        "The server's unlabelled examples for FedBE are taken from the training images; the paper has no result of "
        "FedBE with two labels.",
    )
    datasets = ("mnist",)
    small_scale = (
        "LeNet-5 on images of 20x20, 50 clients, 40 rounds of 20 steps of 32 images; two seeds with two labels, "
        "otherwise one."
    )
    full_scale = "60,000 images of 28x28, 100 clients, 400 rounds of one epoch, three seeds."

    def trials(self, full: bool) -> Sequence[Trial]:
        seeds = {split: (1, 2, 3) if full else (1, 2) if split == "two-labels" else (1,) for split in SPLITS}
        methods = [
            _trial(f"{slug(method)}-{split}-{seed}", method, split, seed, full)
            for split in SPLITS for method in METHODS for seed in seeds[split]
        ]  # fmt: skip
        return methods + [
            _trial(f"modes-{modes}-{seed}", "Fed-ensemble", "iid", seed, full, {"fedensemble.modes": modes})
            for modes in _modes(full) for seed in seeds["iid"][:1] if modes != 5
        ]  # fmt: skip

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        return trained(trial, inputs)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        runs = {(method, split): seeds_of(found, f"{slug(method)}-{split}") for method in METHODS for split in SPLITS}
        scores = {key: [values["server"] for values in each] for key, each in runs.items()}
        splits = {split: split.replace("-", " ") for split in SPLITS}
        all_modes = sorted({*_modes(True), *_modes(False)})
        by_modes = {modes: seeds_of(found, f"modes-{modes}") for modes in all_modes}
        by_modes[5] = runs["Fed-ensemble", "iid"]
        sweep = {modes: each for modes, each in by_modes.items() if each}

        def of_modes(modes: int, key: str) -> str | None:
            return mean_text([value for values in sweep[modes] if (value := values.get(key)) is not None])

        def papers_modes(modes: int, key: str) -> float | None:
            return dict(zip(_PUBLISHED, PAPER_MODES[modes], strict=True)).get(key) if modes in PAPER_MODES else None

        tables = [
            paper_table(
                "Accuracy by method", "method", splits, METHODS,
                lambda method, split: mean_text(scores[method, split]),
                lambda method, split: PAPER_METHODS.get((method, split)),
            ),
            paper_table("Accuracy by modes, iid", "K", _MEASURED, sweep, of_modes, papers_modes),
        ]  # fmt: skip
        figures = [
            curves({method: runs[method, split] for method in METHODS}, split, f"MNIST, {text}", _CAPTION)
            for split, text in splits.items() if any(runs[method, split] for method in METHODS)
        ]  # fmt: skip
        if sweep:
            lines = {
                "Fed-ensemble": {modes: [values["server"] for values in each] for modes, each in sweep.items()},
                PAPER: {modes: [each[0]] for modes, each in PAPER_MODES.items() if modes in sweep},
            }
            figures.append(by_setting(lines, "modes", "Accuracy by modes, iid", "modes K", _CAPTION))
        findings = []
        for split, text in splits.items():
            ensemble, single = ("Fed-ensemble", split), ("FedAvg", split)
            if scores[ensemble] and scores[single]:
                findings.append(
                    f"{text.capitalize()}: Fed-ensemble is {compared(scores[ensemble], scores[single])} FedAvg "
                    f"(paper: {compared([PAPER_METHODS[ensemble]], [PAPER_METHODS[single]])})."
                )
        return Reproduction(tables, figures, findings)


_CAPTION = "Accuracy on the 10,000 test images, which no client has; mean over the seeds."


def _modes(full: bool) -> tuple[int, ...]:
    return (3, 5, 20, 40, 80) if full else (3, 5, 10)


def _trial(name: str, method: str, split: str, seed: int, full: bool, more: Mapping[str, Any] | None = None) -> Trial:
    scale = _FULL if full else _SMALL
    config = {**_COMMON, **scale, **SPLITS[split], **METHODS[method], "seed": seed, **(more or {})}
    if method == "FedBE":
        config |= _FEDBE[full]
    return Trial(name, {"config": config, "clients": 100 if full else 50})
