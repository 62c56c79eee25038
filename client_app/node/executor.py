"""Takes tasks from the SuperNode, one at a time, and has worker processes run them.

One worker for each run, so that apps of the same package name do not meet in one process, and memory is given back when
a run is over. Beside it a spare one, which has imported torch and waits for the next run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

import httpx
import psutil
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

from tepal.host.flower.link import Link, command
from tepal.host.limits import Limits
from tepal.host.processes import MARK, marked

log = getLogger("flwr")

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_LOOK_AGAIN = 2.0  # seconds without word from the SuperNode, after which it is asked for a task all the same
_HEARTBEAT = 10.0  # seconds between two signs of life for a task; the SuperNode gives it up after 60
_STOPPING = 2.0  # seconds that a worker has for ending by itself
_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)  # seconds before a worker is started again, by how many died in a row
_QUIET = 3.0  # seconds without a message, after which a spare worker is started
_SICK = 3  # workers that died before they were ready, in a row, after which the executor is not healthy


class Worker:
    """One worker process. `run` is the run that it has worked for, None as long as it is spare."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], mark: str, link: Link, folder: Path) -> None:
        self.name = name
        self.run: int | None = None
        self.ready = False
        self.worked_at = time.monotonic()
        self.events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._process = process
        self._mark = mark
        self._link = link
        self._folder = folder
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, but not longer; return its exit status, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status

    def send(self, address: str, token: str) -> None:
        self._link.send("work", address=address, token=token)

    def stop(self, *, now: bool = False) -> None:
        """End it and what it has started, and remove its folder. `now`: without giving it time."""
        self._link.close()  # it ends when its link does
        if not now:
            self.wait(_STOPPING)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for left in marked(self._mark):  # what the app has started in sessions of its own
            with contextlib.suppress(psutil.Error):
                left.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        for event in self._link:
            self.ready = True  # whatever it says, it says after it is
            if event["event"] != "ready":
                self.events.put(event)
        self.events.put(None)


@dataclass
class Task:
    """The message in hand. `began`, `answered` and `done` say when (`time.monotonic`): the app has the message, its
    answer is there, and the SuperNode has it; 0 for what did not happen."""

    run: int
    worker: Worker
    since: float = field(default_factory=time.monotonic)
    type: str = ""
    round: str = ""
    began: float = 0.0
    answered: float = 0.0
    done: float = 0.0


class _NoAnswer(Exception):
    """The ClientApp has not answered its message, and will not. The text says why."""


