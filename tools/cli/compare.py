"""`tepal compare`: run several strategies, or the variants of a file, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from click.core import ParameterSource
from rich.console import Console

from tepal.host.superlink import RunError, is_app
from tepal.host.toml import Value
from tepal.records.run_directory import LATEST, RunInUse
from tepal.server_app.config import ConfigError, RunConfig, defaults
from tepal.tools.cli import Ray, commands, reported
from tepal.tools.cli.running import CPUS, ENGINE, GPUS, MEMORY, AppFolder, RunConfigs, Verbose, runner_for
from tepal.tools.compare.checks import ALL, USUAL, check, check_tasks, seed_numbers, strategy_names
from tepal.tools.compare.comparison import (
    OWN_KEYS,
    PLAN,
    Comparison,
    find_comparison,
    measure,
    planned_runs,
    planned_variants,
    read_comparison,
)
from tepal.tools.compare.grid.expand import planned_text, strategies_grid, variants_grid
from tepal.tools.compare.grid.values import Grid, read_vary
from tepal.tools.compare.runs import new_folder, run_all
from tepal.tools.compare.tables import comparison_table, resume_command
from tepal.tools.compare.target import target_value
from tepal.tools.compare.variants import VariantsFile, read_variants
from tepal.tools.own_app import is_own_app
from tepal.tools.paths import given_run_config, has_our_keys, usual_run_config
from tepal.tools.simulation.engines import AUTO, engine_for
from tepal.tools.simulation.running import cache_in, check_clients, check_parts, run_once
from tepal.tools.terminal import RoundProgress

app = commands("compare")


@app.command("compare")
def compare_command(
    context: typer.Context,
    app: AppFolder = Path("."),
    strategies: Annotated[
        str | None,
        typer.Option(help=f"names in order, separated by commas; {ALL!r}: all", show_default=",".join(USUAL)),
    ] = None,
    variants: Annotated[
        Path | None, typer.Option(help="TOML file with the run configs to compare, instead of --strategies")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="run each strategy or variant with each of these values of a run config key; may be repeated: then "
            "with every combination",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="run each strategy with these: 1,2,3", show_default="that of the run config")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=2, help="simulated clients", show_default="10")] = None,
    run_config: RunConfigs = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="SCORE|NAME-MARGIN",
            help="accuracy (RMSE for a regression) until which bytes, rounds and time are counted: a number such as "
            "0.9, or a strategy's or variant's final one with a margin, each seed its own: fedavg-0.005 (for a "
            "regression fedavg+0.005); baseline-0.005: of each section's baseline. Only rounds with a score count",
            show_default="90 % of FedAvg's final accuracy; with a variants file, by question",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help=f"resume the comparison in this folder; {LATEST!r}: the last one"),
    ] = None,
    cpus: Annotated[float | None, typer.Option(min=0.01, help=CPUS, show_default="1")] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help=GPUS, show_default="0")] = None,
    memory: Annotated[float | None, typer.Option(min=0, help=MEMORY, show_default="0")] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE, show_default=AUTO)] = None,
    ray: Ray = None,
    verbose: Verbose = False,
) -> None:
    """Run several strategies with otherwise equal settings, or the variants of a file, and show accuracy and bytes.

    All results are in one folder, runs/<start>-compare: the runs, comparison.html, and tables as CSV, Markdown and
    LaTeX, with --vary with a line for each combination of values. When a run fails the others continue, and the exit
    status is 1. Ctrl-C ends all runs and shows the results so far. --resume FOLDER runs what is not finished; --target,
    --cpus, --gpus, --memory, --engine and --ray may then change.
    """
    console, errors = Console(), Console(stderr=True)
    with reported(RunError, RunInUse):
        if resume is None:
            if not has_our_keys(app):
                raise ConfigError(
                    f"{app.absolute()} is not Tepal's own app: it has no keys to compare strategies with. Run "
                    "it with `tepal simulate`, or name the folder of a checkout of Tepal"
                )
            given = given_run_config(run_config or [])
            grid = read_vary(vary or [])
            _check_varied(grid, run_config or [])
            if variants is None:
                comparison = _new_comparison(app, given, strategies, grid, seeds, clients or 10)
            else:
                if strategies is not None:
                    raise ConfigError("--strategies and --variants: leave out one; the file names the strategies")
                comparison = _of_variants(app, given, variants, read_variants(variants), grid, seeds, clients)
            comparison.app = "" if is_own_app(app) else str(app.resolve())
        else:
            fixed = {"--strategies": strategies, "--variants": variants, "--vary": vary, "--seeds": seeds,
                     "--clients": clients, "--run-config": run_config}  # fmt: skip
            comparison = _begun_comparison(app, resume, [option for option, value in fixed.items() if value])
            app = _app_of(comparison, app, given=context.get_parameter_source("app") is not ParameterSource.DEFAULT)
        comparison.target = comparison.target if target is None else _target(target)
        comparison.cpus = comparison.cpus if cpus is None else cpus
        comparison.gpus = comparison.gpus if gpus is None else gpus
        comparison.memory = comparison.memory if memory is None else memory
        comparison.engine = engine or comparison.engine
        resources: dict[str, Any] = {key: getattr(comparison, key) for key in ("clients", "cpus", "gpus")}
        resources.update(memory=memory or 0, kept_memory=comparison.memory)
        with runner_for(ray, comparison.engine, app, engine_for, asked=engine, **resources) as simulated:  # of all runs
            simulated.start_ahead(sum(run.outcome != "finished" for run in comparison.runs))
            where = "" if variants is None else f"{variants}: "
            # A seed without a partition is refused at first. Of a comparison that goes on, its runs fail alone.
            parts = None if resume else lambda config: check_parts(config, comparison.clients)
            check(
                comparison,
                lambda config: check_clients(config, comparison.clients, parts=False, here=simulated.here),
                parts,
                where,
            )
            check_tasks(comparison)
            if resume is None:
                comparison.folder = new_folder(comparison.folder)
            simulated.cache = cache_in(comparison.folder)
            for line in (simulated.description, planned_text(comparison)):
                console.print(line, markup=False, highlight=False, soft_wrap=True)

            def start(config: RunConfig, progress: RoundProgress, on_run: Callable[[Path], None]) -> Path:
                return run_once(simulated, config, progress, console, verbose, on_run)

            try:
                run_all(
                    comparison, start, console=console, errors=errors, at_once=simulated.at_once, stop=simulated.stop
                )
            except SystemExit:  # of SIGTERM or SIGHUP
                hint = f"Resume it with `{resume_command(comparison, simulated.options)}`"
                console.print(hint, markup=False, highlight=False, soft_wrap=True)
                raise
        console.print(comparison_table(measure(comparison), simulated.options), soft_wrap=True)
    outcomes = {run.outcome for run in comparison.runs}
    if "stopped" in outcomes:
        raise typer.Exit(130)  # as shells do for a command that Ctrl-C ended
    if outcomes != {"finished"}:
        raise typer.Exit(1)


def _target(given: str) -> float | str:
    try:
        return target_value(given)
    except ValueError as error:
        raise ConfigError(f"--target {given!r}: {error}") from error


def _new_comparison(
    app: Path, given: Mapping[str, Value], strategies: str | None, grid: Grid, seeds: str | None, clients: int
) -> Comparison:
    """Return a new comparison, whose folder is still the parent. Raises ConfigError for invalid settings."""
    _check_given(given, "Name the strategies with --strategies")
    if "seed" in given and seeds is not None:
        raise ConfigError(f"seed={given['seed']!r} in the run config and --seeds {seeds}: leave out one of them")
    config = {**defaults(), **usual_run_config(app), **given}
    names = list(USUAL) if strategies is None else strategy_names(strategies)
    numbers = seed_numbers(str(config["seed"]) if seeds is None else seeds)
    if not grid:
        return Comparison(_runs_folder(config), planned_runs(names, numbers), _common(config), clients)
    sections = strategies_grid(names, grid, len(numbers))
    runs = planned_variants(sections, numbers)
    return Comparison(_runs_folder(config), runs, _common(config), clients, sections=sections)


def _of_variants(
    app: Path, given: Mapping[str, Value], path: Path, file: VariantsFile, grid: Grid, seeds: str | None,
    clients: int | None,
) -> Comparison:  # fmt: skip
    """As `_new_comparison`, of the variants of a file. A key of `grid` takes precedence over the file's `[vary]`."""
    _check_given(given, f"Set it in {path}")
    named = f"--seeds {seeds}" if seeds is not None else f"seeds={list(file.seeds)} in {path}" if file.seeds else ""
    if "seed" in given and named:
        raise ConfigError(f"seed={given['seed']!r} in the run config and {named}: leave out one of them")
    config = {**defaults(), **usual_run_config(app), **file.common, **given}
    numbers = list(file.seeds)
    if seeds is not None or not numbers:
        numbers = seed_numbers(str(config["seed"]) if seeds is None else seeds)
    sections, grid = file.sections, {**file.vary, **grid}
    if grid:
        try:
            sections = variants_grid(sections, grid, len(numbers))
        except ConfigError as error:
            raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
    return Comparison(
        _runs_folder(config), planned_variants(sections, numbers), _common(config), clients or file.clients or 10,
        target=file.target, sections=sections,
    )  # fmt: skip


