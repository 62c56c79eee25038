"""The engine with Ray: Flower's simulation runtime, with a SuperLink and an actor for each client that trains."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tepal.host.allocator import KEPT, LARGEST
from tepal.host.processes import Process, ProcessError, free_port, started, wait_for_http, wait_for_log
from tepal.host.superlink import Clock, RunError, connect, follow, submit
from tepal.tools.simulation.engine import Engine, RunRequest, cores_for


class RayEngine(Engine):
    """Flower's simulation runtime: a SuperLink and Ray for all runs; each run has its own actors.

    Args:
        cpus_per_client: CPU cores for each client that trains; with less than 1, more clients than cores train at once.
        gpus_per_client: Share of a GPU for each client that trains.
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
        cores = cores_for(cpus_per_client)
        at_once = min(clients, int(cores / cpus_per_client))
        # Flower takes whole cores per client only, and derives the number of actors from Ray's number of cores. So a
        # share of a core becomes one core of a larger number, and no actor is started without a client for it.
        each = max(1, math.ceil(cpus_per_client))
        self.cores = at_once * each
        """The number of cores given to Ray."""
        self.federation = (
            f"num-supernodes={clients} client-resources-num-cpus={each} "
            f"client-resources-num-gpus={float(gpus_per_client)}"
        )
        """The value of `flwr run --federation-config`."""
        self.kind = f"Flower's simulation runtime on Ray, up to {at_once} clients at once"
        self._superlink: Process | None = None

    def __enter__(self) -> Self:
        if find_spec("ray") is None:
            raise RunError(
                "Ray is not installed, and Flower's simulation runtime needs it: install it with pip install "
                "'tepal[ray]' (in a checkout pip install -e '.[ray]'), or use --engine process"
            )
        if shlex.quote(sys.executable) != sys.executable:
            # Ray's workers would never start, and Flower reports that only after six minutes.
            raise RunError(
                f"Ray cannot start its workers with {sys.executable}: the path has a space or another character that a "
                "shell reads. Make the virtual environment elsewhere (with make: VENV=/a/path/without/spaces), or use "
                "--engine process."
            )
        return self

    def _run(self, run: RunRequest) -> tuple[int, str, str]:
        clock = run.clock
        if self._superlink is None or not self._superlink.running:
            clock.stage("Starting a SuperLink and Ray ...")
            self._superlink, self._address = self._running.enter_context(self._started(run))
        clock.stage("Submitting the app ...")
        run_id = submit(self._bundle, run.changes, self._superlink, self._environment, clock.left(120), self.federation)
        clock.stage(f"Run {run_id} with {self.clients} clients; starting its actors takes some seconds ...")
        status, details = follow(run_id, self._address, self._superlink, clock, run.log)
        clock.stage(f"Run {run_id}: {status}")
        return run_id, status, details

    @contextlib.contextmanager
    def _started(self, run: RunRequest) -> Iterator[tuple[Process, str]]:
        """Start Ray and a SuperLink in simulation mode; yield the SuperLink and its address when it answers."""
        clock = run.clock
        environment = self._environment | {
            "TEPAL_CACHE": str(run.cache),
            "RAY_TMPDIR": str(self._folder),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # longest delay of a submitted run (default 1 s)
            # As `tepal.host.allocator` for one process: glibc reads them as a process starts.
            "MALLOC_MMAP_THRESHOLD_": str(LARGEST),
            "MALLOC_TRIM_THRESHOLD_": str(KEPT),
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
def _superlink(folder: Path, work: Path, environment: Mapping[str, str], clock: Clock) -> Iterator[tuple[Process, str]]:
    """Start a SuperLink in simulation mode; yield its process and address when it answers."""
    for attempts_left in (2, 1, 0):
        port = free_port()
        command = ["flower-superlink", "--simulation", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        with started(
            command, log=folder / "superlink.log", env=environment, cwd=work, grace=2, folder=folder
        ) as process:
            # Imported for following the run, while the SuperLink starts.
            import_module("flwr.supercore.control")
            try:
                wait_for_http(f"http://127.0.0.1:{port}/health", timeout=clock.left(60), process=process)
            except ProcessError:
                # Another program may have taken the port since `free_port`.
                if attempts_left and "address already in use" in process.tail(50):
                    continue
                raise
            yield process, f"127.0.0.1:{port}"
            return
