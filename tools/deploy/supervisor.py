"""Keeps a SuperLink running and lets its runs go on: what `tepal server` does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepal.host.processes import Process, ProcessError, flower_environment, started, wait_for_http

if TYPE_CHECKING:

    from tepal.host.toml import Value
    from tepal.tools.deploy.provision import ServerFolder

from tepal.host.metrics import serving
from tepal.tools.deploy.metrics import server_families
from tepal.tools.deploy.node_keys import Keys, ServerError, check_credentials
from tepal.tools.deploy.recovery import (
    RESUMES,
    Record,
    RunOnDisk,
    config_digest,
    find_submitted,
    judge,
    look_at,
    next_attempt,
    pause,
    unfinished,
)

log = logging.getLogger("tepal.server")

STATE, LOCK = "server.json", "server.lock"

_TICK = 0.5  # seconds between two looks at what goes on
_HEARTBEAT = 5.0  # server.json is written at least this often
_LOOK_AT_KEYS = 3.0
_LOOK_AT_RUNS = 1.0
_DEAD_AFTER = 3.0  # a ServerApp has given back its run directory, and Flower has not noticed
_SILENT = 120.0  # a SuperLink that does not answer is started again after this time ...
_PENDING = 90.0  # ... and one that does not start the run which it has accepted
_START = 180.0  # until a SuperLink must answer
_GRACE = 10.0
_STARTS = 5  # attempts to bring up the first SuperLink, then a person must look
_LONGEST_PAUSE = 30.0  # before a SuperLink is started again
_SETTLED = 60.0  # a SuperLink that has lived so long may be started again at once
_LARGEST_LOG = 10_000_000  # bytes
# The SuperLink logs every question and every request, ten lines a second.
_ROUTINE = re.compile(r"ControlServicer\.List(Runs|Nodes)\s*$|\[uvicorn\.access\] .* 200\s*$")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `tepal server` was given. `credentials` None: no TLS, and nodes are not authenticated."""

    state: Path
    credentials: ServerFolder | None = None
    app: Path | None = None
    run_config: Mapping[str, Value] | None = None
    fleet: str = "0.0.0.0:9092"
    host: str = "127.0.0.1"
    port: int = 8000
    attempts: int = 5
    metrics: str = ""
    """HOST:PORT for Prometheus; "": none."""

    @property
    def control(self) -> str:
        """The address at which this machine reaches the control port."""
        return f"{reachable(self.host)}:{self.port}"

    @property
    def root_certificates(self) -> Path | None:
        return self.credentials.root_certificates if self.credentials else None


@dataclass
class Journal:
    """server.json. Read by `tepal server status` and by the next server with this state folder."""

    path: Path
    pid: int = 0
    since: str = ""
    heartbeat: float = 0.0
    """When the server's loop moved, in seconds since 1970."""
    control: str = ""
    fleet: str = ""
    root_certificates: str = ""
    superlink: str = ""
    """What it does: starting, running, waiting, stopped."""
    superlink_starts: int = 0
    nodes: list[str] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    """The run that goes on, or the last one: directory, state, run-id."""
    last_error: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Record] = field(default_factory=dict)
    """By run directory."""
    started: dict[str, Record] = field(default_factory=dict)
    """Runs that --run-config asked for, by `config_digest`."""

    @classmethod
    def read(cls, path: Path) -> Journal:
        """What the file says; an empty one where there is none. Raises ServerError where it cannot be read."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known = {item.name for item in fields(cls)} - {"path"}
            journal = cls(path, **{key: value for key, value in kept.items() if key in known})
            for records in (journal.runs, journal.started):
                for key, value in list(dict[str, Any](records).items()):
                    records[key] = Record(**value)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{path} cannot be read: {error}. It says which runs were stopped and which were tried how often; "
                "without it (move it away) the newest unfinished run goes on"
            ) from error
        return journal

    def write(self) -> None:
        """Write the file so that a reader sees the old one or the new one; only its owner may read it."""
        content = {key: value for key, value in asdict(self).items() if key != "path"}
        part = self.path.with_name(f".{self.path.name}.part")
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)

    def record(self, run: Path | str) -> Record:
        return self.runs.setdefault(str(run), Record())

    def error(self, text: str) -> None:
        """Log an error, and keep it for `tepal server status`."""
        log.error(text)
        self.last_error = {"at": _now(), "text": text}


# ---- the server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    """Flower's words about a run: pending, starting, running, finished; then completed, failed or stopped; and why."""

    status: str = ""
    ended: str = ""
    details: str = ""


