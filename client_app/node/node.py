"""The node's parent process: keeps SuperNode and executor alive, and ends them without losing a message."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from types import FrameType

import psutil
from joblib import cpu_count

from tepal.client_app.node import node_pb2
from tepal.client_app.node.executor import Executor
from tepal.client_app.node.metrics import node_families
from tepal.client_app.node.service import Services
from tepal.host.files import locked
from tepal.host.flower.link import Link, command
from tepal.host.flower.patches import require_flower
from tepal.host.metrics import serving
from tepal.host.processes import flower_environment, free_port
from tepal.host.toml import Value, to_toml

log = getLogger("flwr")

_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before the SuperNode is started again, by how often it ended
_LONG_ENOUGH = 60.0  # seconds after which a SuperNode counts as one that ran
_SILENCE = 20.0  # seconds without word from the SuperLink after which it counts as unreachable
_SEE_OFF = 15.0  # seconds for sending the last answer to the SuperLink
_LAST_WORD = 5.0  # seconds that a SuperNode has for saying goodbye
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class NodeSettings:
    """What a node is started with. Seconds and bytes throughout.

    Args:
        superlink: address of the SuperLink's Fleet API, "host:port".
        root_certificates: PEM file of the authority that signed the SuperLink's certificate; None: the system's.
        insecure: no TLS, for trying things out on one machine.
        key: this node's private key, which the SuperLink knows; None for a node without a name.
        name: what it is called in logs and status.
        node_config: what the ClientApp finds in its context.
        folder: for what the node writes while it runs; None for a temporary one.
        control: address for `tepal node status` and `drain`: of this machine alone, or "unix:/path".
        health: address for the standard health service, for others to ask; "" for none.
        poll: the longest pause between two looks for a message.
        idle: without a message for so long, the memory of the last run's process is given back.
        grace: what a message in hand gets when the node is stopped.
        spare: keep a process with torch loaded for the next run.
        memory_limit: private memory of a process that runs a ClientApp; 0 for none but the machine's.
        metrics: address at which Prometheus finds what the node does; "" for none.
        preload: modules that the spare process imports, where they are installed.
    """

    superlink: str
    root_certificates: Path | None = None
    insecure: bool = False
    key: Path | None = None
    name: str = ""
    node_config: Mapping[str, Value] = field(default_factory=dict)
    folder: Path | None = None
    control: str = "127.0.0.1:9095"
    health: str = ""
    poll: float = 1.0
    idle: float = 900.0
    grace: float = 30.0
    spare: bool = True
    memory_limit: int = 0
    metrics: str = ""
    preload: tuple[str, ...] = ("torch",)


def run_node(settings: NodeSettings) -> None:
    """Run a node until SIGTERM or SIGINT; the message in hand is finished, or handed back with an error.

    Raises `UnsupportedFlowerVersion` on another version of Flower, `OSError` where an address is taken.
    """
    require_flower()
    with _folder(settings.folder) as folder:
        Node(settings, folder).run()


class Node:
    """One node. `folder` is its own; all in it goes with it."""

    def __init__(self, settings: NodeSettings, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._hurry = False
        self._draining = False
        secret = secrets.token_bytes(32)
        (folder / "secret").touch(0o600)
        (folder / "secret").write_bytes(secret)
        self._supernode: _SuperNode | None = None
        self._supernodes_died = self._in_a_row = 0
        self._next_start = 0.0
        self._problem = ""
        self._stages: dict[str, tuple[int, float]] = {}
        """Of answered messages: how many went each stage of their way, and the sum of their seconds."""
        self._environment = _environment(folder)
        self._executor = Executor(
            "127.0.0.1:0",  # known when there is a SuperNode
            secret,
            folder,
            self._environment,
            preload=settings.preload,
            spare=settings.spare,
            memory_limit=settings.memory_limit,
            idle=settings.idle,
            grace=settings.grace,
        )

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. From the main thread."""
        with serving(self.settings.metrics, lambda: node_families(self.status(), dict(self._stages))):
            self._run()

    def _run(self) -> None:
        services = Services(self.settings.control, self.settings.health, status=self.status, drain=self.drain)
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        executor = threading.Thread(target=self._executor.run, name="executor")
        try:
            executor.start()
            while not self._stop.wait(0.2):
                if not executor.is_alive():
                    raise RuntimeError("the executor's thread ended")
                self._look_after_supernode()
                services.serving(self.healthy)
            services.serving(False)
            self._finish(executor)
        finally:
            self._executor.stop()
            if self._supernode is not None:
                self._supernode.stop()
            executor.join()
            services.stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def state(self) -> str:
        """One of the states in node.proto."""
        supernode = self._supernode
        if self._stop.is_set():
            return "stopping"
        if self._draining:
            return "drained" if supernode is None else "draining"
        if supernode is None or supernode.refused:
            return "refused" if self._problem else "starting"
        if supernode.node_id is None:
            return "unreachable" if supernode.lost else "starting"
        return "connected" if supernode.reached else "unreachable"

    @property
    def healthy(self) -> bool:
        """Whether a message that is sent to this node now would be answered."""
        return self.state == "connected" and not self._executor.problem

    def status(self) -> node_pb2.NodeStatus:
        """What `tepal node status` shows."""
        task, supernode, executor = self._executor.task, self._supernode, self._executor
        problems = [executor.problem, self._problem if self.state in ("refused", "starting") else ""]
        if self.state == "unreachable":
            problems.append(f"the SuperLink at {self.settings.superlink} does not answer")
        answer = node_pb2.NodeStatus(
            state=self.state,
            problem="; ".join(filter(None, problems)),
            name=self.settings.name,
            superlink=self.settings.superlink,
            node_id=(supernode.node_id if supernode else 0) or 0,
            uptime_seconds=time.monotonic() - self._started,
            answered=executor.answered,
            failed=executor.failed,
            executors_died=executor.died,
            supernodes_died=self._supernodes_died,
        )
        if task is not None:
            answer.run_id, answer.message_type, answer.round = task.run, task.type or "train", task.round
            answer.message_seconds = time.monotonic() - task.since
        answer.processes.append(_process("node", os.getpid()))
        if supernode is not None:
            answer.processes.append(_process("supernode", supernode.pid))
        for role, worker in executor.workers:
            answer.processes.append(_process(role, worker.pid, worker.run or 0))
        return answer

    def drain(self, undo: bool) -> node_pb2.NodeStatus:
        """Take no further message, finish the one in hand, leave the SuperLink; or come back."""
        log.info("The node %s.", "takes messages again" if undo else "is drained: it takes no further message")
        self._draining = not undo
        if self._supernode is not None:
            self._supernode.hold(not undo)
        return self.status()

    def _look_after_supernode(self) -> None:
        supernode = self._supernode
        if supernode is not None and supernode.status is not None:
            self._executor.supernode_died()
            self._supernodes_died += 1
            self._in_a_row = 0 if time.monotonic() - supernode.since > _LONG_ENOUGH else self._in_a_row + 1
            pause = _PAUSES[min(self._in_a_row, len(_PAUSES) - 1)]
            self._problem = supernode.refused or f"the SuperNode ended with status {supernode.status}"
            log.error("%s. It is tried again in %g s.", _sentence(self._problem), pause)
            supernode.stop()
            self._supernode, self._next_start = None, time.monotonic() + pause
        elif supernode is not None and self._draining and (supernode.held or not self._has_work(supernode)):
            supernode.stop()
            self._supernode = None
        elif supernode is None and not self._draining and time.monotonic() >= self._next_start:
            port = free_port()  # a new one each time: another program may have taken the last
            self._executor.address = f"127.0.0.1:{port}"
            self._supernode = _SuperNode(
                self._options(port), self.settings.poll, self._environment, self._executor, self._stages
            )
        elif supernode is not None and supernode.node_id is not None:
            self._problem = ""

    def _finish(self, executor: threading.Thread) -> None:
        """Take nothing more, let the message in hand be answered within the grace period, and see the answer off."""
        supernode, grace = self._supernode, self.settings.grace
        log.info("The node is stopping%s.", ": it finishes its message first" if self._executor.task else "")
        if supernode is not None:
            supernode.hold(True)
            # The executor works on until the SuperNode says that there is nothing more: a message may be on its way in.
            idle = lambda: supernode.held or not supernode.alive or not self._has_work(supernode)  # noqa: E731
            self._wait(grace, lambda: self._hurry or idle())
        self._executor.stop(now=True)
        executor.join()
        if supernode is not None:  # the answer, or the error in its place, is still to be sent
            self._wait(_SEE_OFF, lambda: supernode.held or not supernode.alive or not supernode.reached)

    def _has_work(self, supernode: _SuperNode) -> bool:
        """Whether there is a message, or can be one on its way in."""
        return self._busy or supernode.reached

    @property
    def _busy(self) -> bool:
        return self._executor.task is not None

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not over() and time.monotonic() < end:
            time.sleep(0.02)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._hurry = self._stop.is_set()  # who asks twice does not want to wait
        self._stop.set()

    def _options(self, port: int) -> list[str]:
        settings = self.settings
        options = ["--superlink", settings.superlink, "--isolation", "process"]
        options += ["--host", "127.0.0.1", "--port", str(port)]
        options += ["--superexec-auth-secret-file", str(self._folder / "secret")]
        options += ["--insecure"] if settings.insecure else []
        options += ["--root-certificates", str(settings.root_certificates)] if settings.root_certificates else []
        options += ["--auth-supernode-private-key", str(settings.key)] if settings.key else []
        if settings.node_config:
            config = self._folder / "node-config.toml"
            config.write_text(to_toml(settings.node_config), encoding="utf-8")
            options += ["--node-config", str(config)]
        return options


