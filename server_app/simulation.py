"""Run a Flower app by simulation on this machine: one call that starts all it needs and leaves nothing behind.

`flwr run` against a SuperLink of our own, in simulation mode. Flower's managed `:local:` SuperLink stays alive
afterwards, keeps a database in the user's home, and client actors import from the folder it was started in before they
import from the app bundle; ours runs in an empty temporary folder and ends with the run.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tepal.server_app.flower import (
    Clock,
    Listener,
    Outcome,
    RunError,
    Value,
    app_run_config,
    connect,
    explain,
    follow,
    parse_run_config,
    stage_app,
    submit,
    to_toml,
)
from tepal.server_app.processes import (
    Process,
    ProcessError,
    flower_environment,
    free_port,
    started,
    wait_for_http,
)

# A Unix socket's path has 107 bytes on Linux and 103 on macOS; Ray puts its sockets 69 bytes below its folder.
_LONGEST_RAY_FOLDER = 34


def simulate(
    app: Path,
    *,
    clients: int,
    run_config: Mapping[str, Value] | Sequence[str] = (),
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    on_event: Listener | None = None,
    timeout: float | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> Outcome:
    """Run the Flower app in the folder `app` with simulated clients, and wait for its end.

    The app runs from a bundle in an empty temporary folder: outputs belong at absolute paths, given in `run_config`.

    Args:
        clients: Number of simulated clients (Flower's SuperNodes).
        run_config: Changes to the app's `[tool.flwr.app.config]`: a mapping with the flat keys, or strings as
            `flwr run --run-config` takes them (`'lr=0.1 name="x"'`, or the path of a TOML file); later ones win.
        cpus_per_client: CPU cores for each client at work; less than 1 runs more clients at once than there are cores.
        gpus_per_client: Share of a GPU for each client at work.
        on_event: Hears stages and log lines.
        timeout: Seconds after which the run is stopped, from the call on. None: no limit.
        log: File for the run's log (default: a new one in the system's temporary folder).
        cache: Folder for what clients keep (default: $TEPAL_CACHE, else a temporary one that ends with the run).

    Raises:
        RunError: with the app's own error where the app failed.
        ValueError: an argument out of range.
    """
    if clients < 1:
        raise ValueError(f"clients is {clients}, expected at least 1")
    resources = _resources(clients, cpus_per_client, gpus_per_client)
    config = parse_run_config(run_config) if not isinstance(run_config, Mapping) else dict(run_config)
    if shlex.quote(sys.executable) != sys.executable:
        # Its workers never start, and Flower waits six minutes before it says so.
        raise RunError(
            f"Ray cannot start its workers with {sys.executable}: the path has a space or another character that a "
            "shell reads. Make the virtual environment elsewhere (with make: VENV=/a/path/without/spaces)."
        )
    app = app.resolve()
    known = app_run_config(app)
    if unknown := sorted(set(config) - set(known)):
        raise RunError(
            f"{app.name} has no run configuration key {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
        )
    if log is None:
        handle, name = tempfile.mkstemp(prefix="tepal-simulation-", suffix=".log")
        os.close(handle)
        log = Path(name)
    log.parent.mkdir(parents=True, exist_ok=True)

    clock = Clock(on_event or (lambda _kind, _text: None), timeout)
    folder = Path(tempfile.mkdtemp(prefix="tepal-", dir=_short_temporary_folder()))
    try:
        kept = cache or Path(os.environ.get("TEPAL_CACHE") or folder / "cache")
        return _run(app, folder, clients, resources, config, clock, log.resolve(), kept.resolve())
    except (ProcessError, TimeoutError, subprocess.TimeoutExpired) as error:
        # At the limit, whatever was under way then may have failed by it, in words of its own.
        raise RunError(clock.over or str(error), log) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    app: Path,
    folder: Path,
    clients: int,
    resources: str,
    config: Mapping[str, Value],
    clock: Clock,
    log: Path,
    cache: Path,
) -> Outcome:
    """Start the SuperLink, submit the app, follow the run. Everything else that this writes is in `folder`."""
    home, work, bundle = folder / "home", folder / "work", folder / "app"
    for each in (home, work, bundle):
        each.mkdir()
    environment = flower_environment(home) | {
        "RAY_TMPDIR": str(folder),
        "TEPAL_CACHE": str(cache),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # how long a submitted run lies there (default 1 s)
    }
    clock.stage("start SuperLink", "Starting a SuperLink ...")
    with _superlink(folder, work, environment, clock) as (superlink, address):
        clock.stage("submit", "Submitting the app ...")
        connect(home, address)
        stage_app(app, bundle)
        (folder / "run-config.toml").write_text(to_toml(config))
        federation = f"num-supernodes={clients} {resources}"
        run_id = submit(bundle, folder / "run-config.toml", environment, clock.left(120), federation)
        clock.stage("run", f"Run {run_id} with {clients} clients; starting Ray takes some seconds ...")
        status, details = follow(run_id, address, superlink, clock, log)
        clock.stage("stop", f"Run {run_id}: {status}")
    clock.stage("", "")
    if status != "completed":
        raise RunError(f"The run {status}: {explain(log.read_text(), details)}", log)
    return Outcome(run_id, status, log, details, clock.seconds)


@contextlib.contextmanager
def _superlink(
    folder: Path, work: Path, environment: Mapping[str, str], clock: Clock
) -> Iterator[tuple[Process, str]]:
    """A SuperLink in simulation mode, and its address, once it answers."""
    for attempts_left in (2, 1, 0):
        port = free_port()
        command = ["flower-superlink", "--simulation", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        with started(
            command, log=folder / "superlink.log", env=environment, cwd=work, grace=2, folder=folder
        ) as process:
            # Imports for following the run, while the SuperLink does its own.
            importlib.import_module("flwr.supercore.control")
            try:
                wait_for_http(f"http://127.0.0.1:{port}/health", timeout=clock.left(60), process=process)
            except ProcessError:
                # Between our look and its start another program may have taken the port.
                if attempts_left and "address already in use" in process.tail(50):
                    continue
                raise
            yield process, f"127.0.0.1:{port}"
            return


def _resources(clients: int, cpus_per_client: float, gpus_per_client: float) -> str:
    """Say to Flower how many clients work at once, as its federation configuration.

    Flower takes whole cores per client only, and derives the number of workers from Ray's number of cores. So a share
    of a core becomes one core of a larger number, and workers that no client would use are not started.
    """
    if not cpus_per_client > 0:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, expected more than 0")
    if not 0 <= gpus_per_client < math.inf:
        raise ValueError(f"gpus_per_client is {gpus_per_client}, expected 0 or more")
    from joblib import cpu_count  # minds affinity and a container's quota

    cores = cpu_count()
    if cpus_per_client > cores:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, but there are {cores} cores here")
    at_once = min(clients, int(cores / cpus_per_client))
    each = max(1, math.ceil(cpus_per_client))
    return (
        f"client-resources-num-cpus={each} client-resources-num-gpus={float(gpus_per_client)} "
        f"init-args-num-cpus={at_once * each}"
    )


def _short_temporary_folder() -> str:
    """Return the folder for temporary folders whose path is short enough for the sockets Ray puts there."""
    usual = tempfile.gettempdir()
    fits = len(usual.encode()) + len("/tepal-12345678") <= _LONGEST_RAY_FOLDER
    return usual if fits or not os.path.isdir("/tmp") else "/tmp"
