"""A comparison: strategies or variants × seeds, the files in its folder, and the measurements of its runs.

    comparison.json     what is run, and the state of each run: written before the first run, and as runs begin and end
    <start>-<strategy>/ a directory for each run
    comparison.csv      one line per strategy or variant, over its seeds; this and the following can be written again
                        from the runs
    runs.csv            one line per run
    comparison.md       the table in Markdown
    comparison.tex      the table in LaTeX
    comparison.html     table and figures, like a run's report.html
    comparison.svg      accuracy (in a regression, the error) over transferred bytes, as a picture; if sections ask
                        questions, bars that answer them
    latest              a link to its newest run; `runs/latest` is a link to it, too

The runs of one seed differ only in their strategy or, with a variants file, in the keys of their variants, and in the
varied keys (`grid`), each combination of which is a variant. All figures are read from the runs' `metrics.jsonl` and
`summary.json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tepal.host.toml import Value
from tepal.records.run_directory import Measure, measured_by
from tepal.tools.compare.measured import TO_TARGET, Curve, Measured, Point, measured
from tepal.tools.compare.plan import (
    CSV,
    FEDAVG,
    HTML,
    LATEX,
    MARKDOWN,
    OWN_KEYS,
    PLAN,
    RUNS_CSV,
    SVG,
    ComparedRun,
    Comparison,
    find_comparison,
    is_comparison,
    planned_runs,
    planned_variants,
    read_comparison,
)
from tepal.tools.compare.sections import BYTES, Section, Variant

__all__ = [
    "CSV", "HTML", "LATEX", "MARKDOWN", "OWN_KEYS", "PLAN", "RUNS_CSV", "SVG", "ComparedRun", "Comparison", "Curve",
    "Group", "Measured", "Point", "Result", "Results", "Statistic", "Target", "find_comparison", "is_comparison",
    "measure", "measured", "over_seeds", "planned_runs", "planned_variants", "read_comparison", "results_of",
    "target_of",
]  # fmt: skip

_TARGET = 0.9  # of FedAvg's final accuracy; its final error is divided by it

# --- over the seeds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistic:
    """The mean over runs, their sample standard deviation (None for a single run), and the number of runs."""

    mean: float
    deviation: float | None
    runs: int


def over_seeds(values: Sequence[float | None]) -> Statistic | None:
    """The statistic of a figure's values; None if one of them is unknown, or their mean or deviation is too large."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    try:
        return Statistic(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))
    except (OverflowError, ValueError):  # of numbers that are as large as a float can be
        return None


@dataclass(frozen=True)
class Result:
    """The results of one strategy, variant or combination of varied values over its seeds.

    Args:
        name: Its name in the comparison.
        runs: Its runs, one for each seed.
        target: The target of its section.
        variant: What it is the result of; None: of the strategy `name`.
        titled: Whether the title of its section has the varied values.
    """

    name: str
    runs: Sequence[Measured]
    target: Target | None = None
    variant: Variant | None = None
    titled: bool = False

    @property
    def base(self) -> str:
        """The strategy or variant without the varied values."""
        return self.variant.base if self.variant else self.name

    @property
    def values(self) -> Mapping[str, Value]:
        """The values of the varied keys."""
        return self.variant.values if self.variant else {}

    @property
    def label(self) -> str:
        """What messages and tables call it."""
        return self.variant.label if self.variant and not self.titled else self.base

    @property
    def full_label(self) -> str:
        """What it is called outside of its section."""
        return self.variant.label if self.variant else self.name

    @property
    def short(self) -> str:
        """What figures call it."""
        return self.variant.short if self.variant and not self.titled else self.base

    @property
    def by(self) -> Measure:
        return self.runs[0].by

    @cached_property
    def counted(self) -> Sequence[Measured]:
        """The runs that the figures are of: the finished ones, or if there are none, all that have rounds."""
        finished = [each for each in self.runs if each.run.outcome == "finished"]
        return finished or [each for each in self.runs if each.metrics]

    @cached_property
    def aimed(self) -> int:
        """How many of the counted runs have a target."""
        return sum(self.target is not None and self.target.at(each.run.seed) is not None for each in self.counted)

    @cached_property
    def lacks(self) -> str:
        """What all counted runs lack of a target: "no score on the server's data", as of personal models; else ""."""
        if self.target is None or not self.counted:
            return ""
        scored = any(each.scores_on(self.target.own_tests) for each in self.counted)
        return "" if scored else f"no score on {self.target.data}"

    @property
    def finished(self) -> int:
        return sum(each.run.outcome == "finished" for each in self.runs)

    @property
    def outcome(self) -> str:
        """The word "finished", or how many runs are, or the outcome of the only run."""
        if self.finished == len(self.runs):
            return "finished"
        return self.runs[0].run.outcome if len(self.runs) == 1 else f"{self.finished} of {len(self.runs)} finished"

    @property
    def strategy(self) -> str:
        return self.runs[0].run.strategy

    @cached_property
    def _each(self) -> list[tuple[int, dict[str, float | None]]]:
        """The seed and all figures of each counted run."""
        return [(each.run.seed, {**each.figures(*aim(self.target, each)), **each.doubt}) for each in self.counted]

    def by_seed(self, key: str) -> dict[int, float]:
        """A figure of each counted run that has it, by seed."""
        return {seed: value for seed, figures in self._each if (value := figures[key]) is not None}

    @cached_property
    def figures(self) -> dict[str, Statistic | None]:
        """All figures over the seeds; those of TO_TARGET over the runs that reached it."""
        each = [figures for _, figures in self._each]
        reached = [figures for figures in each if figures["rounds_to_target"] is not None]
        return {
            name: over_seeds([figures[name] for figures in (reached if name in TO_TARGET else each)])
            for name in (each[0] if each else ())
        }

    @cached_property
    def curve(self) -> Curve | None:
        """The mean over the seeds, of the rounds in which all runs have a score; None if there is no such round."""
        curves = [run.curve for run in self.counted if run.curve is not None]
        if not curves or len(curves) < len(self.counted):
            return None
        by_round = [{point.round: point for point in curve.points} for curve in curves]
        common = [number for number in by_round[0] if all(number in points for points in by_round)]
        means = (_mean([points[number] for points in by_round]) for number in common)
        points = tuple(point for point in means if point is not None)
        return Curve(curves[0].of, points) if points else None

    @property
    def over_bytes(self) -> tuple[Point, ...]:
        """The points of the curve whose bytes are known."""
        return tuple(point for point in self.curve.points if point.transferred is not None) if self.curve else ()