class _SuperNode:
    """The SuperNode's process, and what it last said."""

    def __init__(
        self,
        options: list[str],
        poll: float,
        environment: Mapping[str, str],
        executor: Executor,
        stages: dict[str, tuple[int, float]],
    ) -> None:
        self.since = time.monotonic()
        self.node_id: int | None = None
        self.refused = ""
        self.lost = False
        self.held = False
        self._executor = executor
        self._stages = stages
        while not executor.finished.empty():  # answers that the SuperNode before this one did not send
            executor.finished.get()
        self._busy = False
        self._came = self._fetched = 0.0
        self._heard = time.monotonic()
        self._link, there = Link.pair()
        with there:
            self._process = subprocess.Popen(
                command("supernode", str(there.fileno()), str(poll), *options),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        threading.Thread(target=self._listen, name="supernode", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.node_id is not None and self.status is None

    @property
    def reached(self) -> bool:
        """Whether the SuperLink has answered lately, as far as one can know while a message is worked on."""
        return not self.lost and (self._busy or time.monotonic() - self._heard < _SILENCE)

    def hold(self, held: bool) -> None:
        self.held = self.held and held
        self._link.send("hold", held=held)

    def stop(self) -> None:
        """Let it say goodbye to the SuperLink, and end it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORD)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()

    def _listen(self) -> None:
        for event in self._link:
            match event["event"]:
                case "connected":
                    self.node_id = int(event["node"])
                case "refused":
                    self.refused = str(event["reason"])
                case "task":
                    self._executor.ring()
                case "busy":
                    self._busy, self.held, self._came = True, False, time.monotonic()
                case "fetched":
                    self._fetched = time.monotonic()
                case "idle":
                    if self._busy:
                        self._log_times(time.monotonic())
                    self._busy, self.held = False, bool(event["held"])
            self.lost = event["event"] == "lost"
            self._heard = time.monotonic()


    def _log_times(self, sent: float) -> None:
        """Say where the message's time went: its way here, the app, and the way of the answer."""
        try:
            task = self._executor.finished.get(timeout=1)  # it may be a moment behind
        except queue.Empty:
            return
        if task.answered and task.done:
            seconds = {
                "fetch": self._fetched - self._came,
                "hand over": task.began - self._fetched,
                "app": task.answered - task.began,
                "hand back": task.done - task.answered,
                # Two threads look at the clock: of nearly nothing may become less, and a counter must not go back.
                "send": max(0.0, sent - task.done),
            }
            for stage, took in seconds.items():
                count, total = self._stages.get(stage, (0, 0.0))
                self._stages[stage] = count + 1, total + took
            log.info(
                "Answered %s of round %s in %.2f s: %.2f to fetch it, %.2f to hand it to the app, %.2f in the app, "
                "%.2f to hand it back, %.2f to send it.",
                task.type, task.round or "?", sent - self._came, *seconds.values(),
            )  # fmt: skip


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _process(role: str, pid: int, run: int = 0) -> node_pb2.Process:
    resident = 0
    with contextlib.suppress(psutil.Error):
        resident = psutil.Process(pid).memory_info().rss
    return node_pb2.Process(role=role, pid=pid, resident_bytes=resident, run_id=run)


def _environment(folder: Path) -> dict[str, str]:
    """What the SuperNode and the ClientApps run in: nothing calls out, and no more threads than there are cores."""
    home = Path(os.environ.get("FLWR_HOME") or folder / "flower")
    environment = flower_environment(home)
    cpus = str(cpu_count())  # of the container, if it is in one
    return {name: cpus for name in _THREADS} | environment


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A folder of the node's own, in `given` or among the temporary ones; what killed nodes left there is removed."""
    within = given or Path(tempfile.gettempdir())
    within.mkdir(parents=True, exist_ok=True)
    for left in within.glob("tepal-node-*/lock"):
        with contextlib.suppress(OSError), locked(left, BlockingIOError()):  # its node is dead
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="tepal-node-", dir=within))
    try:
        (folder / "new").touch()
        with locked(folder / "new", BlockingIOError()):
            (folder / "new").rename(folder / "lock")  # so that nobody finds it without being locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
