"""The engine of one run whose clients train on the machines of a Ray cluster; its server is on this machine.

Each client has its machine, where its cached parts stay. Messages and replies are files on their way (see
`tepal.host.request_files`). A client whose machine is lost goes on elsewhere: its personal state is here, and the
server sends its cached parts again.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tepal.host.files import locked, new_log, replacing
from tepal.host.processes import signals_postponed
from tepal.host.request_files import ARRAYS, CRASHED, END, GONE, READY, REPLIES, REQUESTS
from tepal.host.superlink import EndedRun, Listener, RunError
from tepal.host.toml import Value, parse_run_config
from tepal.tools.cluster.ahead import Ahead
from tepal.tools.cluster.connection import Cluster, ClusterLost
from tepal.tools.cluster.inputs import caches_for
from tepal.tools.cluster.job import Job, JobFailed, Place, done, noted
from tepal.tools.cluster.there import CACHE, WORKER
from tepal.tools.paths import files_in, with_paths
from tepal.tools.simulation.engine import Runner, RunStopped
from tepal.tools.simulation.process_engine import ProcessEngine

_FOLDER = "tepal-spread-"
_PAUSE = 0.05  # seconds between two looks for a place that is ready
_ABANDONED = 60.0  # seconds without a change after which a folder that nobody has locked is removed
_GRACE = 5.0  # seconds until jobs have ended by themselves


class SpreadEngine(Runner):
    """Runs an app of Tepal's keys once: the ServerApp here, the clients on a cluster.

    Args:
        cluster: the connection. Its jobs are the processes in which clients train, one after another in each.
    """

    here = False

    def __init__(self, app: Path, clients: int, cluster: Cluster) -> None:
        super().__init__(app, clients)
        self._cluster, self._ahead = cluster, Ahead(cluster, self.app, clients)
        self._count = min(clients, cluster.at_once)
        self._opened = ExitStack()
        self._folder = self._opened.enter_context(_own_folder())
        others = {"asks": str(self._folder), "workers": self._count}
        self._server = ProcessEngine(app, clients, others=others)
        self.options = f"--ray {cluster.address} --spread"

    @property
    def description(self) -> str:
        return self._cluster.described_for_clients(self._count)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ahead.join()

    def start_ahead(self, runs: int = 1) -> None:
        """Start the server's process, and prepare places for clients. If machines fail, a note of the place says so."""
        self._ahead.start(self._count)
        self._server.start_ahead(runs)

    def stop(self) -> None:
        self._cluster.stopped.set()
        self._server.stop()
        self._opened.close()

    def run(
        self,
        run_config: Mapping[str, Value] | Sequence[str] = (),
        *,
        on_event: Listener | None = None,
        log: Path | None = None,
    ) -> EndedRun:
        config = parse_run_config(run_config)
        if (together := config.get("train-together", 1)) != 1:
            raise RunError(f"train-together={together} is for clients of one process: leave it out, or --spread")
        log = log or new_log("run")
        self._server.cache = caches = caches_for(self.cache, Path(str(config["runs"])))
        listener = on_event or (lambda _kind, _text: None)
        workers = _Workers(self._cluster, self._ahead, self._folder, self._count, listener)
        app = self._cluster.inputs.of_app(self.app)
        inputs = {path: self._cluster.inputs.of(path) for path in files_in(config)}

        def arguments(place: Place) -> Mapping[str, Any]:
            paths = {str(path): each.on(place.store) for path, each in inputs.items()}
            there = with_paths(config, lambda path: paths[str(path)])
            return {"app": app.on(place.store), "config": there, "clients": self.clients, "paths": paths}

        def job(folder: Path) -> Job:
            return Job(
                function="tepal.tools.cluster.there:answer_there", arguments=arguments, inputs=(app, *inputs.values()),
                folders={CACHE: caches, WORKER: folder}, files=(f"{CACHE}/secret", f"{WORKER}/{READY}"),
                made=(f"{WORKER}/{REPLIES}/*",),
                fed=(f"{WORKER}/{ARRAYS}/*", f"{WORKER}/{REQUESTS}/*", f"{WORKER}/{END}"),
                answers={f"{WORKER}/{REQUESTS}": f"{WORKER}/{REPLIES}"},
            )  # fmt: skip

        try:
            workers.start(job)
            workers.wait_for_one()  # a round must not wait for machines
            return self._server.run(config, on_event=workers.tell_of_server, log=log)
        except RunError:
            if workers.lost:
                raise workers.lost from None
            raise
        finally:
            workers.end()
            with log.open("ab") as lines, workers.printed.open("rb") as printed:
                shutil.copyfileobj(printed, lines)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Make a folder for a block. Those of processes that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError), locked(left, OSError("it is used")):
            if left.stat().st_mtime < time.time() - _ABANDONED:  # else its process may not have locked it yet
                shutil.rmtree(left, ignore_errors=True)
    used = OSError("a new folder for temporary files is used by another process")
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True) as name,
        locked(Path(name), used, patience=10),
    ):
        yield Path(name)


