"""A comparison: strategies × seeds on one task, the files in its folder, and the measurements of its runs.

    comparison.json     what is run, and the state of each run: written before the first run, and as runs begin and end
    <start>-<strategy>/ a directory for each run
    comparison.csv      one line per strategy, over its seeds; this and the following can be written again from the runs
    runs.csv            one line per run
    comparison.md       the table in Markdown
    comparison.tex      the table in LaTeX
    comparison.html     table and figures, like a run's report.html
    comparison.svg      accuracy (in a regression, the error) over transferred bytes, as a picture
    latest              a link to its newest run; `runs/latest` is a link to it, too

The runs of one seed differ only in their strategy. All figures are read from the runs' `metrics.jsonl` and
`summary.json`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tepal.host.toml import Value
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    ACCURACY,
    CHECKPOINTS,
    Measure,
    is_held,
    measured_by,
    read_metrics,
    read_summary,
    summarise,
    write_whole,
)
from tepal.report.round_figures import TEST_DATA, transferred
from tepal.tools.simulation.engines import AUTO, PROCESS

PLAN = "comparison.json"
CSV, RUNS_CSV, MARKDOWN, LATEX = "comparison.csv", "runs.csv", "comparison.md", "comparison.tex"
HTML, SVG = "comparison.html", "comparison.svg"

OWN_KEYS = ("strategy", "seed", "runs", "resume")
"""Keys of the run config that differ between the runs of a comparison."""

_TARGET = 0.9  # of FedAvg's final accuracy; its final error is divided by it

# --- what is run ----------------------------------------------------------------------------------------------------


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
        values = json.loads(plan.read_text(encoding="utf-8"))
        if values.pop("in_process", False):  # the key's name in earlier versions
            values["engine"] = PROCESS
        runs = []
        for cell in values.pop("cells"):
            name = cell.pop("run")
            runs.append(ComparedRun(**cell, directory=folder / name if name else None))
        comparison = Comparison(folder, runs, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{plan} is damaged ({error}): take it from a copy") from error
    for run in comparison.runs:
        _update_state(run, folder)
    return comparison


def _update_state(run: ComparedRun, folder: Path) -> None:
    """Correct the state of a run whose comparison was killed, or that was resumed without it."""
    if run.directory is not None and not run.directory.is_dir():
        run.directory, run.outcome, run.reason = None, "not run", ""
    summary = read_summary(run.directory) if run.directory else None
    if summary is not None and summary.get("stopped_by") is None:
        run.outcome, run.reason = "finished", ""
    elif run.outcome == "running" and not is_held(folder):
        run.outcome = "stopped"


# --- what a run measured --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A point of a curve: the bytes transferred up to the end of a round, and the score; means over several seeds.

    `deviation` is the standard deviation of the score over the seeds.
    """

    round: int
    transferred: float | None
    score: float
    deviation: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The score minus and plus its standard deviation; None for a single seed."""
        return None if self.deviation is None else (self.score - self.deviation, self.score + self.deviation)


@dataclass(frozen=True)
class Curve:
    """The score round by round; `of` names its test data, as `accuracy_of` in metrics.jsonl does."""

    of: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Measured:
    """A run of a comparison with its rounds and its summary so far; `by`: the measure of all runs."""

    run: ComparedRun
    metrics: Sequence[RoundRecord]
    summary: Mapping[str, Any]
    by: Measure = ACCURACY

    @property
    def server_score(self) -> float | None:
        """The last score on the server's held-out data; None if the clients have personal models."""
        if any(line.accuracy_of == "personal" for line in self.metrics):
            return None
        of_server = [line.value(self.by.key) for line in self.metrics if line.accuracy_of == "server"]
        return of_server[-1] if of_server else None

    @cached_property
    def transferred(self) -> list[float | None]:
        """Payload bytes of all clients, both ways, up to and including each round."""
        return transferred(self.metrics)

    @cached_property
    def curve(self) -> Curve | None:
        """The scores of the personal models if there are such, else on the server's data, else on the clients'."""
        for of in ("personal", *TEST_DATA):
            points = tuple(
                Point(line.round, transferred, score)
                for line, transferred in zip(self.metrics, self.transferred, strict=True)
                if (score := line.value(self.by.key)) is not None and line.accuracy_of == of
            )
            if points:
                return Curve(of, points)
        return None

    def reached(self, target: float | None) -> Point | None:
        """The first point with at least the target score on the server's held-out data; None if there is none."""
        if target is None or self.curve is None or self.curve.of != "server":
            return None
        return next((point for point in self.curve.points if self.by.good(point.score, target)), None)

    def figures(self, target: float | None) -> dict[str, float | None]:
        """All figures of the run; None for one that is unknown or does not exist."""
        # Only of the last round: an earlier model is not the result.
        last = self.metrics[-1] if self.metrics else None
        reached = self.reached(target)
        summed = {key: self.summary.get(key) for key in ("bytes_down", "bytes_up", "bytes_vs_fedavg", "seconds")}
        return {
            f"server_{self.by.key}": self.server_score,
            f"clients_{self.by.key}": last.value(f"clients_{self.by.key}") if last else None,
            "clients_spread": last.clients_spread if last else None,
            "rounds_to_target": reached.round if reached else None,
            "bytes_to_target": reached.transferred if reached else None,
            **(summed if self.metrics else dict.fromkeys(summed)),
            "bytes_total": self.transferred[-1] if self.metrics else None,
            "round_seconds": self.round_seconds,
            "step_seconds": self.summary.get("step_seconds"),
        }

    @property
    def round_seconds(self) -> float | None:
        """The median over the rounds, because the first round includes the start of the clients."""
        known = [line.seconds for line in self.metrics if line.round > 0 and line.seconds is not None]
        return statistics.median(known) if known else None


