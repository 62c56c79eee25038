"""Prepares places on a cluster while the command checks its settings.

A job for each place takes an actor, sends the code and the app to its machine, and starts the process there that
imports the app. A run, or a place of a run's clients, waits for one of these, and then finds an actor among those that
have no job.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from threading import Condition, Thread

from tepal.tools.cluster.connection import Cluster, ClusterLost
from tepal.tools.cluster.job import Job, JobFailed, Tell, done
from tepal.tools.simulation.engine import RunStopped


class Ahead:
    """The places of a command that are being prepared.

    Args:
        cluster: where they are.
        app: folder of the app.
        clients: number of clients of a run.
    """

    def __init__(self, cluster: Cluster, app: Path, clients: int) -> None:
        self._cluster, self._app, self._clients = cluster, app, clients
        self._threads = list[Thread]()
        self._changed = Condition()
        self._unclaimed = 0  # places that no job has waited for
        self._ended = deque[Exception | None]()  # of those that have ended, and no job knows it: the error, if any
        self._waiting = list[Tell]()  # of the jobs that wait
        self._notes, self._stage = list[str](), ""  # those and the last stage that were told while none did

    def start(self, count: int) -> None:
        """Start preparing `count` places, each in a thread. Errors are raised by the jobs that wait for them."""
        self._unclaimed += count
        for _ in range(count):
            self._threads.append(Thread(target=self._make, daemon=True))
            self._threads[-1].start()

    def wait_for_one(self, tell: Tell) -> None:
        """Wait until one more of the places is ready, whichever is first; return at once if none is left.

        Args:
            tell: as for a job.

        Raises:
            JobFailed: machines failed. Other errors are ignored: the job tries again and reports its own.
            RunStopped: `stopped` of the cluster was set.
            ClusterLost: this machine is no longer a part of the cluster.
        """
        with self._changed:
            if not self._unclaimed:
                return
            self._unclaimed -= 1
            notes, self._notes = self._notes, []
            for text in notes:
                tell("note", text)
            if self._stage and not self._ended:
                tell("stage", self._stage)
            self._waiting.append(tell)
            try:
                self._changed.wait_for(lambda: self._ended)
            finally:
                self._waiting.remove(tell)
            error = self._ended.popleft()
        if isinstance(error, RunStopped | ClusterLost) or (isinstance(error, JobFailed) and not error.kind):
            raise error

    def join(self) -> None:
        """Wait for the threads. They end soon after `stopped` of the cluster was set."""
        for thread in self._threads:
            thread.join()

    def _make(self) -> None:
        error: Exception | None = None
        try:
            done(self._cluster, self._job(), self._told)
        except Exception as raised:  # whatever it is, it is kept for one that waits
            error = raised
        with self._changed:
            self._ended.append(error)
            self._changed.notify_all()

    def _told(self, kind: str, text: str) -> None:
        """Tell it to a job that waits; notes and the last stage also to one that waits later."""
        with self._changed:
            if kind == "stage":
                self._stage = text
            if kind != "log" and self._waiting:
                self._waiting[0](kind, text)
            elif kind == "note":
                self._notes.append(text)

    def _job(self) -> Job:
        app = self._cluster.inputs.of_app(self._app)
        return Job(
            function="tepal.tools.cluster.there:start_there", inputs=(app,), renewed=True, ahead=True, pause=0.05,
            arguments=lambda place: {"app": app.on(place.store), "clients": self._clients},
        )  # fmt: skip
