"""A deployment on the loopback interface: a real SuperLink and real SuperNodes, each as on a machine of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tepal.server_app.flower import Clock, Outcome, Value, connect, follow, stage_app, submit, to_toml
from tepal.server_app.processes import Process, flower_environment, free_port, started, wait_for_http

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Loopback:
    """A SuperLink with its SuperNodes. Made by `loopback`."""

    folder: Path
    address: str
    superlink: Process
    nodes: tuple[Process, ...]
    _environment: Mapping[str, str]
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self, app: Path, run_config: Mapping[str, Value] | None = None, *, timeout: float = 600) -> Outcome:
        """Submit the app in the folder `app` with `flwr run`, and wait for the end of its run, good or bad.

        The run config goes to Flower as it is: nothing is checked before the ServerApp sees it.
        """
        folder = self.folder / f"run-{next(self._numbers)}"
        log, bundle, config = folder / "run.log", folder / "app", folder / "run-config.toml"
        bundle.mkdir(parents=True)
        stage_app(app, bundle)
        config.write_text(to_toml(run_config or {}))
        clock = Clock(lambda kind, text: None, timeout)
        clock.stage("submit", "")
        run_id = submit(bundle, config, self._environment, clock.left())
        clock.stage("run", "")
        status, details = follow(run_id, self.address, self.superlink, clock, log)
        clock.stage("", "")
        return Outcome(run_id, status, log, details, clock.seconds)


@contextlib.contextmanager
def loopback(nodes: Sequence[str]) -> Iterator[Loopback]:
    """Start a SuperLink, and a SuperNode for each of the node configs `nodes`.

    Everything they write is in one temporary folder, which goes with them when the block is left. Tepal is importable
    for apps that do not bring it along, as where it is installed.
    """
    superlink_port, fleet_port, *node_ports = _free_ports(2 + len(nodes))
    fleet = f"127.0.0.1:{fleet_port}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tepal-loopback-")))

        def start(name: str, port: int, *command: str) -> Process:
            home, work = folder / name / "home", folder / name / "work"
            home.mkdir(parents=True)
            work.mkdir()
            environment = _environment(home) | {"TEPAL_CACHE": str(folder / name / "cache")}
            command = (*command, "--insecure", "--host", "127.0.0.1", "--port", str(port))
            log = folder / f"{name}.log"
            return stack.enter_context(started(command, log=log, env=environment, cwd=work, name=name, grace=5))

        superlink = start("superlink", superlink_port, "flower-superlink", "--fleet-api-address", fleet)
        supernode = ("flower-supernode", "--superlink", fleet, "--node-config")
        supernodes = tuple(
            start(f"node-{k}", port, *supernode, config)
            for k, (port, config) in enumerate(zip(node_ports, nodes, strict=True))
        )
        stack.callback(_stop_all, [*supernodes, superlink])
        for process, port in zip((superlink, *supernodes), (superlink_port, *node_ports), strict=True):
            wait_for_http(f"http://127.0.0.1:{port}/health", timeout=120, process=process)
        address = f"127.0.0.1:{superlink_port}"
        connect(folder / "home", address)
        yield Loopback(folder, address, superlink, supernodes, _environment(folder / "home"))


def partitions(clients: int) -> list[str]:
    """Node configs of clients that each take a partition of the run's dataset."""
    return [f"partition-id={k} num-partitions={clients}" for k in range(clients)]


def _environment(home: Path) -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return flower_environment(home) | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    }


def _free_ports(count: int) -> list[int]:
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


def _stop_all(processes: list[Process]) -> None:
    """Stop them side by side: each takes a second or two to say goodbye."""
    threads = [threading.Thread(target=process.stop, args=(5,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