def _mean(points: Sequence[Point]) -> Point | None:
    transferred = over_seeds([point.transferred for point in points])
    score = over_seeds([point.score for point in points])
    if score is None:
        return None
    return Point(points[0].round, transferred.mean if transferred else None, score.mean, score.deviation)


# --- sections -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The score until which bytes, rounds and time are counted.

    Args:
        score: The score; the mean over the seeds where each has its own.
        of: What it is derived from, a strategy or variant; "" if it is given.
        by_seed: Each seed's own score; None: all have the same.
        margin: What is added to the final score that it is derived from; None: it is a share of that, or given.
        own_tests: Whether it is a score on the clients' own tests, and not on the server's held-out data.
    """

    score: float
    of: str = ""
    by_seed: Mapping[int, float] | None = None
    margin: float | None = None
    own_tests: bool = False

    def at(self, seed: int) -> float | None:
        """The score of a seed; None if it has none."""
        return self.score if self.by_seed is None else self.by_seed.get(seed)

    @property
    def data(self) -> str:
        """What it is a score on, in words."""
        return "the clients' own tests" if self.own_tests else "the server's data"

    @property
    def of_data(self) -> str:
        """What it is a score on, as files name it: server or clients."""
        return "clients" if self.own_tests else "server"


def aim(target: Target | None, run: Measured) -> tuple[float | None, bool]:
    """The score that a run is to reach, or None, and whether it is one on the clients' own tests."""
    return (None, False) if target is None else (target.at(run.run.seed), target.own_tests)


@dataclass(frozen=True)
class Group:
    """The results of a section so far."""

    comparison: Comparison
    section: Section
    variants: Sequence[Result]
    target: Target | None

    @property
    def by(self) -> Measure:
        return self.variants[0].by

    @property
    def varied(self) -> Sequence[str]:
        """The keys in whose values its variants differ; none if its title has the values."""
        return () if self.section.question else list(self.comparison.grid)

    @property
    def baseline(self) -> Result:
        """What the others are compared with."""
        name = self.section.baseline
        return next((result for result in self.variants if result.name == name), self.variants[0])

    @property
    def others(self) -> list[Result]:
        """All but the baseline."""
        return [result for result in self.variants if result is not self.baseline]

    @property
    def line(self) -> float | None:
        """The target as figures draw it: with a curve of the data to which it belongs."""
        if self.target is None or not self.section.counts:
            return None
        curves = [result.curve for result in self.variants if result.curve is not None]
        drawn = any((curve.of == "server") is not self.target.own_tests for curve in curves)
        return self.target.score if drawn else None

    @property
    def score_key(self) -> str:
        """The figure that its target is compared with: the score on the server's data or on the clients' own tests."""
        return f"{self.target.of_data if self.target else 'server'}_{self.by.key}"

    @property
    def unfinished(self) -> list[Measured]:
        return [each for result in self.variants for each in result.runs if each.run.outcome != "finished"]

    @property
    def unreached(self) -> list[Result]:
        """The variants of which some runs, but not all, reached the target."""
        counts = ((result, result.figures.get("rounds_to_target")) for result in self.variants)
        return [result for result, reached in counts if reached and reached.runs < result.aimed]


