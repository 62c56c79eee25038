"""`tepal compare`: runs strategies × seeds in turn, and writes the score and the transferred bytes of each.

What a comparison is and where it lies: `comparison.py`. It can be stopped or killed at any time, and goes on from its
folder: runs that finished stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tepal.host.superlink import RunError
from tepal.records.run_directory import held, make_first_free, point_latest_at, read_metrics, write_whole
from tepal.report.terminal import RoundProgress, TimeLeft
from tepal.server_app.config import ConfigError, RunConfig, read_run_config
from tepal.tools.compare.comparison import CSV, HTML, LATEX, MARKDOWN, PLAN, RUNS_CSV, SVG, Cell, Comparison, measure
from tepal.tools.compare.page import comparison_page
from tepal.tools.compare.picture import STRATEGIES, draw
from tepal.tools.compare.tables import latex, markdown, runs_csv, strategies_csv

USUAL = ("fedavg", "fedfrozen", "selective", "fedensemble", "fedacs")
"""The strategies that are compared unless others are named."""

ALL = "all"  # in the place of the names

Start = Callable[[RunConfig, RoundProgress, Callable[[Path], None]], Path]
"""Runs one config with its progress, tells the run's directory as soon as there is one, and returns it."""

Check = Callable[[RunConfig], None]
"""Raises ConfigError for a config that cannot be run."""


# --- what is asked for ----------------------------------------------------------------------------------------------


def strategy_names(text: str) -> list[str]:
    """Names with commas between, or "all". Raises ConfigError for one that is unknown, or there twice."""
    if text.strip() == ALL:
        return list(STRATEGIES)
    names = _parts(text)
    problems = []
    for name in dict.fromkeys(names):
        if name not in STRATEGIES:
            near = get_close_matches(name, STRATEGIES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"--strategies: there is no strategy {name!r}: {hint}known are {', '.join(STRATEGIES)}")
        elif names.count(name) > 1:
            problems.append(f"--strategies: {name!r} is there twice")
    if not names:
        problems.append(f"--strategies names none: known are {', '.join(STRATEGIES)}; {ALL!r} is all of them")
    if problems:
        raise ConfigError("\n".join(problems))
    return names


def seed_numbers(text: str) -> list[int]:
    """Whole numbers with commas between. Raises ConfigError for what can be no seed, or is there twice."""
    parts = _parts(text)
    try:
        seeds = [int(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r}: expected whole numbers with commas between, such as 1,2,3") from error
    if not seeds:
        raise ConfigError("--seeds names none: expected whole numbers with commas between, such as 1,2,3")
    if twice := [str(seed) for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]:
        raise ConfigError(f"--seeds: {', '.join(twice)} is there twice; it would be the same run again")
    for seed in seeds:
        read_run_config({"seed": seed})
    return seeds


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def check(comparison: Comparison, check_one: Check) -> None:
    """See that what is not finished can be run. Raises ConfigError with what is wrong with any of the strategies."""
    open_cells = {cell.strategy: cell for cell in comparison.cells if cell.outcome != "finished"}
    wrong: dict[str, list[str]] = {}
    for strategy, cell in open_cells.items():
        try:
            check_one(read_run_config(comparison.config_of(cell)))
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(strategy)
    if wrong:
        # What is wrong for all of them is said once, without their names.
        said = (text if found == list(open_cells) else f"{', '.join(found)}: {text}" for text, found in wrong.items())
        raise ConfigError("\n".join(said))


def new_folder(runs: Path) -> Path:
    """Make the folder of a comparison that begins now. Raises OSError where that cannot be."""
    runs.mkdir(parents=True, exist_ok=True)
    return make_first_free(runs, f"{datetime.now(UTC):%Y%m%d-%H%M%S}-compare")


# --- running --------------------------------------------------------------------------------------------------------


def run_cells(comparison: Comparison, start: Start, *, console: Console, errors: Console) -> None:
    """Run in turn what has not finished, and write the comparison after each run.

    A run that was begun and left a checkpoint goes on from there. One that fails ends alone; Ctrl-C ends it and those
    to come. Raises RunInUse where another process is at work on this comparison.
    """
    with held(comparison.folder):
        comparison.save()
        todo = [cell for cell in comparison.cells if cell.outcome != "finished"]
        time_left = TimeLeft(len(todo), int(comparison.run_config["num-server-rounds"]))
        for cell in todo:
            try:
                _run_cell(comparison, cell, start, time_left, console, errors)
                write_comparison(comparison)
            except KeyboardInterrupt:
                if cell.outcome != "finished":
                    cell.outcome, cell.reason = "stopped", ""
                comparison.save()
                break
            except Exception:
                _remove_if_nothing_began(comparison.folder)
                raise
        write_comparison(comparison)


def _run_cell(
    comparison: Comparison, cell: Cell, start: Start, time_left: TimeLeft, console: Console, errors: Console
) -> None:
    def begun(run: Path) -> None:
        cell.run, cell.outcome, cell.reason = run, "running", ""
        comparison.save()
        # As it is without a comparison: for `tepal report runs`, or to resume it.
        point_latest_at(run, comparison.folder.parent)

    config = read_run_config(comparison.config_of(cell))
    name = f"{comparison.cells.index(cell) + 1}/{len(comparison.cells)} {comparison.name(cell)}"
    done = max((line["round"] for line in read_metrics(cell.run)), default=0) if cell.run and cell.checkpointed else 0
    progress = RoundProgress(
        config.rounds.num_server_rounds, name=name, time_left=time_left, done=done, console=console
    )
    try:
        with progress:
            cell.run = start(config, progress, begun)
        cell.outcome, cell.reason = "finished", ""
    except (RunError, OSError) as error:
        cell.outcome = "failed"
        cell.reason = (error.reason if isinstance(error, RunError) else str(error)).partition("\n")[0]
        said = f"[bold red]error:[/] {escape(f'{comparison.name(cell)}: {error}')}"
        errors.print(said, highlight=False, soft_wrap=True)
    comparison.save()


def _remove_if_nothing_began(folder: Path) -> None:
    """A folder that would only say that nothing could be run."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [PLAN]:
            (folder / PLAN).unlink()
            folder.rmdir()


def write_comparison(comparison: Comparison) -> Path:
    """Write tables, picture and page anew; returns the page. Raises OSError naming a file that cannot be written."""
    results = measure(comparison)
    written = {
        CSV: strategies_csv,
        RUNS_CSV: runs_csv,
        MARKDOWN: markdown,
        LATEX: latex,
        SVG: draw,
        HTML: comparison_page,
    }
    for name, write in written.items():
        write_whole(comparison.folder / name, write(results).encode())
    return comparison.folder / HTML