class Runs:
    """The runs of a SuperLink, by its Control API."""

    def __init__(self, address: str, root_certificates: Path | None) -> None:
        from flwr.supercore.control import ControlHttpClient

        self._client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=root_certificates.read_bytes() if root_certificates else None,
            interceptors=(),
        )

    def statuses(self) -> dict[int, RunStatus]:
        """Run id → its status."""
        from flwr.proto.control_pb2 import ListRunsRequest

        found = self._client.ListRuns(ListRunsRequest()).run_dict
        return {
            run_id: RunStatus(run.status.status, run.status.sub_status, run.status.details)
            for run_id, run in found.items()
        }

    def stop(self, run_id: int) -> None:
        """Let Flower forget a run whose process is dead, and what its nodes were to do for it."""
        import httpx
        from flwr.proto.control_pb2 import StopRunRequest

        with contextlib.suppress(httpx.HTTPError):  # it has ended meanwhile, or the SuperLink has
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def close(self) -> None:
        self._client.close()


class Watch:
    """A run of the SuperLink, followed by a thread."""

    def __init__(
        self, run_id: int, control: str, superlink: Process, log: Path, root_certificates: Path | None, ours: Due | None
    ) -> None:
        from tepal.host.superlink import Clock

        self.run_id = run_id
        self.log = log
        self.ours = ours
        self.kept: Path | None = None
        """Its directory, once it has said so."""
        self.heard = False
        """Whether the supervisor has taken note of that."""
        self.end: tuple[str, str] | None = None
        """Flower's status and words."""
        self.free_since: float | None = None
        """Since when nobody runs in its directory."""
        self.pending_since = time.monotonic()
        self._clock = Clock(self._hear, None)
        self._thread = threading.Thread(
            target=self._follow, args=(control, superlink, root_certificates), name=f"run-{run_id}", daemon=True
        )
        self._thread.start()

    def _follow(self, control: str, superlink: Process, root_certificates: Path | None) -> None:
        from tepal.host.superlink import follow

        # A SuperLink that is lost is the supervisor's to notice; a run that cannot be followed is still seen on disk.
        with contextlib.suppress(ProcessError, OSError, ValueError, KeyError):
            self.end = follow(self.run_id, control, superlink, self._clock, self.log, root_certificates)

    def _hear(self, kind: str, text: str) -> None:
        from tepal.records.run_directory import KEPT_IN

        if kind != "log":
            return
        with contextlib.suppress(OSError):
            print(text, flush=True)  # the SuperLink's own log has none of it
        if KEPT_IN in text and self.kept is None:
            self.kept = Path(text.partition(KEPT_IN)[2].strip())

    @property
    def lost(self) -> bool:
        """Whether it is not followed any more, though its end was not seen."""
        return self.end is None and not self._thread.is_alive()

    def leave(self) -> None:
        """Follow it no longer, and put its log into its directory. The SuperLink waits for open streams otherwise."""
        self._clock.limit = 0.0
        self._thread.join(5)
        with contextlib.suppress(OSError):
            if self.kept is not None:
                with (self.kept / "flower.log").open("ab") as file, self.log.open("rb") as new:
                    shutil.copyfileobj(new, file)
            self.log.unlink(missing_ok=True)


@dataclass
class Due:
    """A run to be submitted: one to go on with, or (`directory` is None) the one that --run-config asks for."""

    directory: Path | None
    when: float
    said: bool = False

    def __str__(self) -> str:
        return str(self.directory) if self.directory else "the run of --run-config"


