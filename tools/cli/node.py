"""`tepal node`: the warm node on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tepal.tools.cli import commands, reported

if TYPE_CHECKING:
    from tepal.client_app.node.node_pb2 import NodeStatus

_CONTROL = "127.0.0.1:9095"
_HELP = "the node's control address, or unix:/PATH"
_Control = Annotated[str, typer.Option("--control", envvar="TEPAL_NODE_CONTROL", help=_HELP)]
_OfCommand = Annotated[str | None, typer.Option("--control", help=_HELP, show_default=_CONTROL)]  # after `status`

app = commands(
    "node",
    help="Run a client: Flower's SuperNode, and a process that keeps the ClientApp, torch and the data in memory.",
    invoke_without_command=True,
)


@app.callback()
def run(
    context: typer.Context,
    site: Annotated[
        Path | None, typer.Option(envvar="TEPAL_SITE", help="folder of this site's archive, from `tepal provision`")
    ] = None,
    superlink: Annotated[
        str, typer.Option(envvar="TEPAL_SUPERLINK", help="HOST:PORT of the server; by default the site's")
    ] = "",
    root_certificates: Annotated[
        Path | None, typer.Option(envvar="TEPAL_ROOT_CERTIFICATES", help="certificates to trust, without --site")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(envvar="TEPAL_NODE_KEY", help="this node's private key, without --site")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", envvar="TEPAL_INSECURE", help="no TLS and no key")] = False,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            help="further 'key=value …' for the ClientApp (environment: TEPAL_NODE_CONFIG; TEPAL_NODE_DATA: the "
            "data-path where there is neither one nor a partition-id)"
        ),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(envvar="TEPAL_NODE_STATE", help="folder for the node's files; by default temporary")
    ] = None,
    control: _Control = _CONTROL,
    health: Annotated[
        str, typer.Option(envvar="TEPAL_NODE_HEALTH", help="HOST:PORT of the gRPC health service; none by default")
    ] = "",
    poll: Annotated[
        float, typer.Option(envvar="TEPAL_NODE_POLL", min=0.02, help="longest pause between two polls, in seconds")
    ] = 1.0,
    idle: Annotated[
        float, typer.Option(envvar="TEPAL_NODE_IDLE", min=1, help="seconds until an idle run's memory is freed")
    ] = 900.0,
    grace: Annotated[
        float, typer.Option(envvar="TEPAL_NODE_GRACE", min=0, help="seconds to finish a message after SIGTERM")
    ] = 30.0,
    spare: Annotated[
        bool, typer.Option("--spare/--no-spare", envvar="TEPAL_NODE_SPARE", help="keep a process for the next run")
    ] = True,
    memory_limit: Annotated[
        str, typer.Option(envvar="TEPAL_NODE_MEMORY_LIMIT", help="memory limit of a ClientApp, such as 2GB; 0: none")
    ] = "0",
    metrics: Annotated[
        str, typer.Option(envvar="TEPAL_NODE_METRICS", help="[HOST:]PORT of /metrics for Prometheus; none by default")
    ] = "",
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TEPAL_NODE_METRICS_TOKEN_FILE",
            help="file with the token of /metrics; by default $TEPAL_NODE_METRICS_TOKEN",
        ),
    ] = None,
    metrics_cert: Annotated[
        Path | None, typer.Option(envvar="TEPAL_NODE_METRICS_CERT", help="PEM file, for https of /metrics")
    ] = None,
    metrics_key: Annotated[
        Path | None, typer.Option(envvar="TEPAL_NODE_METRICS_KEY", help="PEM file with the certificate's private key")
    ] = None,
    metrics_open: Annotated[
        bool,
        typer.Option(
            "--metrics-open",
            envvar="TEPAL_NODE_METRICS_OPEN",
            help="no token, on a network that only Prometheus reaches",
        ),
    ] = False,
    log_format: Annotated[
        str, typer.Option(envvar="TEPAL_LOG_FORMAT", help="text, or json: an object for each line of the log")
    ] = "text",
) -> None:
    """Run a client until it is stopped. It then finishes its message, or returns it to the server.

    --site names the folder with certificate and key. --insecure, without TLS, is for tests on one machine.
    """
    if context.invoked_subcommand:
        return
    from tepal.host.flower.patches import UnsupportedFlowerVersion
    from tepal.host.log_format import log_format as formatted

    # The outer one reports another format.
    with reported(), formatted(log_format), reported(UnsupportedFlowerVersion):
        from tepal.client_app.node.node import run_node
        from tepal.client_app.node.settings import NodeSettings
        from tepal.host.limits import parse_size
        from tepal.host.metrics import endpoint
        from tepal.host.site import read_site, with_absolute_paths
        from tepal.host.toml import parse_run_config

        if site is not None and (insecure or key or root_certificates):
            raise ValueError("--site has key and certificate: leave out --insecure, --key and --root-certificates")
        if site is None and not insecure and key is None:
            raise ValueError(
                "no key is given: name the folder of this node's site with --site, or give --key and "
                "--root-certificates, or use --insecure on one machine"
            )
        if not control.startswith("unix:") and control.rpartition(":")[0] not in ("127.0.0.1", "[::1]", "localhost"):
            raise ValueError(
                f"--control is {control!r}, expected an address on 127.0.0.1 or unix:/PATH: whoever can connect can "
                "drain the node"
            )
        own = read_site(site) if site else None
        of_site = {"name": own.name, **own.node_config} if own else {}
        # Not read by typer, which would split the text at every space.
        given = parse_run_config(filter(None, node_config or [os.environ.get("TEPAL_NODE_CONFIG", "")]))
        data = os.environ.get("TEPAL_NODE_DATA")
        if data and not {"data-path", "partition-id"} & {*of_site, *given}:
            given = {**given, "data-path": data}
        of_node = {**of_site, **with_absolute_paths(given)}
        settings = NodeSettings(
            superlink=superlink or (own.superlink if own else "127.0.0.1:9092"),
            root_certificates=own.root_certificates if own else root_certificates,
            insecure=insecure,
            key=own.key if own else key,
            name=own.name if own else "",
            node_config=of_node,
            folder=state,
            control=control,
            health=health,
            poll=poll,
            idle=idle,
            grace=grace,
            spare=spare,
            memory_limit=parse_size(memory_limit),
            metrics=endpoint(
                metrics, token_file=metrics_token_file, token=os.environ.get("TEPAL_NODE_METRICS_TOKEN", ""),
                certificate=metrics_cert, key=metrics_key, open=metrics_open,
            ),
        )
        run_node(settings)


@app.command("status")
def status_command(
    context: typer.Context,
    control: _OfCommand = None,
    only_alive: Annotated[
        bool, typer.Option("--alive", help="exit status 0 whenever the node replies, such as while it is unreachable")
    ] = False,
) -> None:
    """Show the status of the node on this machine. The exit status is 0 if it can answer messages, else 1."""
    from tepal.client_app.node.service import Control

    with reported():
        asked = Control(_address(context, control))
        answer, healthy = asked.status(), asked.healthy()
    typer.echo("\n".join(_lines(answer)))
    if not healthy and not only_alive:
        raise typer.Exit(1)


@app.command("drain")
def drain_command(
    context: typer.Context,
    control: _OfCommand = None,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait until the node is drained")] = 3600.0,
    undo: Annotated[bool, typer.Option("--undo", help="reconnect, and accept messages again")] = False,
) -> None:
    """Let the node finish its message, accept no other, and leave the server: it can then be stopped without loss."""
    from tepal.client_app.node.service import Control

    with reported():
        answer = Control(_address(context, control)).drain(undo=undo, wait=wait)
    typer.echo("\n".join(_lines(answer)))
    if answer.state == ("draining" if not undo else "drained"):
        raise typer.Exit(1)


def _address(context: typer.Context, control: str | None) -> str:
    """Return the control address, which may be given before or after the name of the command."""
    return str(context.parent.params["control"]) if control is None and context.parent else control or _CONTROL


def _lines(answer: NodeStatus) -> list[str]:
    rows = [
        ("state", answer.state),
        ("problem", answer.problem),
        ("name", answer.name),
        ("server", answer.superlink),
        ("node id", str(answer.node_id or "")),
        ("up", _time(answer.uptime_seconds)),
        ("message", _message(answer) if answer.message_type else ""),
        ("answered", f"{answer.answered}, and {answer.failed} with an error"),
        ("died", f"{answer.executors_died} executors, {answer.supernodes_died} SuperNodes"),
    ]
    for process in answer.processes:
        run = f", run {process.run_id}" if process.run_id else ""
        rows.append((process.role, f"pid {process.pid}, {process.resident_bytes / 2**20:,.0f} MB{run}"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}} {value}" for name, value in rows if value]


def _message(answer: NodeStatus) -> str:
    since = _time(answer.message_seconds)
    return f"{answer.message_type} of round {answer.round or '?'}, run {answer.run_id}, for {since}"


def _time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
