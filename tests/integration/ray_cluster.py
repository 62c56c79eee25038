"""A Ray cluster on this machine, whose nodes are as machines of their own: processes, ports and temporary files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tepal.host.processes import Process, free_port, started, wait_for_log
from tepal.tools.cluster.machine import JOB

_LOOPBACK = "127.0.0.1"
_STORE_BYTES = 200 * 2**20
WATCHFUL = {
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "3", "RAY_worker_niceness": "0",
}  # fmt: skip
"""Settings of Ray with which a node is found to be dead after some seconds, not after half a minute."""
RESENT = ("down", "bytes_total", "bytes_vs_fedavg", "bytes_to_target", "plain_vs_fedavg")
"""Columns of runs.csv of which a run that goes on with another machine has more: clients have lost their caches."""


def python_without_tepal(folder: Path) -> Path:
    """A Python that has all packages that this one has, except for Tepal: its code must be sent to it."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "tepal" not in path.name.lower():
            (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


@dataclass
class RayNode:
    """A machine of the cluster with one core. `files`: its folder of temporary files."""

    files: Path
    process: Process
    _stop: contextlib.ExitStack = field(repr=False)

    def stop(self) -> None:
        self._stop.close()

    def kill(self) -> None:
        """End all its processes at once, as if its power failed."""
        self.process.kill()
        self.stop()

    def jobs(self) -> list[Path]:
        """The folders of jobs."""
        return sorted(self.files.glob(f"{JOB}*"))

    def job_processes(self) -> list[str]:
        """The command lines of actors and processes of jobs."""
        lines = []
        for process in self.process.tree():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return [line for line in lines if "tepal.tools.cluster" in line or line.startswith("ray::Machine")]


class RayCluster:
    """A head without cores, and workers. Made by `ray_cluster`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"{_LOOPBACK}:{free_port()}"
        self.nodes: list[RayNode] = []
        self._made = 0
        self._python = python_without_tepal(folder / "python")
        self.head = self._start(
            "--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=0", "--include-dashboard=false"
        )

    def add(self, *, wait: bool = True) -> RayNode:
        """Start a worker."""
        node = self._start(f"--address={self.address}", "--num-cpus=1", wait=wait)
        self.nodes.append(node)
        return node

    def remove(self, node: RayNode) -> None:
        """Kill a worker."""
        self.nodes.remove(node)
        node.kill()

    def job_processes(self) -> list[str]:
        return [line for node in self.nodes for line in node.job_processes()]

    def jobs(self) -> list[Path]:
        return [folder for node in self.nodes for folder in node.jobs()]

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no actor or process of a job is left."""
        end = time.monotonic() + seconds
        while left := self.job_processes():
            assert time.monotonic() < end, left
            time.sleep(0.2)

    def stop(self) -> None:
        for node in (*self.nodes, self.head):
            node.stop()

    def _start(self, *options: str, wait: bool = True) -> RayNode:
        self._made += 1
        # Short names: Ray's sockets are below them.
        files = self.folder / f"t{self._made}"
        files.mkdir()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        environment |= {
            "TMPDIR": str(files), "OMP_NUM_THREADS": "1", "PATH": f"{self._python.parent}:{os.environ['PATH']}",
        }  # fmt: skip
        ports = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
        command = [
            str(self._python), "-m", "ray.scripts.scripts", "start", *options, "--block",
            f"--node-ip-address={_LOOPBACK}", f"--temp-dir={self.folder / f'r{self._made}'}",
            f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats",
            "--min-worker-port=0", "--max-worker-port=0",
            *(f"--{name}-port={free_port()}" for name in ports),
        ]  # fmt: skip
        with contextlib.ExitStack() as opened:
            log = self.folder / f"{self._made}.log"
            process = opened.enter_context(
                started(command, log=log, env=environment | WATCHFUL, cwd=files, name="Ray", grace=3)
            )
            if wait:
                wait_for_log(process, "Ray runtime started", 90)
            stop = opened.pop_all()
        return RayNode(files, process, stop)


@contextlib.contextmanager
def ray_cluster(workers: int) -> Iterator[RayCluster]:
    """Run a cluster during the block."""
    with tempfile.TemporaryDirectory(prefix="tr", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        try:
            for _ in range(workers):
                cluster.add(wait=False)
            for node in cluster.nodes:
                wait_for_log(node.process, "Ray runtime started", 90)
            yield cluster
        finally:
            cluster.stop()


def seen_nodes(address: str) -> str:
    """What a process sees of the cluster, for tests of these helpers."""
    code = f"import ray; ray.init({address!r}); print([(n['Alive'], n['Resources'].get('CPU')) for n in ray.nodes()])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
