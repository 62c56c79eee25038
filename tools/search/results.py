"""What a search found: trials.csv, found.toml, and its lines and table in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich import box
from rich.console import Group
from rich.table import Table as TerminalTable
from rich.text import Text

from tepal.host.toml import Value
from tepal.records.columns import Column, score_text, seconds_text
from tepal.report.table import MISSING, Table
from tepal.tools.search.plan import SearchPlan
from tepal.tools.search.study import Trial
from tepal.tools.terminal import indented, shown

TRIALS, FOUND = "trials.csv", "found.toml"

_HEAD = "# The best settings that `python -m tepal.tools.search` found, for `tepal compare --variants`.\n"


@dataclass(frozen=True)
class Found:
    """The trials that have ended, by variant, and the best one of each variant that has one."""

    plan: SearchPlan
    trials: Sequence[Trial]
    best: Mapping[str, Trial]
    minimise: bool

    @property
    def without(self) -> list[str]:
        """The names of searched variants of which no trial has finished."""
        return [variant.name for variant in self.plan.searched if variant.name not in self.best]


def trials_csv(found: Found) -> str:
    """One line per trial, with a column for each key that is searched in any variant."""
    keys = list(dict.fromkeys(key for variant in found.plan.searched for key in variant.search))
    names = ["variant", "trial", *keys, "score", "outcome", "reason", "run", "seconds"]
    rows = [
        {
            "variant": trial.variant, "trial": trial.number + 1, **trial.values, "score": trial.score,
            "outcome": trial.outcome, "reason": trial.reason, "run": trial.run, "seconds": trial.seconds,
        }
        for trial in found.trials
    ]  # fmt: skip
    return Table.of("", [Column(name, name) for name in names], rows).csv()


def found_toml(found: Found) -> str:
    """The search file with the best values in place of the ranges, without variants that have none yet."""
    variants: list[dict[str, Any]] = []
    for variant in found.plan.variants:
        best = found.best.get(variant.name)
        if best or not variant.search:
            variants.append({"name": variant.name, **variant.config, **(best.values if best else {})})
    common = {"common": dict(found.plan.common)} if found.plan.common else {}
    return _HEAD + tomli_w.dumps({"clients": found.plan.clients, **common, "variant": variants})


def trial_line(trial: Trial, trials: int, minimise: bool) -> Text:
    """One line: the trial, its score or why it failed, its values, its time, its run."""
    result = f"{'rmse' if minimise else 'accuracy'} {score_text(trial.score)}"
    failed = trial.score is None
    parts = (
        f"{trial.variant} {trial.number + 1}/{trials}", f"failed: {trial.reason}" if failed else result,
        values_text(trial.values), seconds_text(trial.seconds), trial.run,
    )  # fmt: skip
    return shown("  ".join(filter(None, parts)), style="yellow" if failed else "")


def best_table(found: Found, folder: Path) -> Group:
    """The best trial of each variant, the failed trials, and the paths of the results."""
    measure = "RMSE" if found.minimise else "accuracy"
    table = TerminalTable(
        title=f"Best mean {measure} over the clients' own tests, seed {found.plan.seed}", title_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False,
    )  # fmt: skip
    table.add_column("variant")
    table.add_column(measure, justify="right")
    table.add_column("trial", justify="right")
    table.add_column("values")
    for variant in found.plan.searched:
        ended = sum(trial.variant == variant.name for trial in found.trials)
        best = found.best.get(variant.name)
        of = f"{best.number + 1} of {ended}" if best else f"{MISSING} of {ended}"
        score = score_text(best.score) if best else MISSING
        table.add_row(shown(variant.name), score, of, shown(values_text(best.values) if best else MISSING))
    failed = [f"{trial.variant} {trial.number + 1}" for trial in found.trials if trial.score is None]
    notes = [f"Failed trials, which counted as the worst: {', '.join(failed)}"] if failed else []
    notes += [f"Without a result, so not in {FOUND}: {', '.join(found.without)}"] if found.without else []
    files = [folder / FOUND, folder / TRIALS]
    return Group(table, *map(shown, notes), shown(f"Results in {folder}"), *map(indented, files))


def values_text(values: Mapping[str, Value]) -> str:
    """Values as `key=value`, decimal numbers to four digits."""
    return " ".join(f"{key}={_text(value)}" for key, value in values.items())


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
