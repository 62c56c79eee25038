"""Each method's settings, found by a search: the same number of trials for all, on other clients than the results'.

A trial of the search is a trial of the experiment, so it is kept. It needs the earlier ones of its method, by whose
scores Optuna draws its values; with the same scores it has the same values.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from typing import Any

from tepal.strategies import RoundFailed
from tepal.tools.reproduce.experiment import MissingData, Trial, TrialInputs, Values
from tepal.tools.reproduce.runs import run_folder, trained
from tepal.tools.spaces import RANDOM_TRIALS, Space, distribution, draw, optuna_is_missing, spread_out

_DIVERGED = re.compile("diverged|times as large|NaN|infinite")  # in the reasons of a round that failed
SEED = 1000
"""The run config's seed in all trials of a search; results have others."""


def search_trials(
    name: str, options: Values, search: Mapping[str, Space], count: int, *, alike: bool = False
) -> list[Trial]:
    """The trials of a search.

    Args:
        name: of the searched method in its setting; the trials are `<name>-search-<number>`.
        options: of each trial.
        search: run config key → the values among which the best one is searched.
        count: of trials.
        alike: whether the first trials have evenly spread values, the same for all methods (see `spread_out`), so that
            chance draws favour no method.
    """
    spaces = {key: repr(space) for key, space in search.items()}  # of other ranges, trials are computed again
    options = {**options, "alike": True} if alike else options
    names = [f"{name}-search-{number}" for number in range(count)]
    return [Trial(each, {**options, "search": spaces}, tuple(names[:place])) for place, each in enumerate(names)]


def tuned(trial: Trial, inputs: TrialInputs, search: Mapping[str, Space], **files: Any) -> Values:
    """Compute a trial of a search, or one of the results with the best settings that the search found.

    Args:
        trial: of the results if its option `part` is "main".
        inputs: with the values of the search's trials that it needs, and no others.
        search: what is searched for the trial's method.
        files: keys of the run config that depend on this machine.

    Returns:
        As `trained`, with the `settings` that were found, or with those that were `drawn`. A trial of a search whose
        training diverged, for instance with a learning rate that is too high, has no scores, and says so as `failed`.

    Raises:
        MissingData: Optuna is not installed.
        RoundFailed: the run failed for another reason.
    """
    if trial.options["part"] == "main":
        values = best(inputs.needed)
        return {**trained(trial, inputs, **files, **values), "settings": values}
    values = drawn(trial, inputs, search)
    try:
        found = trained(trial, inputs, **files, **values)
        return {**found, "drawn": values, "score": _score(found, int(trial.options["clients"]))}
    except RoundFailed as failure:
        if not _DIVERGED.search(str(failure)):
            raise
        shutil.rmtree(run_folder(trial, inputs), ignore_errors=True)  # as after a run that has ended well
        return {"clients": None, "server": None, "drawn": values, "failed": str(failure)}


def drawn(trial: Trial, inputs: TrialInputs, search: Mapping[str, Space]) -> dict[str, Any]:
    """The values of a trial of a search, drawn by the scores of those that it needs. Raises MissingData."""
    if missing := optuna_is_missing():
        raise MissingData(missing)
    import optuna

    if trial.options.get("alike") and (number := len(trial.needs)) < RANDOM_TRIALS:
        return spread_out(search, number)
    spaces = {key: distribution(space) for key, space in search.items()}
    earlier = [
        optuna.trial.create_trial(params=values["drawn"], distributions=spaces, value=score_of(values))
        for values in (inputs.needed[name] for name in trial.needs)
    ]
    found = draw(spaces, earlier, minimise=False, seed=lambda again: _seed(trial.name, again))
    return {key: space.exact(found[key]) for key, space in search.items()}


def best(needed: Mapping[str, Values]) -> dict[str, Any]:
    """The values with the highest score of a search's trials, of equal ones the first."""
    found = max(needed.values(), key=score_of)
    return dict(found["drawn"])


def score_of(values: Values) -> float:
    """What is searched for: the accuracy on the server's examples or, of personal models, on the clients' own tests."""
    own: float | None = values.get("clients") if values.get("server") is None else values["server"]
    return float(values.get("score", own) or 0.0)


def _score(values: Values, clients: int) -> float:
    """The score of a search's trial. A client that has no score, as its training diverged, counts as 0."""
    if values.get("server") is not None or not values.get("of_clients"):
        return score_of(values)
    return sum(float(accuracy) for accuracy, _ in values["of_clients"].values()) / clients


def text_of(values: Mapping[str, Any]) -> str:
    """Values as text: learning-rate 0.05, fedacs.quantile 0.9."""
    return ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {json.dumps(value)}"
                     for key, value in values.items())  # fmt: skip


def _seed(name: str, again: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}/{again}".encode()).digest()[:4], "big")
