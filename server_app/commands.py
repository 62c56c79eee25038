"""The command line: `tepal …`. Flower's own commands (`flwr run`, `flower-superlink`, …) stay as they are."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tepal.exchange.cache import forget_parts
from tepal.server_app.compare import (
    CSV,
    STRATEGIES,
    comparison_table,
    new_folder,
    read_comparison,
    run_each,
    strategy_names,
    write_comparison,
)
from tepal.server_app.config import ConfigError, RunConfig, open_run
from tepal.server_app.flower import RunError, Value, app_run_config, parse_run_config
from tepal.server_app.report import write_report
from tepal.server_app.run_directory import CHECKPOINTS, KEPT_IN, METRICS, find_run, read_metrics, read_summary
from tepal.server_app.simulation import simulate
from tepal.server_app.terminal import RoundProgress, final_table, follow_metrics

_CLIENTS = ".clients"  # in the folder of runs: what simulated clients keep, by experiment

main = typer.Typer(
    name="tepal",
    help="Federated learning that moves only the parts of a model that a round needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@main.callback()
def tepal() -> None:
    """Federated learning that moves only the parts of a model that a round needs."""


@main.command("simulate")
def simulate_command(
    app: Annotated[Path, typer.Argument(help="folder of the Flower app: a checkout of this project")] = Path("."),
    clients: Annotated[int, typer.Option(min=2, help="simulated clients")] = 10,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="'key=value …' or a TOML file, as in `flwr run`; may be repeated"),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.01, help="CPU cores for each client at work")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="share of a GPU for each client at work")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Flower's own log")] = False,
) -> None:
    """Run the app with simulated clients on this machine, show its progress, and say what it moved.

    An own SuperLink is started for it on a free port, and stopped whatever happens. A run that was stopped goes on with
    -c 'resume="runs/latest"'.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        given = parse_run_config(run_config or [])
        config, _ = open_run({**app_run_config(app), **given})
        _check(config, clients)
        with RoundProgress(config.rounds.num_server_rounds, console=console) as progress:
            run = _simulate(progress, console, app, config, clients, cpus, gpus, verbose)
        summary = read_summary(run)
        if summary is not None:
            console.print(final_table(summary, read_metrics(run), run), soft_wrap=True)
    except (ConfigError, RunError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@main.command("compare")
def compare_command(
    app: Annotated[Path, typer.Argument(help="folder of the Flower app: a checkout of this project")] = Path("."),
    strategies: Annotated[str, typer.Option(help="which, in this order, with commas between")] = ",".join(STRATEGIES),
    clients: Annotated[int, typer.Option(min=2, help="simulated clients")] = 10,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="as in `tepal simulate`, for all strategies; may be repeated"),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.01, help="CPU cores for each client at work")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="share of a GPU for each client at work")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Flower's own log")] = False,
) -> None:
    """Run several strategies in turn, alike in all else, and show what each reached and what it moved for that.

    Everything lies in one folder, runs/<start>-compare: the runs, comparison.html, comparison.csv and comparison.svg.
    A run that fails does not end the others; the status is then 1. Ctrl-C ends all of them, and shows what there is.
    """
    console, errors = Console(), Console(stderr=True)

    def start(config: RunConfig, progress: RoundProgress, on_run: Callable[[Path], None]) -> Path:
        return _simulate(progress, console, app, config, clients, cpus, gpus, verbose, on_run)

    try:
        configs = _comparable(strategy_names(strategies), app, parse_run_config(run_config or []), clients)
        folder = new_folder(Path(next(iter(configs.values())).rounds.runs).expanduser().resolve())
        configs = {
            name: replace(config, rounds=config.rounds.model_copy(update={"runs": str(folder)}))
            for name, config in configs.items()
        }
        entries = run_each(configs, folder, start, console=console, errors=errors)
        console.print(comparison_table(folder, entries), soft_wrap=True)
    except (ConfigError, RunError, OSError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if any(entry.outcome == "stopped" for entry in entries):
        raise typer.Exit(130)  # as a shell says it of a command that Ctrl-C ended
    if any(entry.outcome != "finished" for entry in entries):
        raise typer.Exit(1)


@main.command("report")
def report_command(
    run: Annotated[
        Path, typer.Argument(help="a run directory, a folder of them (the latest), or that of a comparison")
    ] = Path("runs"),
) -> None:
    """Write a run's report.html anew, of a run in progress too, or a comparison's files, and say where it is."""
    try:
        if (run / CSV).is_file():
            typer.echo(write_comparison(run, read_comparison(run)))
        else:
            typer.echo(write_report(find_run(run)))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@main.command("predict")
def predict_command(
    model: Annotated[
        Path, typer.Argument(help="a run directory, a folder of runs (the latest), or a .safetensors file")
    ],
    files: Annotated[list[Path], typer.Argument(help="images, folders of images, .npz files (their test set if any)")],
    output: Annotated[
        Path | None, typer.Option(help="CSV file for all predictions; one that is there is replaced")
    ] = None,
) -> None:
    """Predict images with a saved model, or with the mean over the models of an ensemble."""
    # Here and not at the top: torch takes seconds to import, and `tepal report` needs none of it.
    from tepal.server_app.predict import load_predictor, results_table, write_csv

    console, errors = Console(), Console(stderr=True)
    try:
        if output is not None and not output.absolute().parent.is_dir():
            raise ValueError(f"--output {output}: there is no folder {output.absolute().parent}")
        predictor = load_predictor(model)
        if predictor.caution:
            errors.print(f"[yellow]{escape(predictor.caution)}[/]", highlight=False, soft_wrap=True)
        with errors.status("predicting …") as status:
            rows = predictor.predict_files(files, lambda done: status.update(f"predicting … {done:,} examples"))
        console.print(results_table(rows), soft_wrap=True)
        if output is not None:
            write_csv(rows, output)
            console.print(f"All {len(rows):,} predictions: {output}", markup=False, highlight=False, soft_wrap=True)
    except (OSError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _check(config: RunConfig, clients: int) -> None:
    """What can be known before anything is started. Raises ConfigError."""
    # Here and not at the top: torch takes seconds to import, and `tepal report` needs none of it.
    from tepal.server_app.run import build_model, build_strategy

    _, blocks = build_model(config)
    needed = build_strategy(config, blocks).min_available_nodes
    if needed > clients:
        rounds, said = config.rounds, ""
        if rounds.strategy == "fedensemble":
            said = f" and fedensemble.strata={config.fedensemble.strata} of fraction-train={rounds.fraction_train:g}"
        raise ConfigError(
            f"min-clients={rounds.min_clients}, min-replies={rounds.min_replies}{said}: at least {needed} clients are "
            f"needed, and --clients is {clients}"
        )


def _comparable(names: list[str], app: Path, given: Mapping[str, Value], clients: int) -> dict[str, RunConfig]:
    """Each strategy's config, the same but for the strategy. Raises ConfigError with what is wrong in any of them."""
    if "strategy" in given:
        raise ConfigError(
            f"strategy={given['strategy']!r} in the run config: a comparison sets the strategy itself. Name those that "
            "it shall run with --strategies"
        )
    if given.get("resume"):
        raise ConfigError(
            f"resume={given['resume']!r} in the run config: a comparison begins all its runs anew. One run goes on "
            "with `tepal simulate`"
        )
    configs: dict[str, RunConfig] = {}
    wrong: dict[str, list[str]] = {}
    for name in names:
        try:
            config, _ = open_run({**app_run_config(app), **given, "strategy": name})
            _check(config, clients)
            configs[name] = config
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(name)
    if wrong:
        # What is wrong for all of them is said once, without their names.
        said = (text if found == names else f"{', '.join(found)}: {text}" for text, found in wrong.items())
        raise ConfigError("\n".join(said))
    return configs


def _simulate(
    progress: RoundProgress,
    console: Console,
    app: Path,
    config: RunConfig,
    clients: int,
    cpus: float,
    gpus: float,
    verbose: bool,
    on_run: Callable[[Path], None] = lambda _run: None,
) -> Path:
    """One run with its progress; returns its directory, which `on_run` hears of as soon as there is one."""
    resumed = find_run(Path(config.rounds.resume).expanduser()) if config.rounds.resume else None
    runs = resumed.parent if resumed else Path(config.rounds.runs).expanduser().resolve()
    # What simulated clients keep must outlive a run that is stopped, for it to go on.
    cache = Path(os.environ.get("TEPAL_CACHE") or runs / _CLIENTS)
    done = threading.Event()
    found: list[Path] = []
    followers: list[threading.Thread] = []

    def follow(run: Path) -> None:
        for line in follow_metrics(run / METRICS, done.is_set):
            progress.update(line)

    def hear(kind: str, text: str) -> None:
        if verbose:
            console.print(text, markup=False, highlight=False)
        if kind == "stage" and not found and text:
            progress.stage(text)
        if kind == "log" and KEPT_IN in text and not found:
            # The ServerApp runs in a process of Flower's; the metrics that it writes are what is seen of it here.
            found.append(Path(text.partition(KEPT_IN)[2].strip()))
            on_run(found[0])
            followers.append(threading.Thread(target=follow, args=found, daemon=True))
            followers[0].start()

    handle, name = tempfile.mkstemp(prefix="tepal-simulation-", suffix=".log")
    os.close(handle)
    log = Path(name)
    try:
        simulate(
            app,
            clients=clients,
            run_config={**config.flat, "runs": str(runs), "resume": str(resumed or "")},
            cpus_per_client=cpus,
            gpus_per_client=gpus,
            on_event=hear,
            log=log,
            cache=cache,
        )
    except RunError as error:
        if not found:
            raise  # its text says where the log is
        kept = _keep_log(log, found[0])
        said = [error.reason, f"What there is of it: {found[0]}", _go_on(found[0])]
        raise RunError("\n".join(filter(None, said)), kept) from error
    except KeyboardInterrupt:
        console.print(_go_on(found[0]) if found else "", markup=False, highlight=False, soft_wrap=True)
        raise
    finally:
        done.set()
        for follower in followers:
            follower.join(timeout=5)
        if found and log.exists():
            _keep_log(log, found[0])
        elif not isinstance(sys.exception(), RunError):
            log.unlink(missing_ok=True)
    if not found:
        raise RunError("the run ended without a run directory")
    for experiment in cache.glob(f"{found[0].name}-{'[0-9a-f]' * 8}"):  # as `run` names it
        forget_parts(experiment)
    return found[0]


def _go_on(run: Path) -> str:
    """How to resume a run that was stopped; "" for one that has no checkpoint."""
    return f"It goes on with -c 'resume=\"{run}\"'" if any((run / CHECKPOINTS).glob("round-*")) else ""


def _keep_log(log: Path, run: Path) -> Path:
    """Move Flower's own log of a run to its results, behind that of the run which this one resumed."""
    kept = run / "flower.log"
    with kept.open("ab") as file, log.open("rb") as new:
        shutil.copyfileobj(new, file)
    log.unlink()
    return kept


if __name__ == "__main__":
    sys.exit(main())