class _Workers:
    """The jobs in which clients train, each followed by a thread.

    Args:
        ahead: places that are being made ready for them.
        folder: has a folder for each.
        listener: is told of them, and of the server.
    """

    def __init__(self, cluster: Cluster, ahead: Ahead, folder: Path, count: int, listener: Listener) -> None:
        self._cluster, self._ahead, self._listener = cluster, ahead, listener
        self._folders = [folder / str(worker) for worker in range(count)]
        self._threads = list[threading.Thread]()
        self._telling = threading.Lock()
        self.printed = folder / "printed"
        """Lines that the clients' processes have printed, and on their machines, in the order of their arrival."""
        self.printed.write_bytes(b"")
        self.lost: ClusterLost | None = None

    def start(self, job: Callable[[Path], Job]) -> None:
        """Start a job for each folder, which is made anew."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
            for name in (REQUESTS, ARRAYS, REPLIES):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._threads.append(threading.Thread(target=self._follow, args=[folder, job(folder)], daemon=True))
            self._threads[-1].start()

    def wait_for_one(self) -> None:
        """Wait until clients can train somewhere. Raises RunError if they never can."""
        while not any((folder / READY).exists() for folder in self._folders):
            if all((folder / GONE).exists() for folder in self._folders):
                raise RunError(f"clients can train nowhere: {(self._folders[0] / GONE).read_text(encoding='utf-8')}")
            time.sleep(_PAUSE)

    @signals_postponed()  # after a second Ctrl-C the folder would be removed before its threads have ended
    def end(self) -> None:
        """End the jobs. A client that still trains is not waited for, and neither is a machine with room."""
        for folder in self._folders[: len(self._threads)]:
            (folder / END).touch()
        end = time.monotonic() + _GRACE
        for folder, thread in zip(self._folders, self._threads, strict=False):
            if (folder / READY).exists():
                thread.join(max(end - time.monotonic(), 0))
        self._cluster.stopped.set()
        for thread in self._threads:
            thread.join()

    def tell_of_server(self, kind: str, text: str) -> None:
        if kind == "log":
            self._tell(kind, text)

    def _tell(self, kind: str, text: str) -> None:
        with self._telling:
            self._listener(kind, text)

    def _follow(self, folder: Path, job: Job) -> None:
        def tell(kind: str, text: str) -> None:
            with self._telling, self.printed.open("a", encoding="utf-8") as lines:
                print(text if kind == "log" else noted(f"place {folder.name}: {text}"), file=lines)
            if kind == "log":
                return
            if kind == "note":  # it begins again elsewhere
                (folder / READY).unlink(missing_ok=True)
            self._tell(kind, text)

        why = "it has ended"
        try:
            self._ahead.wait_for_one(tell)
            done(self._cluster, job, tell)
        except RunStopped:
            pass
        except ClusterLost as error:
            self.lost = error
        except Exception as error:  # whatever it is, the others go on
            why = str(error) if isinstance(error, JobFailed) else f"{type(error).__name__}: {error}"
            if isinstance(error, JobFailed) and error.kind and (folder / READY).exists():
                (folder / CRASHED).touch()
            tell("note", f"{why}; no client trains there any more")
        finally:
            with suppress(OSError), replacing(folder / GONE) as partial:  # the folder goes when the run is stopped
                partial.write_text(why, encoding="utf-8")
            (folder / READY).unlink(missing_ok=True)