class Executor:
    """Runs in a thread of its own (`run`), until `stop`.

    Args:
        address: of the SuperNode's Runtime API, "host:port"; may be set anew with another SuperNode.
        secret: what the SuperNode knows its executor by.
        folder: for what workers unpack and write; each has its own in it, which goes with it.
        environment: of the workers.
        preload: modules that a spare worker imports.
        spare: keep a spare worker.
        memory_limit: bytes of private memory that a worker may have; 0 for no limit but the machine's.
        idle: seconds without a message after which a run's worker is ended, and its memory is free.
        grace: seconds that a message has when the node is told to stop.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        folder: Path,
        environment: Mapping[str, str],
        *,
        preload: tuple[str, ...] = ("torch",),
        spare: bool = True,
        memory_limit: int = 0,
        idle: float = 900.0,
        grace: float = 30.0,
    ) -> None:
        self.address = address
        self.answered = self.failed = self.died = 0
        self.task: Task | None = None
        self.finished: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._secret = secret
        self._folder = folder
        self._environment = dict(environment)
        self._preload = preload
        self._keep_spare = spare
        self._memory_limit = memory_limit
        self._idle = idle
        self._grace = grace
        self._limits = Limits()
        self._killed = self._limits.killed
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._numbers = iter(range(1, 1 << 62))
        self._bell = threading.Event()
        self._stop_at: float | None = None
        self._broken = False
        self._stillborn = 0
        self._next_start = 0.0
        self._alive_at = time.monotonic()

    # What others may ask and say -------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """What is wrong with it; "" if it can work."""
        if time.monotonic() - self._alive_at > 3 * _HEARTBEAT:
            return "its executor does not move"
        if self._stillborn >= _SICK:
            return f"the last {self._stillborn} processes for ClientApps died before they were ready"
        return ""

    @property
    def workers(self) -> list[tuple[str, Worker]]:
        """(role, worker) of all that live."""
        return [(role, w) for role, w in (("executor", self._worker), ("spare", self._spare)) if w is not None]

    def ring(self) -> None:
        """There is a task."""
        self._bell.set()

    def supernode_died(self) -> None:
        """What is in hand can be delivered to nobody any more."""
        self._broken = self.task is not None

    def stop(self, *, now: bool = False) -> None:
        """Finish the message in hand within the grace period, or hand it back; `run` then returns. `now`: no grace."""
        if self._stop_at is None or now:
            self._stop_at = time.monotonic() + (0 if now else self._grace)
        self._bell.set()

    # Its thread -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take tasks and have them run, until `stop`."""
        known_by = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods=[_ACQUIRE])
        try:
            while self._stop_at is None:
                address = self.address
                with self._client(known_by) as client:
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

    def _acquire(self, client: RuntimeHttpClient) -> tuple[int, str] | None:
        try:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except (httpx.HTTPError, ValueError):  # no SuperNode, or not one: the node's parent sees to that
            return None
        return (found.task.run_id, found.token) if found.HasField("task") and found.token else None

    def _work(self, run: int, token: str) -> None:
        with self._client(RuntimeTokenHttpInterceptor(token)) as client:
            try:
                task = self.task = Task(run, self._worker_for(run))
            except OSError as error:  # no disk, no memory, no more processes
                self.failed += 1
                log.error("The ClientApp of run %d has no process: %s.", run, error)
                self._hand_back(client, f"this node cannot start a process for the ClientApp: {error}")
                return
            task.worker.send(self.address, token)
            try:
                if self._watch(task, client):
                    self.answered += 1
                else:
                    self.failed += 1  # the app raised: the answer says so
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

    def _watch(self, task: Task, client: RuntimeHttpClient) -> bool:
        """Wait until the worker has answered; return whether it was without an error. Raises `_NoAnswer`."""
        beat = time.monotonic() + _HEARTBEAT
        while True:
            self._alive_at = now = time.monotonic()
            if self._broken:
                raise _NoAnswer("the SuperNode ended")
            if self._stop_at is not None and now > self._stop_at:
                raise _NoAnswer(f"this node is being stopped, and has waited {self._grace:g} s for the app")
            if now > beat:
                beat = now + _HEARTBEAT
                if not self._beat(client):
                    raise _NoAnswer("the SuperNode has given up the task")
            try:
                event = task.worker.events.get(timeout=0.5)
            except queue.Empty:
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
        """What a dead worker died of, as far as one can tell."""
        status = worker.wait(1.0)
        if status == -signal.SIGKILL and self._limits.killed > self._killed:
            self._killed = self._limits.killed
            limit = self._limits.memory
            of = f"the {limit / 2**20:,.0f} MB of this node" if limit else "this machine's memory"
            return f"the ClientApp's process was killed: {of} ran out"
        if status == -signal.SIGKILL:
            return "the ClientApp's process was killed (SIGKILL), as the system does where memory runs out"
        if status is not None and status < 0:
            return f"the ClientApp's process was ended by {signal.Signals(-status).name}"
        return f"the ClientApp's process ended with status {status}"

    def _beat(self, client: RuntimeHttpClient) -> bool:
        """Tell the SuperNode that the task is worked on; False if it knows the task no more."""
        try:
            return client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
        except httpx.HTTPStatusError as error:
            return error.response.status_code >= 500
        except httpx.HTTPError:
            return True  # it does not answer now; its parent watches it

    def _hand_back(self, client: RuntimeHttpClient, reason: str) -> None:
        """Have the SuperNode answer the message with an error."""
        # `PromptState` answers the message of a task that failed without an answer.
        try:
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason))
        except httpx.HTTPError as error:
            log.warning("The SuperNode cannot be told: %s", error)

    # Workers ----------------------------------------------------------------------------------------------------------

    def _worker_for(self, run: int) -> Worker:
        """The run's worker, or a new one in place of another run's."""
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
        """Between messages: end a worker that is not needed any more, start a spare one."""
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
        quiet = worker is None or time.monotonic() - worker.worked_at > _QUIET  # it shall not slow a run that is on
        if self._keep_spare and self._spare is None and quiet and time.monotonic() >= self._next_start:
            try:
                self._spare = self._start()
            except OSError as error:
                self._stillborn += 1
                self._next_start = time.monotonic() + _PAUSES[min(self._stillborn, len(_PAUSES) - 1)]
                log.error("No process for ClientApps can be started: %s.", error)

    def _start(self) -> Worker:
        name = f"worker-{next(self._numbers)}"
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        link, there = Link.pair()
        mark = uuid.uuid4().hex
        marks = ",".join(filter(None, [self._environment.get(MARK), mark]))
        try:
            number, limit = str(there.fileno()), str(self._memory_limit)
            process = subprocess.Popen(
                command("worker", number, str(folder), limit, *self._preload),
                env={**self._environment, "TMPDIR": str(folder), MARK: marks},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        except OSError:
            link.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            there.close()
        # Where memory runs out the system shall take the app, and not the node.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("500", encoding="ascii")
        return Worker(name, process, mark, link, folder)

    @contextlib.contextmanager
    def _client(self, interceptor: Any) -> Iterator[RuntimeHttpClient]:
        # Without Flower's tries: a SuperNode that is gone for good would keep this thread, and SIGTERM would wait.
        client = RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,  # it is on this machine's loopback interface
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
        )
        with contextlib.closing(client):
            yield client
