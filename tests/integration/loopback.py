"""A deployment on the loopback interface: a real SuperLink and real SuperNodes, each as on a machine of its own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from tepal.client_app.node.service import Control
from tepal.host.processes import MARK, Process, flower_environment, free_port, marked, started, wait_for_http
from tepal.host.superlink import Clock, EndedRun, connect, follow, stage_app, submit
from tepal.host.toml import Value, to_toml
from tepal.tools.deploy.fleet import open_fleet
from tepal.tools.deploy.loopback import wait_for_node
from tepal.tools.deploy.provision import load_public_key
from tests.integration import forks
from tests.integration.credentials import authority, node_key
from tests.integration.relay import Relay
from tests.packages import ROOT

SHORT_HEARTBEAT = Path(__file__).parent / "short_heartbeat"


class Submitted:
    """A run that the SuperLink has accepted, followed by a thread. Made by `Loopback.submit`."""

    def __init__(self, run_id: int, folder: Path, clock: Clock, watch: Callable[[Path], tuple[str, str]]) -> None:
        self.run_id = run_id
        self.folder = folder
        self.log = folder / "run.log"
        self._clock = clock
        self._end: EndedRun | BaseException | None = None
        self._thread = threading.Thread(target=self._follow, args=(watch,), name=f"run-{run_id}", daemon=True)
        self._thread.start()

    def log_text(self) -> str:
        """The run's log so far."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    @property
    def running(self) -> bool:
        """Whether the run's end has not been seen yet."""
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> EndedRun:
        """Wait for the end of the run, good or bad; `TimeoutError` after `timeout` seconds, the run goes on.

        Raises what `follow` does: `ProcessError` if the SuperLink has ended, `TimeoutError` at the limit of `submit`.
        """
        self._thread.join(timeout)
        if self._end is None:
            raise TimeoutError(f"run {self.run_id} still goes on after {timeout:g} s\n{self.log_text()}")
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    def leave(self) -> None:
        """Follow it no longer. The run goes on."""
        self._clock.limit = 0.0
        self._thread.join(30)

    def _follow(self, watch: Callable[[Path], tuple[str, str]]) -> None:
        try:
            status, details = watch(self.log)
            self._end = EndedRun(self.run_id, status, self.log, details)
        except BaseException as error:  # `wait` raises it
            self._end = error


@dataclass(frozen=True)
class _Program:
    """What it takes to start a SuperLink or a node, any number of times: its command, and where its health is asked."""

    name: str
    command: tuple[str, ...]
    health: str


