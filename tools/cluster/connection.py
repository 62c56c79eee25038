"""The connection to a Ray cluster, and what is on its machines."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from importlib.util import find_spec
from threading import Event, Lock, Thread
from typing import TypeVar

from tepal.host.processes import exit_on_signals
from tepal.host.superlink import RunError
from tepal.host.text import visible
from tepal.tools.cluster import machine
from tepal.tools.cluster.actors import Actors
from tepal.tools.cluster.inputs import Inputs

NONE = "none"
"""As an address: no cluster, whatever RAY_ADDRESS is."""
_ANSWER = 5.0  # seconds until a cluster's port must answer, and Ray
_ASKING = Lock()  # held by a thread that asks Ray
_Found = TypeVar("_Found")
_PATIENCE = 30.0  # seconds for the versions of a machine


class ClusterLost(RuntimeError):
    """This machine is no longer a part of the cluster: it would hear nothing of jobs any more."""


def address_of(given: str | None) -> str:
    """The address of a cluster for `--ray`, else that in RAY_ADDRESS; "": no cluster.

    RAY_ADDRESS may also be that of a dashboard, for Ray's own commands, or "local": these are no clusters to join.
    Raises ValueError for an address that is given and cannot be joined.
    """
    if given is None:
        of_environment = os.environ.get("RAY_ADDRESS", "")
        return of_environment if _is_cluster(of_environment) else ""
    if given != NONE and not _is_cluster(given):
        raise ValueError(
            f"--ray {given}: expected HOST:PORT of a cluster that this machine is a part of, or auto. To make it a "
            "part that computes nothing: ray start --address=HOST:PORT --num-cpus=0 --num-gpus=0"
        )
    return "" if given == NONE else given


def _is_cluster(address: str) -> bool:
    return "://" not in address and address not in (NONE, "local")


@dataclass(frozen=True)
class Resources:
    """What a machine has, or what Ray reserves for a job: CPU cores, GPUs or a share of one, gigabytes of memory."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: float = 0.0

    def room_for(self, job: Resources) -> int:
        """How many such jobs there is room for. Several share one GPU, or one has several."""
        counts = [int(self.cpus / job.cpus + 1e-9)]
        if job.gpus:
            counts.append(int(self.gpus) * int(1 / job.gpus + 1e-9) if job.gpus <= 1 else int(self.gpus / job.gpus))
        if job.memory:
            counts.append(int(self.memory / job.memory + 1e-9))
        return min(counts)

    def __str__(self) -> str:
        found = [_counted(self.cpus, "core")]
        found += [_counted(self.gpus, "GPU")] if self.gpus else []
        found += [f"{self.memory:.3g} GB of memory"] if self.memory else []
        return " and ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Args:
        address: what the user gave.
        job: what each job has.
        nodes: what each machine has.
        inputs: files that jobs read.
        stopped: set when all jobs are to end.
        actors: those that have no job.
    """

    address: str
    job: Resources
    nodes: tuple[Resources, ...]
    inputs: Inputs
    stopped: Event = field(default_factory=Event)
    actors: Actors = field(default_factory=Actors)

    @property
    def at_once(self) -> int:
        """How many jobs the machines have room for."""
        return sum(node.room_for(self.job) for node in self.nodes)

    def has_room(self) -> bool | None:
        """Whether any machine is there now that could do a job, even if it is busy; None: not known now.

        Raises ClusterLost.
        """
        self.check()
        nodes = _unless_cut(_nodes)
        return None if nodes is None else any(node.room_for(self.job) for node in nodes)

    def check(self) -> None:
        """Raise ClusterLost if this machine is no longer a part of the cluster."""
        import ray

        def is_lost() -> bool:
            own = ray.get_runtime_context().get_node_id()
            return not any(each["Alive"] for each in ray.nodes() if each["NodeID"] == own)

        if _unless_cut(is_lost):
            raise self.lost()

    def lost(self) -> ClusterLost:
        """What is raised if this machine is no longer a part of the cluster."""
        return ClusterLost(
            f"--ray {self.address}: this machine is no longer a part of the cluster. Ray has ended here or on the "
            "head, or the network was cut for so long (a minute, say) that the cluster took it for dead. Start Ray "
            "again, and go on with what is here: --resume, or for a search or an experiment the same command"
        )

    @property
    def contents(self) -> str:
        """Its machines that compute, in words."""
        computing = [node for node in self.nodes if node.cpus]
        memory = sum(node.memory for node in computing) if self.job.memory else 0.0
        total = Resources(sum(node.cpus for node in computing), sum(node.gpus for node in self.nodes), memory)
        return f"{self.address}: {_counted(len(computing), 'machine')} with {total}"

    @property
    def description(self) -> str:
        """One line on the cluster, and on what a job has of it."""
        return f"Engine: Ray cluster {self.contents}; {self._jobs(self.at_once, 'run')}"

    def described_for_clients(self, count: int) -> str:
        """The same for a run of which `count` clients train at once."""
        return f"Engine: Ray cluster {self.contents}; the server here, {self._jobs(count, 'client')}"

    def _jobs(self, count: int, what: str) -> str:
        return f"{_counted(count, what)} at once, each with {self.job}"


@contextmanager
def connected(address: str, cpus: float | None = None, gpus: float = 0, memory: float = 0) -> Iterator[Cluster]:
    """Connect to a cluster for a block. Its end stops all that was started on it.

    Args:
        address: as of `address_of`, not "".
        cpus: cores of a job; one by default.
        gpus: share of a GPU of a job.
        memory: gigabytes that Ray reserves for a job, so that no more begin on a machine than it has memory for.

    Raises RunError if there is no cluster, if none of its machines has room for a job, and for a ClusterLost.
    """
    if find_spec("ray") is None:
        raise RunError(
            f"--ray {address} needs Ray: pip install 'tepal[ray]' (in a checkout pip install -e '.[ray]'). Without "
            "--ray the address is that of RAY_ADDRESS; --ray none computes on this machine"
        )
    for option, value in (("--cpus", cpus), ("--gpus", gpus)):
        if value and value > 1 and value != int(value):
            raise RunError(f"{option} {value:g}: on a Ray cluster what is more than 1 must be a whole number")
    _check_answers(address)
    if address == "auto" and not _is_cluster(os.environ.get("RAY_ADDRESS", "")):
        os.environ.pop("RAY_ADDRESS", None)  # Ray would take it
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a call after the end would start a Ray of its own
    import ray

    # The machines have no code of this project: what they run first is sent as it stands.
    ray.cloudpickle.register_pickle_by_value(machine)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # on what Ray does with GPUs that were not asked for
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, error) from error
    except ray.exceptions.AuthenticationError as error:
        reason = _first_line(error).partition(". ")[0]
        raise RunError(
            f"--ray {address}: the cluster and this machine do not have the same token ({reason}). Where "
            "RAY_AUTH_MODE is token, all machines need it: write what `ray get-auth-token` prints on the head to "
            "~/.ray/auth_token here, or set RAY_AUTH_TOKEN to it"
        ) from error
    except ray.exceptions.RayError as error:
        raise _no_cluster(address, error) from error
    try:
        nodes = _nodes()
        with exit_on_signals(), Inputs() as inputs:  # Ray has set a handler for SIGTERM, and none for SIGHUP
            asked_for = Resources(1.0 if cpus is None else cpus, gpus, memory)
            cluster = Cluster(address, asked_for, nodes, inputs, inputs.stopped)
            if not cluster.at_once:
                asked = f"--cpus {cluster.job.cpus:g} --gpus {gpus:g}{f' --memory {memory:g}' if memory else ''}"
                values = zip(*map(astuple, nodes), strict=True)
                largest = Resources(*(max(each) for each in values))
                raise RunError(
                    f"--ray {address}: no machine of this cluster has room for a run with {asked}. The largest have "
                    f"{largest if memory else replace(largest, memory=0.0)}"
                )
            try:
                yield cluster
            except ClusterLost as error:
                raise RunError(str(error)) from error
            finally:
                cluster.stopped.set()  # threads must not ask Ray for anything after this
                cluster.actors.close()
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise RunError if nothing listens at HOST:PORT. Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> RunError:
    if (said := " ".join(str(error).split())).startswith("Version mismatch"):
        return RunError(f"--ray {address}: {visible(said)}. Install the cluster's versions of both here")
    return RunError(
        f"--ray {address}: no cluster answers there, or this machine is not a part of it ({_first_line(error)}). See "
        "`ray status`; a machine joins with ray start --address=HOST:PORT, and with --num-cpus=0 --num-gpus=0 it "
        "computes nothing itself. Without --ray the address is that of RAY_ADDRESS; --ray none computes on this machine"
    )


def _unless_cut(call: Callable[[], _Found]) -> _Found | None:
    """What a call of Ray returns; None if there is no answer now. It may wait for as long as the network is cut."""
    found = list[_Found]()

    def ask() -> None:
        try:
            with suppress(Exception):  # Ray's are of many kinds
                found.append(call())
        finally:
            _ASKING.release()

    if not _ASKING.acquire(timeout=_ANSWER):  # another thread waits for an answer
        return None
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER)
    return found[0] if found else None


def _nodes() -> tuple[Resources, ...]:
    """What each machine that is alive has."""
    import ray

    resources = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    return tuple(
        Resources(float(each.get("CPU", 0)), float(each.get("GPU", 0)), each.get("memory", 0) / 1e9)
        for each in resources
    )


def _counted(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# --- versions -------------------------------------------------------------------------------------------------------


def versions_by_machine() -> dict[str, Mapping[str, str] | str]:
    """The versions (see `machine.versions`) on each machine of the cluster that has cores, or why they are unknown."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(machine.versions)
    asked = {
        f"{each['NodeManagerHostname']} ({each['NodeManagerAddress']}:{each['NodeManagerPort']})": remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)
        ).remote()
        for each in ray.nodes()
        if each["Alive"] and each["Resources"].get("CPU")
    }
    found = dict[str, Mapping[str, str] | str]()
    for name, reference in asked.items():
        try:
            found[name] = ray.get(reference, timeout=_PATIENCE)
        except Exception as error:  # Ray's are of many kinds
            found[name] = _first_line(error)
    return found
