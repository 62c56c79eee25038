"""`tepal.compare`: several strategies or variants with several seeds, in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tepal.host.toml import Value
from tepal.server_app.config import ConfigError, RunConfig
from tepal.tools.api.run import Run, with_pandas
from tepal.tools.compare.checks import check, check_tasks, seed_numbers, strategy_names
from tepal.tools.compare.comparison import (
    CSV,
    HTML,
    Comparison,
    Results,
    measure,
    planned_runs,
    planned_variants,
    read_comparison,
)
from tepal.tools.compare.grid.expand import strategies_grid, variants_grid
from tepal.tools.compare.grid.values import read_vary_table
from tepal.tools.compare.plan import OWN_KEYS
from tepal.tools.compare.runs import new_folder, run_all
from tepal.tools.compare.sections import NAME, Section, Variant
from tepal.tools.compare.target import target_value
from tepal.tools.simulation.running import cache_in, check_clients, check_parts, run_once
from tepal.tools.simulation.this_process import ThisProcess
from tepal.tools.terminal import RoundProgress

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

NOT_OF_RUNS = {
    "seed": "a comparison has seeds=[…]",
    "resume": "resume a comparison with `tepal compare --resume FOLDER`",
}
"""Keys that differ between the runs of a comparison, and what to give instead."""
_NOT_OF_VARIANTS = {**NOT_OF_RUNS, "runs": "all runs are in one folder: give runs=… to the comparison"}
assert {*_NOT_OF_VARIANTS, "strategy"} == set(OWN_KEYS)


@dataclass(frozen=True)
class Compared:
    """A comparison that has ended. `path` is its folder, and everything else is read from there."""

    path: Path

    @cached_property
    def table(self) -> pandas.DataFrame:
        """One row for each strategy or variant, and each combination of varied values, which are columns.

        Figures are means over the seeds; their standard deviations are in columns `…_sd`.
        """
        frame = with_pandas().read_csv(self.path / CSV, keep_default_na=False, na_values=[""])  # "NA" may be a name
        return frame.set_index("variant" if "variant" in frame else "strategy")

    @cached_property
    def runs(self) -> list[Run]:
        """The runs that have begun, in their order."""
        return [Run(run.directory) for run in self._comparison.runs if run.directory is not None]

    def plot(self) -> Figure:
        """Draw the mean score of each strategy or variant over the transferred bytes."""
        from plotly.graph_objects import Figure, Scatter

        figure = Figure()
        for result in (result for group in self._results.sections for result in group.variants):
            points = [point for point in result.over_bytes if point.transferred is not None]
            figure.add_trace(
                Scatter(
                    x=[(point.transferred or 0.0) / 1e6 for point in points],
                    y=[point.score for point in points],
                    text=[f"round {point.round}" for point in points],
                    mode="lines+markers",
                    name=result.full_label,
                )
            )
        return figure.update_layout(xaxis_title="transferred (MB)", yaxis_title=self._results.by.name)

    def report(self) -> Path:
        """Return the path of the comparison's page, for a browser."""
        return self.path / HTML

    @cached_property
    def _comparison(self) -> Comparison:
        return read_comparison(self.path)

    @cached_property
    def _results(self) -> Results:
        return measure(self._comparison)

    def __repr__(self) -> str:
        labels = [result.full_label for group in self._results.sections for result in group.variants]
        return f"<Compared {self.path.name}: {', '.join(labels)}; {len(self.runs)} runs>"


def compared(
    what: Sequence[str | Mapping[str, Any]],
    seeds: Sequence[int],
    config: Mapping[str, Value],
    clients: int,
    vary: Mapping[str, Any],
    target: Any,
    keys: Callable[[Mapping[str, Any]], dict[str, Value]],
    console: Console,
) -> Compared:
    """Run all strategies or variants with all seeds.

    Args:
        what: names of strategies; or variants, each with `name`, `strategy` and further options.
        seeds: of the runs.
        config: the run config of all runs.
        clients: number of clients.
        vary: key of the run config → list of values; every combination is run.
        target: a score, or the text of a final score with a margin; None: that of the comparison.
        keys: turns a variant's options into keys of the run config.
        console: where progress is shown. Errors go to standard error.

    Raises:
        ConfigError: before the first run, with everything that is wrong.
        KeyboardInterrupt: the user stopped it; the files are written.
    """
    numbers = seed_numbers(",".join(map(str, seeds)))
    common = {key: value for key, value in config.items() if key not in OWN_KEYS}
    problems: list[str] = []
    lists = {key: list(values) if isinstance(values, tuple | range) else values for key, values in vary.items()}
    grid = read_vary_table(lists, Path(), problems)
    if problems:
        raise ConfigError("\n".join(problem.replace("[vary]", "vary") for problem in problems))
    sections: tuple[Section, ...] = ()
    if all(isinstance(each, str) for each in what):
        names = strategy_names(",".join(map(str, what)))
        sections = strategies_grid(names, grid, len(numbers)) if grid else ()
        runs = planned_variants(sections, numbers) if grid else planned_runs(names, numbers)
    else:
        sections = (Section("", tuple(_variants(what, keys))),)
        sections = variants_grid(sections, grid, len(numbers)) if grid else sections
        runs = planned_variants(sections, numbers)
    try:
        score = None if target is None else target_value(target)
    except ValueError as error:
        raise ConfigError(f"target is {target!r}: {error}") from error
    comparison = Comparison(Path(str(config["runs"])), runs, common, clients, target=score, sections=sections)
    check(  # each run shows its own warnings
        comparison,
        lambda one: check_clients(one, clients, parts=False),
        lambda one: check_parts(one, clients),
        warn=False,
    )
    try:
        check_tasks(comparison)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--target", "target").replace(" with --strategies", "")) from error
    comparison.folder = new_folder(comparison.folder)
    engine = ThisProcess(clients)
    engine.cache = cache_in(comparison.folder)

    def start(one: RunConfig, progress: RoundProgress, on_run: Callable[[Path], None]) -> Path:
        return run_once(engine, one, progress, console, False, on_run)

    # Not to the line of the progress, which the next run overwrites, and also without progress.
    errors = Console(stderr=True, force_jupyter=False)
    run_all(comparison, start, console=console, errors=errors)
    if any(run.outcome in ("stopped", "not run") for run in comparison.runs):
        raise KeyboardInterrupt(f"the comparison was stopped. What it has so far: {comparison.folder}")
    return Compared(comparison.folder)


def _variants(
    what: Sequence[str | Mapping[str, Any]], keys: Callable[[Mapping[str, Any]], dict[str, Value]]
) -> list[Variant]:
    """Raises ConfigError with all that is wrong."""
    found: list[Variant] = []
    wrong = []
    for number, each in enumerate(what, start=1):
        options = {"name": each, "strategy": each} if isinstance(each, str) else dict(each)
        name, strategy = options.pop("name", options.get("strategy")), options.get("strategy")
        config = keys(options)
        wrong += [
            f"variant {number}: {key}={config[key]!r}: {remedy}"
            for key, remedy in _NOT_OF_VARIANTS.items()
            if key in config
        ]
        if not isinstance(strategy, str):
            wrong.append(f"variant {number}: strategy is {strategy!r}, expected the name of one, such as 'fedavg'")
        elif not isinstance(name, str) or not NAME.fullmatch(name):
            wrong.append(f"variant {number}: name is {name!r}, expected 1 to 64 letters, digits, - and _")
        elif name in (variant.name for variant in found):
            wrong.append(f"variant {number}: a second variant has the name {name!r}: give each its own")
        else:
            found.append(Variant(name, config))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found
