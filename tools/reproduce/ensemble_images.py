"""Fed-ensemble on images (arXiv 2107.10663): methods compared, iid and with few labels per client (Tables 2 and 3), and
the number of modes varied (Table 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tepal.tools.reproduce.data import shuffled_images, write_images
from tepal.tools.reproduce.experiment import Claim, Experiment, Reproduction, Trial, TrialInputs, Values, joined
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import PAPER, by_setting, curves, mean_text, paper_table, slug
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import ahead, by_seed, claimed, differences, on_server, versus
from tepal.tools.spaces import Choices, Range, Space

POOLED = "pooled data"
"""The label of one model that is trained on all clients' images at once: what it reaches without dividing the data."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "FedProx": {"strategy": "fedprox"},
    "FedBE": {"strategy": "fedbe"},
    "Fed-ensemble": {"strategy": "fedensemble", "fedensemble.modes": 5},
    POOLED: {"strategy": "fedavg", "min-clients": 1},
}
_RATE: Mapping[str, Space] = {"learning-rate": Range(0.01, 0.5, log=True)}
SEARCH: Mapping[str, Mapping[str, Space]] = {
    "FedAvg": _RATE,
    "FedProx": {**_RATE, "fedprox.mu": Range(1e-3, 1.0, log=True)},
    "FedBE": {**_RATE, "fedbe.temperature": Choices((0.5, 1.0)), "fedbe.variance-scale": Choices((0.01, 1.0))},
    "Fed-ensemble": _RATE,
    POOLED: _RATE,
}
"""Method → the run config keys that are searched, and among which values."""
_SOME = (4, 6, 8, 10)
SPLITS: Mapping[str, Mapping[str, Any]] = {
    "iid": {"partitioner": "iid"},
    "two-labels": {"partitioner": "pathological", "classes-per-client": 2},
    **{f"{count}-labels": {"partitioner": "pathological", "classes-per-client": count} for count in _SOME},
}
BY_LABELS = {2: "two-labels", **{count: f"{count}-labels" for count in _SOME}}
"""Labels per client → split."""
_PUBLISHED = {
    "server": "ours", "lowest_accuracy": "worst mode", "highest_accuracy": "best mode",
    "mode_entropy": "mean of the modes' entropies",
}  # fmt: skip
"""What is measured of an ensemble, in the order of the paper's Table 4 → column."""
_MEASURED = {**_PUBLISHED, "entropy": "entropy of the mean prediction"}
"""All that is measured of an ensemble → column."""

_COMMON: Mapping[str, Any] = {
    "schedule": "constant", "optimizer": "sgd", "batch-size": 32, "weight-decay": 0.0, "test-fraction": 0.1,
    "fraction-evaluate": 0.0, "score-in-training": False,
}  # fmt: skip
_CAPTION = "Accuracy on the test images, which no client has; mean over the seeds."
_SEEDS = (1, 2, 3, 4, 5)


