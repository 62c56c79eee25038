"""FedACS, six other methods and local training on Fashion-MNIST and CIFAR-10 (arXiv 2312.15148).

Settings: two classes per client; Dirichlet .5; 50 training examples each at five Dirichlet distributions (Tables 1 and
2); 500 clients by Dirichlet .5, of which a tenth participates. The settings of every method are searched on other
clients, which, but for those of the 500, share no image with those of the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepal.tools.reproduce.data import Images, by_distribution, grouped, shuffled_images, write_images
from tepal.tools.reproduce.experiment import Claim, Experiment, Reproduction, Trial, TrialInputs, Values, joined, table
from tepal.tools.reproduce.networks import LENET
from tepal.tools.reproduce.runs import PAPER, by_setting, curves, mean_text, slug
from tepal.tools.reproduce.tuning import SEED, search_trials, tuned
from tepal.tools.reproduce.versus import (
    Scores,
    ahead,
    as_most,
    by_seed,
    claimed,
    differences,
    on_common_clients,
    versus,
)
from tepal.tools.spaces import Choices, Range, Space

_RATES: Mapping[str, Space] = {"learning-rate": Range(0.01, 0.3, log=True)}
METHODS: Mapping[str, Mapping[str, Space]] = {
    "FedAvg": _RATES,
    "Local": _RATES,
    "Ditto": {**_RATES, "ditto.lambda": Range(0.01, 10.0, log=True)},
    "Per-FedAvg": {**_RATES, "perfedavg.alpha": Range(0.003, 0.3, log=True)},
    "pFedMe": {**_RATES, "pfedme.lambda": Range(1.0, 100.0, log=True), "pfedme.outer-step": Range(0.05, 1.0, log=True),
               "pfedme.inner-learning-rate": Range(0.003, 0.3, log=True)},
    "APFL": {**_RATES, "apfl.alpha": Range(0.1, 0.9)},
    "FedAMP": {**_RATES, "fedamp.sigma": Range(0.1, 10.0, log=True), "fedamp.lambda": Choices((0.0, 0.001, 0.01))},
    "FedACS": {**_RATES, "fedacs.quantile": Choices((0.5, 0.7, 0.8, 0.9, 0.95))},
}  # fmt: skip
"""Method → the run config keys that are searched, and among which values. pFedMe's `learning-rate` is not used."""
ALPHAS = (0.1, 0.5, 1.0, 5.0, 10.0)
TABLE_1: Mapping[str, Mapping[str, float]] = {
    "cifar-10": {"Local": 0.7729, "Ditto": 0.7733, "Per-FedAvg": 0.7307, "FedACS": 0.8384},
    "fashion-mnist": {"Local": 0.7598, "Ditto": 0.7879, "Per-FedAvg": 0.7407, "FedACS": 0.8433},
}
"""Accuracy with 50 training examples and Dirichlet .5: personal models in Table 1, FedACS in Table 2."""
TABLE_2: Mapping[str, tuple[float, ...]] = {
    "cifar-10": (0.8172, 0.8384, 0.8497, 0.8576, 0.8542),
    "fashion-mnist": (0.8426, 0.8433, 0.8557, 0.8613, 0.8842),
}
"""Accuracy of FedACS by α, with 50 training examples per client."""
_DRAWN: Mapping[str, Any] = {"partitioner": "natural", "min-partition-size": 2, "test-fraction": 30 / 80}
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "two-classes": (
        "two classes per client", {"partitioner": "pathological", "classes-per-client": 2, "test-fraction": 0.3},
    ),
    "scarce": ("50 examples each, Dirichlet .5", _DRAWN),
    "dirichlet": ("Dirichlet .5", {"partitioner": "dirichlet", "dirichlet-alpha": 0.5, "test-fraction": 0.3}),
    "many": (
        "500 clients, a tenth participates, Dirichlet .5",
        {"partitioner": "dirichlet", "dirichlet-alpha": 0.5, "test-fraction": 1 / 6, "fraction-train": 0.1},
    ),
}  # fmt: skip
"""Setting → its text in tables and titles, and its keys of the run config."""
_COMMON: Mapping[str, Any] = {
    "model": LENET, "optimizer": "sgd", "weight-decay": 0.0, "batch-size": 32, "schedule": "constant",
    "fraction-evaluate": 1.0, "held-out-fraction": 0.0, "local-steps": 10, "score-in-training": False,
}  # fmt: skip
_FAR, _NEAR = 0.2, 0.05
"""Differences of accuracy that count as large and as small; the paper's Figure 1 has no numbers."""
_SCARCE = 80  # examples per client, of which 50 are trained on
_OTHER_FILES = ("scarce", "many")  # settings whose file of images is their own
_CAPTION = "Mean over the clients of the accuracy of each one's model on its own test examples."


