"""A whole deployment on this machine: a SuperLink and warm nodes as real processes, with TLS and registered keys.

`tepal simulate` tests a method; this tests a deployment, with the same app and the same protocols as between machines.
All credentials and processes are temporary.
"""

from __future__ import annotations

import contextlib
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from joblib import cpu_count

from tepal.client_app.node.service import Control
from tepal.host.processes import (
    Process,
    ProcessError,
    flower_environment,
    free_port,
    started,
    wait_for_http,
    wait_for_log,
)
from tepal.host.site import read_site
from tepal.host.superlink import Clock, connect, follow, submit
from tepal.host.toml import Value, to_toml
from tepal.tools.deploy.fleet import align, open_fleet
from tepal.tools.deploy.provision import make
from tepal.tools.deploy.settings import Settings, superlink_command
from tepal.tools.simulation.engine import Engine, RunRequest

_START = 120.0  # seconds within which SuperLink and nodes must start
_GRACE = 5.0  # seconds within which they must end
# Variables of `tepal node`, with those that begin with TEPAL_NODE_.
_OF_A_NODE = {"TEPAL_SITE", "TEPAL_SUPERLINK", "TEPAL_ROOT_CERTIFICATES", "TEPAL_INSECURE", "TEPAL_LOG_FORMAT"}
_SPARE = "TEPAL_NODE_SPARE"  # of all nodes of a machine: how much of its memory they take


class LoopbackEngine(Engine):
    """Runs a Flower app on a deployment of its own, which is started for the run and stopped after it.

    Args:
        app: folder of the app.
        clients: number of clients; each is a `tepal node`, registered as site-1, site-2, …
        node_configs: each client's, in order; by default a client gets its partition of the run's dataset.
        cache: folder of the clients' caches (default: $TEPAL_CACHE, else a temporary one).

    Raises ValueError for an argument out of range.
    """

    kind = "a deployment on this machine"
    _one_run = True

    def __init__(
        self, app: Path, clients: int, node_configs: Sequence[Mapping[str, Value]] = (), *, cache: Path | None = None
    ) -> None:
        super().__init__(app, clients, cache=cache)
        if node_configs and len(node_configs) != clients:
            raise ValueError(f"there are {len(node_configs)} node configs for {clients} clients")
        self._configs = node_configs or [{"partition-id": k, "num-partitions": clients} for k in range(clients)]

    def _run(self, run: RunRequest) -> tuple[int, str, str]:
        clock = run.clock
        with deployment(self._folder, self._configs, clock, run.cache) as running:
            clock.stage("Submitting the app ...")
            run_id = submit(self._bundle, run.changes, running.superlink, running.environment, clock.left(120))
            clock.stage(f"Run {run_id} with {self.clients} clients ...")
            status, details = follow(
                run_id, running.address, running.superlink, clock, run.log, running.root_certificates
            )
            clock.stage(f"Run {run_id}: {status}")
        return run_id, status, details


@dataclass(frozen=True)
class Deployment:
    """A running SuperLink and its nodes. With `environment` Flower's commands find this SuperLink."""

    superlink: Process
    nodes: tuple[Process, ...]
    address: str
    root_certificates: Path
    environment: Mapping[str, str]


