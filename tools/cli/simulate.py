"""`tepal simulate` and `tepal loopback`: run once on this machine, by simulation or by a real deployment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tepal.host.site import with_absolute_paths
from tepal.host.superlink import RunError
from tepal.host.toml import parse_run_config
from tepal.tools.cli import Ray, commands, reported
from tepal.tools.cli.running import (
    CPUS,
    ENGINE,
    GPUS,
    MEMORY,
    AppFolder,
    RunConfigs,
    Verbose,
    run_and_show,
    run_other,
    runner_for,
)
from tepal.tools.simulation.engine import Engine
from tepal.tools.simulation.engines import AUTO, engine_for
from tepal.tools.simulation.running import cache_of, check_clients, clients_of, forget_data

app = commands("simulate")


@app.command("simulate")
def simulate_command(
    app: AppFolder = Path("."),
    clients: Annotated[
        int | None, typer.Option(min=2, help="simulated clients; 10, or as many as a run that is resumed has")
    ] = None,
    run_config: RunConfigs = None,
    cpus: Annotated[float, typer.Option(min=0.01, help=CPUS)] = 1,
    gpus: Annotated[float, typer.Option(min=0, help=GPUS)] = 0,
    memory: Annotated[float, typer.Option(min=0, help=MEMORY)] = 0,
    engine: Annotated[str, typer.Option(help=ENGINE)] = AUTO,
    ray: Ray = None,
    spread: Annotated[bool, typer.Option("--spread", help="with --ray: clients train on all machines at once")] = False,
    verbose: Verbose = False,
) -> None:
    """Run the app with simulated clients on this machine, and show its progress and the transferred bytes.

    All processes end with the command. Resume a run that was stopped with -c 'resume="runs/latest"'. Of an app that
    is not Tepal's own, the log is shown. With --ray the run is on one machine of a cluster; with --spread its server is
    on this machine, and its clients are on all.
    """
    console = Console()
    resources: dict[str, Any] = {"cpus": cpus, "gpus": gpus, "memory": memory, "spread": spread}
    with (
        reported(RunError),
        runner_for(
            ray, engine, app, engine_for, asked=engine, clients=clients or _resumed(run_config) or 10, **resources
        ) as simulated,
    ):
        simulated.start_ahead()
        # Imported here, while the engine imports the app: torch takes a second.
        from tepal.server_app.config import open_run
        from tepal.tools.paths import given_run_config, has_our_keys, usual_run_config

        ours = has_our_keys(app)
        # The keys of another app are its own: they may have the names of Tepal's, and be no paths.
        given = given_run_config(run_config or []) if ours else parse_run_config(run_config or [])
        if ours:
            config, _ = open_run({**usual_run_config(app), **given}, simulated.clients, given=given)
            check_clients(config, simulated.clients, here=simulated.here)
            simulated.cache = cache_of(config)
            forget_data()
        console.print(simulated.description, markup=False, highlight=False, soft_wrap=True)
        if ours:
            run_and_show(simulated, config, console, verbose)
        else:
            assert isinstance(simulated, Engine)  # only Tepal's own app runs elsewhere
            run_other(simulated, given, console)


def _resumed(run_config: Sequence[str] | None) -> int | None:
    """Return how many clients the run has that a run config resumes; None if it resumes none, or it is not known."""
    return clients_of(str(parse_run_config(run_config or []).get("resume", "")))


@app.command("loopback")
def loopback_command(
    app: AppFolder = Path("."),
    clients: Annotated[
        int | None, typer.Option(min=2, help="clients, each a warm node; 3, or as many as a run that is resumed has")
    ] = None,
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
    from tepal.server_app.config import ConfigError, open_run
    from tepal.tools.deploy.loopback import LoopbackEngine
    from tepal.tools.paths import given_run_config, has_our_keys, usual_run_config

    console = Console()
    with reported(RunError):
        clients = clients or _resumed(run_config) or 3
        node_configs = [with_absolute_paths(parse_run_config([text])) for text in node_config or []]
        if not has_our_keys(app):
            with LoopbackEngine(app, clients, node_configs) as engine:
                run_other(engine, parse_run_config(run_config or []), console)
            return
        given = given_run_config(run_config or [])
        config, _ = open_run({**usual_run_config(app), **given}, clients, given=given)
        if config.clients and node_configs:
            raise ConfigError(
                f"--node-config and client.{next(iter(config.clients))}: a node config has the settings of its client: "
                "write them there, and leave out client.…"
            )
        check_clients(config, clients, parts=not node_configs)
        forget_data()
        with LoopbackEngine(app, clients, node_configs, cache=cache_of(config)) as engine:
            run_and_show(engine, config, console, verbose)