class FedAcs(Experiment):
    """Mean over the clients of the accuracy of each one's model on its own test examples.

    Args:
        data: name of the data set.
        title: its name in titles.
    """

    paper = "FedACS, Figure 1, Tables 1 and 2 (arXiv 2312.15148)"
    small_scale = (
        "The two settings that decide the paper's claims: two classes per client, and 50 training examples each. 24 "
        "clients (12 others to search on), 40 rounds, five seeds, eight trials of a search for each method; images of "
        "20x20."
    )
    full_scale = (
        "100 clients with two classes each, by Dirichlet .5, or with 50 training examples each at all α, on two thirds "
        "of all images; the rest is searched on. 500 clients share all images by Dirichlet .5, those of the search "
        "among them; they train on 100 to 120 on average, with the settings that were found with 50. 100 rounds, five "
        "seeds, 20 trials of a search for each method. The paper divides all images. It does not say on how many a "
        "client is tested (here on 30 % of its own; on 30 if it trains on 50; of the 500, on a sixth), nor how many of "
        "the 500 participate (here 50)."
    )
    deviations = (
        "The paper gives neither network, learning rate, rounds, local epochs, batch size nor p: here "
        "LeNet-5, SGD, ten batches of 32 per round, a constant rate.",
        "Two classes per client: a client trains on some 140 images (its share of two thirds of 7,200, less 30 %). The "
        "paper calls its data sufficient, and does not say how many a client has.",
        "By α (the paper's Table 2): all α use the settings found at α = .5.",
        "With 50 training examples each, all seeds have the same division of the images among the clients. The "
        "intervals reflect initial weights and batches, not the division.",
        "Learning rate and options of every method are found by the same number of trials of Optuna's TPE sampler with "
        "one seed, on images of other clients, which the results of the searched setting do not have.",
        "With 50 training examples each, a client draws its images by label shares of its own from the Dirichlet "
        "distribution. The paper divides each class among the clients, and keeps 50 of a client's examples.",
        "All methods of a setting are scored on the same clients: those that every run scored. Differences are paired "
        "by seed; intervals are Student's at 95 %.",
        "Figure 1 of the paper has no numbers; Tables 1 and 2 have.",
    )

    def __init__(self, data: str, title: str) -> None:
        self.name = f"fedacs-{data}"
        self.title = f"FedACS and personalised methods on {title}"
        self.datasets = (data,)

    def trials(self, full: bool) -> Sequence[Trial]:
        (data,), trials = self.datasets, list[Trial]()
        seeds, searched = (1, 2, 3, 4, 5), 20 if full else 8
        for setting in SETTINGS if full else ("two-classes", "scarce"):
            for method, search in METHODS.items():
                of = _name("scarce" if setting == "many" else setting, method)
                needs = tuple(f"{of}-search-{number}" for number in range(searched))
                if setting != "many":
                    validation = options(data, setting, method, full, part="validation")
                    trials += search_trials(of, validation, search, searched)
                alphas = ALPHAS if full else (0.1, 0.5, 5.0)
                varied = alphas if setting == "scarce" and method in ("FedACS", "Local") else (0.5,)
                trials += [
                    Trial(f"{_name(setting, method, alpha)}-{seed}",
                          options(data, setting, method, full, alpha=alpha, seed=seed), needs)
                    for alpha in varied for seed in seeds
                ]  # fmt: skip
        return trials

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        return tuned(trial, inputs, METHODS[trial.options["method"]], dataset=str(images_file(trial.options, inputs)))

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        (data,) = self.datasets
        settings = [setting for setting in SETTINGS if by_seed(found, _name(setting, "FedACS"))]
        return joined(*(_results(data, setting, found) for setting in settings), _by_alpha(data, found))


