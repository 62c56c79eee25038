"""The base class of engines, which run one app any number of times and remove their files."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tepal.host.files import new_log
from tepal.host.processes import ProcessError, flower_environment
from tepal.host.superlink import Clock, EndedRun, Listener, RunError, app_run_config, explain, stage_app
from tepal.host.toml import Value, parse_run_config, to_toml

# A Unix socket's path has 107 bytes on Linux and 103 on macOS; Ray puts its sockets 69 bytes below its folder.
_LONGEST_RAY_FOLDER = 34


@dataclass(frozen=True)
class RunRequest:
    """One run: the file with changes to the run config, the folder of the clients' caches, its log, its clock."""

    changes: Path
    cache: Path
    log: Path
    clock: Clock


class Runner(ABC):
    """Runs a Flower app with simulated clients, here or on other machines. A context manager.

    Args:
        app: folder of the app.
        clients: number of clients.
        cache: folder of the clients' caches (default: $TEPAL_CACHE, else a temporary one, removed with the engine).
        why: the reason for this engine, for `description`.

    Raises ValueError for an argument out of range.
    """

    kind: str
    """A description, with the number of clients that train at the same time."""

    here = True
    """Whether the runs are on this machine."""
    options = ""
    """Command-line options that resume a run on the same engine; "" for this machine."""
    at_once = 1
    """How many runs it does at the same time, each called in a thread of its own."""

    def __init__(self, app: Path, clients: int, *, cache: Path | None = None, why: str = "") -> None:
        if clients < 1:
            raise ValueError(f"clients is {clients}, expected at least 1")
        self.app, self.clients = app.resolve(), clients
        self.cache = cache
        """Folder of the clients' caches. With Ray it is read at the first run."""
        self._why = why

    @property
    def description(self) -> str:
        """One line with the engine and the reason for it."""
        return f"Engine: {self.kind}{f' ({self._why})' if self._why else ''}"

    def __enter__(self) -> Self:
        """Raises RunError if this engine cannot run on this machine."""
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def start_ahead(self, runs: int = 1) -> None:
        """Start what takes time before the first runs, while the caller checks their settings.

        Args:
            runs: how many runs there will be.

        Raises RunError if that fails.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all that was started. A run that another thread waits for raises RunStopped."""

    @abstractmethod
    def run(
        self,
        run_config: Mapping[str, Value] | Sequence[str] = (),
        *,
        on_event: Listener | None = None,
        log: Path | None = None,
    ) -> EndedRun:
        """Run the app once, and wait for its end.

        The app runs from a bundle in an empty temporary folder: outputs belong at absolute paths in `run_config`.

        Args:
            run_config: Changes to the app's `[tool.flwr.app.config]`: a mapping with the flat keys, or strings as
                `flwr run --run-config` takes them (`'lr=0.1 name="x"'`, or the path of a TOML file); later ones win.
            on_event: Called with stages and log lines.
            log: File for the run's log (default: a new one in the system's temporary folder).

        Raises:
            RunError: with the app's own error where the app failed.
            ValueError: the run config cannot be read.
        """


class RunStopped(RuntimeError):
    """`Runner.stop` was called during a run."""


class Engine(Runner):
    """Runs an app with clients on this machine, one run after another. `run` starts processes."""

    _one_run = False
    """Whether all its files are removed after a run, so that the next one starts anew."""

    def __init__(self, app: Path, clients: int, *, cache: Path | None = None, why: str = "") -> None:
        super().__init__(app, clients, cache=cache, why=why)
        self._runs = 0
        self._running = contextlib.ExitStack()  # the processes that serve the runs

    def start_ahead(self, runs: int = 1) -> None:
        try:
            self._begin()
        except BaseException as error:
            self.stop()
            if isinstance(error, ProcessError):
                raise RunError(str(error)) from error
            raise

    def _begin(self) -> None:
        """What `start_ahead` does."""
        self._start()

    def stop(self) -> None:
        self._running.close()

    def run(
        self,
        run_config: Mapping[str, Value] | Sequence[str] = (),
        *,
        on_event: Listener | None = None,
        timeout: float | None = None,
        log: Path | None = None,
        written: Path | None = None,
    ) -> EndedRun:
        """As `Runner.run`.

        Args:
            run_config, on_event, log: as there.
            timeout: Seconds from the call on, after which the run is stopped. None: no limit.
            written: Folder to which the files are moved that the ServerApp wrote in its current folder.
        """
        clock = Clock(on_event or (lambda _kind, _text: None), timeout)
        config = parse_run_config(run_config)
        known = app_run_config(self.app)
        if unknown := sorted(set(config) - set(known)):
            allowed = ", ".join(sorted(known)) or "none"
            raise RunError(f"{self.app.name} has no run configuration key {', '.join(unknown)}. It has: {allowed}")
        log = log or new_log("run")
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
            self._runs += 1
            cache = self.cache or Path(os.environ.get("TEPAL_CACHE") or self._folder / "cache")
            run = RunRequest(self._folder / f"run-{self._runs}.toml", cache.resolve(), log.resolve(), clock)
            run.changes.write_text(to_toml(config), encoding="utf-8")
            try:
                run_id, status, details = self._run(run)
            finally:
                if written is not None:
                    for path in list(self._work.iterdir()):
                        shutil.move(path, _free(written / path.name))
            if self._one_run:
                self.stop()
        except BaseException as error:
            # The processes may still be working on this run: the next run starts new ones.
            self.stop()
            if isinstance(error, ProcessError | TimeoutError | subprocess.TimeoutExpired):
                # Beyond the time limit, the limit is the cause, whatever the error's own text.
                raise RunError(clock.over or str(error), log) from error
            raise
        if status != "completed":
            raise RunError(f"The run {status}: {explain(run.log.read_text(), details)}", run.log)
        return EndedRun(run_id, status, run.log, details)

    def _start(self) -> None:
        """Copy the app's files to a temporary folder, once."""
        if hasattr(self, "_folder"):
            return
        folder = Path(tempfile.mkdtemp(prefix="tepal-", dir=_short_temporary_folder()))
        self._folder = folder
        self._running.callback(self._forget)
        self._bundle, self._work, self._home = folder / "apps" / "app", folder / "work", folder / "home"
        for each in (self._bundle, self._work, self._home):
            each.mkdir(parents=True)
        stage_app(self.app, self._bundle)
        self._environment = flower_environment(self._home)

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        del self._folder

    @abstractmethod
    def _run(self, run: RunRequest) -> tuple[int, str, str]:
        """Start the processes if necessary, and run the app; return the run's id, status and Flower's explanation."""


def cores_for(cpus_per_client: float = 1) -> int:
    """Return the number of cores of this machine. Raises ValueError if a client cannot have so many."""
    from joblib import cpu_count  # respects affinity and a container's quota

    cores = int(cpu_count())
    if not cpus_per_client > 0:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, expected more than 0")
    if cpus_per_client > cores:
        raise ValueError(f"cpus_per_client is {cpus_per_client}, but this machine has {cores} cores")
    return cores


def _short_temporary_folder() -> str:
    """Return a folder for temporary folders whose path is short enough for Ray's sockets."""
    usual = tempfile.gettempdir()
    fits = len(usual.encode()) + len("/tepal-12345678") <= _LONGEST_RAY_FOLDER
    return usual if fits or not os.path.isdir("/tmp") else "/tmp"


def _free(path: Path) -> Path:
    """The path, or if something is there the first free one with a number before its suffix."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())
