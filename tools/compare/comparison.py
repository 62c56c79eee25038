"""A comparison: strategies × seeds on one task, as it lies in its folder, and what its runs measured.

    comparison.json     what is run, and how far it is: written before the first run, and anew as runs begin and end
    <start>-<strategy>/ each run's own directory
    comparison.csv      one line a strategy, over its seeds; this and the following can be written anew from the runs
    runs.csv            one line a run
    comparison.md       the table for a text, and
    comparison.tex      for a paper
    comparison.html     table and figures, in the manner of a run's report.html
    comparison.svg      accuracy (of a regression, the error) over transferred bytes, as a picture
    latest              a link to its newest run; `runs/latest` leads there, too

The runs of one seed differ in their strategy alone. Every figure is read from the runs' `metrics.jsonl` and
`summary.json`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tepal.host.toml import Value
from tepal.records.run_directory import (
    ACCURACY,
    CHECKPOINTS,
    Measure,
    add,
    is_held,
    measured_by,
    read_metrics,
    read_summary,
    summarise,
    write_whole,
)
from tepal.report.page import cumulative
from tepal.report.round_figures import TEST_DATA
from tepal.tools.simulation.engines import AUTO, PROCESS

PLAN = "comparison.json"
CSV, RUNS_CSV, MARKDOWN, LATEX = "comparison.csv", "runs.csv", "comparison.md", "comparison.tex"
HTML, SVG = "comparison.html", "comparison.svg"

OWN_KEYS = ("strategy", "seed", "runs", "resume")
"""Keys of the run config that every run of a comparison has of its own."""

_TARGET = 0.9  # of FedAvg's final accuracy; its final error is divided by it

# --- what is run ----------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One run of a comparison, and how it went."""

    strategy: str
    seed: int
    run: Path | None = None
    outcome: str = "not run"  # or "running", "finished", "failed", "stopped"
    reason: str = ""  # why it failed

    @property
    def checkpointed(self) -> bool:
        """Whether its run can go on from where it was."""
        return self.run is not None and any((self.run / CHECKPOINTS).glob("round-*"))


@dataclass
class Comparison:
    """What is compared, in the order in which it is run, and where that lies."""

    folder: Path
    cells: list[Cell]
    run_config: Mapping[str, Value]
    """Of all runs: every key but `OWN_KEYS`."""
    clients: int
    cpus: float | None = None
    gpus: float = 0
    engine: str = AUTO
    target: float | None = None
    """The score that rounds and bytes are counted until; None: 90 % of FedAvg's accuracy, or its error / 0.9."""

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(cell.strategy for cell in self.cells))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(cell.seed for cell in self.cells))

    @property
    def task(self) -> str:
        """Model and dataset."""
        names = [str(self.run_config[key]) for key in ("model", "dataset") if key in self.run_config]
        return " on ".join(names) or "strategies compared"

    def name(self, cell: Cell) -> str:
        """A run in words; the seed is in it where there are several."""
        return cell.strategy if len(self.seeds) == 1 else f"{cell.strategy} seed {cell.seed}"

    def config_of(self, cell: Cell) -> dict[str, Value]:
        """The run config of a run that begins or, where there is a checkpoint of it, goes on."""
        resume = str(cell.run) if cell.checkpointed else ""
        values = (cell.strategy, cell.seed, str(self.folder), resume)
        return {**self.run_config, **dict(zip(OWN_KEYS, values, strict=True))}

    def save(self) -> None:
        """Write `comparison.json`. Raises OSError naming it where that fails."""
        plan = {key: value for key, value in vars(self).items() if key not in ("folder", "cells")}
        cells = [{**asdict(cell), "run": cell.run.name if cell.run else None} for cell in self.cells]
        write_whole(self.folder / PLAN, (json.dumps({**plan, "cells": cells}, indent=2) + "\n").encode())