def _results(data: str, setting: str, found: Mapping[str, Values]) -> Reproduction:
    """The table, the curves and the findings of one setting."""
    runs = {method: of for method in METHODS if (of := by_seed(found, _name(setting, method)))}
    (scores, clients), text = on_common_clients(runs), SETTINGS[setting][0]
    title = f"Accuracy on {data}: {text}, {clients} clients, {len(scores['FedACS'])} seeds"
    paper = TABLE_1[data] if setting == "scarce" else None
    lines = curves({method: [*of.values()] for method, of in runs.items()}, f"{data}-{setting}", text, _CAPTION)
    claims = claimed(*_claims(setting, scores))
    return joined(
        versus("FedACS", runs, scores, title, what=text, paper=paper), Reproduction([], [lines], claims=claims)
    )


def _claims(setting: str, scores: Scores) -> Iterator[Claim | None]:
    """The paper's claims on a setting."""
    gains = differences("FedACS", scores)
    fedavg, local = ({name: gain for name, gain in gains.items() if name == one} for one in ("FedAvg", "Local"))
    others = {name: gain for name, gain in gains.items() if name not in ("FedAvg", "Local")}
    text = f"{SETTINGS[setting][0][0].upper()}{SETTINGS[setting][0][1:]}"
    if setting == "two-classes":
        yield ahead(f"{text}: FedACS is better than FedAvg, by more than {_FAR}.", fedavg, least=_FAR)
        yield ahead(f"{text}: APFL is better than all others (Figure 1a).", differences("APFL", scores),
                    wanted=METHODS.keys() - {"APFL"})  # fmt: skip
    if setting in ("two-classes", "dirichlet"):
        yield as_most(f"{text}: FedACS is comparable to most other personalised methods, within {_NEAR} (Figure 1a).",
                      others, _NEAR, METHODS.keys() - {"FedACS", "FedAvg", "Local"})  # fmt: skip
    else:
        yield ahead(f"{text}: FedACS is better than local training (Figure 1b, Table 1).", local)
        yield ahead(f"{text}: FedACS is better than every other method (Figure 1b, Table 1).", {**fedavg, **others},
                    wanted=[name for name in METHODS if name not in ("FedACS", "Local")])  # fmt: skip
        of_meta = {name: gain for name, gain in differences("Per-FedAvg", scores).items() if name == "pFedMe"}
        yield ahead(f"{text}: Per-FedAvg is better than pFedMe (Section 3.3).", of_meta)