class EnsembleImages(Experiment):
    """Accuracy of an ensemble, and of single models, on a data set of images.

    Subclasses give what is the data set's own. Mappings by a flag are of the small setting (False) and of the full one.
    """

    label: ClassVar[str]
    """The data set's name in titles."""
    splits: ClassVar[Mapping[bool, Sequence[str]]]
    clients: ClassVar[Mapping[bool, int]]
    sizes: ClassVar[Mapping[bool, Mapping[str, Any]]]
    """Keys of the run config: network, images, rounds and local work."""
    fedbe: ClassVar[Mapping[bool, Mapping[str, Any]]]
    """Keys of the run config: the unlabelled examples of the server, on which FedBE distils, and its work on them."""
    modes: ClassVar[Mapping[bool, Sequence[int]]] = {False: (5,), True: (5,)}
    """Numbers of modes K that are trained, iid."""
    paper_scores: ClassVar[Mapping[tuple[str, str], float]]
    """(method, split) → the paper's accuracy."""
    paper_modes: ClassVar[Mapping[int, Sequence[float]]] = {}
    """K → the paper's numbers in the order of `_PUBLISHED`."""

    def trials(self, full: bool) -> Sequence[Trial]:
        trials = list[Trial]()
        for split in self.splits[full]:
            for method in _methods(split):
                name = f"{slug(method)}-{split}"
                swept = (method, split) == ("Fed-ensemble", "iid")
                of_modes = {k: name if k == 5 else f"modes-{k}" for k in self.modes[full]} if swept else {5: name}
                trials += self._searched(name, method, split, full, of_modes)
        return [*trials, *self._searched("pooled", POOLED, "iid", full, {5: "pooled"})]

    def _searched(
        self, name: str, method: str, split: str, full: bool, of_modes: Mapping[int, str]
    ) -> Sequence[Trial]:
        """The trials of a search, and those that use what it finds, given as K → their names without the seed."""
        options = self._options(method, split, SEED, full, "search")
        search = search_trials(name, options, SEARCH[method], 12 if full else 5)
        needs = tuple(trial.name for trial in search)
        found = [
            Trial(f"{of}-{seed}", self._options(method, split, seed, full, "main", k), needs)
            for k, of in of_modes.items() for seed in _SEEDS
        ]  # fmt: skip
        return [*search, *found]

    def _options(self, method: str, split: str, seed: int, full: bool, part: str, modes: int = 5) -> dict[str, Any]:
        clients = self.clients[full]
        config = {
            **_COMMON, "normalise": self.datasets[0], **self.sizes[full], **SPLITS[split], **METHODS[method],
            **(self.fedbe[full] if method == "FedBE" else {}), "seed": seed,
            **({"fedensemble.modes": modes} if modes != 5 else {}),
        }  # fmt: skip
        if method == POOLED:
            if "local-steps" in config:  # as many examples as FedAvg's clients have together
                config["local-steps"] *= clients
            clients = 1
        return {"method": method, "part": part, "full": full, "config": config, "clients": clients}

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        dataset = str(self._images(inputs, trial.options["part"]))
        return tuned(trial, inputs, SEARCH[trial.options["method"]], dataset=dataset)

    def _images(self, inputs: TrialInputs, part: str) -> Path:
        """A file of the images of the results or of the search, written once; they share none."""
        (name,) = self.datasets
        path = inputs.folder / "images" / f"{name}-{part}.npz"
        if not path.exists():
            train, test = shuffled_images(name, inputs.data[name], seed=1)
            assert test is not None  # the published files have it
            third = len(train) // 3
            if part == "main":
                return write_images(path, train.first(2 * third), test)
            scored = third // 5
            trained = third * 4 // 5
            write_images(path, train.first(trained, 2 * third), train.first(scored, 2 * third + trained))
        return path

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        of_splits = (self._by_method(found, split) for split in SPLITS)
        more = claimed(self._larger_with_two_labels(found), self._grows_with_modes(found))
        return joined(*of_splits, Reproduction([], claims=more), self._by_labels(found), self._by_modes(found))

    def _by_method(self, found: Mapping[str, Values], split: str) -> Reproduction:
        names = {method: "pooled" if method == POOLED else f"{slug(method)}-{split}" for method in METHODS}
        runs = {method: of for method, name in names.items() if (of := by_seed(found, name))}
        if "Fed-ensemble" not in runs:
            return Reproduction([])
        text, scores = split.replace("-", " "), on_server(runs)
        paper = {method: score for (method, of), score in self.paper_scores.items() if of == split}
        shown = {method: [*of.values()] for method, of in runs.items()}
        figure = curves(shown, split, f"{self.label}, {text}", _CAPTION)
        title = f"Accuracy, {text}, {len(scores['Fed-ensemble'])} seeds"
        of_all = versus("Fed-ensemble", runs, scores, title, what=text.capitalize(), paper=paper)
        said = ", ".join(f"{method} {score}" for method, score in paper.items())
        gains = {method: gain for method, gain in differences("Fed-ensemble", scores).items() if method in paper}
        claim = ahead(f"{text.capitalize()}, Fed-ensemble is better than the others ({said}).", gains)
        return joined(of_all, Reproduction([], [figure], claims=claimed(claim)))

    def _larger_with_two_labels(self, found: Mapping[str, Values]) -> Claim | None:
        if "two-labels" not in self.splits[True]:
            return None
        gains, papers = dict[str, Mapping[int, float]](), list[str]()
        for split in ("two-labels", "iid"):
            ours, others = (by_seed(found, f"{method}-{split}") for method in ("fedensemble", "fedavg"))
            gains[split] = {seed: ours[seed]["server"] - of["server"] for seed, of in others.items() if seed in ours}
            gain = self.paper_scores["Fed-ensemble", split] - self.paper_scores["FedAvg", split]
            papers.append(f"{gain:.4f} {split.replace('-', ' ')}")
        text = f"The gain over FedAvg is larger with two labels per client than iid ({', '.join(papers)})."
        return ahead(text, differences("two-labels", gains))

    def _grows_with_modes(self, found: Mapping[str, Values]) -> Claim | None:
        scores = {k: of for k in self._all_modes() if k <= 40 and (of := by_seed(found, f"modes-{k}"))}
        if len(scores) < 2:
            return None
        few, most = min(scores), max(scores)
        gains = differences(str(most), on_server({str(k): scores[k] for k in (few, most)}))
        return ahead(f"The accuracy grows with K up to 40; here K = {most} against {few}.", gains)

    def _all_modes(self) -> Sequence[int]:
        return sorted({*self.modes[False], *self.modes[True]})

    def _by_labels(self, found: Mapping[str, Values]) -> Reproduction:
        """Table 3."""
        scores = {
            method: {count: [of["server"] for of in by_seed(found, f"{slug(method)}-{split}").values()]
                     for count, split in BY_LABELS.items()}
            for method in _methods("4-labels")
        }  # fmt: skip
        counts = [count for count in BY_LABELS if any(of[count] for of in scores.values())]
        if len(counts) < 2:
            return Reproduction([])
        seeds = max(len(of_one) for of in scores.values() for of_one in of.values())
        title = f"Accuracy by labels per client, {seeds} seeds"
        table = paper_table(
            title, "labels", {method: method for method in scores}, counts,
            lambda count, method: mean_text(scores[method][count]),
            lambda count, method: self.paper_scores.get((method, BY_LABELS[count])),
        )  # fmt: skip
        return Reproduction([table], [by_setting(scores, "labels", title, "labels per client", _CAPTION)])

    def _by_modes(self, found: Mapping[str, Values]) -> Reproduction:
        """Table 4."""
        names = {k: "fedensemble-iid" if k == 5 else f"modes-{k}" for k in self._all_modes()}
        sweep = {k: of for k, name in names.items() if (of := by_seed(found, name))}
        if not sweep:
            return Reproduction([])

        def ours(k: int, key: str) -> str | None:
            return mean_text([value for of in sweep[k].values() if (value := of.get(key)) is not None])

        def papers(k: int, key: str) -> float | None:
            return dict(zip(_PUBLISHED, self.paper_modes[k], strict=True)).get(key) if k in self.paper_modes else None

        title = f"Accuracy by modes, iid, {max(map(len, sweep.values()))} seeds"
        table = paper_table(title, "K", _MEASURED, sweep, ours, papers)
        lines = {
            "Fed-ensemble": {k: [of["server"] for of in each.values()] for k, each in sweep.items()},
            PAPER: {k: [each[0]] for k, each in self.paper_modes.items() if k in sweep},
        }
        figure = by_setting(lines, "modes", title, "modes K", _CAPTION)
        return Reproduction([table], [figure] if len(sweep) > 1 else [])


