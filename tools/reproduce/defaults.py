"""Three defaults of this project, chosen on the images of the searches of two papers' settings.

FedACS' `follow-rate`, FedAMP's λ and the coupling of selective layers: each value runs in several settings with five
seeds; other settings are fixed. The results of the papers' settings share no image with these runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tepal.server_app.config import defaults
from tepal.tools.compare.answers import Paired, paired
from tepal.tools.reproduce import fedacs
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, joined, table
from tepal.tools.reproduce.runs import mean_text, slug, trained
from tepal.tools.reproduce.selective import SEARCHED, Selective
from tepal.tools.reproduce.tuning import score_of
from tepal.tools.reproduce.versus import by_seed

SEEDS = (1001, 1002, 1003, 1004, 1005)
"""Of the runs; neither those of the papers' results nor the searches'."""
RATE = 0.1
"""The fixed learning rate; on Fashion-MNIST the searches found about .16 for FedACS and .07 for FedAMP."""

Options = Callable[[str, int], dict[str, Any]]
Scores = Mapping[str, Mapping[int, float]]
"""Value of a key → seed → accuracy."""


@dataclass(frozen=True)
class Choice:
    """A key of the run config: its values, and the settings in which they run.

    options: function of a setting and a seed that returns a trial's options.
    """

    key: str
    values: Sequence[float | bool]
    settings: Sequence[str]
    options: Options

    @property
    def default(self) -> str:
        """The present default, as text."""
        return json.dumps(defaults()[self.key])

    def name(self, setting: str, value: str) -> str:
        """The name of its trials, without the seed."""
        return f"{slug(self.key)}-{setting}-{value}"


_CLIENTS = {f"{data}-{setting}": (data, setting) for data in ("fashion-mnist", "cifar-10")
            for setting in ("two-classes", "scarce")}  # fmt: skip


def _personal(method: str, **config: Any) -> Options:
    def options(setting: str, seed: int) -> dict[str, Any]:
        found = fedacs.options(*_CLIENTS[setting], method, False, part="validation", seed=seed)
        return {**found, "config": {**found["config"], "learning-rate": RATE, **config}}

    return options


def _selective(setting: str, seed: int) -> dict[str, Any]:
    found = Selective(setting).options("gradient", SEARCHED, seed, False, "search")
    return {**found, "kind": setting, "config": {**found["config"], "learning-rate": RATE}}


CHOICES = (
    Choice("fedacs.follow-rate", (True, False), tuple(_CLIENTS), _personal("FedACS", schedule="cosine")),
    Choice("fedamp.lambda", (0.0, 0.001, 0.01, 0.1), tuple(_CLIENTS), _personal("FedAMP")),
    Choice("selective.coupling", (0.0, 0.1, 0.2, 0.4), ("labels", "domains"), _selective),
)


class Defaults(Experiment):
    """Accuracy by value of three keys whose defaults are this project's."""

    name = "defaults"
    title = "Defaults, chosen on validation clients"
    paper = "No paper's table: choices of this project"
    datasets = ("fashion-mnist", "cifar-10", "pacs")
    deviations = (
        "The images are those on which the small settings of fedacs and selective are searched. The results of those "
        "experiments share none with them.",
        f"The learning rate is {RATE:g}. FedACS runs with a cosine schedule, without which follow-rate has no effect; "
        "the others with a constant rate. Selective layers have R = 1 to 4. All other options have their defaults.",
        "FedACS and FedAMP are scored by the mean over the clients of each one's model on its own test examples, "
        "selective layers on examples that no client has.",
        "The best value is that with the highest mean over the settings. Differences to the default are paired by "
        "seed; intervals are Student's at 95 %, for one value at a time.",
    )
    small_scale = "Twelve clients for FedACS and FedAMP, 20 for selective layers; five seeds."
    full_scale = "As the small setting."

    def trials(self, full: bool) -> Sequence[Trial]:
        return [
            Trial(f"{choice.name(setting, json.dumps(value))}-{seed}", _with(choice, setting, value, seed))
            for choice in CHOICES for setting in choice.settings for value in choice.values for seed in SEEDS
        ]  # fmt: skip

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        of = trial.options
        if "kind" in of:
            return trained(trial, inputs, **Selective(of["kind"]).files(of, inputs))
        return trained(trial, inputs, dataset=str(fedacs.images_file(of, inputs)))

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        return joined(*(_results(choice, found) for choice in CHOICES))


def _with(choice: Choice, setting: str, value: float | bool, seed: int) -> dict[str, Any]:
    options = choice.options(setting, seed)
    return {**options, "config": {**options["config"], choice.key: value}}


def _results(choice: Choice, found: Mapping[str, Values]) -> Reproduction:
    """A table of a choice, by setting and over all settings, and a finding that names the best value."""
    by_setting = {setting: of for setting in choice.settings if (of := _scores(choice, setting, found))}
    if not by_setting:
        return Reproduction([])
    everywhere = _over_settings([*by_setting.values()])
    rows = [
        (setting, value, mean_text([*seeds.values()]), gain.text if (gain := _gain(choice, value, of)) else None)
        for setting, of in {**by_setting, "all": everywhere}.items() for value, seeds in of.items()
    ]  # fmt: skip
    headings = ("setting", choice.key, "accuracy", f"less that with {choice.default}, the default")
    finding = [_finding(choice, everywhere)] if everywhere else []
    title = f"Accuracy by {choice.key}, {max(len(seeds) for of in by_setting.values() for seeds in of.values())} seeds"
    return Reproduction([table(title, headings, rows)], findings=finding)


def _scores(choice: Choice, setting: str, found: Mapping[str, Values]) -> Scores:
    runs = {value: by_seed(found, choice.name(setting, value)) for value in map(json.dumps, choice.values)}
    return {value: {seed: score_of(run) for seed, run in of.items()} for value, of in runs.items() if of}


def _over_settings(scores: Sequence[Scores]) -> Scores:
    """The mean over the settings, for the values and seeds that all of them have."""
    values = [value for value in scores[0] if all(value in of for of in scores)]
    seeds = {value: sorted(set.intersection(*(set(of[value]) for of in scores))) for value in values}
    means = {value: {seed: mean(of[value][seed] for of in scores) for seed in each} for value, each in seeds.items()}
    return {value: of for value, of in means.items() if of}


def _gain(choice: Choice, value: str, scores: Scores) -> Paired | None:
    """The accuracy with a value less that with the default, paired by seed; None of the default itself."""
    default = scores.get(choice.default, {})
    return None if value == choice.default else paired(scores[value], default, len({*scores[value], *default}))


def _finding(choice: Choice, scores: Scores) -> str:
    best = max(scores, key=lambda value: mean(scores[value].values()))
    begun = f"{choice.key}: {best} is best, {mean(scores[best].values()):.4f} over all settings"
    if best == choice.default:
        return f"{begun}; it is the default."
    gain = _gain(choice, best, scores)
    return f"{begun}; less that with {choice.default}, the default: {gain.text if gain else 'not computed yet'}."
