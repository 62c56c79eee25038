"""`tepal compare`: run several strategies with otherwise equal settings, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tepal import models
from tepal.host.superlink import RunError, app_run_config
from tepal.host.toml import Value, parse_run_config
from tepal.records.run_directory import LATEST, RunInUse
from tepal.server_app.config import ConfigError, RunConfig, defaults
from tepal.tools.cli import commands, reported
from tepal.tools.cli.running import CPUS, ENGINE, AppFolder, RunConfigs, Verbose, cache_in, check_clients, run_once
from tepal.tools.compare.comparison import OWN_KEYS, Comparison, find_comparison, measure, planned_runs, read_comparison
from tepal.tools.compare.runs import ALL, USUAL, check, new_folder, run_all, seed_numbers, strategy_names
from tepal.tools.compare.tables import comparison_table
from tepal.tools.simulation.engines import AUTO, engine_for
from tepal.tools.terminal import RoundProgress
from tepal.training.data.inputs import InputConfig

app = commands("compare")


@app.command("compare")
def compare_command(
    app: AppFolder = Path("."),
    strategies: Annotated[
        str | None,
        typer.Option(help=f"names in order, separated by commas; {ALL!r}: all", show_default=",".join(USUAL)),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="run each strategy with these: 1,2,3", show_default="that of the run config")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=2, help="simulated clients", show_default="10")] = None,
    run_config: RunConfigs = None,
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="accuracy (RMSE for a regression) up to which rounds and bytes are counted",
            show_default="90 % of FedAvg's final accuracy",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help=f"resume the comparison in this folder; {LATEST!r}: the last one"),
    ] = None,
    cpus: Annotated[float | None, typer.Option(min=0.01, help=CPUS, show_default="1")] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="share of a GPU for each client that trains", show_default="0")
    ] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE, show_default=AUTO)] = None,
    verbose: Verbose = False,
) -> None:
    """Run several strategies with otherwise equal settings, and show accuracy and bytes of each.

    All results are in one folder, runs/<start>-compare: the runs, comparison.html, and tables as CSV, Markdown and
    LaTeX. When a run fails the others continue, and the exit status is 1. Ctrl-C ends all runs and shows the results so
    far. --resume FOLDER runs what is not finished; --target, --cpus, --gpus and --engine may then change.
    """
    console, errors = Console(), Console(stderr=True)
    with reported(RunError, RunInUse):
        if resume is None:
            comparison = _new_comparison(app, parse_run_config(run_config or []), strategies, seeds, clients or 10)
        else:
            fixed = {"--strategies": strategies, "--seeds": seeds, "--clients": clients, "--run-config": run_config}
            comparison = _begun_comparison(app, resume, [option for option, value in fixed.items() if value])
        comparison.target = comparison.target if target is None else target
        comparison.cpus = comparison.cpus if cpus is None else cpus
        comparison.gpus = comparison.gpus if gpus is None else gpus
        comparison.engine = engine or comparison.engine
        regression = InputConfig.from_run_config(comparison.run_config).kind == models.SEQUENCES
        if not regression and comparison.target is not None and comparison.target > 1:
            raise ConfigError(f"--target is {comparison.target:g}, expected an accuracy from 0 to 1")
        resources: dict[str, Any] = {key: getattr(comparison, key) for key in ("clients", "cpus", "gpus")}
        with engine_for(comparison.engine, app, **resources) as simulated:  # one for all runs
            check(comparison, lambda config: check_clients(config, comparison.clients))
            if resume is None:
                comparison.folder = new_folder(comparison.folder)
            simulated.cache = cache_in(comparison.folder)
            console.print(simulated.description, markup=False, highlight=False, soft_wrap=True)

            def start(config: RunConfig, progress: RoundProgress, on_run: Callable[[Path], None]) -> Path:
                return run_once(simulated.run, config, progress, console, verbose, on_run)

            run_all(comparison, start, console=console, errors=errors)
        console.print(comparison_table(measure(comparison)), soft_wrap=True)
    outcomes = {run.outcome for run in comparison.runs}
    if "stopped" in outcomes:
        raise typer.Exit(130)  # as shells do for a command that Ctrl-C ended
    if outcomes != {"finished"}:
        raise typer.Exit(1)


def _new_comparison(
    app: Path, given: Mapping[str, Value], strategies: str | None, seeds: str | None, clients: int
) -> Comparison:
    """Return a new comparison, whose folder is still the parent. Raises ConfigError for invalid settings."""
    if "strategy" in given:
        raise ConfigError(
            f"strategy={given['strategy']!r} in the run config: a comparison sets the strategy itself. Name the "
            "strategies with --strategies"
        )
    if given.get("resume"):
        raise ConfigError(
            f"resume={given['resume']!r} in the run config: a comparison starts all its runs from the beginning. "
            "Resume one run with `tepal simulate`, a comparison with `tepal compare --resume FOLDER`"
        )
    if "seed" in given and seeds is not None:
        raise ConfigError(f"seed={given['seed']!r} in the run config and --seeds {seeds}: leave out one of them")
    config = {**defaults(), **app_run_config(app), **given}
    names = list(USUAL) if strategies is None else strategy_names(strategies)
    numbers = seed_numbers(str(config["seed"]) if seeds is None else seeds)
    return Comparison(
        folder=Path(str(config["runs"])).expanduser().resolve(),
        runs=planned_runs(names, numbers),
        run_config={key: value for key, value in config.items() if key not in OWN_KEYS},
        clients=clients,
    )


def _begun_comparison(app: Path, resume: str, fixed: list[str]) -> Comparison:
    """Return the comparison to resume. Raises ConfigError for `fixed`, given options that cannot change any more.

    Raises OSError or ValueError if there is no comparison.
    """
    if fixed:
        raise ConfigError(
            f"--resume {resume}: a comparison is resumed with its own settings, so leave out {', '.join(fixed)}. Only "
            "--target, --cpus, --gpus and --engine may change"
        )
    runs = {**defaults(), **app_run_config(app)}["runs"] if resume == LATEST else resume
    return read_comparison(find_comparison(Path(str(runs)).expanduser().resolve()))
