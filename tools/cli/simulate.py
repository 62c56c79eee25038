"""`tepal simulate` and `tepal loopback`: run once on this machine, by simulation or by a real deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tepal.host.superlink import RunError, app_run_config
from tepal.host.toml import parse_run_config
from tepal.server_app.config import open_run
from tepal.tools.cli import commands, reported
from tepal.tools.cli.running import CPUS, ENGINE, AppFolder, RunConfigs, Verbose, cache_of, check_clients, run_and_show
from tepal.tools.simulation.engines import AUTO, engine_for

app = commands("simulate")


@app.command("simulate")
def simulate_command(
    app: AppFolder = Path("."),
    clients: Annotated[int, typer.Option(min=2, help="simulated clients")] = 10,
    run_config: RunConfigs = None,
    cpus: Annotated[float, typer.Option(min=0.01, help=CPUS)] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="share of a GPU for each client that trains")] = 0,
    engine: Annotated[str, typer.Option(help=ENGINE)] = AUTO,
    verbose: Verbose = False,
) -> None:
    """Run the app with simulated clients on this machine, and show its progress and the transferred bytes.

    All processes end with the command. Resume a run that was stopped with -c 'resume="runs/latest"'.
    """
    console = Console()
    with reported(RunError):
        given = parse_run_config(run_config or [])
        config, _ = open_run({**app_run_config(app), **given})
        with engine_for(engine, app, clients=clients, cpus=cpus, gpus=gpus, cache=cache_of(config)) as simulated:
            check_clients(config, clients)
            console.print(simulated.description, markup=False, highlight=False, soft_wrap=True)
            run_and_show(simulated.run, config, console, verbose)


@app.command("loopback")
def loopback_command(
    app: AppFolder = Path("."),
    clients: Annotated[int, typer.Option(min=2, help="clients, each a warm node")] = 3,
    run_config: RunConfigs = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(help="'key=value …' of one client, such as its data-path; one for each client, in order"),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run the app on a deployment on this machine: a SuperLink and warm nodes as processes, TLS, registered keys.

    Certificates and keys are made for it. All processes end, and all files except the run's are removed.
    """
    from tepal.tools.deploy.loopback import LoopbackEngine

    console = Console()
    with reported(RunError):
        config, _ = open_run({**app_run_config(app), **parse_run_config(run_config or [])})
        check_clients(config, clients, parts=not node_config)
        node_configs = [parse_run_config([text]) for text in node_config or []]
        with LoopbackEngine(app, clients, node_configs, cache=cache_of(config)) as engine:
            run_and_show(engine.run, config, console, verbose)
