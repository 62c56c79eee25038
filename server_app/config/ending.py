"""Checks of the keys that say which round's model is a run's result, and whether the run ends early."""

from __future__ import annotations

from collections.abc import Iterator

from tepal import models
from tepal.server_app.config.run_config import RunConfig
from tepal.strategies import STRATEGIES
from tepal.training.data.inputs import has_held_out
from tepal.training.tasks import TASKS, Task


def metrics_of(task: Task) -> tuple[str, ...]:
    """Return the scores of a task that rounds can be compared by, the default first."""
    if task.regression:
        return ("rmse", "loss")
    return ("accuracy", "loss", *(["macro-f1"] if task.macro_f1 else []))


def best_metric(config: RunConfig) -> str:
    """Return the score by which rounds are compared."""
    given = config.rounds.best_metric
    return metrics_of(TASKS[config.data.kind])[0] if given == "auto" else given


def ending_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each key about a run's result or end that cannot be used with the others."""
    rounds = config.rounds
    try:
        allowed = metrics_of(TASKS[config.data.kind])
    except models.ModelError:  # a message of its own
        return
    if rounds.best_metric not in ("auto", *allowed):
        yield (
            f"best-metric={rounds.best_metric!r}: model={rounds.model!r} is for {config.data.kind}, whose rounds are "
            f"scored by {', '.join(allowed)}: set it to one of them, or to 'auto'"
        )
    if rounds.deliver == "best" and (result := STRATEGIES[rounds.strategy].result):
        yield (
            f"deliver='best': strategy={rounds.strategy!r} scores the clients' personal models, which stay with the "
            f"clients; the model that is delivered is {result}, and has no score of its own. Set deliver='last' "
            "(patience can be set)"
        )


def scoring_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message if no score decides which model is the best, or when the run ends.

    Raises DataError if the data cannot be read.
    """
    rounds = config.rounds
    keys = [f"patience={rounds.patience}"] * bool(rounds.patience) + ["deliver='best'"] * (rounds.deliver == "best")
    if not keys:
        return
    key, personal = " and ".join(keys), bool(STRATEGIES[rounds.strategy].result)
    if not personal and has_held_out(config.data):
        every, planned = rounds.evaluate_every, rounds.num_server_rounds
        if rounds.patience and every >= planned:
            yield (
                f"patience={rounds.patience} and evaluate-every={every}: the server scores the model only before the "
                f"first and after the last of num-server-rounds={planned} rounds, so that the run cannot end early: "
                "set a lower evaluate-every, or patience=0"
            )
        return
    ensemble = rounds.strategy == "fedensemble" and config.fedensemble.modes > 1
    if config.training.score_in_training:
        if ensemble:
            yield (
                f"{key}: the server has no held-out data (dataset={config.data.dataset!r}, held-out-fraction="
                f"{config.data.held_out_fraction:g}), and clients that train a mode do not score the ensemble: set "
                "score-in-training=false, with which clients score the ensemble after every round"
            )
    elif not rounds.fraction_evaluate:
        yield (
            f"{key} with score-in-training=false and fraction-evaluate=0: no round is scored: set score-in-training="
            "true, or fraction-evaluate above 0"
        )


def ending_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a message if a run cannot end early although it is set to."""
    rounds = config.rounds
    if 0 < rounds.num_server_rounds <= rounds.patience:
        yield (
            f"patience={rounds.patience} and num-server-rounds={rounds.num_server_rounds}: the run cannot end early."
        )