@dataclass(frozen=True)
class Results(Group):
    """The results of a comparison so far: of each section, and of all as of one group. `runs` are in their order."""

    runs: Sequence[Measured]
    sections: Sequence[Group]


def measure(comparison: Comparison) -> Results:
    """Read the results of all runs, as far as they have come."""
    return results_of(comparison, [measured(run, comparison.settings_of(run)) for run in comparison.runs])


def results_of(comparison: Comparison, runs: Sequence[Measured]) -> Results:
    """The results of runs that are read, in the sections of their comparison."""
    by = measured_by([line for each in runs for line in each.metrics])
    runs = [replace(each, by=by) for each in runs]
    groups = []
    for section in comparison.groups:
        results = [
            Result(
                variant.name, [each for each in runs if each.run.compared == variant.name], variant=variant,
                titled=bool(section.question),
            )
            for variant in section.variants
        ]  # fmt: skip
        target = _target(comparison, section, results)
        groups.append(Group(comparison, section, [replace(result, target=target) for result in results], target))
    everything = [result for group in groups for result in group.variants]
    return Results(comparison, groups[0].section, everything, groups[0].target, runs, groups)


def _target(comparison: Comparison, section: Section, results: Sequence[Result]) -> Target | None:
    if relative := comparison.relative_target:
        of = comparison.reference(section, relative.of)
        return _relative([each for each in results if each.base == of], relative.margin, _on_own_tests(results))
    if comparison.target is not None:
        return Target(float(comparison.target), own_tests=_on_own_tests(results))
    return target_of(section, results)


def _on_own_tests(results: Sequence[Result]) -> bool:
    """Whether the target of a section with these results is one on the clients' own tests: all models are personal.

    A global model may be scored there in the last round alone, and so cannot be compared by the round that reached it.
    """
    return all(each.personal for result in results for each in result.runs)


def _final(run: Measured, own_tests: bool) -> float | None:
    return run.own_score if own_tests else run.server_score


def _relative(results: Sequence[Result], margin: float, own: bool) -> Target | None:
    """The final score of each seed plus a margin; of combinations of varied values, that of the best one.

    The best one is of those that finished with the most seeds: another one may be without the difficult seed.
    """
    found, share = [], bool(results) and results[0].by.share
    for result in results:
        finals = {each.run.seed: _final(each, own) for each in result.runs if each.run.outcome == "finished"}
        by_seed = {seed: score + margin for seed, score in finals.items() if score is not None}
        if mean := over_seeds(list(by_seed.values())):
            found.append(Target(mean.mean, result.label, by_seed, margin, own))
    return max(found, key=lambda one: (len(one.by_seed or ()), one.score if share else -one.score), default=None)


def target_of(section: Section, results: Sequence[Result]) -> Target | None:
    """The target of a section for which none is given. Only finished runs count.

    It is a score on the server's held-out data, or if all models are personal, on the clients' own tests.

    If it asks for bytes: the baseline's final score less `within`, of each seed its own. Otherwise: 90 % of the final
    accuracy of the baseline, of FedAvg if there is no baseline, or of the first that has one. An error is divided by
    0.9 instead. If keys are varied, the final accuracy is that of the best combination of the baseline.
    """
    share, own = results[0].by.share, _on_own_tests(results)
    if section.question == BYTES:
        baseline = next((result for result in results if result.name == section.baseline), results[0])
        return _relative([baseline], -section.within if share else section.within, own)
    key = f"{'clients' if own else 'server'}_{results[0].by.key}"
    known = [
        (result, score.mean) for result in results if result.finished and (score := result.figures[key]) is not None
    ]
    if not known:
        return None
    wanted = next((result.base for result in results if result.name == section.baseline), FEDAVG)
    if wanted not in (result.base for result, _ in known):
        wanted = known[0][0].base
    scores = [(result, score) for result, score in known if result.base == wanted]
    of, best = (max if share else min)(scores, key=lambda one: one[1])
    return Target(best * _TARGET if share else best / _TARGET, of.label, own_tests=own)