class Supervisor:
    """What `tepal server` does, until it is ended by a signal. One for each state folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = settings.state.resolve()
        self.home, self.bundle = self.state / "flower", self.state / "app"
        self.journal = Journal(self.state / STATE)
        self._digest = None if settings.run_config is None else config_digest(settings.run_config)
        self._folders = [self.state / "runs"]
        self._submitting: tuple[Due, threading.Thread, list[int | Exception]] | None = None
        self._written = 0.0

    def run(self) -> None:
        """Serve until a signal raises SystemExit. Raises ServerError for what a person must mend first."""
        settings = self.settings
        self.state.mkdir(parents=True, exist_ok=True)
        scraped = lambda: server_families(self.journal, self._folders)  # noqa: E731
        with _alone(self.state), serving(settings.metrics, scraped):
            self.journal = Journal.read(self.state / STATE)
            self._check_credentials()
            self._prepare_app()
            (self.state / "log").mkdir(exist_ok=True)
            for torn in (self.state / "log").glob("run-*.log"):
                torn.unlink()
            self.journal.pid, self.journal.since = os.getpid(), _now()
            self.journal.control, self.journal.fleet = settings.control, settings.fleet
            self.journal.root_certificates = str(settings.root_certificates or "")
            self.journal.superlink_starts, self.journal.nodes = 0, []
            from tepal.host.superlink import connect

            connect(self.home, settings.control, settings.root_certificates)
            try:
                with _tailed(self.state / "log" / "superlink.log"):
                    self._keep_superlink_running()
            finally:
                self.journal.superlink = "stopped"
                self._beat(now=True)

    # SuperLink --------------------------------------------------------------------------------------------------------

    def _keep_superlink_running(self) -> None:
        failures, ever = 0, False
        while True:
            answered: list[float] = []
            try:
                self._serve_once(answered)
            except (ProcessError, TimeoutError) as error:
                self.journal.error(f"The SuperLink is started again: {error}")
            ever = ever or bool(answered)
            settled = answered and time.monotonic() - answered[0] > _SETTLED
            failures = 1 if settled else failures + 1
            if not ever and failures >= _STARTS:
                raise ServerError(
                    f"the SuperLink did not come up in {failures} attempts. {self.journal.last_error['text']}"
                )
            self._pause(pause(failures, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.journal.superlink = "waiting"
        while time.monotonic() < end:
            self._beat()
            time.sleep(min(_TICK, max(end - time.monotonic(), 0)))

    def _serve_once(self, answered: list[float]) -> None:
        """One life of a SuperLink; when it first answered is put into `answered`. Raises ProcessError at its end."""
        settings = self.settings
        self.journal.superlink, self.journal.superlink_starts = "starting", self.journal.superlink_starts + 1
        self._beat(now=True)
        environment = self._environment()
        with started(
            superlink_command(settings),
            log=self.state / "log" / "superlink.log",
            env=environment,
            cwd=self.state,
            name="SuperLink",
            grace=_GRACE,
        ) as superlink:
            scheme = "https" if settings.credentials else "http"
            context = ssl.create_default_context(cafile=settings.root_certificates) if settings.credentials else None
            end = time.monotonic() + _START
            while not answered:
                try:
                    health = f"{scheme}://{settings.control}/health"
                    wait_for_http(health, timeout=_HEARTBEAT, process=superlink, context=context)
                    answered.append(time.monotonic())
                except TimeoutError:
                    if time.monotonic() > end:
                        raise
                    self._beat()
            log.info("The SuperLink runs: control %s, fleet %s.", settings.control, settings.fleet)
            self.journal.superlink = "running"
            from tepal.tools.deploy.fleet import open_fleet

            with (
                open_fleet(settings.control, settings.root_certificates) as fleet,
                contextlib.closing(Runs(settings.control, settings.root_certificates)) as runs,
            ):
                self._serve(superlink, runs, Keys(settings.credentials, fleet) if settings.credentials else None)

    def _environment(self) -> dict[str, str]:
        return flower_environment(self.home) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}

    def _serve(self, superlink: Process, runs: Runs, keys: Keys | None) -> None:
        import httpx

        from tepal.tools.deploy.fleet import FleetError, Unreachable

        watches: dict[int, Watch] = {}
        done: set[int] = set()
        look_at_keys = look_at_runs = 0.0
        check = time.monotonic() + 24 * 3600
        last_answer = time.monotonic()
        statuses: dict[int, RunStatus] = {}
        self._due = self._plan()
        try:
            while True:
                now = time.monotonic()
                if not superlink.running:
                    raise ProcessError(f"it ended with status {superlink.returncode}.\n{superlink.tail()}")
                try:
                    if keys and now >= look_at_keys:
                        keys.look()
                        self.journal.nodes, look_at_keys = keys.names, now + _LOOK_AT_KEYS
                    if now >= look_at_runs:
                        statuses, look_at_runs = runs.statuses(), now + _LOOK_AT_RUNS
                    last_answer = now
                except FleetError as error:
                    if not isinstance(error, Unreachable):
                        log.error("%s", error)
                    elif now - last_answer > _SILENT:
                        raise ProcessError(f"it has not answered for {_SILENT:g} s ({error})") from error
                except (httpx.HTTPError, OSError) as error:
                    if now - last_answer > _SILENT:
                        raise ProcessError(f"it has not answered for {_SILENT:g} s ({error})") from error
                self._submit(superlink, watches)
                for run_id in statuses:
                    # Our own are watched as soon as it is known which of them they are.
                    if run_id not in watches and run_id not in done and self._submitting is None:
                        watches[run_id] = self._watch(run_id, superlink, None)
                for run_id, watch in list(watches.items()):
                    if self._look_after(watch, statuses.get(run_id, RunStatus()), runs):
                        done.add(run_id)
                        del watches[run_id]
                self._check_pending(watches, statuses)
                if now >= check:
                    self._check_credentials(again=True)
                    check = now + 24 * 3600
                self._beat()
                time.sleep(_TICK)
        except SystemExit:
            # Being stopped is no failed attempt.
            interrupted = [watch.ours for watch in watches.values() if watch.ours and not watch.end]
            interrupted += [self._submitting[0]] if self._submitting else []
            for record in map(self._record, interrupted):
                record.attempts, record.tried = max(0, record.attempts - 1), 0.0
            raise
        finally:
            for watch in watches.values():
                self._hear(watch)
                if watch.end:
                    self._conclude(watch, *watch.end)
                watch.leave()

    def _check_pending(self, watches: Mapping[int, Watch], statuses: Mapping[int, RunStatus]) -> None:
        """The SuperLink's executor can die without a word; then runs are accepted and never started."""
        busy = any(each.status in ("starting", "running") for each in statuses.values())
        for run_id, watch in watches.items():
            if busy or statuses.get(run_id, RunStatus()).status != "pending":
                watch.pending_since = time.monotonic()
            elif time.monotonic() - watch.pending_since > _PENDING:
                raise ProcessError(f"it has accepted run {run_id} and did not start it within {_PENDING:g} s")

    # Runs -------------------------------------------------------------------------------------------------------------

    def _plan(self) -> list[Due]:
        """What to submit to a SuperLink that has just been started, and so has no runs."""
        now = time.time()
        runs = self._runs()
        # One that was being submitted when the SuperLink died is found like any other.
        self._submitting = None
        self.journal.runs = {path: record for path, record in self.journal.runs.items() if Path(path).is_dir()}
        if self.journal.run.get("state") in ("submitted", "running"):
            last = next((run for run in runs if str(run.path) == self.journal.run.get("directory")), None)
            self.journal.run["state"] = "ended" if last and last.ended else "unfinished"
        due: list[Due] = []
        started_run = self._plan_run_config(runs, now)
        candidates = unfinished(runs, self.journal.runs)
        for run in candidates[1:]:
            self.journal.record(run.path).outcome = "left"
            how = self._by_hand(run.path)
            log.warning("%s is unfinished, and a newer one goes on. To go on with it: %s", run.path, how)
        if candidates:
            due += self._again(candidates[0].path, now)
        if due and started_run:
            log.info("The run of --run-config starts when %s has ended.", due[0])
        return due + started_run

    def _plan_run_config(self, runs: Sequence[RunOnDisk], now: float) -> list[Due]:
        if self._digest is None or self.settings.run_config is None:
            return []
        record = self.journal.started.get(self._digest)
        if record is None:
            return [Due(None, now)]
        if not record.directory and not record.outcome and record.begun:
            found = find_submitted(runs, self.settings.run_config, record.begun)
            record.directory = str(found.path) if found else ""
        run = look_at(Path(record.directory)) if record.directory else None
        if record.outcome or (run is not None and (run.ended or run.round is not None)):
            state = record.outcome or ("ended" if run and run.ended else "goes on")
            log.info(
                "The run of --run-config was started before (%s: %s) and is not started again. For another one change "
                "the run config, or use `flwr run`.", record.directory or "no run directory", state,
            )  # fmt: skip
            return []
        return self._again(None, now)

    def _runs(self) -> list[RunOnDisk]:
        paths = {Path(path) for path in self.journal.runs}
        for folder in self._folders:
            with contextlib.suppress(OSError):
                paths |= {path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()}
        return [run for run in map(look_at, sorted(paths)) if run is not None]

    def _record(self, due: Due) -> Record:
        if due.directory is not None:
            return self.journal.record(due.directory)
        assert self._digest is not None
        return self.journal.started.setdefault(self._digest, Record())

    def _again(self, directory: Path | None, now: float, reason: str = "") -> list[Due]:
        """When a run goes on, or (None) is started anew; nothing after too many attempts, which is then said."""
        due = Due(directory, now)
        record = self._record(due)
        if directory is not None and (why_not := self._cannot_resume()):
            self.journal.error(f"{directory} is unfinished and cannot go on by itself: {why_not}")
            return []
        run = look_at(directory) if directory else None
        when = next_attempt(record, run.round if run else None, self.settings.attempts, now)
        if when is None:
            record.outcome, record.reason = "given up", reason or record.reason
            how = self._by_hand(directory) if directory else "change the run config, or start it with `flwr run`"
            self.journal.error(
                f"{due} was tried {record.attempts} times without finishing another round, and is given up"
                f"{': ' + record.reason if record.reason else ''}. See {self.state / 'log'} and its flower.log; when "
                f"the cause is mended: {how}"
            )
            return []
        record.reason = reason or record.reason
        due.when = when
        if when > now:
            log.info("%s goes on in %.0f s (attempt %d of %d).", due, when - now, record.attempts + 1,
                     self.settings.attempts)  # fmt: skip
        return [due]

    def _by_hand(self, directory: Path) -> str:
        app = self.settings.app or "APP"
        return f"FLWR_HOME={self.home} flwr run {app} tepal --run-config 'resume=\"{directory}\"'"

    def _submit(self, superlink: Process, watches: dict[int, Watch]) -> None:
        """Submit what is due, one at a time and beside the loop: `flwr run` takes seconds."""
        if self._submitting is not None:
            due, thread, answer = self._submitting
            if thread.is_alive():
                return
            self._submitting = None
            if isinstance(answer[0], Exception):
                self.journal.error(f"{due} could not be submitted: {answer[0]}")
                self._due += self._again(due.directory, time.time(), str(answer[0]))
            else:
                watches[answer[0]] = self._watch(answer[0], superlink, due)
            return
        for due in list(self._due):
            if due.when > time.time():
                continue
            if due.directory is None:
                # It waits for the run that is resumed.
                if len(self._due) > 1 or any(watch.ours for watch in watches.values()):
                    continue
                config = self._own_run_config()
            else:
                run = look_at(due.directory)
                taken_up = any(watch.kept == due.directory for watch in watches.values())
                if run is None or run.ended or taken_up or self._record(due).outcome:
                    self._due.remove(due)
                    continue
                if run.in_use:
                    if not due.said:
                        log.info("%s is still in use by another process; it goes on after that.", due)
                    due.said = True
                    continue
                config = {RESUMES: str(due.directory)}
            self._due.remove(due)
            record = self._record(due)
            record.attempts, record.tried = record.attempts + 1, time.time()
            record.begun = record.tried
            self.journal.run = {"directory": str(due.directory or ""), "state": "submitted", "attempt": record.attempts}
            self._beat(now=True)  # counted also if this process is killed now
            action = "goes on" if due.directory else "starts"
            log.info("%s %s (attempt %d of %d).", due, action, record.attempts, self.settings.attempts)
            result: list[int | Exception] = []
            given = (superlink, config, result)
            thread = threading.Thread(target=self._submit_now, args=given, name="submit", daemon=True)
            self._submitting = (due, thread, result)
            thread.start()
            return

    def _submit_now(self, superlink: Process, config: Mapping[str, Value], result: list[int | Exception]) -> None:
        from tepal.host.superlink import submit
        from tepal.host.toml import to_toml

        path = self.state / "run-config.toml"
        try:
            path.write_text(to_toml(config), encoding="utf-8")
            result.append(submit(self.bundle, path, superlink, self._environment(), 120))
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            result.append(error)

    def _own_run_config(self) -> dict[str, Value]:
        """The run config of --run-config, with its folder of run directories absolute: a ServerApp may be anywhere."""
        from tepal.host.superlink import app_run_config

        config = dict(self.settings.run_config or {})
        if self.settings.app and "runs" in app_run_config(self.bundle):
            config["runs"] = str(self.state / Path(str(config.get("runs", "runs"))).expanduser())
        return config

    def _watch(self, run_id: int, superlink: Process, due: Due | None) -> Watch:
        log.info("Run %d is followed%s.", run_id, f": {due}" if due else "")
        path = self.state / "log" / f"run-{run_id}.log"
        return Watch(run_id, self.settings.control, superlink, path, self.settings.root_certificates, due)

    def _look_after(self, watch: Watch, status: RunStatus, runs: Runs) -> bool:
        """Take note of what has become of a run. Returns whether it needs no more looking after."""
        self._hear(watch)
        if watch.lost and status.status == "finished":
            watch.end = status.ended, status.details
        if watch.end is not None:
            self._conclude(watch, *watch.end)
            watch.leave()
            return True
        run = look_at(watch.kept) if watch.heard and watch.kept else None
        if run is None or run.in_use or run.ended or status.status == "finished":
            watch.free_since = None
            if run is not None and self.journal.run.get("directory") == str(run.path):
                self.journal.run |= {"round": run.round}
            return False
        watch.free_since = watch.free_since or time.monotonic()
        if time.monotonic() - watch.free_since < _DEAD_AFTER:
            return False
        # Flower would notice after a minute.
        log.warning("The ServerApp of run %d (%s) has died.", watch.run_id, run.path)
        runs.stop(watch.run_id)
        self._conclude(watch, "lost", "its process died")
        watch.leave()
        return True

    def _hear(self, watch: Watch) -> None:
        """Take note of where a run is kept."""
        if watch.kept is None or watch.heard:
            return
        watch.heard = True
        due = watch.ours
        if due is None:
            # A person began it, or resumed it: whatever was said of it before is past.
            self.journal.runs[str(watch.kept)] = Record(begun=time.time())
        elif due.directory is None:
            self._record(due).directory = str(watch.kept)
            self.journal.record(watch.kept)
        log.info("Run %d is kept in %s.", watch.run_id, watch.kept)
        record = self.journal.record(watch.kept)
        self.journal.run = {
            "directory": str(watch.kept), "run_id": watch.run_id, "state": "running", "attempt": record.attempts,
        }  # fmt: skip

    def _conclude(self, watch: Watch, status: str, details: str) -> None:
        """Decide what becomes of a run that has ended, in whatever way, and note it."""
        from tepal.host.superlink import explain

        directory = watch.kept or (watch.ours.directory if watch.ours else None)
        run = look_at(directory) if directory else None
        text = watch.log.read_text(encoding="utf-8", errors="replace") if watch.log.exists() else ""
        reason = explain(text, details) if status == "failed" else details
        what = judge(status, run, reason)
        where = directory or f"run {watch.run_id}"
        if self.journal.run.get("directory") == str(directory or ""):
            state = "unfinished" if what == "again" else what
            self.journal.run |= {"state": state, "round": run.round if run else None}
        if what == "again":
            self.journal.error(f"{where} was interrupted: {reason}")
            own = watch.ours is not None and watch.ours.directory is None
            if directory is not None and run is not None and run.round is not None:
                self._due += self._again(directory, time.time(), reason)
            elif own:  # it has nothing to go on from
                self._due += self._again(None, time.time(), reason)
            else:
                log.error("%s never finished a round, so there is nothing to go on from: start it again.", where)
            return
        records = [self.journal.record(directory)] if directory else []
        if watch.ours is not None:
            records.append(self._record(watch.ours))
        for record in records:
            record.outcome, record.reason = what, "" if what == "ended" else reason
        if what == "failed":
            reason = (run.stopped_by if run else None) or reason
            how = self._by_hand(directory) if directory and run and run.round is not None else "start it again"
            self.journal.error(f"{where} failed, and does not go on by itself: {reason}\nWhen this is mended: {how}")
        elif what == "stopped" and directory and run and run.round is not None:
            log.info("%s was stopped. To go on with it: %s", where, self._by_hand(directory))
        else:
            log.info("%s has %s.", where, "been stopped" if what == "stopped" else what)

    # Beginning --------------------------------------------------------------------------------------------------------

    def _check_credentials(self, again: bool = False) -> None:
        settings = self.settings
        if settings.credentials is None:
            return
        try:
            warnings = check_credentials(settings.credentials, reachable(settings.host), datetime.now(UTC))
        except ServerError as error:
            if not again:
                raise
            self.journal.error(str(error))
            return
        for warning in warnings:
            log.warning(warning)

    def _cannot_resume(self) -> str:
        """Why runs cannot go on by themselves; "" if they can."""
        from tepal.host.superlink import app_run_config

        if self.settings.app is None:
            return "name its app's folder with --app"
        if RESUMES not in app_run_config(self.bundle):
            return f"the app in {self.settings.app} has no run config key {RESUMES!r}"
        return ""

    def _prepare_app(self) -> None:
        """Copy the app, and check that it has the run config's keys. Raises ServerError."""
        from tepal.host.superlink import RunError, app_run_config, stage_app

        given, app = self.settings.run_config, self.settings.app
        if app is None:
            if given is not None:
                raise ServerError("--run-config says how a run is to be, and --app is needed to say of which app")
            return
        try:
            known = app_run_config(app)
            shutil.rmtree(self.bundle, ignore_errors=True)
            self.bundle.mkdir()
            stage_app(app, self.bundle)
        except (RunError, OSError) as error:
            raise ServerError(f"--app {app}: {error}") from error
        if unknown := sorted(set(given or ()) - set(known)):
            raise ServerError(
                f"--run-config: {app} has no run config key {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
            )
        if given and "runs" in given:
            self._folders.append(self.state / Path(str(given["runs"])).expanduser())

    def _beat(self, now: bool = False) -> None:
        """Write the journal every few seconds: it is the server's heartbeat."""
        if not now and time.monotonic() - self._written < _HEARTBEAT:
            return
        self.journal.heartbeat = time.time()
        try:
            self.journal.write()
            self._written = time.monotonic()
        except OSError as error:  # a full disk stops no run
            log.error("%s cannot be written: %s", self.journal.path, error.strerror)