@contextlib.contextmanager
def deployment(
    folder: Path,
    node_configs: Sequence[Mapping[str, Value]],
    clock: Clock,
    cache: Path,
    *,
    warm: bool = True,
    stock: bool = False,
) -> Iterator[Deployment]:
    """Run a SuperLink and a node for each node config during the block, which begins when all are connected.

    They write to `folder`, and clients' caches are in `cache`. Nodes are `tepal node` if `warm`, else Flower's own
    `flower-supernode`. `stock` leaves Flower's settings unchanged.
    """
    sites = [f"site-{k}" for k in range(1, len(node_configs) + 1)]
    port, fleet_port = free_port(), free_port()
    clock.stage("Making certificates and keys ...")
    made = make(folder / "fleet", hosts=["localhost"], sites=sites, port=fleet_port, unpacked=True)
    settings = Settings(
        state=folder, credentials=made.server, fleet=f"127.0.0.1:{fleet_port}", host="127.0.0.1", port=port
    )
    address, trusted = settings.control, made.server.root_certificates
    environment = flower_environment(folder / "home") | ({} if stock else {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"})
    # The nodes share this machine's cores; more threads than cores make training many times slower.
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, cpu_count() // len(sites)))
    connect(folder / "home", address, trusted)
    with contextlib.ExitStack() as stack:
        clock.stage("Starting a SuperLink ...")
        process = started(
            superlink_command(settings),
            log=folder / "superlink.log", env=environment, cwd=folder / "work", grace=_GRACE, folder=folder,
        )  # fmt: skip
        superlink = stack.enter_context(process)
        wait_for_http(
            f"https://{address}/health", timeout=clock.left(_START), process=superlink,
            context=ssl.create_default_context(cafile=trusted),
        )  # fmt: skip
        with open_fleet(address, trusted) as fleet:
            for result in align(fleet, made.server):
                if result.problem:
                    raise ProcessError(f"{result.site} cannot be registered: {result.problem}")
        clock.stage(f"Starting {len(sites)} nodes ...")
        nodes, of_nodes = [], _without_options(environment)
        for site, config in zip(sites, node_configs, strict=True):
            command = (_node if warm else _supernode)(made.unpacked(site), folder / f"{site}.sock", config)
            process = started(
                command, log=folder / f"{site}.log", env=of_nodes | {"TEPAL_CACHE": str(cache / site)},
                cwd=folder / "work", name=site, grace=_GRACE, folder=folder,
            )  # fmt: skip
            nodes.append(stack.enter_context(process))
        for node, site in zip(nodes, sites, strict=True):
            if warm:
                wait_for_node(node, folder / f"{site}.sock", clock.left(_START))
            else:
                wait_for_log(node, "SuperNode ID:", clock.left(_START))
        try:
            yield Deployment(superlink, tuple(nodes), address, trusted, environment)
        finally:
            # No server waits for their answers any more, and their SuperLink ends with them: they need not sign off.
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(lambda node: node.kill(), nodes))


def wait_for_node(process: Process, control: Path, timeout: float) -> None:
    """Wait until a node is connected. Raises `ProcessError` if it ended, `TimeoutError` after `timeout` seconds."""
    end = time.monotonic() + timeout
    with contextlib.closing(Control(f"unix:{control}")) as asked:
        while True:
            problem = "it does not answer"
            with contextlib.suppress(ConnectionError):
                if asked.healthy():
                    return
                problem = asked.status().problem
            if not process.running:
                raise ProcessError(f"{process.name} ended with status {process.returncode}.\n{process.tail()}")
            if time.monotonic() > end:
                tail = process.tail()
                raise TimeoutError(f"{process.name} is not connected after {timeout:.0f} s: {problem}\n{tail}")
            time.sleep(0.05)


def _without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the options of `tepal node`, which may be set for another node of this machine."""
    options = {name for name in environment if name in _OF_A_NODE or name.startswith("TEPAL_NODE_")} - {_SPARE}
    return {name: value for name, value in environment.items() if name not in options}


def _node(site: Path, control: Path, node_config: Mapping[str, Value]) -> list[str]:
    command = [sys.executable, "-m", "tepal.tools.cli.main", "node", "--site", str(site)]
    command += ["--control", f"unix:{control}", "--state", str(control.with_suffix(""))]
    return [*command, "--node-config", _config_file(control, node_config)]


def _supernode(folder: Path, control: Path, node_config: Mapping[str, Value]) -> list[str]:
    site = read_site(folder)
    command = ["flower-supernode", "--superlink", site.superlink, "--root-certificates", str(site.root_certificates)]
    command += ["--auth-supernode-private-key", str(site.key), "--host", "127.0.0.1", "--port", str(free_port())]
    return [*command, "--node-config", _config_file(control, {"name": site.name, **node_config})]


def _config_file(control: Path, config: Mapping[str, Value]) -> str:
    """Write a node's config to a TOML file next to its control socket; return the file's path, for `--node-config`.

    Flower's parser of 'key=value' pairs ends a text at the first quote of its kind, so pairs cannot express every text.
    """
    path = control.with_suffix(".toml")
    path.write_text(to_toml(config), encoding="utf-8")
    return str(path)
