"""`tepal server`: the server of a deployment, which restarts its SuperLink and resumes its runs after a failure.

It keeps Flower's SuperLink running, registers the nodes' keys, and resumes a run whose ServerApp, SuperLink or machine
has died. Its state is in one folder:

    runs/               run directories, as ServerApps write them
    server.json         the journal: the status, and what must survive a restart, such as attempts and stopped runs
    server.lock         locked while a server runs with this folder
    flower/             FLWR_HOME; with `FLWR_HOME=<here>`, `flwr … tepal` connects to the SuperLink
    tepal-served-app/   a copy of the app, which is submitted
    log/                the SuperLink's log, its older part in superlink.log.1, and logs of runs that a crash cut off

`recovery.py` and `node_keys.py` decide what to do, by functions of plain values. `supervisor.py` keeps the SuperLink
running, `run_queue.py` submits the runs and records their ends, and this file is the command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import ssl
import sys
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from tepal.tools.cli import commands, reported

if TYPE_CHECKING:
    from types import FrameType


from tepal.host.log_format import TEXT
from tepal.host.log_format import log_format as formatted
from tepal.tools.deploy.journal import STATE, Journal
from tepal.tools.deploy.node_keys import ServerError
from tepal.tools.deploy.settings import Settings, reachable

log = logging.getLogger("tepal.server")

_ALIVE = 30.0  # seconds without a new server.json after which the server counts as stuck


def why_dead(journal: Journal, now: float, alive: bool) -> str:
    """Return why a new server is needed, "" if none is. `alive`: whether the process of the journal exists."""
    if not journal.pid or not journal.heartbeat:
        return f"no server has been started with this state folder ({journal.path} does not exist)"
    if journal.superlink == "stopped":
        return "the server was stopped"
    if not alive:
        return f"the server (pid {journal.pid}) is no longer running"
    if (age := now - journal.last_beat) > _ALIVE:
        return f"the server (pid {journal.pid}) is stuck: its last heartbeat was {age:.0f} s ago"
    return ""


def why_unhealthy(journal: Journal, now: float, alive: bool) -> str:
    """Return what is wrong with the server by its journal, "" if nothing; `alive` as for `why_dead`."""
    if problem := why_dead(journal, now, alive):
        return problem
    if journal.superlink != "running":
        return f"the SuperLink is not running: its state is {journal.superlink}"
    return ""


def describe(journal: Journal, problem: str) -> list[str]:
    """Return the status as lines of text."""
    lines = [f"unhealthy: {problem}" if problem else "healthy"]
    if not journal.pid:
        return lines
    again = f", restarted {journal.superlink_starts - 1} times" if journal.superlink_starts > 1 else ""
    secure = bool(journal.root_certificates)
    nodes = f"{len(journal.nodes)} registered: {', '.join(journal.nodes) or 'none'}" if secure else "any may connect"
    lines += [
        f"server     pid {journal.pid}, since {journal.since}",
        f"SuperLink  {journal.superlink}{again}; control {journal.control}, fleet {journal.fleet}"
        f"{'' if secure else ', WITHOUT TLS and node keys'}",
        f"nodes      {nodes}",
    ]
    if journal.run:
        run = journal.run
        state = f"{run.get('state')}, last finished round {run.get('round', '-')}, attempt {run.get('attempt') or '-'}"
        lines.append(f"run        {run.get('directory') or '(no directory yet)'}: {state}")
    for path, record in journal.runs.items():
        if record.outcome in ("stopped", "failed", "given up", "left"):
            lines.append(f"           {path}: {record.outcome}")
    if journal.last_error:
        lines.append(f"last error {journal.last_error['at']}: {journal.last_error['text']}")
    return lines


def _health(journal: Journal) -> str:
    """Ask the SuperLink for its health; "" if it is healthy, else what is wrong."""
    # Not by httpx: its import takes longer than all else that this command does.
    trusted = journal.root_certificates
    problem = f"the SuperLink does not answer at {'https' if trusted else 'http'}://{journal.control}/health"
    try:
        connection = HTTPConnection(journal.control, timeout=10)
        if trusted:
            context = ssl.create_default_context(cafile=trusted)
            connection = HTTPSConnection(journal.control, timeout=10, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return "" if answer.status == 200 else f"{problem}: {answer.status} {answer.reason}"
    except (OSError, HTTPException) as error:
        return f"{problem}: {error}"


# ---- command line -------------------------------------------------------------------------------------------------

app = commands(
    "server",
    help="Run a deployment's server: Flower's SuperLink with its nodes' keys. Runs are resumed after a failure.",
    invoke_without_command=True,
)

_State = Annotated[Path, typer.Option(envvar="TEPAL_STATE", help="folder for runs and the server's state")]


@app.callback()
def run_server(
    context: typer.Context,
    credentials: Annotated[
        Path | None,
        typer.Option(envvar="TEPAL_CREDENTIALS", help="the server's folder from `tepal provision`"),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="TEPAL_INSECURE", help="no TLS, and any node may connect")
    ] = False,
    state: _State = Path("."),
    app: Annotated[
        Path | None, typer.Option(envvar="TEPAL_APP", help="folder of the Flower app whose runs are resumed")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config",
            "-c",
            help="start one run of the app with 'key=value …' or a TOML file; may be repeated "
            "(environment: TEPAL_RUN_CONFIG, one on each line)",
        ),
    ] = None,
    fleet_api_address: Annotated[
        str, typer.Option(envvar="TEPAL_FLEET_API_ADDRESS", help="address for the nodes")
    ] = "0.0.0.0:9092",
    host: Annotated[
        str,
        typer.Option(
            envvar="TEPAL_HOST", help="address of the control port; anyone who can connect can run code on all nodes"
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="TEPAL_PORT", min=1, max=65535, help="the control port")] = 8000,
    attempts: Annotated[
        int, typer.Option(envvar="TEPAL_ATTEMPTS", min=1, help="attempts to resume a run that finishes no round")
    ] = 5,
    metrics: Annotated[
        str, typer.Option(envvar="TEPAL_METRICS", help="[HOST:]PORT of /metrics for Prometheus; none by default")
    ] = "",
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TEPAL_METRICS_TOKEN_FILE", help="file with the token of /metrics; by default $TEPAL_METRICS_TOKEN"
        ),
    ] = None,
    metrics_cert: Annotated[
        Path | None, typer.Option(envvar="TEPAL_METRICS_CERT", help="PEM file, for https of /metrics")
    ] = None,
    metrics_key: Annotated[
        Path | None, typer.Option(envvar="TEPAL_METRICS_KEY", help="PEM file with the certificate's private key")
    ] = None,
    metrics_open: Annotated[
        bool,
        typer.Option(
            "--metrics-open", envvar="TEPAL_METRICS_OPEN", help="no token, on a network that only Prometheus reaches"
        ),
    ] = False,
    log_format: Annotated[
        str, typer.Option(envvar="TEPAL_LOG_FORMAT", help="text, or json: an object for each line of the log")
    ] = TEXT,
) -> None:
    """Run the server until it is stopped. Started again after a stop or a crash, it resumes its runs."""
    if context.invoked_subcommand is not None:
        return
    from tepal.host.metrics import endpoint
    from tepal.host.toml import parse_run_config
    from tepal.tools.deploy.provision import find_server

    # The outer one reports another format.
    with reported(), formatted(log_format), reported(ServerError):
        if credentials is None and not insecure:
            raise ServerError(
                "no credentials are given, and without them any node could connect: name their folder with "
                "--credentials (`tepal provision` makes one), or use --insecure on one machine"
            )
        if credentials is not None and insecure:
            raise ServerError(f"--credentials {credentials} and --insecure contradict each other; leave one out")
        # Not read by typer, which would split the text at every space.
        given = run_config or [line for line in os.environ.get("TEPAL_RUN_CONFIG", "").splitlines() if line.strip()]
        settings = Settings(
            state=state.resolve(),
            credentials=find_server(credentials.resolve()) if credentials else None,
            app=app.resolve() if app else None,
            run_config=parse_run_config(given) if given else None,
            fleet=fleet_api_address,
            host=host,
            port=port,
            attempts=attempts,
            metrics=endpoint(
                metrics, token_file=metrics_token_file, token=os.environ.get("TEPAL_METRICS_TOKEN", ""),
                certificate=metrics_cert, key=metrics_key, open=metrics_open,
            ),
        )
        _serve(settings, insecure)


def _serve(settings: Settings, insecure: bool) -> None:
    from tepal.tools.deploy.supervisor import Supervisor

    host, port = settings.host, settings.port
    _log_to_stdout()
    if insecure:
        log.warning("--insecure: no TLS, and any node may connect. Use it for tests on one machine only.")
    if reachable(host) not in ("127.0.0.1", "[::1]", "localhost") or host != reachable(host):
        log.warning("--host %s: anyone who can connect to port %d there can run code on all nodes.", host, port)
    _stop_on_signals()
    Supervisor(settings).run()


@app.command("status")
def status_command(
    context: typer.Context,
    state: _State = Path("."),
    only_alive: Annotated[
        bool, typer.Option("--alive", help="exit status 0 also while the server restarts its SuperLink")
    ] = False,
) -> None:
    """Show the server's status. The exit status is 0 if it is healthy, else 1."""
    if str(state) == "." and context.parent is not None and context.parent.params.get("state"):
        state = Path(context.parent.params["state"])
    try:
        journal = Journal.read(state / STATE)
    except ServerError as error:
        typer.echo(f"unhealthy: {error}")
        raise typer.Exit(1) from error
    alive = bool(journal.pid) and psutil.pid_exists(journal.pid)
    if only_alive:
        problem = why_dead(journal, time.time(), alive)
    else:
        problem = why_unhealthy(journal, time.time(), alive) or _health(journal)
    lines = describe(journal, problem)
    typer.echo("\n".join(["alive", *lines[1:]] if only_alive and not problem else lines))
    if problem:
        raise typer.Exit(1)


def _stop_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` leaves it
            signal.signal(number, _stop)


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleaning up
    log.info("%s: the server stops. A run in progress is resumed at the next start.", signal.Signals(number).name)
    raise SystemExit(0)


def _log_to_stdout() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s tepal server: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    app()
