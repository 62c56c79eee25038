"""Simulate a Flower app on this machine: engines that start what its runs need, and leave nothing behind.

    ProcessEngine   a process that imports the app, and forks the ServerApp and a worker for each client at work
    RayEngine       Flower's simulation runtime: a SuperLink, Ray, and an actor for each client at work

An engine runs one app any number of times, one run after another. What it starts serves all of them: the process keeps
its imports and the data it has read, the SuperLink and Ray stay up. `simulate` and `simulate_in_process` are one run
each.

Flower's managed `:local:` SuperLink stays alive afterwards, keeps a database in the user's home, and client actors
import from the folder it was started in before they import from the app bundle; ours runs in an empty temporary folder
and ends with the engine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tepal.host.processes import (
    Process,
    ProcessError,
    flower_environment,
    free_port,
    started,
    wait_for_http,
    wait_for_log,
)
from tepal.host.superlink import (
    Clock,
    Listener,
    Outcome,
    RunError,
    app_run_config,
    app_settings,
    connect,
    explain,
    follow,
    stage_app,
    submit,
    without_colour,
)
from tepal.host.toml import Value, parse_run_config, to_toml

AUTO, PROCESS, RAY = "auto", "process", "ray"
ENGINES = (AUTO, PROCESS, RAY)
"""What an engine is called; `AUTO` is the choice between the other two."""

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
    """Run the Flower app in the folder `app` in Flower's simulation runtime, and wait for its end.

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
    with RayEngine(app, clients, cpus_per_client, gpus_per_client, cache=cache) as engine:
        return engine.run(run_config, on_event=on_event, timeout=timeout, log=log)


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
    """As `simulate`, but without SuperLink and Ray.

    `cpus_per_client` says how many are at work at once, as in `simulate`; by default clients take turns, and PyTorch
    has all cores for the one at work. OMP_NUM_THREADS, where it is set, says how many threads PyTorch has for each.
    """
    with ProcessEngine(app, clients, cpus_per_client, cache=cache) as engine:
        return engine.run(run_config, on_event=on_event, timeout=timeout, log=log)


def engine_for(
    asked: str, app: Path, *, clients: int, cpus: float | None = None, gpus: float = 0, cache: Path | None = None
) -> Engine:
    """The engine that is asked for or, of `AUTO`, one process unless something asks for Ray.

    Ray is for what one process cannot do: to give clients shares of GPUs (`gpus` > 0), and to run an app whose clients
    cannot share a process, which says so in its pyproject.toml: `engine = "ray"` under `[tool.tepal]`.

    Args:
        asked: one of `ENGINES`.
        cpus: CPU cores for each client at work.
        gpus: share of a GPU for each client at work.

    Raises:
        RunError: Ray is needed and not installed, or what the app says is not one of `ENGINES`.
        ValueError: an argument out of range.
    """
    of_app = str(app_settings(app).get("engine", AUTO))
    for where, name in (("--engine", asked), (f"{app}: engine in [tool.tepal] of pyproject.toml", of_app)):
        if name not in ENGINES:
            raise ValueError(f"{where} is {name!r}, expected auto, process or ray")
    if asked != AUTO:
        chosen, why = asked, f"--engine {asked}"
    elif gpus:
        chosen, why = RAY, f"--gpus {gpus:g} gives each client a share of a GPU"
    elif of_app != AUTO:
        chosen, why = of_app, "the app's pyproject.toml asks for it"
    else:
        chosen, why = PROCESS, "nothing asks for Ray"
    if chosen == RAY:
        return RayEngine(app, clients, cpus or 1, gpus, cache=cache, why=why)
    if gpus:
        raise ValueError(
            f"--gpus {gpus:g} with --engine process: in one process clients share a GPU without limits; leave out "
            "--gpus, or take --engine ray"
        )
    return ProcessEngine(app, clients, cpus or 1, cache=cache, why=why)


def _nobody(_kind: str, _text: str) -> None:
    """Hears nothing."""


@dataclass(frozen=True)
class _Run:
    """One run: the file with changes to the run config, its log, its clock."""

    changes: Path
    log: Path
    clock: Clock