def superlink_command(settings: Settings) -> list[str]:
    """The SuperLink's command line."""
    command = ["flower-superlink", "--host", settings.host, "--port", str(settings.port)]
    command += ["--fleet-api-address", settings.fleet]
    if settings.credentials is None:
        return [*command, "--insecure"]
    own = settings.credentials
    command += ["--ssl-ca-certfile", str(own.root_certificates), "--ssl-certfile", str(own.certificate)]
    return [*command, "--ssl-keyfile", str(own.key), "--enable-supernode-auth"]


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Keep other servers out of the state folder; the lock ends with this process, however that ends."""
    handle = os.open(state / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServerError(
                f"another `tepal server` runs with the state folder {state}; stop that one first, or use another folder"
            ) from error
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _tailed(path: Path) -> Iterator[None]:
    """Write what is added to a log file to this process's output as well, and keep the file small."""
    stop = threading.Event()
    position = path.stat().st_size if path.exists() else 0

    def tail() -> None:
        nonlocal position
        while not stop.wait(0.3):
            with contextlib.suppress(OSError):
                position = pass_on(path, position, _LARGEST_LOG)

    thread = threading.Thread(target=tail, name="superlink-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
        with contextlib.suppress(OSError):
            pass_on(path, position, _LARGEST_LOG)


def pass_on(path: Path, position: int, largest: int) -> int:
    """Write the whole lines of `path` behind `position` to stdout, but for routine ones; return where they end.

    A file of more than `largest` bytes becomes `path`.1 and is begun anew; the process that appends to it goes on
    appending to the same file, so what it writes in that moment may be lost.
    """
    with path.open("rb") as file:
        file.seek(position)
        whole, newline, _ = file.read().rpartition(b"\n")
    for line in whole.decode(errors="replace").splitlines():
        if line.strip() and not _ROUTINE.search(line):
            print(line)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    position += len(whole) + len(newline)
    if position > largest:
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
        position = 0
    return position


def reachable(host: str) -> str:
    """The host at which a server that listens on `host` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host.strip("[]"), host.strip("[]"))
    return f"[{host}]" if ":" in host else host


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
