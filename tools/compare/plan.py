"""The plan of a comparison: its runs and their state, as `comparison.json` has them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepal.host.text import visible
from tepal.host.toml import Value
from tepal.records.columns import is_number
from tepal.records.run_directory import CHECKPOINTS, MOST_CONFIG, is_held, read_file, read_summary, write_whole
from tepal.tools.simulation.engines import AUTO, PROCESS

PLAN = "comparison.json"
CSV, RUNS_CSV, MARKDOWN, LATEX = "comparison.csv", "runs.csv", "comparison.md", "comparison.tex"
HTML, SVG = "comparison.html", "comparison.svg"

OWN_KEYS = ("strategy", "seed", "runs", "resume")
"""Keys of the run config that differ between the runs of a comparison."""


@dataclass
class ComparedRun:
    """One run of a comparison: a strategy with a seed, its run directory once it has begun, and its state."""

    strategy: str
    seed: int
    directory: Path | None = None
    outcome: str = "not run"  # or "running", "finished", "failed", "stopped"
    reason: str = ""  # why it failed

    @property
    def checkpointed(self) -> bool:
        """Whether it can be resumed."""
        return self.directory is not None and any((self.directory / CHECKPOINTS).glob("round-*"))

    def to_dict(self) -> dict[str, Any]:
        """Return its values under the keys of `comparison.json`."""
        return {"run" if key == "directory" else key: value for key, value in vars(self).items()}


@dataclass
class Comparison:
    """The runs that are compared, in the order in which they are run, and their common settings.

    Args:
        folder: The folder of the comparison.
        runs: Every strategy with every seed.
        run_config: The run config of all runs, without `OWN_KEYS`.
        clients: The number of simulated clients.
        cpus, gpus: Resources of each client, as of `tepal compare`.
        engine: What simulates the clients.
        target: The score until which rounds and bytes are counted; None: `usual_target`.
    """

    folder: Path
    runs: list[ComparedRun]
    run_config: Mapping[str, Value]
    clients: int
    cpus: float | None = None
    gpus: float = 0
    engine: str = AUTO
    target: float | None = None

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(run.strategy for run in self.runs))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def task(self) -> str:
        """Model and dataset."""
        names = [str(self.run_config[key]) for key in ("model", "dataset") if key in self.run_config]
        return " on ".join(names) or "strategies compared"

    def name(self, run: ComparedRun) -> str:
        """The name of a run: its strategy, with the seed if there are several."""
        return run.strategy if len(self.seeds) == 1 else f"{run.strategy} seed {run.seed}"

    def config_of(self, run: ComparedRun) -> dict[str, Value]:
        """The run config with which a run is begun or, if it has a checkpoint, resumed."""
        resume = str(run.directory) if run.checkpointed else ""
        values = (run.strategy, run.seed, str(self.folder), resume)
        return {**self.run_config, **dict(zip(OWN_KEYS, values, strict=True))}

    def save(self) -> None:
        """Write `comparison.json`. Raises OSError, naming the file, where it cannot be written."""
        plan = {key: value for key, value in vars(self).items() if key not in ("folder", "runs")}
        cells = [{**run.to_dict(), "run": run.directory.name if run.directory else None} for run in self.runs]
        write_whole(self.folder / PLAN, (json.dumps({**plan, "cells": cells}, indent=2) + "\n").encode())


def planned_runs(strategies: Sequence[str], seeds: Sequence[int]) -> list[ComparedRun]:
    """All runs in their order: every strategy with the first seed, then with the next."""
    return [ComparedRun(strategy, seed) for seed in seeds for strategy in strategies]


def is_comparison(folder: Path) -> bool:
    """Whether a folder is that of a comparison."""
    return (folder / PLAN).is_file() or (folder / CSV).is_file()


def find_comparison(path: Path) -> Path:
    """The folder of a comparison: `path` itself, or the folder in it whose `comparison.json` is the newest.

    Raises FileNotFoundError if there is none.
    """
    if is_comparison(path):
        return path
    inside = list(path.glob(f"*/{PLAN}"))
    if not inside:
        raise FileNotFoundError(
            f"no comparison at {path}: expected runs/<start>-compare, as `tepal compare` makes it, or a folder of those"
        )
    return max(inside, key=lambda plan: plan.stat().st_mtime_ns).parent


def read_comparison(folder: Path) -> Comparison:
    """Read the comparison in a folder. Raises OSError or ValueError if it is not one."""
    folder = folder.resolve()
    plan = folder / PLAN
    if not plan.is_file():
        raise FileNotFoundError(
            f"{folder} has no {PLAN}, which names what is compared: it is not a comparison, or an older version made it"
        )
    try:
        values = json.loads(read_file(plan, MOST_CONFIG))
        if values.pop("in_process", False):  # the key's name in earlier versions
            values["engine"] = PROCESS
        runs = [_compared_run(cell, folder) for cell in values.pop("cells")]
        comparison = Comparison(folder, runs, **values)
        _check(comparison)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{plan} is damaged ({visible(error, _LONGEST_ERROR)}): take it from a copy") from error
    for run in comparison.runs:
        _update_state(run, folder)
    return comparison


_LONGEST_ERROR = 300  # characters
_STRATEGY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_MOST_RUNS = 10_000
_OUTCOMES = ("not run", "running", "finished", "failed", "stopped")


def _compared_run(cell: dict[str, Any], folder: Path) -> ComparedRun:
    """A run as `comparison.json` has it. Raises ValueError, KeyError or TypeError where it is not one."""
    name = cell.pop("run")
    run = ComparedRun(**cell, directory=folder / name if name else None)
    # A strategy's name is also the name of its colour in style sheets.
    if not isinstance(run.strategy, str) or not _STRATEGY.fullmatch(run.strategy):
        raise ValueError("the name of a strategy is not of letters, digits, - and _")
    if name and not (isinstance(name, str) and _FOLDER.fullmatch(name)):  # pages have links to it
        raise ValueError("a run is not the name of a run directory next to it")
    if type(run.seed) is not int or run.outcome not in _OUTCOMES or not isinstance(run.reason, str):
        raise ValueError("the seed, the outcome or the reason of a run is of another type")
    if run.directory is not None and run.directory.is_symlink():
        raise ValueError("a run is a link")
    return run


def _check(comparison: Comparison) -> None:
    """Raise ValueError for a comparison without runs or with very many, or settings of another type."""
    if not 0 < len(comparison.runs) <= _MOST_RUNS:
        raise ValueError(f"it has {len(comparison.runs)} runs, expected 1 to {_MOST_RUNS:,}")
    if not isinstance(comparison.run_config, dict) or type(comparison.clients) is not int:
        raise ValueError("the run config or the number of clients is of another type")
    if comparison.target is not None and not (is_number(comparison.target) and math.isfinite(comparison.target)):
        raise ValueError("the target is not a number")
    for value in comparison.run_config.values():
        if not isinstance(value, str | int | float | bool | list | None):
            raise ValueError("a value of the run config is of another type")


def _update_state(run: ComparedRun, folder: Path) -> None:
    """Correct the state of a run whose comparison was killed, or that was resumed without it."""
    if run.directory is not None and not run.directory.is_dir():
        run.directory, run.outcome, run.reason = None, "not run", ""
    summary = read_summary(run.directory) if run.directory else None
    if summary is not None and summary.get("stopped_by") is None:
        run.outcome, run.reason = "finished", ""
    elif run.outcome == "running" and not is_held(folder):
        run.outcome = "stopped"