class Engine(ABC):
    """Runs a Flower app with simulated clients, one run after another; a context manager, which starts nothing yet.

    Args:
        app: folder of the app.
        clients: number of simulated clients.
        cache: folder for what clients keep (default: $TEPAL_CACHE, else a temporary one that ends with the engine).
        why: why it is this engine, for `said`.

    Raises ValueError for an argument out of range.
    """

    kind: str
    """In words, with what runs at once."""

    def __init__(self, app: Path, clients: int, *, cache: Path | None = None, why: str = "") -> None:
        if clients < 1:
            raise ValueError(f"clients is {clients}, expected at least 1")
        self.app, self.clients = app.resolve(), clients
        self.cache = cache
        """Folder for what clients keep, as the first run finds it."""
        self._why = why
        self._runs = 0
        self._running = contextlib.ExitStack()  # what serves the runs

    @property
    def said(self) -> str:
        """Which engine it is and why, in one line."""
        return f"Engine: {self.kind}{f' ({self._why})' if self._why else ''}"

    def __enter__(self) -> Self:
        """Raises RunError where it cannot run on this machine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(
        self,
        run_config: Mapping[str, Value] | Sequence[str] = (),
        *,
        on_event: Listener | None = None,
        timeout: float | None = None,
        log: Path | None = None,
    ) -> Outcome:
        """Run the app once, and wait for its end. Arguments and errors are those of `simulate`."""
        clock = Clock(on_event or _nobody, timeout)
        config = parse_run_config(run_config) if not isinstance(run_config, Mapping) else dict(run_config)
        known = app_run_config(self.app)
        if unknown := sorted(set(config) - set(known)):
            raise RunError(
                f"{self.app.name} has no run configuration key {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
            )
        if log is None:
            handle, name = tempfile.mkstemp(prefix="tepal-simulation-", suffix=".log")
            os.close(handle)
            log = Path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
            self._runs += 1
            run = _Run(self._folder / f"run-{self._runs}.toml", log.resolve(), clock)
            run.changes.write_text(to_toml(config), encoding="utf-8")
            run_id, status, details = self._run(run)
        except BaseException as error:
            # Whatever it was, what served this run may be at work on it still: the next one begins anew.
            self._stop()
            if isinstance(error, ProcessError | TimeoutError | subprocess.TimeoutExpired):
                # At the limit, whatever was under way then may have failed by it, in words of its own.
                raise RunError(clock.over or str(error), log) from error
            raise
        clock.stage("", "")
        if status != "completed":
            raise RunError(f"The run {status}: {explain(run.log.read_text(), details)}", run.log)
        return Outcome(run_id, status, run.log, details, clock.seconds)

    def _start(self) -> None:
        """Stage the app's files in a temporary folder, where they are not yet."""
        if hasattr(self, "_folder"):
            return
        folder = Path(tempfile.mkdtemp(prefix="tepal-", dir=_short_temporary_folder()))
        self._folder = folder
        self._running.callback(self._forget)
        self._bundle, self._work, self._home = folder / "apps" / "app", folder / "work", folder / "home"
        for each in (self._bundle, self._work, self._home):
            each.mkdir(parents=True)
        stage_app(self.app, self._bundle)
        kept = self.cache or Path(os.environ.get("TEPAL_CACHE") or folder / "cache")
        self._environment = flower_environment(self._home) | {"TEPAL_CACHE": str(kept.resolve())}

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        del self._folder

    def _stop(self) -> None:
        self._running.close()

    @abstractmethod
    def _run(self, run: _Run) -> tuple[int, str, str]:
        """Run the app; its id, status, and what there is to say. Starts what it needs, where that is not there."""


