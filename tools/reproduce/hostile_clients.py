"""Hostile clients: what each robust way of merging keeps of the accuracy, by method and attack.

Of twenty clients a fifth attacks in every round. Every method runs without an attack and with each of five, with the
plain mean and with the settings of `robust` that suit it; FedAvg with every setting. There is no table of a paper to
compare with: the reference of a method is its own run without attack and with the plain mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from tepal.report.page import Figure
from tepal.report.table import Table
from tepal.tools.reproduce.attacks import ATTACKS, NO_ATTACK, NOISE, SCALE, Population
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, joined, table
from tepal.tools.reproduce.networks import LENET, VIT
from tepal.tools.reproduce.runs import by_setting, seeds_of, slug, trained

CLIENTS, HOSTILE = 20, 4
MODES = 3
SETTINGS = ("none", "clip", "trimmed", "median", "krum", "rfa", "clip+krum")
"""Values of `robust`; "none" is the plain mean."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "FedFrozen": {"strategy": "fedfrozen"},
    "Fed-ensemble": {"strategy": "fedensemble", "fedensemble.modes": MODES},
    "FedACS": {"strategy": "fedacs"},
    "Selective": {"strategy": "selective", "selective.draw-budgets": True},
}
OF_METHOD: Mapping[str, Sequence[str]] = {"FedAvg": SETTINGS, "FedACS": ("none", "clip")}
"""Method → the settings of `robust` with which it runs, unless they are `USUAL`."""
USUAL = ("none", "krum", "rfa", "clip+krum")
PERSONAL = ("FedACS",)
"""Methods without a global model: the honest clients' accuracy with their own models counts."""
KEPT = 0.02
"""Accuracy that may be lost under an attack: two points."""

_COMMON: Mapping[str, Any] = {
    "partitioner": "dirichlet", "dirichlet-alpha": 1.0, "min-clients": CLIENTS, "score-in-training": False,
    "hostile-share": HOSTILE / CLIENTS, "optimizer": "adamw", "schedule": "cosine", "batch-size": 32,
}  # fmt: skip
DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "dataset": "digits", "model": "cnn", "num-server-rounds": 20, "local-steps": 10, "learning-rate": 0.002,
    },
    "cifar-10": {
        "dataset": "cifar-10", "model": LENET, "normalise": "cifar-10", "num-server-rounds": 30, "local-steps": 20,
        "learning-rate": 0.001,
    },
}  # fmt: skip
_OF_METHOD: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("digits", "FedACS"): {"schedule": "constant"},  # mixing goes on as the rate falls, and accuracy falls with it
    ("cifar-10", "FedACS"): {"schedule": "constant"},
    ("digits", "FedFrozen"): {"model": "tiny-vit", "local-steps": 20, "fedfrozen.warmup-rounds": 10},
    ("cifar-10", "FedFrozen"): {"model": VIT, "num-server-rounds": 15, "fedfrozen.warmup-rounds": 8},
}
_ROUNDS_BETWEEN = 5  # of two scores of the global model
_SEEDS, _SEEDS_FULL = (1, 2, 3), (1, 2, 3, 4, 5)


class HostileClients(Experiment):
    """Accuracy by method, attack and setting of `robust`."""

    name = "hostile-clients"
    title = "Hostile clients: what robust merging keeps of the accuracy"
    paper = "No paper's table; the attack of Baruch et al. 2019 (arXiv 1902.06156) and four common ones"
    deviations = (
        f"{HOSTILE} of {CLIENTS} clients are hostile, and attack in every round. They return −u instead of their "
        f"update u, {SCALE:g} u, N(0, {NOISE:g}) for each coordinate, or what they trained with the labels y replaced "
        "by C − 1 − y; or, as in “A little is enough”, the honest updates' mean − z·std by coordinate.",
        "In “A little is enough” the hostile clients know the honest updates of the round, while its paper estimates "
        "mean and deviation from the hostile clients' own data; z is the paper's, from all clients of the round.",
        "The clients' labels follow Dir(1). Every honest client participates in every round.",
        "Accuracy is that on the server's held-out examples; for FedACS, the mean over the honest clients of that of "
        "each one's model on its own test examples.",
        "The rate falls by a cosine over the rounds; for FedACS, whose mixtures would undo what the last rounds learn, "
        "it is constant.",
        "After ±: half of the 95 % confidence interval of the mean over the seeds, by Student's t. A figure without it "
        "is of one seed.",
    )
    small_scale = (
        f"Digits with a CNN; {CLIENTS} clients, 20 rounds of 10 steps, three seeds. FedFrozen with a small transformer "
        "and 20 steps."
    )
    full_scale = (
        "Digits; and CIFAR-10 with LeNet for 30 rounds of 20 steps, FedFrozen with a small transformer for 15; "
        f"{CLIENTS} clients, five seeds."
    )

    def data(self, full: bool) -> Sequence[str]:
        return ("cifar-10",) if full else ()

    def trials(self, full: bool) -> Sequence[Trial]:
        return [
            _trial(data, method, attack, robust, seed)
            for seed in (_SEEDS_FULL if full else _SEEDS) for data in (DATA if full else ("digits",))
            for method in METHODS for attack in ATTACKS for robust in settings_of(method)
        ]  # fmt: skip

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        of = trial.options
        population = Population(int(of["clients"]), int(of["hostile"]), of["attack"], int(of["config"]["seed"]))
        values = trained(trial, inputs, grid=population.grid)
        return {**values, "honest": population.accuracy}

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        return joined(*(_results(data, found) for data in DATA))


