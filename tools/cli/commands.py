"""The command line: `tepal …`. Flower's own commands (`flwr run`, `flower-superlink`, …) stay as they are."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tepal import models
from tepal.host.superlink import Outcome, RunError, app_run_config
from tepal.host.toml import Value, parse_run_config
from tepal.records.run_directory import (
    CHECKPOINTS,
    KEPT_IN,
    LATEST,
    METRICS,
    RunInUse,
    find_run,
    read_metrics,
    read_summary,
)
from tepal.report.run_page import write_report
from tepal.report.terminal import RoundProgress, final_table, follow_metrics
from tepal.server_app.catalogue import table
from tepal.server_app.config import ConfigError, RunConfig, defaults, open_run
from tepal.tools.cli.node import node
from tepal.tools.cli.provision import provision
from tepal.tools.cli.server import server
from tepal.tools.compare.comparison import (
    OWN_KEYS,
    Comparison,
    cells_of,
    find_comparison,
    is_comparison,
    measure,
    read_comparison,
)
from tepal.tools.compare.runs import (
    ALL,
    USUAL,
    check,
    new_folder,
    run_cells,
    seed_numbers,
    strategy_names,
    write_comparison,
)
from tepal.tools.compare.tables import comparison_table
from tepal.tools.dashboard.views import (
    ComparisonView,
    RunView,
    comparison_facts,
    comparison_summary_page,
    console,
    facts_of,
    find,
    reasons,
    run_facts,
    run_page,
    runs_table,
    views,
)
from tepal.tools.simulation.engines import AUTO, engine_for
from tepal.training.data.inputs import InputConfig

_ENGINE = (
    "process: all clients in one process; ray: in Flower's simulation runtime; auto: in one process, unless --gpus or "
    "the app asks for Ray"
)
_JSON = "as JSON, for programs"
_CPUS = "CPU cores for each client at work"
_SHORTEST_TOKEN = 12  # characters
_CLIENTS = ".clients"  # in the folder of runs: what simulated clients keep, by experiment

main = typer.Typer(
    name="tepal",
    help="Federated learning that moves only the parts of a model that a round needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


for group in (provision, server, node):
    main.add_typer(group)


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
    cpus: Annotated[float, typer.Option(min=0.01, help=_CPUS)] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="share of a GPU for each client at work")] = 0,
    engine: Annotated[str, typer.Option(help=_ENGINE)] = AUTO,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Flower's own log")] = False,
) -> None:
    """Run the app with simulated clients on this machine, show its progress, and say what it moved.

    Whatever it starts is stopped, whatever happens. A run that was stopped goes on with -c 'resume="runs/latest"'.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        given = parse_run_config(run_config or [])
        config, _ = open_run({**app_run_config(app), **given})
        with engine_for(engine, app, clients=clients, cpus=cpus, gpus=gpus, cache=_cache(config)) as simulated:
            _check(config, clients)
            console.print(simulated.said, markup=False, highlight=False, soft_wrap=True)
            _run_and_show(simulated.run, config, console, verbose)
    except (ConfigError, RunError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@main.command("loopback")
def loopback_command(
    app: Annotated[Path, typer.Argument(help="folder of the Flower app: a checkout of this project")] = Path("."),
    clients: Annotated[int, typer.Option(min=2, help="clients, each a warm node of its own")] = 3,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="as in `tepal simulate`; may be repeated"),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(help="'key=value …' of one client, such as its data-path; one for each client, in order"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Flower's own log")] = False,
) -> None:
    """Run the app on a deployment on this machine: a SuperLink and warm nodes as processes, TLS, registered keys.

    Certificates and keys are made for it. All processes and files but the run's own are gone when it ends.
    """
    from tepal.tools.deploy.loopback import loopback

    console, errors = Console(), Console(stderr=True)
    try:
        config, _ = open_run({**app_run_config(app), **parse_run_config(run_config or [])})
        _check(config, clients, parts=not node_config)
        node_configs = [parse_run_config([text]) for text in node_config or []]
        start = partial(loopback, app, clients=clients, node_configs=node_configs, cache=_cache(config))
        _run_and_show(start, config, console, verbose)
    except (ConfigError, RunError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@main.command("compare")
def compare_command(
    app: Annotated[Path, typer.Argument(help="folder of the Flower app: a checkout of this project")] = Path("."),
    strategies: Annotated[
        str | None,
        typer.Option(help=f"which, in this order, with commas between; {ALL!r}: all", show_default=",".join(USUAL)),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="run each with all of these: 1,2,3", show_default="that of the run config")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=2, help="simulated clients", show_default="10")] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="as in `tepal simulate`, for all runs; may be repeated"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="accuracy (of a regression, RMSE) that rounds and bytes are counted until",
            show_default="90 % of FedAvg's final accuracy",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help=f"go on with the comparison in this folder; {LATEST!r}: with that which was at work last"),
    ] = None,
    cpus: Annotated[float | None, typer.Option(min=0.01, help=_CPUS, show_default="1")] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="share of a GPU for each client at work", show_default="0")
    ] = None,
    engine: Annotated[str | None, typer.Option(help=_ENGINE, show_default=AUTO)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Flower's own log")] = False,
) -> None:
    """Run several strategies in turn, alike in all else, and show what each reached and what it moved for that.

    Everything lies in one folder, runs/<start>-compare: the runs, comparison.html, and tables as CSV, Markdown and
    LaTeX. A run that fails does not end the others; the status is then 1. Ctrl-C ends all of them, and shows what there
    is. --resume FOLDER runs what is not finished; --target, --cpus, --gpus and --engine may then be others than
    before.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        if resume is None:
            comparison = _new_comparison(app, parse_run_config(run_config or []), strategies, seeds, clients or 10)
        else:
            fixed = {"--strategies": strategies, "--seeds": seeds, "--clients": clients, "--run-config": run_config}
            comparison = _begun_comparison(app, resume, [option for option, value in fixed.items() if value])
        comparison.target = comparison.target if target is None else target
        comparison.cpus = comparison.cpus if cpus is None else cpus
        comparison.gpus = comparison.gpus if gpus is None else gpus
        comparison.engine = engine or comparison.engine
        _check_target(comparison)
        resources: dict[str, Any] = {key: getattr(comparison, key) for key in ("clients", "cpus", "gpus")}
        with engine_for(comparison.engine, app, **resources) as simulated:  # one for all runs
            check(comparison, lambda config: _check(config, comparison.clients))
            if resume is None:
                comparison.folder = new_folder(comparison.folder)
            simulated.cache = _cache_in(comparison.folder)
            console.print(simulated.said, markup=False, highlight=False, soft_wrap=True)

            def start(config: RunConfig, progress: RoundProgress, on_run: Callable[[Path], None]) -> Path:
                return _run(simulated.run, config, progress, console, verbose, on_run)

            run_cells(comparison, start, console=console, errors=errors)
        console.print(comparison_table(measure(comparison)), soft_wrap=True)
    except (ConfigError, RunError, RunInUse, OSError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    outcomes = {cell.outcome for cell in comparison.cells}
    if "stopped" in outcomes:
        raise typer.Exit(130)  # as a shell says it of a command that Ctrl-C ended
    if outcomes != {"finished"}:
        raise typer.Exit(1)


@main.command("strategies")
def strategies_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="of these, what there is to know; default: all, a line each")
    ] = None,
) -> None:
    """List the strategies: what each does, what travels, its paper; and with a name its options and their defaults."""
    console, errors = Console(), Console(stderr=True)
    try:
        console.print(table(strategy_names(",".join(names)) if names else ()), soft_wrap=True)
    except ConfigError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@main.command("reproduce")
def reproduce_command(
    name: Annotated[str, typer.Argument(help="which experiment; without it they are listed")] = "",
    full: Annotated[bool, typer.Option("--full", help="at the paper's scale, not a small machine's")] = False,
    folder: Annotated[Path, typer.Option(help="for the results; what is there already is not computed again")] = Path(
        "runs/reproduce"
    ),
    data: Annotated[Path, typer.Option(help="folder with the data sets, each under its name: cifar-10, mnist.npz")] = (
        Path("data")
    ),
    at_once: Annotated[
        int, typer.Option(min=1, help="runs at once, each in a process with one thread; 1: in turn, with all threads")
    ] = 1,
) -> None:
    """Run a named experiment of a paper, and show its numbers beside the paper's."""
    from tepal.tools.reproduce.experiment import NotAtHand
    from tepal.tools.reproduce.runner import EXPERIMENTS, OtherData, UnknownExperiment, find_experiment, reproduce

    if not name:
        for each in EXPERIMENTS.values():
            typer.echo(f"{each.name:20} {each.title}. {each.paper}. {each.scale(full=False)}")
        return
    try:
        experiment = find_experiment(name)
        how = "one process (nothing asks for Ray)" if at_once == 1 else f"{at_once} processes (--at-once {at_once})"
        typer.echo(f"Engine: {how}")
        page = reproduce(experiment, folder, full=full, said=typer.echo, data=data.expanduser(), at_once=at_once)
        typer.echo((page.parent / "results.md").read_text(encoding="utf-8"))
        typer.echo(f"Results in {page.parent}\n  {page}  (open it in a browser)")
    except (UnknownExperiment, NotAtHand, OtherData, RunInUse, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@main.command("report")
def report_command(
    run: Annotated[
        Path, typer.Argument(help="a run directory, a folder of them (the latest), or that of a comparison")
    ] = Path("runs"),
    figures: Annotated[
        str, typer.Option(help="write its figures as files instead, for a paper: svg, png or pdf", show_default=False)
    ] = "",
    output: Annotated[
        Path | None, typer.Option(help="folder for these files", show_default="figures, beside the report")
    ] = None,
) -> None:
    """Write a run's report.html anew, of a run in progress too, or a comparison's files, and say where it is."""
    try:
        if figures or output:
            for path in _figure_files(run, figures, output):
                typer.echo(path)
        elif is_comparison(run):
            typer.echo(write_comparison(read_comparison(run)))
        else:
            typer.echo(write_report(find_run(run)))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@main.command("runs")
def runs_command(
    folder: Annotated[Path, typer.Argument(help="folder of run directories, or of a comparison")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """List runs and comparisons, the newest first: how far each is, its score, the bytes that it moved."""
    try:
        facts = [facts_of(view) for view in views(folder)]
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    elif facts:
        console().print(runs_table(facts), *map(Text, reasons(facts)), sep="\n")
    else:
        typer.echo(f"{folder} has no runs")


@main.command("show")
def show_command(
    run: Annotated[str, typer.Argument(help=f"a path, a name in the folder of runs, or {LATEST!r}")] = LATEST,
    runs: Annotated[Path, typer.Option(help="folder in which names are looked for")] = Path("runs"),
    all_rounds: Annotated[bool, typer.Option("--all-rounds", help="a line for every round, however many")] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Tell of one run: settings of its own, rounds, clients with their troubles, bytes, files. Or of a comparison."""
    try:
        path = find(run, runs)
        if is_comparison(path):
            compared = ComparisonView(path)
            results = measure(compared.comparison)
            facts = comparison_facts(compared, results)
            page = comparison_summary_page(compared, results)
        else:
            view = RunView(path)
            facts = run_facts(view, defaults())
            page = run_page(view, defaults(), all_rounds=all_rounds)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(page)


@main.command("dashboard")
def dashboard_command(
    folder: Annotated[Path, typer.Argument(help="folder of run directories, or of a comparison")] = Path("runs"),
    host: Annotated[str, typer.Option(help="name or address to listen on; on other than loopback a token is asked for")]
    = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the token; without it TEPAL_DASHBOARD_TOKEN, or a new one")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, for https")] = None,
    key: Annotated[Path | None, typer.Option(help="of the certificate, PEM file")] = None,
) -> None:
    """Show runs in a browser, while they go on and afterwards. It only reads, and works offline."""
    from tepal.tools.dashboard.app import TOKEN, is_loopback, serve  # a web server is no part of the other commands

    try:
        if (certificate is None) != (key is None):
            raise ValueError("--certificate and --key belong together: give both, for https, or neither")
        views(folder)  # says what is wrong with the folder
        token = token_file.read_text(encoding="utf-8").strip() if token_file else os.environ.get(TOKEN)
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise ValueError(f"the token has {len(token)} characters; it must have {_SHORTEST_TOKEN} at least")
        new = ""  # a token of one's own is shown to nobody
        if token is None and not is_loopback(host):
            token = secrets.token_urlsafe(24)
            new = f"?token={token}"
        if certificate is None and not is_loopback(host):
            typer.echo("warning: without --certificate and --key what is shown travels as plain text", err=True)
        serve(
            folder, host, port, token=token, certificate=certificate, key=key,
            said=lambda address: typer.echo(address + new),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@main.command("doctor")
def doctor_command(
    credentials: Annotated[
        Path | None, typer.Option(help="a folder of `tepal provision`, or a copy of its server/, to look at")
    ] = None,
    site: Annotated[Path | None, typer.Option(help="a site's archive or folder to look at")] = None,
    superlink: Annotated[
        str, typer.Option(help="HOST:PORT of a server's control port, to compare this machine's clock with its")
    ] = "",
    root_certificates: Annotated[
        Path | None, typer.Option(help="whom to trust there", show_default="those of --credentials or --site")
    ] = None,
    runs: Annotated[Path, typer.Option(help="folder for run directories")] = Path("runs"),
    cache: Annotated[
        Path | None, typer.Option(help="folder of what clients keep", show_default="$TEPAL_CACHE, or the user's")
    ] = None,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="that must be free; may be repeated", show_default="a server's"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Check this installation and its machine, and say for each problem what to do. Exit status 1: there is one."""
    from tepal.tools.deploy.doctor import PROBLEM, Questions, examine, findings_table

    asked = Questions(
        runs=runs,
        cache=cache,
        ports=tuple(port or ()),
        credentials=credentials,
        site=site,
        superlink=superlink,
        root_certificates=root_certificates,
    )
    with Console(stderr=True).status("looking …"):
        findings = list(examine(asked))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        console().print(findings_table(findings))
    if any(each.state == PROBLEM for each in findings):
        raise typer.Exit(1)


@main.command("predict")
def predict_command(
    model: Annotated[
        Path, typer.Argument(help="a run directory, a folder of runs (the latest), or a .safetensors file")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="images, folders of images, .npz files (their test set if any); for texts or numbers, tables "
            "(.csv, .jsonl, .parquet) with the run's columns; .txt with a text on each line"
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="CSV file for all predictions; one that is there is replaced")
    ] = None,
) -> None:
    """Predict images, texts or numbers with a saved model, or with the mean over the models of an ensemble."""
    # Here and not at the top: torch takes seconds to import, and `tepal report` needs none of it.
    from tepal.tools.predict.predict import load_predictor, results_table, write_csv

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


def _figure_files(run: Path, kind: str, folder: Path | None) -> list[Path]:
    """The files of a run's or comparison's figures. Raises OSError or ValueError where they cannot be written."""
    from tepal.tools.compare.figure_files import FiguresError, write_comparison_figures, write_run_figures

    if not kind:
        raise FiguresError(f"--output {folder} is for figures: name their format, too, with --figures svg, png or pdf")
    if is_comparison(run):
        return write_comparison_figures(measure(read_comparison(run)), kind, folder)
    return write_run_figures(run, kind, folder)


def _check(config: RunConfig, clients: int, *, parts: bool = True) -> None:
    """What can be known before anything is started. `parts`: each client has one of the dataset. Raises ConfigError."""
    # Here and not at the top: torch takes seconds to import, and `tepal report` needs none of it.
    from tepal.server_app.run import build_model, build_strategy
    from tepal.training.data import DataError, check_partition

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
    if parts:
        try:
            check_partition(config.data, clients, numbers=config.data.kind == models.SEQUENCES)
        except DataError as error:
            raise ConfigError(str(error)) from error


def _new_comparison(
    app: Path, given: Mapping[str, Value], strategies: str | None, seeds: str | None, clients: int
) -> Comparison:
    """What is asked for; its folder is yet the one in which it will be made. Raises ConfigError for what cannot be."""
    if "strategy" in given:
        raise ConfigError(
            f"strategy={given['strategy']!r} in the run config: a comparison sets the strategy itself. Name those that "
            "it shall run with --strategies"
        )
    if given.get("resume"):
        raise ConfigError(
            f"resume={given['resume']!r} in the run config: a comparison begins all its runs anew. One run goes on "
            "with `tepal simulate`, a comparison with `tepal compare --resume FOLDER`"
        )
    if "seed" in given and seeds is not None:
        raise ConfigError(f"seed={given['seed']!r} in the run config and --seeds {seeds}: leave out one of them")
    config = {**defaults(), **app_run_config(app), **given}
    names = list(USUAL) if strategies is None else strategy_names(strategies)
    numbers = seed_numbers(str(config["seed"]) if seeds is None else seeds)
    return Comparison(
        folder=Path(str(config["runs"])).expanduser().resolve(),
        cells=cells_of(names, numbers),
        run_config={key: value for key, value in config.items() if key not in OWN_KEYS},
        clients=clients,
    )


def _check_target(comparison: Comparison) -> None:
    """Raises ConfigError for an accuracy that none can be."""
    regression = InputConfig.from_run_config(comparison.run_config).kind == models.SEQUENCES
    if not regression and comparison.target is not None and comparison.target > 1:
        raise ConfigError(f"--target {comparison.target:g}: an accuracy is a share, from 0 to 1")


def _begun_comparison(app: Path, resume: str, fixed: list[str]) -> Comparison:
    """The comparison that goes on; `fixed`: options that are given, and cannot change any more.

    Raises ConfigError for those, OSError or ValueError where there is no comparison.
    """
    if fixed:
        raise ConfigError(
            f"--resume {resume}: a comparison goes on as it was begun, so leave out {', '.join(fixed)}. What may "
            "change: --target, --cpus, --gpus"
        )
    runs = {**defaults(), **app_run_config(app)}["runs"] if resume == LATEST else resume
    return read_comparison(find_comparison(Path(str(runs)).expanduser().resolve()))


def _run_and_show(start: Callable[..., Outcome], config: RunConfig, console: Console, verbose: bool) -> None:
    """One run with its progress, and its table at the end."""
    begun: list[Path] = []
    try:
        with RoundProgress(config.rounds.num_server_rounds, console=console) as progress:
            run = _run(start, config, progress, console, verbose, begun.append)
    except KeyboardInterrupt:
        console.print(_go_on(begun[0]) if begun else "", markup=False, highlight=False, soft_wrap=True)
        raise
    summary = read_summary(run)
    if summary is not None:
        console.print(final_table(summary, read_metrics(run), run), soft_wrap=True)


def _run(
    start: Callable[..., Outcome],
    config: RunConfig,
    progress: RoundProgress,
    console: Console,
    verbose: bool,
    on_run: Callable[[Path], None],
) -> Path:
    """One run by an engine or `loopback`; returns its directory, which `on_run` hears of as soon as there is one."""
    resumed, runs = _places(config)
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

    handle, name = tempfile.mkstemp(prefix="tepal-run-", suffix=".log")
    os.close(handle)
    log = Path(name)
    try:
        start(
            run_config={**config.flat, "runs": str(runs), "resume": str(resumed or "")},
            on_event=hear,
            log=log,
        )
    except RunError as error:
        if not found:
            raise  # its text says where the log is
        kept = _keep_log(log, found[0])
        said = [error.reason, f"What there is of it: {found[0]}", _go_on(found[0])]
        raise RunError("\n".join(filter(None, said)), kept) from error
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
    # Here and not at the top: `tepal node status` is asked every few seconds, and needs nothing of Flower.
    from tepal.exchange.cache import forget_parts

    for experiment in _cache_in(runs).glob(f"{found[0].name}-{'[0-9a-f]' * 8}"):  # as `run` names it
        forget_parts(experiment)
    return found[0]


def _places(config: RunConfig) -> tuple[Path | None, Path]:
    """The run that a run resumes, if it does, and the folder of runs that its own directory is in."""
    resumed = find_run(Path(config.rounds.resume).expanduser()) if config.rounds.resume else None
    return resumed, resumed.parent if resumed else Path(config.rounds.runs).expanduser().resolve()


def _cache(config: RunConfig) -> Path:
    """Where the clients of a run keep what they hold."""
    return _cache_in(_places(config)[1])


def _cache_in(runs: Path) -> Path:
    # In the folder of runs, so that it outlives a run that is stopped, for it to go on.
    return Path(os.environ.get("TEPAL_CACHE") or runs / _CLIENTS)


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
