"""Places on a cluster that are made ready before there are runs: while the command still checks what it was given.

A job for each place takes an actor, sends the code and the app to its machine, and starts the process there that
imports the app. A run, or a place of a run's clients, waits for one of these, and then finds its actor among those that
have no job.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from tepal.tools.cluster.connection import Cluster, ClusterLost
from tepal.tools.cluster.job import Job, JobFailed, Tell, done
from tepal.tools.simulation.engine import RunStopped


class Ahead:
    """The places of a command that are being made ready.

    Args:
        cluster: where they are.
        app: folder of the app.
        clients: number of clients of a run.
    """

    def __init__(self, cluster: Cluster, app: Path, clients: int) -> None:
        self._cluster, self._app, self._clients = cluster, app, clients
        self._begun, self._threads = SimpleQueue[_Place](), list[Thread]()

    def start(self, count: int) -> None:
        """Begin with so many places, each in a thread. Errors are those of the jobs that wait for them."""
        for _ in range(count):
            place = _Place()
            self._threads.append(Thread(target=place.make, args=[self._cluster, self._job], daemon=True))
            self._threads[-1].start()
            self._begun.put(place)

    def wait_for_one(self, tell: Tell) -> None:
        """Wait until a place that was begun, and that no other job has waited for, is ready; if there is none, return.

        Args:
            tell: as for a job.

        Raises:
            JobFailed: machines failed. What else fails there is left to the job itself.
            RunStopped: `stopped` of the cluster was set.
            ClusterLost: this machine is no longer a part of the cluster.
        """
        try:
            place = self._begun.get_nowait()
        except Empty:
            return
        place.wait(tell)

    def join(self) -> None:
        """Wait for the threads. They end soon after `stopped` of the cluster was set."""
        for thread in self._threads:
            thread.join()

    def _job(self) -> Job:
        app = self._cluster.inputs.of_app(self._app)
        return Job(
            function="tepal.tools.cluster.there:start_there", inputs=(app,), renewed=True, ahead=True, pause=0.05,
            arguments=lambda place: {"app": app.on(place.store), "clients": self._clients},
        )  # fmt: skip


class _Place:
    def __init__(self) -> None:
        self._told = SimpleQueue[tuple[str, str] | None]()  # None: it has ended
        self._error: Exception | None = None

    def make(self, cluster: Cluster, job: Callable[[], Job]) -> None:
        try:
            done(cluster, job(), lambda *event: self._told.put(event))
        except Exception as error:  # whatever it is, it is kept for the one that waits
            self._error = error
        finally:
            self._told.put(None)

    def wait(self, tell: Tell) -> None:
        """Wait until it is ready or has failed. Raises as `Ahead.wait_for_one`."""
        for kind, text in iter(self._told.get, None):
            if kind != "log":
                tell(kind, text)
        failed = isinstance(self._error, JobFailed) and not self._error.kind
        if self._error is not None and (failed or isinstance(self._error, RunStopped | ClusterLost)):
            raise self._error