def settings_of(method: str) -> Sequence[str]:
    """The settings of `robust` with which a method runs."""
    return OF_METHOD.get(method, USUAL)


def _trial(data: str, method: str, attack: str, robust: str, seed: int) -> Trial:
    config = {
        **_COMMON, **DATA[data], **METHODS[method], **_OF_METHOD.get((data, method), {}),
        "evaluate-every": _ROUNDS_BETWEEN, "robust": robust, "seed": seed,
    }  # fmt: skip
    options = {"config": config, "clients": CLIENTS, "hostile": HOSTILE, "attack": attack}
    return Trial(f"{_name(data, method, attack, robust)}-{seed}", options)


def _name(data: str, method: str, attack: str, robust: str) -> str:
    return f"{slug(data)}-{slug(method)}-{slug(attack)}-{robust}"


# --- the results ----------------------------------------------------------------------------------------------------

_CAPTION = (
    "Accuracy under each attack; the mean over the seeds. For FedACS it is that of the honest clients' own models."
)


def _results(data: str, found: Mapping[str, Values]) -> Reproduction:
    """The results on one data set, of the trials that are computed."""

    def by_seed(method: str, attack: str, robust: str, key: str = "") -> dict[str, float]:
        """Seed → accuracy."""
        prefix = f"{_name(data, method, attack, robust)}-"
        key = key or ("honest" if method in PERSONAL else "server")
        known = {name.removeprefix(prefix): of[key] for name, of in found.items() if name.startswith(prefix)}
        return {seed: value for seed, value in known.items() if value is not None}

    pairs = [(method, robust) for method in METHODS for robust in settings_of(method)]
    accuracies, kept = [], []
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for method, robust in pairs:
        scores = {attack: by_seed(method, attack, robust) for attack in ATTACKS}
        if not any(scores.values()):
            continue
        accuracies.append((method, robust, *(_text(list(scores[attack].values())) for attack in ATTACKS)))
        reference = by_seed(method, NO_ATTACK, "none")
        losses = {
            attack: [reference[seed] - value for seed, value in scores[attack].items() if seed in reference]
            for attack in ATTACKS
        }
        kept.append((method, robust, *(_kept_text(losses[attack]) for attack in ATTACKS)))
        under = [mean(losses[attack]) <= KEPT for attack in ATTACKS[1:] if losses[attack]]
        counts[method, robust] = sum(under), len(under)
    if not accuracies:
        return Reproduction([])
    tables = [
        table(f"Accuracy on {data}", ("method", "robust", *_headings()), accuracies),
        table(f"Accuracy lost on {data}, and whether it is within 2 points", ("method", "robust", *_headings()), kept),
    ]
    if modes := _modes(data, found):
        tables.append(modes)
    shown = dict.fromkeys(row[0] for row in accuracies)
    figures = [_figure(data, str(method), by_seed) for method in shown]
    return Reproduction(tables, figures, _findings(data, counts))


def _headings() -> tuple[str, ...]:
    return tuple("no attack" if attack == NO_ATTACK else attack for attack in ATTACKS)


def _half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t as student  # for a second, which the command's list of experiments need not wait

    return float(student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5)


def _text(values: Sequence[float], sign: str = "") -> str | None:
    """Mean and 95 % interval, as "0.8512 ± 0.0102"; None without values."""
    if not values:
        return None
    half = _half_width(values)
    return f"{mean(values):{sign}.4f}" + ("" if half is None else f" ± {half:.4f}")


def _kept_text(losses: Sequence[float]) -> str | None:
    """The accuracy lost, and whether it is within two points; undecided if its interval reaches over the bound."""
    if not losses:
        return None
    half = _half_width(losses)
    within = half is not None and mean(losses) + half <= KEPT
    beyond = half is not None and mean(losses) - half > KEPT
    return f"{_text(losses, '+')} {'yes' if within else 'no' if beyond else 'undecided'}"


def _modes(data: str, found: Mapping[str, Values]) -> Table | None:
    """Accuracy of the worst and the best mode of Fed-ensemble."""
    rows = []
    for robust in settings_of("Fed-ensemble"):
        for attack in ATTACKS:
            runs = seeds_of(found, _name(data, "Fed-ensemble", attack, robust))
            if runs:
                both = (_text([of[key] for of in runs]) for key in ("lowest_accuracy", "highest_accuracy"))
                rows.append((robust, "no attack" if attack == NO_ATTACK else attack, *both))
    title = f"Accuracy of the modes of Fed-ensemble on {data}"
    return table(title, ("robust", "attack", "worst mode", "best mode"), rows) if rows else None


def _figure(data: str, method: str, by_seed: Any) -> Figure:
    lines = {
        robust: {attack: list(by_seed(method, attack, robust).values()) for attack in ATTACKS}
        for robust in settings_of(method)
    }
    named = {robust: dict(zip(_headings(), values.values(), strict=True)) for robust, values in lines.items()}
    return by_setting(named, f"{slug(data)}-{slug(method)}", f"{method} on {data}", "attack", _CAPTION)


def _findings(data: str, counts: Mapping[tuple[str, str], tuple[int, int]]) -> list[str]:
    """For each method, how many attacks each setting withstands within two points."""
    sentences = []
    for method in METHODS:
        texts = [f"{robust} {good} of {of}" for (each, robust), (good, of) in counts.items() if each == method and of]
        if texts:
            sentences.append(
                f"{data}, {method}: attacks after which the mean accuracy is within 2 points of that without attack: "
                f"{', '.join(texts)}."
            )
    return sentences