def cells_of(strategies: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All runs in their order: every strategy with the first seed, then with the next."""
    return [Cell(strategy, seed) for seed in seeds for strategy in strategies]


def is_comparison(folder: Path) -> bool:
    """Whether a comparison was begun in this folder."""
    return (folder / PLAN).is_file() or (folder / CSV).is_file()


def find_comparison(path: Path) -> Path:
    """The comparison's folder that is meant: `path` itself, or that in it which was at work last.

    Raises FileNotFoundError where there is none.
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
    """The comparison in a folder. Raises OSError or ValueError where it is none."""
    folder = folder.resolve()
    plan = folder / PLAN
    if not plan.is_file():
        raise FileNotFoundError(
            f"{folder} has no {PLAN}, which says what is compared: it is no comparison, or an older version left it"
        )
    try:
        values = json.loads(plan.read_text(encoding="utf-8"))
        if values.pop("in_process", False):  # as it was called before there were engines
            values["engine"] = PROCESS
        cells = [Cell(**{**cell, "run": folder / cell["run"] if cell["run"] else None}) for cell in values.pop("cells")]
        comparison = Comparison(folder, cells, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{plan} does not say what is compared ({error}): take it from a copy") from error
    for cell in comparison.cells:
        _look_again(cell, folder)
    return comparison


def _look_again(cell: Cell, folder: Path) -> None:
    """What a comparison that was killed could not say, and what became of a run that went on without it."""
    if cell.run is not None and not cell.run.is_dir():
        cell.run, cell.outcome, cell.reason = None, "not run", ""
    summary = read_summary(cell.run) if cell.run else None
    if summary is not None and summary.get("stopped_by") is None:
        cell.outcome, cell.reason = "finished", ""
    elif cell.outcome == "running" and not is_held(folder):
        cell.outcome = "stopped"


# --- what a run measured --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A curve after a round: bytes transferred until its end, and the score; over several seeds they are means."""

    round: int
    transferred: float | None
    score: float
    deviation: float | None = None  # of the score over the seeds

    @property
    def interval(self) -> tuple[float, float] | None:
        """The score minus and plus its standard deviation; None of a single seed."""
        return None if self.deviation is None else (self.score - self.deviation, self.score + self.deviation)


@dataclass(frozen=True)
class Curve:
    """The score round by round, and whose data it is of, as `accuracy_of` in metrics.jsonl says it."""

    of: str
    points: tuple[Point, ...]

    @property
    def over_bytes(self) -> tuple[Point, ...]:
        """The points whose bytes are known."""
        return tuple(point for point in self.points if point.transferred is not None)


@dataclass(frozen=True)
class Measured:
    """A run of a comparison with what it has left until now."""

    cell: Cell
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    by: Measure = ACCURACY
    """What all runs of the comparison are measured by."""

    @property
    def server_score(self) -> float | None:
        """The result's on the server's held-out data; None where every client has a model of its own."""
        if any(line.get("accuracy_of") == "personal" for line in self.metrics):
            return None
        of_server = [line.get(self.by.key) for line in self.metrics if line.get("accuracy_of") == "server"]
        return of_server[-1] if of_server else None

    @cached_property
    def transferred(self) -> list[float | None]:
        """Payload bytes of all clients, both ways, up to and including each line's round."""
        each = [add(line.get("bytes_down"), line.get("bytes_up")) for line in self.metrics]
        pairs = zip(each, self.metrics, strict=True)
        return cumulative(0 if nbytes is None and line["round"] == 0 else nbytes for nbytes, line in pairs)

    @cached_property
    def curve(self) -> Curve | None:
        """Of personal models where clients have them, else on the server's data, else on the clients'."""
        for of in ("personal", *TEST_DATA):
            points = tuple(
                Point(line["round"], transferred, line[self.by.key])
                for line, transferred in zip(self.metrics, self.transferred, strict=True)
                if line.get(self.by.key) is not None and line.get("accuracy_of") == of
            )
            if points:
                return Curve(of, points)
        return None

    def reached(self, target: float | None) -> Point | None:
        """Where the server's held-out data were first read this well; None if never."""
        if target is None or self.curve is None or self.curve.of != "server":
            return None
        return next((point for point in self.curve.points if self.by.good(point.score, target)), None)

    def figures(self, target: float | None) -> dict[str, float | None]:
        """All figures of the run; None is what is not known, or does not exist."""
        # Of the last round alone: an earlier model is not the result.
        last = self.metrics[-1] if self.metrics else {}
        reached = self.reached(target)
        summed = {key: self.summary.get(key) for key in ("bytes_down", "bytes_up", "bytes_vs_fedavg", "seconds")}
        return {
            f"server_{self.by.key}": self.server_score,
            f"clients_{self.by.key}": last.get(f"clients_{self.by.key}"),
            "clients_spread": last.get("clients_spread"),
            "rounds_to_target": reached.round if reached else None,
            "bytes_to_target": reached.transferred if reached else None,
            **(summed if self.metrics else dict.fromkeys(summed)),
            "bytes_total": self.transferred[-1] if self.metrics else None,
            "round_seconds": self.round_seconds,
            "step_seconds": self.summary.get("step_seconds"),
        }

    @property
    def round_seconds(self) -> float | None:
        """The median over the rounds: a run's first one has its clients start."""
        known = [line["seconds"] for line in self.metrics if line["round"] > 0 and line.get("seconds") is not None]
        return statistics.median(known) if known else None


def measured(cell: Cell, config: Mapping[str, Value]) -> Measured:
    """Read what the cell's run has left until now."""
    metrics = read_metrics(cell.run) if cell.run else []
    written = read_summary(cell.run) if cell.run else None
    return Measured(cell, metrics, {**summarise(metrics, config), **(written or {})})


# --- over the seeds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistic:
    """Mean over runs, their (sample) standard deviation, None of a single one, and how many they are."""

    mean: float
    deviation: float | None
    runs: int


def over_seeds(values: Sequence[float | None]) -> Statistic | None:
    """None where a value is not known."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Statistic(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


_TO_TARGET = ("rounds_to_target", "bytes_to_target")


@dataclass(frozen=True)
class Result:
    """One strategy over its seeds."""

    strategy: str
    runs: Sequence[Measured]
    target: float | None = None

    @property
    def by(self) -> Measure:
        return self.runs[0].by

    @cached_property
    def counted(self) -> Sequence[Measured]:
        """The runs that figures are of: those that finished; where none has, what there is."""
        finished = [run for run in self.runs if run.cell.outcome == "finished"]
        return finished or [run for run in self.runs if run.metrics]

    @property
    def finished(self) -> int:
        return sum(run.cell.outcome == "finished" for run in self.runs)

    @property
    def outcome(self) -> str:
        """In words: "finished", or how many are, or what became of the only one."""
        if self.finished == len(self.runs):
            return "finished"
        return self.runs[0].cell.outcome if len(self.runs) == 1 else f"{self.finished} of {len(self.runs)} finished"

    @cached_property
    def figures(self) -> dict[str, Statistic | None]:
        """Those of `Measured.figures` over the seeds; of the way to the target over the runs that reached it."""
        each = [run.figures(self.target) for run in self.counted]
        columns = {name: [figures[name] for figures in each] for name in (each[0] if each else ())}
        return {
            name: over_seeds([value for value in values if value is not None] if name in _TO_TARGET else values)
            for name, values in columns.items()
        }

    @cached_property
    def curve(self) -> Curve | None:
        """The mean over the seeds of each round that all runs have."""
        curves = [run.curve for run in self.counted if run.curve is not None]
        if not curves or len(curves) < len(self.counted):
            return None
        by_round = [{point.round: point for point in curve.points} for curve in curves]
        common = [number for number in by_round[0] if all(number in points for points in by_round)]
        return Curve(curves[0].of, tuple(_mean([points[number] for points in by_round]) for number in common))


def _mean(points: Sequence[Point]) -> Point:
    transferred = over_seeds([point.transferred for point in points])
    score = over_seeds([point.score for point in points])
    assert score is not None
    return Point(points[0].round, transferred.mean if transferred else None, score.mean, score.deviation)


@dataclass(frozen=True)
class Target:
    """The score that rounds and bytes are counted until; `of`: the strategy that it is derived from, "" if given."""

    score: float
    of: str = ""


@dataclass(frozen=True)
class Results:
    """What a comparison has measured until now."""

    comparison: Comparison
    strategies: Sequence[Result]
    target: Target | None

    @property
    def by(self) -> Measure:
        return self.strategies[0].by

    @property
    def unfinished(self) -> list[Measured]:
        return [run for result in self.strategies for run in result.runs if run.cell.outcome != "finished"]

    @property
    def unreached(self) -> list[Result]:
        """Strategies of whose runs on the server's data some, but not all, reached the target."""
        counts = ((result, result.figures.get("rounds_to_target")) for result in self.strategies)
        return [result for result, reached in counts if reached and reached.runs < len(result.counted)]


def measure(comparison: Comparison) -> Results:
    """Read what all runs have left until now."""
    config = comparison.run_config
    runs = [measured(cell, config) for cell in comparison.cells]
    by = measured_by([line for run in runs for line in run.metrics])
    runs = [replace(run, by=by) for run in runs]
    results = [Result(name, [run for run in runs if run.cell.strategy == name]) for name in comparison.strategies]
    target = Target(comparison.target) if comparison.target is not None else usual_target(results)
    score = target.score if target else None
    return Results(comparison, [replace(result, target=score) for result in results], target)


def usual_target(results: Sequence[Result]) -> Target | None:
    """90 % of FedAvg's final accuracy on the server's held-out data, or of the first strategy that has one.

    An error is divided by as much. Only of runs that finished.
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