class Loopback:
    """A SuperLink with its SuperNodes. Made by `loopback`.

    A process that is started dies with the thread that starts it: start them from the thread that holds the block.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        nodes: Sequence[str],
        *,
        secure: bool,
        relay: bool,
        inside: Mapping[str, Sequence[str]],
        warm: bool,
        spare: bool,
        short_heartbeat: bool,
        forked: bool,
    ) -> None:
        self.folder = folder
        self.secure = secure
        self.warm = warm
        self._forked = forked
        self._of_nodes = {"TEPAL_NODE_SPARE": str(int(spare))}
        if short_heartbeat:
            self._of_nodes["PYTHONPATH"] = os.pathsep.join([str(SHORT_HEARTBEAT), _python_path()])
        superlink_port, fleet_port, *node_ports = _free_ports(2 + len(nodes))
        self.address = f"127.0.0.1:{superlink_port}"
        self.fleet = f"127.0.0.1:{fleet_port}"
        self.authority = authority(folder / "keys") if secure else None
        self.root_certificates = self.authority.certificate if self.authority else None
        self.keys = tuple(node_key(folder / "keys", f"site-{k}") for k in range(len(nodes))) if secure else ()
        self.relays = tuple(stack.enter_context(Relay("127.0.0.1", fleet_port)) for _ in nodes) if relay else ()
        self.node_ids: tuple[int, ...] = ()
        """Of the registered keys, in order. A SuperLink that is started again gives them other ids."""
        self._stack = stack
        self._inside = inside
        self._processes: dict[str, Process] = {}
        self._blocks: dict[str, contextlib.ExitStack] = {}
        self._runs: list[Submitted] = []
        self._numbers = itertools.count(1)
        self._environment = self._as_forks(_environment(folder / "home"))
        connect(folder / "home", self.address, self.root_certificates)

        host, port = self.address.split(":")
        command = ["flower-superlink", "--fleet-api-address", self.fleet, "--host", host, "--port", port]
        if self.authority:
            certificate, key = self.authority.server(folder / "keys")
            command += ["--ssl-ca-certfile", str(self.root_certificates), "--ssl-certfile", str(certificate)]
            command += ["--ssl-keyfile", str(key), "--enable-supernode-auth"]
        scheme = "https" if secure else "http"
        command += [] if secure else ["--insecure"]
        self._superlink = _Program("superlink", tuple(command), f"{scheme}://{self.address}/health")
        program = self._warm_node if warm else self._supernode
        self._nodes = tuple(
            program(k, port, config) for k, (port, config) in enumerate(zip(node_ports, nodes, strict=True))
        )

    def _supernode(self, k: int, port: int, config: str) -> _Program:
        command = ["flower-supernode", *self._connection(k, "--auth-supernode-private-key"), "--node-config", config]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        return _Program(f"node-{k}", tuple(command), f"http://127.0.0.1:{port}/health")

    def _warm_node(self, k: int, _port: int, config: str) -> _Program:
        control = f"unix:{self.folder}/node-{k}.sock"
        command = [sys.executable, "-m", "tepal.tools.cli.main", "node", *self._connection(k, "--key")]
        return _Program(f"node-{k}", (*command, "--node-config", config, "--control", control), control)

    def _connection(self, k: int, key_option: str) -> list[str]:
        options = ["--superlink", self.relays[k].address if self.relays else self.fleet]
        if not self.secure:
            return [*options, "--insecure"]
        return [*options, "--root-certificates", str(self.root_certificates), key_option, str(self.keys[k])]

    # Processes --------------------------------------------------------------------------------------------------------

    @property
    def superlink(self) -> Process:
        """The SuperLink, as last started."""
        return self._processes[self._superlink.name]

    @property
    def nodes(self) -> tuple[Process, ...]:
        """The SuperNodes, each as last started."""
        return tuple(self._processes[program.name] for program in self._nodes)

    def cache(self, k: int) -> Path:
        """The folder where a client on node k keeps what it has received."""
        return self.folder / f"node-{k}" / "cache"

    def stop_node(self, k: int) -> None:
        """End node k as an administrator would: SIGTERM, and SIGKILL to what is left after its grace for a message."""
        self.nodes[k].stop(60 if self.warm else 5)

    def kill_node(self, k: int) -> None:
        """End node k as a crash of its machine would: SIGKILL to the SuperNode and all that it started."""
        self.nodes[k].kill()

    def start_node(self, k: int, timeout: float = 180) -> None:
        """Start node k again, with the same configuration, key, cache and ports; what is left of it is killed first.

        It is started until the SuperLink takes it, as `restart: always` would do: the SuperLink refuses the registered
        key of a node that was killed until the node has missed its heartbeats, 40 to 60 s later.
        """
        end = time.monotonic() + timeout
        log = self.folder / f"node-{k}.log"
        before = log.stat().st_size
        self._start(self._nodes[k])
        while b"SuperNode ID:" not in log.read_bytes()[before:]:
            if time.monotonic() > end:
                raise TimeoutError(f"node {k} is not connected after {timeout:g} s\n{self.nodes[k].tail()}")
            time.sleep(0.1)
            if not self.nodes[k].running:
                time.sleep(2)
                self._start(self._nodes[k])
        self._wait(self._nodes[k])

    def kill_superlink(self) -> None:
        """SIGKILL to the SuperLink and to the ServerApps that it runs. What it knew is lost."""
        self.superlink.kill()

    def start_superlink(self) -> None:
        """Start the SuperLink again on the same ports, and register the keys of all nodes with it."""
        self._start(self._superlink)
        self._wait(self._superlink)
        self._register()

    def server_apps(self) -> list[psutil.Process]:
        """The live ServerApp processes."""
        return _running(self.superlink, "flwr-serverapp")

    def client_apps(self, k: int) -> list[psutil.Process]:
        """The live ClientApp processes of node k: Flower starts one for each message, a warm node one for each run."""
        if not self.warm:
            return _running(self.nodes[k], "flwr-clientapp")
        status = self.control(k).status()
        return [psutil.Process(process.pid) for process in status.processes if process.role == "executor"]

    def control(self, k: int) -> Control:
        """What speaks to the warm node k."""
        return Control(self._nodes[k].health)

    def start(self, name: str, *command: str) -> Process:
        """Start a process until the block is left, in folders of its own, with its output in `name`.log.

        One of that name is ended first.
        """
        folder = self.folder / name
        (folder / "work").mkdir(parents=True, exist_ok=True)
        environment = _environment(folder / "home") | {
            "TEPAL_CACHE": str(folder / "cache"), "TEPAL_NODE_STATE": str(folder / "state"),
        }  # fmt: skip
        if any(name == program.name for program in self._nodes):
            environment |= self._of_nodes
        if name not in self._inside and any(name == program.name for program in (self._superlink, *self._nodes)):
            environment = self._as_forks(environment)
        log = self.folder / f"{name}.log"
        if name not in self._blocks:
            self._blocks[name] = self._stack.enter_context(contextlib.ExitStack())
        self._blocks[name].close()
        process = started(command, log=log, env=environment, cwd=folder / "work", name=name, grace=5)
        self._processes[name] = self._blocks[name].enter_context(process)
        return self._processes[name]

    def flwr(self, *arguments: str) -> str:
        """Run Flower's command line, to which this SuperLink is the default one; return what it prints."""
        program = shutil.which("flwr", path=self._environment["PATH"]) or "flwr"
        done = subprocess.run(
            [program, *arguments], env=self._environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"flwr {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _as_forks(self, environment: dict[str, str]) -> dict[str, str]:
        return forks.forked(environment) if self._forked else environment

    def _start(self, program: _Program) -> None:
        if program.name in self._processes:
            self._processes[program.name].kill()
        self.start(program.name, *self._inside.get(program.name, ()), *program.command)

    def _wait(self, program: _Program) -> None:
        process = self._processes[program.name]
        if program.health.startswith("unix:"):
            wait_for_node(process, Path(program.health.removeprefix("unix:")), 120)
            return
        context = ssl.create_default_context(cafile=self.root_certificates) if self.secure else None
        wait_for_http(program.health, timeout=120, process=process, context=context)

    def _register(self) -> None:
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        with open_fleet(self.address, self.root_certificates) as fleet:
            self.node_ids = tuple(
                fleet.register(public_key_to_bytes(load_public_key(Path(f"{key}.pub"))), key.name) for key in self.keys
            )

    def _start_all(self) -> None:
        """Start SuperLink and nodes side by side; with authentication a node comes after its key."""
        self._start(self._superlink)
        if self.secure:
            self._wait(self._superlink)
            self._register()
        for program in self._nodes:
            self._start(program)
        for program in (self._superlink, *self._nodes):
            self._wait(program)

    def _stop_all(self) -> None:
        """End all side by side, nodes by SIGKILL: a node waits seconds before it leaves, for its answers to be read."""
        for run in self._runs:
            run.leave()
        nodes = {program.name for program in self._nodes}
        threads = [
            threading.Thread(target=process.kill if name in nodes else process.stop)
            for name, process in self._processes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # Runs -------------------------------------------------------------------------------------------------------------

    def submit(self, app: Path, run_config: Mapping[str, Value] | None = None, *, timeout: float = 600) -> Submitted:
        """Submit the app in the folder `app`, and return as soon as the SuperLink has accepted it.

        With stock nodes it is submitted by `flwr run`; with warm nodes by the same request, without that process, which
        takes two seconds. The run config goes to Flower as it is: nothing is checked before the ServerApp sees it.
        `timeout` is how long the run is followed.
        """
        folder = self.folder / f"run-{next(self._numbers)}"
        bundle, config = folder / "app", folder / "run-config.toml"
        bundle.mkdir(parents=True)
        stage_app(app, bundle)
        config.write_text(to_toml(run_config or {}))
        clock = Clock(lambda kind, text: None, timeout)
        if self.warm:
            run_id = _submitted(bundle, config, self.address, self.root_certificates)
        else:
            run_id = submit(bundle, config, self.superlink, self._environment, clock.left())
        superlink = self.superlink
        self._runs.append(
            Submitted(
                run_id, folder, clock,
                lambda log: follow(run_id, self.address, superlink, clock, log, self.root_certificates),
            )
        )  # fmt: skip
        return self._runs[-1]

    def run(self, app: Path, run_config: Mapping[str, Value] | None = None, *, timeout: float = 600) -> EndedRun:
        """Submit the app, and wait for the end of its run, good or bad."""
        return self.submit(app, run_config, timeout=timeout).wait()


@contextlib.contextmanager
def loopback(
    nodes: Sequence[str],
    *,
    secure: bool = False,
    relay: bool = False,
    inside: Mapping[str, Sequence[str]] | None = None,
    warm: bool = True,
    spare: bool = False,
    short_heartbeat: bool = False,
    forked: bool = True,
) -> Iterator[Loopback]:
    """Start a SuperLink, and a SuperNode for each of the node configs `nodes`.

    Everything they write is in one temporary folder, which goes with them when the block is left; no process of theirs
    may be left then. Tepal is importable for apps that do not bring it along, as where it is installed.

    Args:
        nodes: The node config of each SuperNode, as `flower-supernode --node-config` takes it.
        secure: TLS on the SuperLink's ports and authenticated SuperNodes, registered under the names site-0, site-1, …
        relay: Each SuperNode reaches the SuperLink through a relay of its own, `relays[k]`.
        inside: Name of a process (superlink, node-0, …) → a command that runs it, such as `unshare` with its arguments.
        warm: The nodes are `tepal node`; else unchanged `flower-supernode`.
        spare: Warm nodes keep a process with torch loaded for the next run, as they do by default: with two cores for
            all, what is not needed had better not be loaded.
        short_heartbeat: The SuperLink notices after at most 20 s that a node has died, not after 60 s.
        forked: Processes are forks of one that has imported torch and the like (`forks`); not where it is the process
            that is looked at, its memory, say.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tepal-loopback-")))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        token = uuid.uuid4().hex
        patch.setenv(MARK, ",".join(filter(None, [os.environ.get(MARK), token])))
        deployment = Loopback(
            stack, folder, nodes, secure=secure, relay=relay, inside=inside or {}, warm=warm, spare=spare,
            short_heartbeat=short_heartbeat, forked=forked,
        )  # fmt: skip
        try:
            deployment._start_all()
            yield deployment
        finally:
            deployment._stop_all()
        assert marked(token) == []
    assert not folder.exists()


def partitions(clients: int) -> list[str]:
    """Node configs of clients that each take a partition of the run's dataset."""
    return [f"partition-id={k} num-partitions={clients}" for k in range(clients)]


def own_data(folder: Path, clients: int) -> list[dict[str, str]]:
    """Node configs of clients site-0, site-1, … with their own data, files in `folder`: every n-th of the digits each.

    What divides a dataset among clients takes seconds to import in each process, and a client with its own data has no
    need of it.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    configs = []
    for k in range(clients):
        path, part = folder / f"site-{k}.npz", slice(k, None, clients)
        np.savez(path, images=(digits.images[part] / 16).astype(np.float32), labels=digits.target[part])
        configs.append({"name": f"site-{k}", "data-path": str(path)})
    return configs


def pairs(config: Mapping[str, str]) -> str:
    """A node config as the command line takes it."""
    return " ".join(f'{key}="{value}"' for key, value in config.items())


def _running(process: Process, program: str) -> list[psutil.Process]:
    found = []
    for candidate in process.tree():
        with contextlib.suppress(psutil.Error):
            if any(Path(part).name == program for part in candidate.cmdline()[:2]):
                found.append(candidate)
    return found


def _submitted(bundle: Path, run_config: Path, address: str, root_certificates: Path | None) -> int:
    """Send the request that `flwr run` sends; return the run's id."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import parse_config_args
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.fab import Fab

    content = build_fab_from_disk(bundle)
    request = StartRunRequest(
        fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
        override_config=user_config_to_proto(parse_config_args([str(run_config)])),
    )
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=root_certificates is None,
        root_certificates=root_certificates.read_bytes() if root_certificates else None,
        interceptors=(),
    )
    with contextlib.closing(client):
        return int(client.StartRun(request).run_id)


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _environment(home: Path) -> dict[str, str]:
    home.mkdir(parents=True, exist_ok=True)
    return flower_environment(home) | {
        "PYTHONPATH": _python_path(),
        "OMP_NUM_THREADS": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    }


def _free_ports(count: int) -> list[int]:
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)