def _methods(split: str) -> Sequence[str]:
    """The methods that are compared; FedBE is not in the paper's Table 3."""
    return [each for each in METHODS if each != POOLED and (each != "FedBE" or split in ("iid", "two-labels"))]


_SEARCHED = (
    "The learning rate of every method, and its own options, are found by the same number of trials (the first five "
    "random, further ones by Optuna's TPE sampler) in each split, on a third of the training images, which the "
    "results do not have, and scored on a fifth of these. The rate is constant, while the paper's decreases by 1 % "
    "every ten rounds."
)
_PAIRED = "Differences are paired by seed; intervals are Student's at 95 %."
_POOLED = (
    f"{POOLED.capitalize()}: one model is trained on the images of all clients by FedAvg's optimizer and batches, in "
    "as many steps as FedAvg's clients have together; its rate is searched likewise. It is no upper bound: the table "
    "has its accuracy after the last round, which may be below its best."
)


class EnsembleMnist(EnsembleImages):
    """MNIST, iid and with two labels per client, and the number of modes varied."""

    name = "ensemble-mnist"
    title = "Fed-ensemble on MNIST, iid and with two labels per client"
    paper = "Fed-ensemble, Tables 2 and 4 (arXiv 2107.10663)"
    datasets = ("mnist",)
    label = "MNIST"
    splits: ClassVar = dict.fromkeys((False, True), ("iid", "two-labels"))
    clients: ClassVar = {False: 50, True: 100}
    sizes: ClassVar = {
        False: {"model": LENET, "image-shape": "1x20x20", "num-server-rounds": 40, "evaluate-every": 8,
                "local-steps": 10},
        True: {"model": "cnn", "num-server-rounds": 400, "evaluate-every": 20, "local-epochs": 1},
    }  # fmt: skip
    fedbe: ClassVar = {
        False: {"server-share": 0.01, "fedbe.samples": 5, "fedbe.epochs": 2},
        True: {"server-share": 0.05},
    }
    modes: ClassVar = {False: (3, 5, 10), True: (3, 5, 20, 40, 80)}
    paper_scores: ClassVar = {
        ("FedAvg", "iid"): 0.9508, ("FedAvg", "two-labels"): 0.9017,
        ("FedProx", "iid"): 0.9576, ("FedProx", "two-labels"): 0.9075,
        ("FedBE", "iid"): 0.9521,
        ("Fed-ensemble", "iid"): 0.9775, ("Fed-ensemble", "two-labels"): 0.9544,
    }  # fmt: skip
    paper_modes: ClassVar = {
        3: (0.9749, 0.9497, 0.9550, 0.16), 5: (0.9785, 0.9500, 0.9560, 0.15), 20: (0.9819, 0.9413, 0.9557, 0.16),
        40: (0.9817, 0.9353, 0.9553, 0.18), 80: (0.9798, 0.9274, 0.9484, 0.20),
    }  # fmt: skip
    deviations = (
        "All clients participate in every round, so that ten train each mode (20 of 100 with `--full`).",
        _SEARCHED,
        _PAIRED,
        "Clients, local work, batch size and rounds are chosen here, as the paper does not give them. The server's "
        "unlabelled examples for FedBE are taken from the training images; the paper has no result of FedBE with two "
        "labels.",
        _POOLED,
    )
    small_scale = (
        "LeNet-5 on images of 20x20, 50 clients, 40 rounds of ten steps of 32 images; five seeds, five trials of a "
        "search."
    )
    full_scale = (
        "40,000 images of 28x28, 100 clients, 400 rounds of one epoch; five seeds, twelve trials of a search."
    )


