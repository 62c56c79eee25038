"""The node's parent process: restarts SuperNode and executor, and ends them without losing a message."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from logging import getLogger
from pathlib import Path
from types import FrameType

import psutil
from joblib import cpu_count

from tepal.client_app.node import node_pb2
from tepal.client_app.node.child import Child
from tepal.client_app.node.executor import Executor
from tepal.client_app.node.metrics import node_families
from tepal.client_app.node.service import Services
from tepal.client_app.node.settings import NodeSettings
from tepal.host.files import locked, replacing
from tepal.host.flower.patches import require_flower
from tepal.host.metrics import serving
from tepal.host.processes import flower_environment
from tepal.host.toml import to_toml

log = getLogger("flwr")

# Seconds before a restart of the SuperNode, by the number of restarts in a row.
_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_LONG_ENOUGH = 60.0  # seconds after which a restart of the SuperNode is not counted as one in a row
_SILENCE = 20.0  # seconds without an answer of the SuperLink, after which it is unreachable
_LAST_ANSWER = 15.0  # seconds for sending the last answer to the SuperLink
_COLLECTING = 5.0  # seconds for the ServerApp to collect an answer: the SuperLink drops it when its node signs off
_SIGNING_OFF = 5.0  # seconds for a SuperNode to sign off from the SuperLink
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_node(settings: NodeSettings) -> None:
    """Run a node until SIGTERM, SIGINT or SIGHUP; the current message is then answered, if need be with an error.

    Raises:
        UnsupportedFlowerVersion: another version of Flower is installed.
        OSError: an address is in use.
    """
    require_flower()
    with _folder(settings.folder) as folder:
        WarmNode(settings, folder).run()


class WarmNode:
    """A SuperNode, and an executor that keeps the ClientApp in memory. `folder`: for this node's files alone."""

    def __init__(self, settings: NodeSettings, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._hurry = False
        self._draining = False
        self._secret = secrets.token_bytes(32)
        self._supernode: _SuperNode | None = None
        self._supernodes_died = self._in_a_row = 0
        self._numbers = count(1)
        self._next_start = 0.0
        self._problem = ""
        self._stages: dict[str, tuple[int, float]] = {}
        """Stage of an answered message → number of messages, and the sum of their seconds."""
        self._environment = _environment(folder)
        # Its address is set when a SuperNode is started.
        self._executor = Executor("", self._secret, folder, self._environment, settings)

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or SIGHUP. Must be called in the main thread."""
        with serving(self.settings.metrics, lambda: node_families(self.status(), dict(self._stages))):
            self._run()

    def _run(self) -> None:
        services = Services(self.settings.control, self.settings.health, status=self.status, drain=self.drain)
        stopping = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` leaves it
            stopping.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in stopping}
        executor = threading.Thread(target=self._executor.run, name="executor")
        try:
            executor.start()
            while not self._stop.wait(0.2):
                if not executor.is_alive():
                    raise RuntimeError("the executor's thread ended")
                self._keep_supernode()
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
        """A state of node.proto."""
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
        """Whether this node can answer a message now."""
        return self.state == "connected" and not self._executor.problem

    def status(self) -> node_pb2.NodeStatus:
        """The status that `tepal node status` shows."""
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
        """Take no further message, finish the current one and leave the SuperLink; `undo`: connect again."""
        log.info("The node %s.", "takes messages again" if undo else "is drained: it takes no further message")
        self._draining = not undo
        if self._supernode is not None:
            self._supernode.hold(not undo)
        return self.status()

    def _keep_supernode(self) -> None:
        """Start the SuperNode, restart it after it ended, and stop it when the node is drained."""
        supernode = self._supernode
        if supernode is not None and supernode.status is not None:
            self._executor.supernode_died()
            self._supernodes_died += 1
            self._in_a_row = 0 if time.monotonic() - supernode.since > _LONG_ENOUGH else self._in_a_row + 1
            problem = supernode.refused or f"the SuperNode ended with status {supernode.status}"
            supernode.stop()
            self._start_later(problem)
            self._supernode = None
        elif supernode is not None and self._draining and self._may_sign_off(supernode):
            supernode.stop()
            self._supernode = None
        elif supernode is None and not self._draining and time.monotonic() >= self._next_start:
            runtime = self._folder / f"runtime-{next(self._numbers)}"  # a SuperNode that was killed leaves its own
            self._executor.address = str(runtime)
            try:
                self._supernode = _SuperNode(
                    self._options(), self.settings.poll, runtime, self._environment, self._executor, self._stages
                )
            except OSError as error:  # no disk, no memory, no more processes
                self._in_a_row += 1
                self._start_later(f"the SuperNode cannot be started: {error}")
        elif supernode is not None and supernode.node_id is not None:
            self._problem = ""

    def _start_later(self, problem: str) -> None:
        pause = _PAUSES[min(self._in_a_row, len(_PAUSES) - 1)]
        self._problem, self._next_start = problem, time.monotonic() + pause
        log.error("%s. The SuperNode is started again in %g s.", _sentence(problem), pause)

    def _finish(self, executor: threading.Thread) -> None:
        """Take no further message; wait for the current one within the grace period, and until its answer is sent."""
        supernode, grace = self._supernode, self.settings.grace
        log.info("The node is stopping%s.", " after its current message" if self._executor.task else "")
        if supernode is not None:
            supernode.hold(True)
            # The executor goes on until the SuperNode reports that it has no message: one may be arriving.
            idle = lambda: supernode.held or not supernode.alive or not self._has_work(supernode)  # noqa: E731
            self._wait(grace, lambda: self._hurry or idle())
        self._executor.stop(now=True)
        executor.join()
        if supernode is not None:  # the answer, or an error, is still to be sent
            self._wait(_LAST_ANSWER, lambda: supernode.held or not supernode.alive or not supernode.reached)
            self._wait(_COLLECTING, lambda: supernode.collected or not supernode.alive)

    def _has_work(self, supernode: _SuperNode) -> bool:
        """Whether there is a message, or one may be arriving."""
        return self._executor.task is not None or supernode.reached

    def _may_sign_off(self, supernode: _SuperNode) -> bool:
        # In this order: another thread sets `held` after the time from which `collected` counts.
        return (supernode.held or not self._has_work(supernode)) and supernode.collected

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not over() and time.monotonic() < end:
            time.sleep(0.02)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The second signal ends the waiting; of SIGHUP, the end of a terminal sends two.
        self._hurry = self._hurry or (self._stop.is_set() and number != signal.SIGHUP)
        self._stop.set()

    def _options(self) -> list[str]:
        settings = self.settings
        options = ["--superlink", settings.superlink, "--isolation", "process"]
        options += ["--superexec-auth-secret-file", str(self._written("secret", self._secret))]
        options += ["--insecure"] if settings.insecure else []
        options += ["--root-certificates", str(settings.root_certificates)] if settings.root_certificates else []
        options += ["--auth-supernode-private-key", str(settings.key)] if settings.key else []
        if settings.node_config:
            config = to_toml(settings.node_config).encode()
            options += ["--node-config", str(self._written("node-config.toml", config))]
        return options

    def _written(self, name: str, content: bytes) -> Path:
        """Write a file for the next SuperNode, and return its path.

        A cleaner of the temporary folder may have removed the last one after some days, or the whole folder.
        """
        path = self._folder / name
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        private = lambda name, flags: os.open(name, flags, 0o600)  # noqa: E731
        try:
            with replacing(path) as new, open(new, "xb", opener=private) as file:
                file.write(content)
        except OSError:  # the disk is full
            if not path.is_file() or path.read_bytes() != content:
                raise
        return path


class _SuperNode(Child):
    """The SuperNode's process, and its last report."""

    def __init__(
        self,
        options: list[str],
        poll: float,
        runtime: Path,
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
        while not executor.finished.empty():  # answers that the previous SuperNode did not send
            executor.finished.get()
        self._busy = False
        self._announced = self._fetched = 0.0
        self._sent = -_COLLECTING
        self._reported = time.monotonic()
        super().__init__("supernode", str(poll), str(runtime), *options, environment=environment)

    @property
    def alive(self) -> bool:
        return self.node_id is not None and self.status is None

    @property
    def reached(self) -> bool:
        """Whether the SuperLink has answered lately; while a message is being answered, this is assumed."""
        return not self.lost and (self._busy or time.monotonic() - self._reported < _SILENCE)

    @property
    def collected(self) -> bool:
        """Whether the ServerApp has had time to collect the last answer."""
        return time.monotonic() - self._sent >= _COLLECTING

    def hold(self, held: bool) -> None:
        self.held = self.held and held
        self.link.send("hold", held=held)

    def stop(self) -> None:
        """End the process, after it has signed off from the SuperLink."""
        self.interrupt()
        self.wait(_SIGNING_OFF)
        self.kill()
        self.link.close()

    def _listen(self) -> None:
        for event in self.link:
            match event["event"]:
                case "connected":
                    self.node_id = int(event["node"])
                case "refused":
                    self.refused = str(event["reason"])
                case "task":
                    self._executor.ring()
                case "busy":
                    self._busy, self.held, self._announced = True, False, time.monotonic()
                case "fetched":
                    self._fetched = time.monotonic()
                case "idle":
                    if self._busy:
                        self._sent = time.monotonic()
                        self._log_times(self._sent)
                    self._busy, self.held = False, bool(event["held"])
            self.lost = event["event"] == "lost"
            self._reported = time.monotonic()

    def _log_times(self, sent: float) -> None:
        """Log and count the seconds of each stage of a message that was answered."""
        try:
            task = self._executor.finished.get(timeout=1)  # the executor may be a moment later
        except queue.Empty:
            return
        if task.answered and task.done:
            seconds = {
                "fetch": self._fetched - self._announced,
                "hand over": task.began - self._fetched,
                "app": task.answered - task.began,
                "hand back": task.done - task.answered,
                # Two threads read the clock, so that this may be slightly negative; a counter must not decrease.
                "send": max(0.0, sent - task.done),
            }
            for stage, took in seconds.items():
                count, total = self._stages.get(stage, (0, 0.0))
                self._stages[stage] = count + 1, total + took
            log.info(
                "Answered %s of round %s in %.2f s: %.2f to fetch it, %.2f to hand it to the app, %.2f in the app, "
                "%.2f to hand it back, %.2f to send it.",
                task.type, task.round or "?", sent - self._announced, *seconds.values(),
            )  # fmt: skip


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _process(role: str, pid: int, run: int = 0) -> node_pb2.Process:
    resident = 0
    with contextlib.suppress(psutil.Error):
        resident = psutil.Process(pid).memory_info().rss
    return node_pb2.Process(role=role, pid=pid, resident_bytes=resident, run_id=run)


def _environment(folder: Path) -> dict[str, str]:
    """Environment of SuperNode and ClientApps: without telemetry, and with no more threads than cores."""
    home = Path(os.environ.get("FLWR_HOME") or folder / "flower")
    environment = flower_environment(home)
    cpus = str(cpu_count())  # of the container, if it is in one
    return {name: cpus for name in _THREADS} | environment


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A folder for one node, in `given` or the temporary folder, where those of killed nodes are removed."""
    within = given or Path(tempfile.gettempdir())
    within.mkdir(parents=True, exist_ok=True)
    for left in within.glob("tepal-node-*/lock"):
        with contextlib.suppress(OSError), locked(left, BlockingIOError()):  # its node is dead
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="tepal-node-", dir=within))
    try:
        (folder / "new").touch()
        with locked(folder / "new", BlockingIOError()):
            (folder / "new").rename(folder / "lock")  # so that others find it locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
