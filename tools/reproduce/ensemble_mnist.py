"""Fed-ensemble on MNIST (arXiv 2107.10663): methods compared (Table 2), iid and with two labels per client, and the
number of modes varied (Table 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tepal.tools.reproduce.data import shuffled_images, write_images
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, joined
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import PAPER, by_setting, curves, mean_text, paper_table, slug
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import by_seed, on_server, versus
from tepal.tools.spaces import Choices, Range, Space

METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "FedProx": {"strategy": "fedprox"},
    "FedBE": {"strategy": "fedbe"},
    "Fed-ensemble": {"strategy": "fedensemble", "fedensemble.modes": 5},
}
_RATE: Mapping[str, Space] = {"learning-rate": Range(0.01, 0.5, log=True)}
SEARCH: Mapping[str, Mapping[str, Space]] = {
    "FedAvg": _RATE,
    "FedProx": {**_RATE, "fedprox.mu": Range(1e-3, 1.0, log=True)},
    "FedBE": {**_RATE, "fedbe.temperature": Choices((0.5, 1.0)), "fedbe.variance-scale": Choices((0.01, 1.0))},
    "Fed-ensemble": _RATE,
}
"""Method → the run config keys that are searched, and among which values."""
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
    "normalise": "mnist", "schedule": "constant", "optimizer": "sgd", "batch-size": 32, "weight-decay": 0.0,
    "test-fraction": 0.1, "fraction-evaluate": 0.0, "score-in-training": False,
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "model": LENET, "image-shape": "1x20x20", "num-server-rounds": 40, "evaluate-every": 8, "local-steps": 10,
}  # fmt: skip
_FULL: Mapping[str, Any] = {"model": "cnn", "num-server-rounds": 400, "evaluate-every": 20, "local-epochs": 1}
# FedBE distils on the server's unlabelled examples.
_FEDBE: Mapping[bool, Mapping[str, Any]] = {
    False: {"server-share": 0.01, "fedbe.samples": 5, "fedbe.epochs": 2},
    True: {"server-share": 0.05},
}
_CAPTION = "Accuracy on the 10,000 test images, which no client has; mean over the seeds."


class EnsembleMnist(Experiment):
    """Accuracy of an ensemble, and of single models."""

    name = "ensemble-mnist"
    title = "Fed-ensemble on MNIST, iid and with two labels per client"
    paper = "Fed-ensemble, Tables 2 and 4 (arXiv 2107.10663)"
    datasets = ("mnist",)
    deviations = (
        "All clients participate in every round. If only a fifth of 100 do, with two labels each, a mode is trained by "
        "four clients per round, which is too few: after 80 rounds the accuracy of FedAvg was .006 higher.",
        "The learning rate of every method, and its own options, are found by the same number of trials of Optuna's "
        "TPE sampler in each split, on a third of the training images, which the results do not have, and scored on a "
        "fifth of these. The rate is constant, while the paper's decreases by 1 % every ten rounds.",
        "Differences are paired by seed; intervals are Student's at 95 %.",
        "Clients, local work, batch size and rounds are chosen here, as the paper does not give them. The server's "
        "unlabelled examples for FedBE are taken from the training images; the paper has no result of FedBE with two "
        "labels.",
    )
    small_scale = (
        "LeNet-5 on images of 20x20, 50 clients, 40 rounds of ten steps of 32 images; five seeds, five trials of a "
        "search."
    )
    full_scale = (
        "40,000 images of 28x28, 100 clients, 400 rounds of one epoch; five seeds, twelve trials of a search."
    )

    def trials(self, full: bool) -> Sequence[Trial]:
        trials, searched = list[Trial](), 12 if full else 5
        for split in SPLITS:
            for method, search in SEARCH.items():
                name = f"{slug(method)}-{split}"
                trials += search_trials(name, _options(method, split, SEED, full, "search"), search, searched)
                needs = tuple(f"{name}-search-{number}" for number in range(searched))
                for modes in _modes(full) if (method, split) == ("Fed-ensemble", "iid") else (5,):
                    of = name if modes == 5 else f"modes-{modes}"
                    more = {"fedensemble.modes": modes} if modes != 5 else {}
                    trials += [
                        Trial(f"{of}-{seed}", _options(method, split, seed, full, "main", more), needs)
                        for seed in (1, 2, 3, 4, 5)
                    ]
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        dataset = str(_images(inputs, trial.options["part"]))
        return tuned(trial, inputs, SEARCH[trial.options["method"]], dataset=dataset)

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        return joined(*(_by_method(found, split) for split in SPLITS), _by_modes(found))


def _by_method(found: Mapping[str, Values], split: str) -> Reproduction:
    runs = {method: of for method in METHODS if (of := by_seed(found, f"{slug(method)}-{split}"))}
    if "Fed-ensemble" not in runs:
        return Reproduction([])
    text, scores = split.replace("-", " "), on_server(runs)
    paper = {method: score for (method, of), score in PAPER_METHODS.items() if of == split}
    shown = {method: [*of.values()] for method, of in runs.items()}
    figure = curves(shown, split, f"MNIST, {text}", _CAPTION)
    title = f"Accuracy, {text}, {len(scores['Fed-ensemble'])} seeds"
    of_all = versus("Fed-ensemble", runs, scores, title, what=text.capitalize(), paper=paper)
    return joined(of_all, Reproduction([], [figure]))


def _by_modes(found: Mapping[str, Values]) -> Reproduction:
    """Table 4."""
    names = {modes: "fedensemble-iid" if modes == 5 else f"modes-{modes}" for modes in _ALL_MODES}
    sweep = {modes: of for modes, name in names.items() if (of := by_seed(found, name))}
    if not sweep:
        return Reproduction([])

    def of_modes(modes: int, key: str) -> str | None:
        return mean_text([value for of in sweep[modes].values() if (value := of.get(key)) is not None])

    def papers_modes(modes: int, key: str) -> float | None:
        return dict(zip(_PUBLISHED, PAPER_MODES[modes], strict=True)).get(key) if modes in PAPER_MODES else None

    table = paper_table("Accuracy by modes, iid", "K", _MEASURED, sweep, of_modes, papers_modes)
    lines = {
        "Fed-ensemble": {modes: [of["server"] for of in each.values()] for modes, each in sweep.items()},
        PAPER: {modes: [each[0]] for modes, each in PAPER_MODES.items() if modes in sweep},
    }
    return Reproduction([table], [by_setting(lines, "modes", "Accuracy by modes, iid", "modes K", _CAPTION)])


def _modes(full: bool) -> tuple[int, ...]:
    return (3, 5, 20, 40, 80) if full else (3, 5, 10)


_ALL_MODES = sorted({*_modes(True), *_modes(False)})


def _options(
    method: str, split: str, seed: int, full: bool, part: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    config = {
        **_COMMON, **(_FULL if full else _SMALL), **SPLITS[split], **METHODS[method],
        **(_FEDBE[full] if method == "FedBE" else {}), "seed": seed, **(more or {}),
    }  # fmt: skip
    return {"method": method, "part": part, "full": full, "config": config, "clients": 100 if full else 50}


def _images(inputs: TrialInputs, part: str) -> Path:
    """A file of the images of the results or of the search, written once; they share none."""
    path = inputs.folder / "images" / f"mnist-{part}.npz"
    if not path.exists():
        train, test = shuffled_images("mnist", inputs.data["mnist"], seed=1)
        assert test is not None  # the published files have it
        third = len(train) // 3
        if part == "main":
            return write_images(path, train.first(2 * third), test)
        write_images(path, train.first(third * 4 // 5, 2 * third), train.first(third // 5, 2 * third + third * 4 // 5))
    return path
