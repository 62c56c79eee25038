"""Run a Flower app by simulation on this machine: one call that starts all it needs and leaves nothing behind.

`flwr run` against a SuperLink of our own, in simulation mode. Flower's managed `:local:` SuperLink stays alive
afterwards, keeps a database in the user's home, and client actors import from the folder it was started in before they
import from the app bundle; ours runs in an empty temporary folder and ends with the run. Where that takes longer than
what is simulated, `simulate_in_process` does without.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    without_colour,
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
    if shlex.quote(sys.executable) != sys.executable:
        # Its workers never start, and Flower waits six minutes before it says so.
        raise RunError(
            f"Ray cannot start its workers with {sys.executable}: the path has a space or another character that a "
            "shell reads. Make the virtual environment elsewhere (with make: VENV=/a/path/without/spaces)."
        )
    with _staged(app, run_config, log, cache, Clock(on_event or _nobody, timeout)) as run:
        return _run(run, clients, resources)


def simulate_in_process(
    app: Path,
    *,
    clients: int,
    run_config: Mapping[str, Value] | Sequence[str] = (),
    cpus_per_client: float | None = None,
    on_event: Listener | None = None,
    timeout: float | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> Outcome:
    """As `simulate`, but in one process: there is neither SuperLink nor Ray, and clients are threads.

    Where a round's training takes a second or two, starting those is most of what a simulation takes. Without
    `cpus_per_client` clients take turns, and PyTorch has all cores for the one at work; with it as many are at work at
    once as there are cores for, as in `simulate`. OMP_NUM_THREADS, where it is set, says how many threads PyTorch has
    for each.
    """
    if clients < 1:
        raise ValueError(f"clients is {clients}, expected at least 1")
    at_once = 1 if cpus_per_client is None else min(clients, max(1, int(_cores(cpus_per_client) / cpus_per_client)))
    with _staged(app, run_config, log, cache, Clock(on_event or _nobody, timeout)) as run:
        return _run_in_process(run, clients, at_once)


def _nobody(_kind: str, _text: str) -> None:
    """Hears nothing."""


@dataclass(frozen=True)
class _Run:
    """What is to be run: the app's files, and changes to its run config. All else that is written is in `folder`."""

    folder: Path
    bundle: Path
    changes: Path
    log: Path
    cache: Path
    clock: Clock

    @property
    def work(self) -> Path:
        """An empty folder, from which nothing is imported."""
        return self.folder / "work"

    @property
    def home(self) -> Path:
        """Flower's."""
        return self.folder / "home"

    def environment(self) -> dict[str, str]:
        return flower_environment(self.home) | {"TEPAL_CACHE": str(self.cache)}

    def ended(self, run_id: int, status: str, details: str) -> Outcome:
        """Raises RunError unless it was completed."""
        self.clock.stage("", "")
        if status != "completed":
            raise RunError(f"The run {status}: {explain(self.log.read_text(), details)}", self.log)
        return Outcome(run_id, status, self.log, details, self.clock.seconds)


@contextlib.contextmanager
def _staged(
    app: Path,
    run_config: Mapping[str, Value] | Sequence[str],
    log: Path | None,
    cache: Path | None,
    clock: Clock,
) -> Iterator[_Run]:
    """The app's files in a temporary folder, once its run config is known to be right. Raises RunError."""
    app = app.resolve()
    config = parse_run_config(run_config) if not isinstance(run_config, Mapping) else dict(run_config)
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
    folder = Path(tempfile.mkdtemp(prefix="tepal-", dir=_short_temporary_folder()))
    try:
        kept = cache or Path(os.environ.get("TEPAL_CACHE") or folder / "cache")
        run = _Run(folder, folder / "apps" / "app", folder / "run-config.toml", log.resolve(), kept.resolve(), clock)
        for each in (run.home, run.work, run.bundle):
            each.mkdir(parents=True)
        stage_app(app, run.bundle)
        run.changes.write_text(to_toml(config), encoding="utf-8")
        yield run
    except (ProcessError, TimeoutError, subprocess.TimeoutExpired) as error:
        # At the limit, whatever was under way then may have failed by it, in words of its own.
        raise RunError(clock.over or str(error), log) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(run: _Run, clients: int, resources: str) -> Outcome:
    """Start the SuperLink, submit the app, follow the run."""
    clock = run.clock
    environment = run.environment() | {
        "RAY_TMPDIR": str(run.folder),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # how long a submitted run lies there (default 1 s)
    }
    clock.stage("start SuperLink", "Starting a SuperLink ...")
    with _superlink(run.folder, run.work, environment, clock) as (superlink, address):
        clock.stage("submit", "Submitting the app ...")
        connect(run.home, address)
        federation = f"num-supernodes={clients} {resources}"
        run_id = submit(run.bundle, run.changes, superlink, environment, clock.left(120), federation)
        clock.stage("run", f"Run {run_id} with {clients} clients; starting Ray takes some seconds ...")
        status, details = follow(run_id, address, superlink, clock, run.log)
        clock.stage("stop", f"Run {run_id}: {status}")
    return run.ended(run_id, status, details)


def _run_in_process(run: _Run, clients: int, at_once: int) -> Outcome:
    """Start the app's process, and hear its log."""
    clock, environment = run.clock, run.environment()
    # The app's own modules come first, as with Flower.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run.bundle), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "tepal.server_app.one_process"]
    command += [str(run.bundle), str(clients), str(at_once), str(run.changes)]
    if at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // at_once)))
    clock.stage("run", f"Running with {clients} clients in one process ...")
    output = run.folder / "output.log"
    with (
        started(
            command, log=output, env=environment, cwd=run.work, name="the app's process", grace=2, folder=run.folder
        ) as process,
        output.open(encoding="utf-8", errors="replace") as new,
        run.log.open("w", encoding="utf-8") as log,
    ):
        rest = ""
        while True:
            running = process.running  # before its output is read, so that all of it is
            whole, newline, rest = (rest + new.read()).rpartition("\n")
            whole = without_colour(whole + newline)
            log.write(whole)
            log.flush()
            for line in whole.splitlines():
                clock.tell("log", line)
            if not running:
                break
            clock.check()
            time.sleep(0.05)
        clock.stage("stop", "The run ended")
        status, details = ("completed", "") if process.returncode == 0 else ("failed", process.tail(1))
    return run.ended(1, status, details)


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
    if not 0 <= gpus_per_client < math.inf:
        raise ValueError(f"gpus_per_client is {gpus_per_client}, expected 0 or more")
    cores = _cores(cpus_per_client)
    at_once = min(clients, int(cores / cpus_per_client))
    each = max(1, math.ceil(cpus_per_client))
    return (
        f"client-resources-num-cpus={each} client-resources-num-gpus={float(gpus_per_client)} "
        f"init-args-num-cpus={at_once * each}"
    )


def _cores(cpus_per_client: float = 1) -> int:
    """Cores of this machine. Raises ValueError where that many for a client cannot be."""
    from joblib import cpu_count  # minds affinity and a container's quota

    cores = int(cpu_count())
    if not cpus_per_client > 0:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, expected more than 0")
    if cpus_per_client > cores:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, but there are {cores} cores here")
    return cores


def _short_temporary_folder() -> str:
    """Return the folder for temporary folders whose path is short enough for the sockets Ray puts there."""
    usual = tempfile.gettempdir()
    fits = len(usual.encode()) + len("/tepal-12345678") <= _LONGEST_RAY_FOLDER
    return usual if fits or not os.path.isdir("/tmp") else "/tmp"
