"""Runs started on the command line: checks, progress, log and final table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tepal.host.superlink import RunError
from tepal.host.toml import Value
from tepal.records.run_directory import make_first_free, read_metrics, read_summary
from tepal.tools.cli import reported
from tepal.tools.own_app import app_folder
from tepal.tools.simulation.engine import Engine, Runner
from tepal.tools.simulation.engines import AUTO
from tepal.tools.simulation.running import resume_hint, run_once
from tepal.tools.terminal import RoundProgress, final_table

if TYPE_CHECKING:
    from tepal.server_app.config import RunConfig

ENGINE = (
    "process: all clients in one process; ray: in Flower's simulation runtime; auto: in one process, unless --gpus is "
    "given or the app needs Ray"
)
CPUS = "CPU cores for each client that trains; on a cluster (--ray) for each run"
MEMORY = "gigabytes of memory that each run has on a cluster (--ray); 0: as much as it needs, unchecked"
GPUS = "share of a GPU for each client that trains; on a cluster (--ray) for each run"


def found_app(given: Path) -> Path:
    """Return the folder of the app, of an option or argument `given`."""
    with reported(RunError):
        return app_folder(given)


APP = "folder of the Flower app; if the current one is not an app, Tepal's own"
AppFolder = Annotated[Path, typer.Argument(help=APP, callback=found_app)]
RunConfigs = Annotated[
    list[str] | None,
    typer.Option("--run-config", "-c", help="'key=value …' or a TOML file, as in `flwr run`; may be repeated"),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show Flower's own log")]


def runner_for(
    ray: str | None,
    engine: str,
    app: Path,
    here: Callable[..., Engine],
    *,
    clients: int,
    cpus: float | None,
    gpus: float = 0,
    memory: float = 0,
    kept_memory: float = 0,
    asked: str | None = None,
    spread: bool = False,
) -> AbstractContextManager[Runner]:
    """Return the engine of a command: on the cluster that `--ray` or RAY_ADDRESS names, else on this machine.

    Args:
        ray: value of `--ray`.
        engine: of this machine.
        app: folder of the app.
        here: makes an engine on this machine, as `engine_for`.
        clients: number of clients.
        cpus, gpus: of each client that trains; on a cluster of each run.
        memory: gigabytes of each run on a cluster.
        kept_memory: the same if `memory` is 0, of a comparison that is resumed, perhaps on this machine.
        asked: value of `--engine`.
        spread: whether the clients of a run are to train on all machines of the cluster.

    Raises ValueError for options that contradict one another; entering it, RunError if there is no cluster.
    """
    from tepal.tools.cluster.connection import address_of

    address = address_of(ray)
    wrong = _not_on_a_cluster(address, app, asked) if address else ""
    for option, value in (("--spread", spread), (f"--memory {memory:g}", memory)):
        if value and not address:
            wrong = f"{option} is for the machines of a cluster: --ray ADDRESS"
    if wrong and (ray is not None or spread or memory):
        raise ValueError(wrong)
    if wrong or not address:  # RAY_ADDRESS may be there for other programs
        return here(engine, app, clients=clients, cpus=cpus, gpus=gpus)
    from tepal.tools.cluster.engine import engine_on

    return engine_on(address, app, clients=clients, cpus=cpus, gpus=gpus, memory=memory or kept_memory, spread=spread)


def _not_on_a_cluster(address: str, app: Path, asked: str | None) -> str:
    """Why a command cannot run on a cluster; "" if it can."""
    if asked not in (None, AUTO):
        return f"--engine {asked} is for this machine, and --ray {address} for others: leave out one of them"
    from tepal.tools.paths import has_our_keys  # imports torch, which takes a second

    if not has_our_keys(app):
        return f"{app} is not Tepal's own app, and only that can run on a cluster: use --ray none"
    return ""


def run_and_show(engine: Runner, config: RunConfig, console: Console, verbose: bool) -> None:
    """Run once with an engine, and show the progress and the final table."""
    begun: list[Path] = []
    try:
        with RoundProgress(config.rounds.num_server_rounds, console=console) as progress:
            run = run_once(engine, config, progress, console, verbose, begun.append)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM and SIGHUP
        hint = resume_hint(begun[0], engine.options) if begun else ""
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
        raise
    summary = read_summary(run)
    if summary is not None:
        console.print(final_table(summary, read_metrics(run), run), soft_wrap=True)


def run_other(engine: Engine, given: Mapping[str, Value], console: Console) -> Path:
    """Run an app other than Tepal's once, with the run config that the user gave, and show its log.

    Returns a new folder in runs/ with the log, and with the files that the ServerApp wrote in its current folder.
    """
    console.print(f"App: {engine.app}, not Tepal's own: its log follows", markup=False, highlight=False, soft_wrap=True)
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", engine.app.name)
    kept = make_first_free(runs, f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}")
    try:
        engine.run(
            given, on_event=lambda _kind, text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            log=kept / "flower.log", written=kept,
        )  # fmt: skip
    except BaseException:
        with suppress(OSError):
            kept.rmdir()  # nothing was run
        raise
    console.print(f"Its log and files: {kept}", markup=False, highlight=False, soft_wrap=True)
    return kept
