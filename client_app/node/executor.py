"""The executor: takes tasks from the SuperNode, one at a time, and passes them to worker processes.

Each run has its own worker, so that apps of the same package name are not imported into one process, and the memory is
freed at the end of a run. A spare worker, which has imported torch, waits for the next run.
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from logging import getLogger
from pathlib import Path
from typing import Any

import psutil
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType

from tepal.client_app.node.child import Child
from tepal.client_app.node.settings import NodeSettings
from tepal.host.flower.runtime import RuntimeClient, RuntimeFailed, RuntimeRefused
from tepal.host.limits import Limits
from tepal.host.processes import MARK, marked

log = getLogger("flwr")

_LOOK_AGAIN = 2.0  # seconds without a message from the SuperNode, after which it is asked for a task
_HEARTBEAT = 10.0  # seconds between two heartbeats of a task, which the SuperNode gives up after 60
_PATIENCE = 5.0  # seconds for the SuperNode to answer; `problem` and the end of the node do not wait for longer
_STOPPING = 2.0  # seconds for a worker to end by itself, or to say that it has answered
_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)  # seconds before a worker is started again, by the number that died in a row
_QUIET = 3.0  # seconds without a message, after which a spare worker is started
_SICK = 3  # number of workers, dead in a row before they were ready, from which the executor is not healthy


class Worker(Child):
    """A worker process. `run`: id of the run that it works for; None while it is spare.

    Raises:
        OSError: the process, or its folder, cannot be made.
    """

    def __init__(
        self, name: str, within: Path, environment: Mapping[str, str], memory_limit: int, preload: Iterable[str]
    ) -> None:
        self.name = name
        self.run: int | None = None
        self.ready = False
        self.worked_at = time.monotonic()
        self.events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=within))
        self._mark = uuid.uuid4().hex
        marks = ",".join(filter(None, [environment.get(MARK), self._mark]))
        variables = {**environment, "TMPDIR": str(self._folder), MARK: marks}
        try:
            super().__init__("worker", str(self._folder), str(memory_limit), *preload, environment=variables)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        # If memory runs out, the system must kill the app and not the node.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("500", encoding="ascii")

    def stop(self, *, now: bool = False) -> None:
        """End the process and those that it has started, and remove its folder. `now`: without waiting for it."""
        self.link.close()  # the worker ends when its link is closed
        if not now:
            self.wait(_STOPPING)
        self.kill()
        for left in marked(self._mark):  # processes that the app has started in other sessions
            with contextlib.suppress(psutil.Error):
                left.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        for event in self.link:
            self.ready = True  # a worker sends nothing before it is ready
            if event["event"] != "ready":
                self.events.put(event)
        self.events.put(None)


@dataclass
class MessageTask:
    """The message that is being answered.

    `began`, `answered` and `done` are times (`time.monotonic`): the app receives the message, the app has answered, and
    the SuperNode has the answer; 0 until then.
    """

    run: int
    worker: Worker
    since: float = field(default_factory=time.monotonic)
    type: str = ""
    round: str = ""
    began: float = 0.0
    answered: float = 0.0
    done: float = 0.0


class _NoAnswer(Exception):
    """The ClientApp will not answer its message; the text has the reason."""


class Executor:
    """Answers messages with worker processes. `run` is called in its own thread, and returns after `stop`.

    Args:
        address: path of the socket at which the SuperNode serves its Runtime API; is set again for another SuperNode.
        secret: authenticates the executor at the SuperNode.
        folder: for the workers' files; each worker has a folder in it, which is removed with the worker.
        environment: variables of the workers.
        settings: of the node.
    """

    def __init__(
        self, address: str, secret: bytes, folder: Path, environment: Mapping[str, str], settings: NodeSettings
    ) -> None:
        self.address = address
        self.answered = self.failed = self.died = 0
        self.task: MessageTask | None = None
        self.finished: queue.SimpleQueue[MessageTask] = queue.SimpleQueue()
        self._secret = secret
        self._folder = folder
        self._environment = environment
        self._settings = settings
        self._idle, self._grace = settings.idle, settings.grace
        self._limits = Limits()
        self._killed = self._limits.killed
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._numbers = count(1)
        self._bell = threading.Event()
        self._stop_at: float | None = None
        self._broken = False
        self._stillborn = 0
        self._next_start = 0.0
        self._alive_at = time.monotonic()

    # For other threads ------------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why the executor cannot work; "" if it can."""
        if time.monotonic() - self._alive_at > 3 * _HEARTBEAT:
            return "its executor does not respond"
        if self._stillborn >= _SICK:
            return f"the last {self._stillborn} processes for ClientApps died before they were ready"
        return ""

    @property
    def workers(self) -> list[tuple[str, Worker]]:
        """(role, worker) of all workers."""
        return [(role, w) for role, w in (("executor", self._worker), ("spare", self._spare)) if w is not None]

    def ring(self) -> None:
        """Wake the executor: the SuperNode has a task."""
        self._bell.set()

    def supernode_died(self) -> None:
        """Give up the current message, whose answer cannot be delivered any more."""
        self._broken = self.task is not None

    def stop(self, *, now: bool = False) -> None:
        """End `run` when the current message is answered or the grace period is over. `now`: without a grace period."""
        if self._stop_at is None or now:
            self._stop_at = time.monotonic() + (0 if now else self._grace)
        self._bell.set()

    # The executor's thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take tasks and have workers answer them, until `stop`."""
        try:
            while self._stop_at is None:
                address = self.address
                with contextlib.closing(RuntimeClient(address, self._secret.hex(), _PATIENCE)) as client:
                    while self._stop_at is None and address == self.address:
                        self._alive_at = time.monotonic()
                        self._tidy()
                        self._bell.wait(_LOOK_AGAIN)
                        self._bell.clear()
                        while self._stop_at is None and (acquired := self._acquire(client)) is not None:
                            self._work(*acquired)
        finally:
            for _, worker in self.workers:
                worker.stop(now=True)
            self._worker = self._spare = None

    def _acquire(self, client: RuntimeClient) -> tuple[int, str] | None:
        try:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except (OSError, RuntimeRefused, RuntimeFailed):  # the node's parent process restarts a SuperNode that ended
            return None
        return (found.task.run_id, found.token) if found.HasField("task") and found.token else None

    def _work(self, run: int, token: str) -> None:
        with contextlib.closing(RuntimeClient(self.address, token, _PATIENCE)) as client:
            try:
                task = self.task = MessageTask(run, self._worker_for(run))
            except OSError as error:  # no disk, no memory, no more processes
                self.failed += 1
                log.error("A process for the ClientApp of run %d cannot be started: %s.", run, error)
                self._hand_back(client, f"this node cannot start a process for the ClientApp: {error}")
                return
            task.worker.link.send("work", address=self.address, token=token)
            try:
                if self._watch(task, client):
                    self.answered += 1
                else:
                    self.failed += 1  # the app raised, which the answer reports
            except _NoAnswer as end:
                self.failed += 1
                log.error("No answer from the ClientApp in run %d: %s.", run, end)
                task.worker.stop(now=True)
                self._worker = None
                if not self._broken:
                    self._hand_back(client, str(end))
            task.worker.worked_at = time.monotonic()
        self.finished.put(task)
        self.task, self._broken = None, False

    def _watch(self, task: MessageTask, client: RuntimeClient) -> bool:
        """Wait until the worker has answered; return whether it answered without an error. Raises `_NoAnswer`."""
        beat, end = time.monotonic() + _HEARTBEAT, math.inf
        while True:
            self._alive_at = now = time.monotonic()
            if self._broken:
                raise _NoAnswer("the SuperNode ended")
            if self._stop_at is not None and now > self._stop_at:
                raise _NoAnswer(f"this node is being stopped, and the app has not answered within {self._grace:g} s")
            if now > beat:
                beat = now + _HEARTBEAT
                if not self._beat(client):
                    # The SuperNode also refuses a task that was answered just now; `done` is then about to come.
                    beat, end = math.inf, time.monotonic() + _STOPPING
            try:
                event = task.worker.events.get(timeout=max(0.0, min(0.5, end - now)))
            except queue.Empty:
                if time.monotonic() >= end:
                    raise _NoAnswer("the SuperNode has given up the task") from None
                continue
            if event is None:
                self.died += 1
                self._stillborn = 0 if task.worker.ready else self._stillborn + 1
                raise _NoAnswer(self._why(task.worker))
            now = time.monotonic()
            match event["event"]:
                case "began":
                    self._stillborn = 0
                    task.type, task.round, task.began = event["type"], event["round"], now
                case "answered":
                    task.answered = now
                case "done":
                    task.done = now
                    return bool(event["ok"])

    def _why(self, worker: Worker) -> str:
        """Why a worker ended, as far as it is known."""
        status = worker.wait(1.0)
        if status == -signal.SIGKILL and self._limits.killed > self._killed:
            self._killed = self._limits.killed
            limit = self._limits.memory
            of = f"the {limit / 2**20:,.0f} MB of this node" if limit else "this machine's memory"
            return f"the ClientApp's process was killed: {of} ran out"
        if status == -signal.SIGKILL:
            return "the ClientApp's process was killed (SIGKILL), as the system does if memory runs out"
        if status is not None and status < 0:
            return f"the ClientApp's process was ended by {signal.Signals(-status).name}"
        return f"the ClientApp's process ended with status {status}"

    def _beat(self, client: RuntimeClient) -> bool:
        """Send a heartbeat of the task; return False if the SuperNode has given the task up."""
        try:
            return bool(client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except RuntimeRefused:
            return False
        except (OSError, RuntimeFailed):
            return True  # it does not answer now; the node's parent process watches it

    def _hand_back(self, client: RuntimeClient, reason: str) -> None:
        """Have the SuperNode answer the message with an error, as its `PromptState` does for failed tasks."""
        try:
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason))
        except (OSError, RuntimeRefused, RuntimeFailed) as error:
            log.warning("The failure of a message cannot be reported to the SuperNode: %s", error)

    # Workers ----------------------------------------------------------------------------------------------------------

    def _worker_for(self, run: int) -> Worker:
        """The run's worker; the spare worker or a new one replaces that of another run."""
        if self._worker is not None and (self._worker.run != run or self._worker.status is not None):
            self._worker.stop()
            self._worker = None
        if self._worker is None:
            if self._spare is not None and self._spare.status is None:
                self._worker, self._spare = self._spare, None
            else:
                self._worker = self._start()
            self._worker.run = run
        return self._worker

    def _tidy(self) -> None:
        """Between messages: end a worker that is idle or dead, and start a spare one."""
        worker, spare = self._worker, self._spare
        if worker is not None and (worker.status is not None or time.monotonic() - worker.worked_at > self._idle):
            worker.stop()
            self._worker = worker = None
        if spare is not None and spare.status is not None:
            self._stillborn = 0 if spare.ready else self._stillborn + 1
            self.died += 1
            log.error("A process for ClientApps died before its first message: %s.", self._why(spare))
            spare.stop(now=True)
            self._spare = None
            self._next_start = time.monotonic() + _PAUSES[min(self._stillborn, len(_PAUSES) - 1)]
        if spare is not None and spare.ready:
            self._stillborn = 0
        quiet = worker is None or time.monotonic() - worker.worked_at > _QUIET  # starting must not slow down a run
        if self._settings.spare and self._spare is None and quiet and time.monotonic() >= self._next_start:
            try:
                self._spare = self._start()
            except OSError as error:
                self._stillborn += 1
                self._next_start = time.monotonic() + _PAUSES[min(self._stillborn, len(_PAUSES) - 1)]
                log.error("A process for ClientApps cannot be started: %s.", error)

    def _start(self) -> Worker:
        name = f"worker-{next(self._numbers)}"
        return Worker(name, self._folder, self._environment, self._settings.memory_limit, self._settings.preload)
