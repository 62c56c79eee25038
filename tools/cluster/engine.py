"""The engine whose runs are jobs on the machines of a Ray cluster: each run is whole on one machine.

A run's directory is made on this machine and sent; its process there resumes it, which for a new one is to begin. What
the run writes comes back while it goes on. A client's personal state comes back too, and its cached parts do not: a run
that goes on elsewhere sends them again, as to clients that have lost their caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tepal.host.files import new_log
from tepal.host.superlink import EndedRun, Listener, RunError, explain
from tepal.host.toml import Value, parse_run_config
from tepal.records.run_directory import (
    CONFIG,
    KEPT_IN,
    MODEL,
    REPORT,
    RunDirectory,
    RunInUse,
    find_run,
    held,
    point_latest_at,
)
from tepal.tools.cluster.ahead import Ahead
from tepal.tools.cluster.connection import Cluster, connected
from tepal.tools.cluster.inputs import caches_for
from tepal.tools.cluster.job import PROCESS, Job, JobFailed, Place, done, noted
from tepal.tools.cluster.spread import SpreadEngine
from tepal.tools.cluster.texts import Written, in_html, in_json, in_toml, replaced
from tepal.tools.cluster.there import CACHE, RUNS
from tepal.tools.paths import files_in, with_paths
from tepal.tools.simulation.engine import Runner

_WRITTEN: Mapping[str, Written] = {CONFIG: in_toml, REPORT: in_html, "": str}
"""A run's files with paths, and how they are written there; "" is a line of its log."""


class ClusterFailed(RunError):
    """Machines of the cluster failed, and not the run: elsewhere, or another time, it may succeed."""


class ClusterEngine(Runner):
    """Runs an app of Tepal's keys on the machines of a cluster, several runs at once.

    Args:
        cluster: the connection.
    """

    here = False

    def __init__(self, app: Path, clients: int, cluster: Cluster) -> None:
        super().__init__(app, clients)
        self._cluster, self._ahead = cluster, Ahead(cluster, self.app, clients)
        self.at_once = cluster.at_once
        self.options = f"--ray {cluster.address}"

    @property
    def description(self) -> str:
        return self._cluster.description

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ahead.join()

    def start_ahead(self, runs: int = 1) -> None:
        """Start preparing places for the first runs. If machines fail, the run that waits for the place raises it."""
        self._ahead.start(min(runs, self.at_once))

    def stop(self) -> None:
        self._cluster.stopped.set()

    def run(
        self,
        run_config: Mapping[str, Value] | Sequence[str] = (),
        *,
        on_event: Listener | None = None,
        log: Path | None = None,
    ) -> EndedRun:
        config = parse_run_config(run_config)
        tell, log = on_event or (lambda _kind, _text: None), log or new_log("run")
        if config.get("resume"):
            directory = find_run(Path(str(config["resume"])))
        else:
            directory = RunDirectory.create(Path(str(config["runs"])), str(config["strategy"]), config).path
        job = self._job(directory, config)
        tell("log", f"INFO : {KEPT_IN}{directory}")  # before there is a machine: it can be resumed from here on
        with log.open("a", encoding="utf-8") as lines, _mine(directory, log):
            point_latest_at(directory)

            def pass_on(kind: str, text: str) -> None:
                print(text if kind == "log" else noted(text), file=lines, flush=True)
                tell("note" if kind == "stage" else kind, text)  # stages are shown before a run has its directory

            try:
                self._ahead.wait_for_one(pass_on)
                done(self._cluster, job, pass_on)
            except JobFailed as error:
                if not error.kind:
                    raise ClusterFailed(str(error), log) from error
                said = explain(log.read_text(), str(error)) if error.kind == PROCESS else str(error)
                raise RunError(said, log) from error
        return EndedRun(1, "completed", log, "")

    def _job(self, directory: Path, config: Mapping[str, Value]) -> Job:
        """The run of a directory as a job."""
        caches = caches_for(self.cache, directory.parent)
        app = self._cluster.inputs.of_app(self.app)
        inputs = {path: self._cluster.inputs.of(path) for path in files_in(config)}
        files = [key for key, value in config.items() if files_in({key: value})]

        def arguments(place: Place) -> Mapping[str, Any]:
            there = with_paths(config, lambda path: inputs[path].on(place.store))
            return {"app": app.on(place.store), "config": there, "files": files, "run": directory.name,
                    "clients": self.clients}  # fmt: skip

        def returned(place: Place, name: str, content: bytes) -> bytes:
            """A file or line of the run with paths on this machine."""
            paths = {each.on(place.store): str(path) for path, each in inputs.items()}
            paths[f"{place.folder}/{RUNS}"] = str(directory.parent)
            if name == f"{RUNS}/{directory.name}/{MODEL}":
                return _with_header(content, paths)
            written = _WRITTEN.get(name.removeprefix(f"{RUNS}/{directory.name}/"))
            return replaced(content, paths, written) if written else content

        experiment = f"{CACHE}/{directory.name}-{'[0-9a-f]' * 8}"  # as a run names it for its clients' caches
        return Job(
            function="tepal.tools.cluster.there:run_there", arguments=arguments, inputs=(app, *inputs.values()),
            folders={RUNS: directory.parent, CACHE: caches},
            files=(f"{CACHE}/secret", f"{experiment}/personal/*", f"{RUNS}/{directory.name}/*"), renewed=True,
            returned=returned,
        )  # fmt: skip


@contextmanager
def _mine(directory: Path, log: Path) -> Iterator[None]:
    """Hold the run directory, as its ServerApp does on its machine. Raises RunError if another process has it."""
    try:
        with held(directory):
            yield
    except RunInUse as error:
        raise RunError(str(error), log) from error


def _with_header(model: bytes, paths: Mapping[str, str]) -> bytes:
    """A safetensors file whose metadata, the run config among it, has other paths.

    It begins with the header's length in 8 bytes and the header, JSON that may end with spaces.
    """
    end = 8 + int.from_bytes(model[:8], "little")
    header = json.loads(model[8:end])
    for key, text in (metadata := header.get("__metadata__", {})).items():
        metadata[key] = replaced(text.encode(), paths, in_json if key == "config" else str).decode()
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    return len(written).to_bytes(8, "little") + written + model[end:]


@contextmanager
def engine_on(
    address: str, app: Path, *, clients: int, cpus: float | None, gpus: float, memory: float, spread: bool = False
) -> Iterator[Runner]:
    """Yield an engine on the cluster at an address. `spread`: the clients of a run train on all machines."""
    kind = SpreadEngine if spread else ClusterEngine
    with ExitStack() as opened:
        cluster = opened.enter_context(connected(address, cpus, gpus, memory))
        yield opened.enter_context(kind(app, clients, cluster))