class EnsembleCifar10(EnsembleImages):
    """CIFAR-10, iid and with few labels per client."""

    name = "ensemble-cifar-10"
    title = "Fed-ensemble on CIFAR-10, iid and with few labels per client"
    paper = "Fed-ensemble, Tables 2 and 3 (arXiv 2107.10663)"
    datasets = ("cifar-10",)
    label = "CIFAR-10"
    splits: ClassVar = {False: ("iid", "two-labels"), True: tuple(SPLITS)}
    clients: ClassVar = {False: 50, True: 50}
    sizes: ClassVar = {
        False: {"model": LENET, "image-shape": "3x20x20", "num-server-rounds": 60, "evaluate-every": 10,
                "local-steps": 10},
        True: {"model": "resnet-18", "num-server-rounds": 300, "evaluate-every": 20, "local-epochs": 1},
    }  # fmt: skip
    fedbe: ClassVar = {
        False: {"server-share": 0.05, "fedbe.samples": 5, "fedbe.epochs": 2},
        True: {"server-share": 0.05},
    }
    paper_scores: ClassVar = {
        ("FedAvg", "iid"): 0.8643, ("FedAvg", "two-labels"): 0.6611,
        ("FedProx", "iid"): 0.8677, ("FedProx", "two-labels"): 0.6662,
        ("FedBE", "iid"): 0.8313,
        ("Fed-ensemble", "iid"): 0.8799, ("Fed-ensemble", "two-labels"): 0.7118,
        ("FedAvg", "4-labels"): 0.8390, ("FedProx", "4-labels"): 0.8440, ("Fed-ensemble", "4-labels"): 0.8612,
        ("FedAvg", "6-labels"): 0.8590, ("FedProx", "6-labels"): 0.8610, ("Fed-ensemble", "6-labels"): 0.8714,
        ("FedAvg", "8-labels"): 0.8590, ("FedProx", "8-labels"): 0.8606, ("Fed-ensemble", "8-labels"): 0.8733,
        ("FedAvg", "10-labels"): 0.8652, ("FedProx", "10-labels"): 0.8677, ("Fed-ensemble", "10-labels"): 0.8794,
    }  # fmt: skip
    deviations = (
        "All clients participate in every round, and each mode has ten of them.",
        _SEARCHED,
        _PAIRED,
        "Clients, local work, batch size and rounds are chosen here, as the paper does not give them; it does not say "
        "which ResNet it has. The server's unlabelled examples for FedBE are taken from the training images; the paper "
        "has no result of FedBE with two labels. With two labels its Tables 2 and 3 differ by up to .003; the numbers "
        "here are Table 2's.",
        _POOLED,
    )
    small_scale = (
        "Two thirds of the training images (6,666 of a file with 10,000), LeNet-5 on images of 20x20, 50 clients, 60 "
        "rounds of ten steps of 32 images; five seeds, five trials of a search; iid and two labels per client."
    )
    full_scale = (
        "33,000 images, ResNet-18, 50 clients, 300 rounds of one epoch; five seeds, twelve trials of a search; iid and "
        "2, 4, 6, 8 and 10 labels per client."
    )