def measured(run: ComparedRun, config: Mapping[str, Value]) -> Measured:
    """Read the rounds and the summary of a run, as far as they are written."""
    metrics = read_metrics(run.directory) if run.directory else []
    written = read_summary(run.directory) if run.directory else None
    return Measured(run, metrics, {**summarise(metrics, config), **(written or {})})


# --- over the seeds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistic:
    """The mean over runs, their sample standard deviation (None for a single run), and the number of runs."""

    mean: float
    deviation: float | None
    runs: int


def over_seeds(values: Sequence[float | None]) -> Statistic | None:
    """The statistic of a figure's values; None if one of them is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Statistic(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


_TO_TARGET = ("rounds_to_target", "bytes_to_target")


@dataclass(frozen=True)
class Result:
    """The results of one strategy over its seeds."""

    strategy: str
    runs: Sequence[Measured]
    target: float | None = None

    @property
    def by(self) -> Measure:
        return self.runs[0].by

    @cached_property
    def counted(self) -> Sequence[Measured]:
        """The runs that the figures are of: the finished ones, or if there are none, all that have rounds."""
        finished = [each for each in self.runs if each.run.outcome == "finished"]
        return finished or [each for each in self.runs if each.metrics]

    @property
    def finished(self) -> int:
        return sum(each.run.outcome == "finished" for each in self.runs)

    @property
    def outcome(self) -> str:
        """The word "finished", or how many runs are, or the outcome of the only run."""
        if self.finished == len(self.runs):
            return "finished"
        return self.runs[0].run.outcome if len(self.runs) == 1 else f"{self.finished} of {len(self.runs)} finished"

    @cached_property
    def figures(self) -> dict[str, Statistic | None]:
        """`Measured.figures` over the seeds; rounds and bytes to the target over the runs that reached it."""
        each = [run.figures(self.target) for run in self.counted]
        columns = {name: [figures[name] for figures in each] for name in (each[0] if each else ())}
        return {
            name: over_seeds([value for value in values if value is not None] if name in _TO_TARGET else values)
            for name, values in columns.items()
        }

    @cached_property
    def curve(self) -> Curve | None:
        """The mean over the seeds, of the rounds that all runs have."""
        curves = [run.curve for run in self.counted if run.curve is not None]
        if not curves or len(curves) < len(self.counted):
            return None
        by_round = [{point.round: point for point in curve.points} for curve in curves]
        common = [number for number in by_round[0] if all(number in points for points in by_round)]
        return Curve(curves[0].of, tuple(_mean([points[number] for points in by_round]) for number in common))

    @property
    def over_bytes(self) -> tuple[Point, ...]:
        """The points of the curve whose bytes are known."""
        return tuple(point for point in self.curve.points if point.transferred is not None) if self.curve else ()


def _mean(points: Sequence[Point]) -> Point:
    transferred = over_seeds([point.transferred for point in points])
    score = over_seeds([point.score for point in points])
    assert score is not None
    return Point(points[0].round, transferred.mean if transferred else None, score.mean, score.deviation)


@dataclass(frozen=True)
class Target:
    """The score until which rounds and bytes are counted; `of`: the strategy it is derived from, "" if given."""

    score: float
    of: str = ""


@dataclass(frozen=True)
class Results:
    """The results of a comparison so far."""

    comparison: Comparison
    runs: Sequence[Measured]
    strategies: Sequence[Result]
    target: Target | None

    @property
    def by(self) -> Measure:
        return self.strategies[0].by

    @property
    def unfinished(self) -> list[Measured]:
        return [each for result in self.strategies for each in result.runs if each.run.outcome != "finished"]

    @property
    def unreached(self) -> list[Result]:
        """The strategies of which some runs, but not all, reached the target on the server's data."""
        counts = ((result, result.figures.get("rounds_to_target")) for result in self.strategies)
        return [result for result, reached in counts if reached and reached.runs < len(result.counted)]


def measure(comparison: Comparison) -> Results:
    """Read the results of all runs, as far as they have come."""
    runs = [measured(run, comparison.run_config) for run in comparison.runs]
    by = measured_by([line for each in runs for line in each.metrics])
    runs = [replace(each, by=by) for each in runs]
    results = [Result(name, [each for each in runs if each.run.strategy == name]) for name in comparison.strategies]
    target = Target(comparison.target) if comparison.target is not None else usual_target(results)
    score = target.score if target else None
    return Results(comparison, runs, [replace(result, target=score) for result in results], target)


def usual_target(results: Sequence[Result]) -> Target | None:
    """90 % of the final accuracy of FedAvg, or of the first strategy that has one, on the server's held-out data.

    An error is divided by 0.9 instead. Only finished runs count.
    """
    known = {
        result.strategy: score.mean
        for result in results
        if result.finished and (score := result.figures[f"server_{result.by.key}"]) is not None
    }
    of = "fedavg" if "fedavg" in known else next(iter(known), "")
    if not of:
        return None
    return Target(known[of] * _TARGET if results[0].by.share else known[of] / _TARGET, of)