class ProcessEngine(Engine):
    """A process that has imported the app and forks what a run needs; see `one_process`.

    Args:
        cpus_per_client: as many clients are at work at once as there are cores for. None: clients take turns, and
            PyTorch has all cores for the one at work.
    """

    def __init__(
        self, app: Path, clients: int, cpus_per_client: float | None = None, *, cache: Path | None = None, why: str = ""
    ) -> None:
        super().__init__(app, clients, cache=cache, why=why)
        cores = _cores(cpus_per_client or 1)
        self._at_once = 1 if cpus_per_client is None else min(clients, max(1, int(cores / cpus_per_client)))
        self._threads = max(1, cores // self._at_once)  # of PyTorch, for each client
        at_once = "client after client" if self._at_once == 1 else f"{self._at_once} clients at once"
        self.kind = f"one process, {at_once}"
        self._worker: _Worker | None = None

    def _run(self, run: _Run) -> tuple[int, str, str]:
        run.clock.stage("run", f"Running with {self.clients} clients in one process ...")
        if self._worker is None or not self._worker.process.running:
            self._worker = self._running.enter_context(self._start_worker())
        status, details = self._worker.run(run, self._folder / f"ended-{self._runs}")
        run.clock.stage("stop", "The run ended")
        return 1, status, details

    @contextlib.contextmanager
    def _start_worker(self) -> Iterator[_Worker]:
        environment = dict(self._environment)
        # The app's own modules come first, as with Flower.
        path = filter(None, [str(self._bundle), environment.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(path)
        environment.setdefault("OMP_NUM_THREADS", str(self._threads))
        command = [sys.executable, "-P", "-m", "tepal.tools.simulation.one_process"]
        together = int(os.environ.get("OMP_NUM_THREADS", self._threads * self._at_once))
        command += [str(self._bundle), str(self.clients), str(self._at_once), str(together)]
        output = self._folder / "output.log"
        read_end, write_end = os.pipe()
        try:
            with (
                started(
                    command, log=output, env=environment, cwd=self._work, name="the app's process", grace=2,
                    folder=self._folder, stdin=read_end,
                ) as process,
                output.open(encoding="utf-8", errors="replace") as log,
            ):  # fmt: skip
                log.seek(0, os.SEEK_END)
                with os.fdopen(write_end, "w", encoding="utf-8", closefd=False) as requests:
                    yield _Worker(process, requests, log)
        finally:
            os.close(read_end)
            os.close(write_end)


@dataclass
class _Worker:
    """The process of a ProcessEngine, what it is asked by, and its output, which has been read so far."""

    process: Process
    requests: IO[str]
    output: IO[str]

    def run(self, run: _Run, ended: Path) -> tuple[str, str]:
        """Have the app run once, and hear its log; the status, and what there is to say. `ended` is a file's name."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as is seen below
            print(json.dumps({"config": str(run.changes), "ended": str(ended)}), file=self.requests, flush=True)
        rest = ""
        with run.log.open("w", encoding="utf-8") as log:
            while True:
                over = ended.exists() or not self.process.running  # before its output is read, so that all of it is
                whole, newline, rest = (rest + self.output.read()).rpartition("\n")
                whole = without_colour(whole + newline)
                log.write(whole)
                log.flush()
                for line in whole.splitlines():
                    run.clock.tell("log", line)
                if over:
                    break
                run.clock.check()
                time.sleep(0.05)
        reason = ended.read_text(encoding="utf-8") if ended.exists() else f"its process ended: {self.process.tail(1)}"
        return ("failed", reason) if reason else ("completed", "")


class RayEngine(Engine):
    """Flower's simulation runtime: a SuperLink and Ray, which serve one run after another; each run has its own actors.

    Args:
        cpus_per_client: CPU cores for each client at work; less than 1 runs more clients at once than there are cores.
        gpus_per_client: Share of a GPU for each client at work.
    """

    def __init__(
        self,
        app: Path,
        clients: int,
        cpus_per_client: float = 1,
        gpus_per_client: float = 0,
        *,
        cache: Path | None = None,
        why: str = "",
    ) -> None:
        super().__init__(app, clients, cache=cache, why=why)
        if not 0 <= gpus_per_client < math.inf:
            raise ValueError(f"gpus_per_client is {gpus_per_client}, expected 0 or more")
        cores = _cores(cpus_per_client)
        at_once = min(clients, int(cores / cpus_per_client))
        # Flower takes whole cores per client only, and derives the number of actors from Ray's number of cores. So a
        # share of a core becomes one core of a larger number, and actors that no client would use are not started.
        each = max(1, math.ceil(cpus_per_client))
        self.cores = at_once * each
        """That Ray is told of."""
        self.federation = (
            f"num-supernodes={clients} client-resources-num-cpus={each} "
            f"client-resources-num-gpus={float(gpus_per_client)}"
        )
        """As `flwr run --federation-config` takes it."""
        self.kind = f"Flower's simulation runtime on Ray, up to {at_once} clients at once"
        self._superlink: Process | None = None

    def __enter__(self) -> Self:
        if find_spec("ray") is None:
            raise RunError(
                "Ray is not installed, and Flower's simulation runtime needs it: install it with pip install "
                "'tepal[ray]' (in a checkout pip install -e '.[ray]'), or take --engine process"
            )
        if shlex.quote(sys.executable) != sys.executable:
            # Its workers never start, and Flower waits six minutes before it says so.
            raise RunError(
                f"Ray cannot start its workers with {sys.executable}: the path has a space or another character that a "
                "shell reads. Make the virtual environment elsewhere (with make: VENV=/a/path/without/spaces), or take "
                "--engine process."
            )
        return self

    def _run(self, run: _Run) -> tuple[int, str, str]:
        clock = run.clock
        if self._superlink is None or not self._superlink.running:
            clock.stage("start SuperLink", "Starting a SuperLink and Ray ...")
            self._superlink, self._address = self._running.enter_context(self._started(clock))
        clock.stage("submit", "Submitting the app ...")
        run_id = submit(
            self._bundle, run.changes, self._superlink, self._environment, clock.left(120), self.federation
        )
        clock.stage("run", f"Run {run_id} with {self.clients} clients; starting its actors takes some seconds ...")
        status, details = follow(run_id, self._address, self._superlink, clock, run.log)
        clock.stage("stop", f"Run {run_id}: {status}")
        return run_id, status, details

    @contextlib.contextmanager
    def _started(self, clock: Clock) -> Iterator[tuple[Process, str]]:
        """Ray and a SuperLink in simulation mode, and the SuperLink's address, once it answers."""
        environment = self._environment | {
            "RAY_TMPDIR": str(self._folder),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # how long a submitted run lies there (default 1 s)
        }
        port = free_port()
        environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"]
        command += ["--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={self.cores}"]
        command += [f"--temp-dir={self._folder / 'ray'}"]
        ray = started(
            command, log=self._folder / "ray.log", env=environment, cwd=self._work, name="Ray", grace=2,
            folder=self._folder,
        )  # fmt: skip
        with ray as process, _superlink(self._folder, self._work, environment, clock) as (superlink, control):
            wait_for_log(process, "Ray runtime started", clock.left(60))
            connect(self._home, control)
            yield superlink, control


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
            import_module("flwr.supercore.control")
            try:
                wait_for_http(f"http://127.0.0.1:{port}/health", timeout=clock.left(60), process=process)
            except ProcessError:
                # Between our look and its start another program may have taken the port.
                if attempts_left and "address already in use" in process.tail(50):
                    continue
                raise
            yield process, f"127.0.0.1:{port}"
            return


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