class EnsembleCifar100(EnsembleImages):
    """CIFAR-100, iid."""

    name = "ensemble-cifar-100"
    title = "Fed-ensemble on CIFAR-100, iid"
    paper = "Fed-ensemble, Table 2 (arXiv 2107.10663)"
    datasets = ("cifar-100",)
    label = "CIFAR-100"
    splits: ClassVar = dict.fromkeys((False, True), ("iid",))
    clients = EnsembleCifar10.clients
    sizes: ClassVar = {
        **EnsembleCifar10.sizes, False: {**EnsembleCifar10.sizes[False], "num-server-rounds": 50, "local-steps": 20}
    }  # fmt: skip
    fedbe = EnsembleCifar10.fedbe
    paper_scores: ClassVar = {
        ("FedAvg", "iid"): 0.5625, ("FedProx", "iid"): 0.5591, ("FedBE", "iid"): 0.4924,
        ("Fed-ensemble", "iid"): 0.5809,
    }  # fmt: skip
    deviations = (
        "All clients participate in every round, and each mode has ten of them.",
        _SEARCHED,
        _PAIRED,
        "Clients, local work, batch size and rounds are chosen here, as the paper does not give them; it does not say "
        "which ResNet it has. The server's unlabelled examples for FedBE are taken from the training images.",
        _POOLED,
    )
    small_scale = (
        "Two thirds of the training images, LeNet-5 on images of 20x20, 50 clients, 50 rounds of 20 steps of 32 "
        "images; five seeds, five trials of a search."
    )
    full_scale = "33,000 images, ResNet-18, 50 clients, 300 rounds of one epoch; five seeds, twelve trials of a search."