def _by_alpha(data: str, found: Mapping[str, Values]) -> Reproduction:
    """Table 2: FedACS and local training by α, each with the settings that were found at .5."""
    paper, methods = dict(zip(ALPHAS, TABLE_2[data], strict=True)), ("FedACS", "Local")
    lines: dict[str, dict[float, list[float]]] = {method: {} for method in methods}
    rows: list[Sequence[Any]] = []
    by_alpha = dict[float, Mapping[int, float]]()
    for alpha in ALPHAS:
        runs = {method: of for method in methods if (of := by_seed(found, _name("scarce", method, alpha)))}
        if len(runs) == len(methods):
            scores, _ = on_common_clients(runs)
            by_alpha[alpha] = scores["FedACS"]
            for method, seeds in scores.items():
                lines[method][alpha] = [*seeds.values()]
            means = (mean_text(lines[method][alpha]) for method in methods)
            rows.append((f"{alpha:g}", *means, differences("FedACS", scores)["Local"].text, paper[alpha]))
    if not rows:
        return Reproduction([])
    headings = ("α", "FedACS", "Local", "FedACS less Local", "FedACS in the paper")
    shown = {**lines, PAPER: {alpha: [score] for alpha, score in paper.items()}}
    title = f"{data}, 50 examples each"
    figure = by_setting(shown, f"{data}-alphas", title, "α of the Dirichlet distribution", _CAPTION)
    count = max(map(len, by_alpha.values()))
    found_table = table(f"Accuracy on {data} by α, 50 examples each, {count} seeds", headings, rows)
    return Reproduction([found_table], [figure], claims=[*_growth(title, by_alpha)])


def _growth(title: str, by_alpha: Mapping[float, Mapping[int, float]]) -> Iterator[Claim]:
    """The claim that accuracy grows with α, by the smallest and the largest one; α → seed → accuracy."""
    low, high = min(by_alpha), max(by_alpha)
    ends = {"high": by_alpha[high], "low": by_alpha[low]}
    text = f"{title}: FedACS' accuracy grows with α (Table 2; here from {low:g} to {high:g})."
    if low < high and (claim := ahead(text, differences("high", ends))):
        yield claim


def _name(setting: str, method: str, alpha: float = 0.5) -> str:
    return f"{setting}-{slug(method)}" + (f"-alpha{alpha}" if alpha != 0.5 else "")


def options(
    data: str, setting: str, method: str, full: bool, *, part: str = "main", alpha: float = 0.5, seed: int = SEED
) -> dict[str, Any]:
    """A trial's options; a search, `part` "validation", has half of the clients of the results, `part` "main"."""
    clients = (500 if setting == "many" else 100) if full else 24
    config: dict[str, Any] = {
        **_COMMON, **SETTINGS[setting][1], "strategy": slug(method), "normalise": data, "seed": seed,
        "num-server-rounds": 100 if full else 40, "evaluate-every": 10,
    }  # fmt: skip
    if not full:
        config["image-shape"] = "1x20x20" if data == "fashion-mnist" else "3x20x20"
    return {
        "data": data, "setting": setting, "method": method, "alpha": alpha, "full": full, "part": part,
        "clients": clients if part == "main" else clients // 2, "config": config,
    }  # fmt: skip


def images_file(of: Mapping[str, Any], inputs: TrialInputs) -> Path:
    """A file of the images for a trial's options, written once; settings are searched on a third of all images."""
    data, setting, part, alpha = of["data"], of["setting"], of["part"], of["alpha"]
    drawn = setting == "scarce"  # each client's images are drawn here, not by the run's partitioner
    name = f"{setting if setting in _OTHER_FILES else 'all'}-{part}{alpha if drawn else ''}"
    path = inputs.folder / "images" / f"{data}-{name}.npz"
    if path.exists():
        return path
    train, test = shuffled_images(data, inputs.data[data])
    images = train if test is None else Images(
        np.concatenate([train.images, test.images]), np.concatenate([train.labels, test.labels])
    )  # fmt: skip
    clients = int(of["clients"])
    most = len(images) if of["full"] else min(len(images), 7_200)
    share = most if setting == "many" else most * 2 // 3
    chosen = images.first(share) if part == "main" else images.first(most - share, after=share)
    if drawn:  # a third of the examples is left over, so that the last clients get their distribution, too
        each = min(_SCARCE, share * 2 // 3 // clients)
        chosen = grouped(chosen, by_distribution(chosen.labels, clients, each, alpha, seed=1))
    return write_images(path, chosen)