def _check_varied(grid: Grid, run_config: list[str]) -> None:
    """Raise ConfigError for varied keys that --run-config sets itself, and not in a file, over which they precede."""
    given = given_run_config(argument for argument in run_config if not argument.endswith(".toml"))
    if both := [f"{key}={given[key]!r}" for key in grid if key in given]:
        raise ConfigError(f"{', '.join(both)} in the run config and in --vary: leave out one of them")


def _check_given(given: Mapping[str, Value], remedy: str) -> None:
    """Raise ConfigError for keys of --run-config that a comparison sets."""
    if "strategy" in given:
        raise ConfigError(
            f"strategy={given['strategy']!r} in the run config: a comparison sets the strategy itself. {remedy}"
        )
    if given.get("resume"):
        raise ConfigError(
            f"resume={given['resume']!r} in the run config: a comparison starts all its runs from the beginning. "
            "Resume one run with `tepal simulate`, a comparison with `tepal compare --resume FOLDER`"
        )


def _runs_folder(config: Mapping[str, Value]) -> Path:
    return Path(str(config["runs"])).expanduser().resolve()


def _common(config: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in config.items() if key not in OWN_KEYS}


def _begun_comparison(app: Path, resume: str, fixed: list[str]) -> Comparison:
    """Return the comparison to resume. Raises ConfigError for `fixed`, given options that cannot change any more.

    Raises OSError or ValueError if there is no comparison.
    """
    if fixed:
        raise ConfigError(
            f"--resume {resume}: a comparison is resumed with its own settings, so leave out {', '.join(fixed)}. Only "
            "--target, --cpus, --gpus, --memory, --engine and --ray may change"
        )
    runs = {**defaults(), **usual_run_config(app)}["runs"] if resume == LATEST else resume
    return read_comparison(find_comparison(Path(str(runs)).expanduser().resolve()))


def _app_of(comparison: Comparison, app: Path, *, given: bool) -> Path:
    """Return the app to resume a comparison with: the one that it began with, if it names one, else `app`.

    Raises ConfigError if that is gone, or if `app` is another one that was `given`.
    """
    if not comparison.app:
        return app
    its = Path(comparison.app)
    runs = f"{comparison.folder}: its runs are of the app in {its}"
    if given and app.resolve() != its:
        raise ConfigError(f"{runs}, not of the one in {app.absolute()}: leave out the folder of the app")
    if not is_app(its):
        raise ConfigError(f"{runs}, which is no longer there: put it back or, if it was moved, change app in {PLAN}")
    return its
