"""The engine without Ray: a process that imports the app, and forks the ServerApp and the clients."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tepal.host.processes import Process, started
from tepal.host.superlink import app_components, app_run_config, without_colour
from tepal.host.toml import parse_run_config
from tepal.tools.simulation.engine import Engine, RunRequest, cores_for


class ProcessEngine(Engine):
    """A process that has imported the app and forks what a run needs; see `one_process`.

    Args:
        cpus_per_client: cores for each client that trains, which gives the number of clients that train at the same
            time. None: clients train in turn, each with all cores.
        others: what a run is told of the clients or the server on other machines, see `one_process.main`.
    """

    def __init__(
        self,
        app: Path,
        clients: int,
        cpus_per_client: float | None = None,
        *,
        cache: Path | None = None,
        why: str = "",
        others: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(app, clients, cache=cache, why=why)
        cores = cores_for(cpus_per_client or 1)
        self._at_once = 1 if cpus_per_client is None else min(clients, max(1, int(cores / cpus_per_client)))
        self._threads = max(1, cores // self._at_once)  # of PyTorch, for each client
        at_once = "client after client" if self._at_once == 1 else f"{self._at_once} clients at once"
        self.kind = f"one process, {at_once}"
        self.others = dict(others or {})
        """As the argument: of the next run."""
        self._process: _AppProcess | None = None

    def _begin(self) -> None:
        """Start the process, which imports the app."""
        super()._begin()
        if self._process is None or not self._process.process.running:
            self._process = self._running.enter_context(self._start_process())

    def _run(self, run: RunRequest) -> tuple[int, str, str]:
        run.clock.stage(f"Running with {self.clients} clients in one process ...")
        self._begin()
        assert self._process is not None
        status, details = self._process.run(run, self._folder / f"ended-{self._runs}", self.others)
        run.clock.stage("The run ended")
        return 1, status, details

    @contextlib.contextmanager
    def _start_process(self) -> Iterator[_AppProcess]:
        environment = dict(self._environment)
        # The app's own modules come first, as with Flower.
        path = filter(None, [str(self._bundle), environment.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(path)
        given = given_threads(environment)
        if not environment.get("OMP_NUM_THREADS"):
            environment["OMP_NUM_THREADS"] = str(self._threads)
        program = Path(__file__).with_name("one_process.py")
        together = given or self._threads * self._at_once
        command = [sys.executable, "-P", str(program), str(self._bundle), *app_components(self._bundle)]
        command += map(str, [self.clients, self._at_once, together])
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
                    yield _AppProcess(self._bundle, process, requests, log)
        finally:
            os.close(read_end)
            os.close(write_end)


@dataclass
class _AppProcess:
    """The process of a ProcessEngine: the app in it, the pipe for requests, and its log, open for reading."""

    app: Path
    process: Process
    requests: IO[str]
    output: IO[str]

    def run(self, run: RunRequest, ended: Path, others: Mapping[str, Any]) -> tuple[str, str]:
        """Run the app once and copy its log; return status and explanation. `ended` is the file that ends the run."""
        config = app_run_config(self.app) | parse_run_config([str(run.changes)])
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which is checked below
            request = {"config": config, "cache": str(run.cache), "ended": str(ended), **others}
            print(json.dumps(request), file=self.requests, flush=True)
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


def given_threads(environment: Mapping[str, str]) -> int:
    """The first number of OMP_NUM_THREADS, which may be a list for levels of nested threads; 0 if there is none."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0
