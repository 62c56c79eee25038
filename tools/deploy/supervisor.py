"""`tepal server`: keep a SuperLink running, and resume its runs."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from tepal.host.addresses import why_taken
from tepal.host.files import locked
from tepal.host.metrics import serving
from tepal.host.processes import Process, ProcessError, started, wait_for_http
from tepal.host.superlink import connect
from tepal.tools.deploy.fleet import Fleet, FleetError, RunStatus, Unreachable, open_fleet
from tepal.tools.deploy.journal import HEARTBEAT, STATE, Journal, timestamp
from tepal.tools.deploy.metrics import server_families
from tepal.tools.deploy.node_keys import Keys, ServerError, check_credentials
from tepal.tools.deploy.recovery import pause
from tepal.tools.deploy.run_queue import RunQueue
from tepal.tools.deploy.settings import Settings, reachable, superlink_command, superlink_environment
from tepal.tools.deploy.superlink_log import tailed
from tepal.tools.deploy.watch import Watch

log = logging.getLogger("tepal.server")

LOCK = "server.lock"

# In seconds:
_TICK = 0.5  # between two iterations of the loop
_KEYS_INTERVAL = 3.0  # between two checks of the nodes' keys
_RUNS_INTERVAL = 1.0  # between two requests for the runs' statuses
_SILENT = 120.0  # after which a SuperLink that does not answer is restarted
_ANSWERS = 5.0  # since its last answer within which a SuperLink is asked once more when the server ends
_LAST_ANSWER = 3.0  # within which it must answer then
_PENDING = 90.0  # after which a SuperLink that does not start an accepted run is restarted
_START = 180.0  # within which a SuperLink must answer for the first time
_GRACE = 10.0  # within which a SuperLink must end
_FREE = 10.0  # within which a SuperLink that was stopped or killed must have freed its ports
_LONGEST_PAUSE = 30.0  # before a SuperLink is restarted
_SETTLED = 60.0  # of running after which a SuperLink is restarted at once

_STARTS = 5  # attempts to start the first SuperLink
_KEPT_LOGS = 5  # logs of runs without an end


class Supervisor:
    """Keeps a SuperLink and its runs going until a signal ends it. One for each state folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = settings.state.resolve()
        self.journal = Journal(self.state / STATE)
        self.queue = RunQueue(settings, self.journal)
        self._answered: float | None = None  # the time of the present SuperLink's first answer
        self._served = b""  # the certificate that the present SuperLink uses

    def run(self) -> None:
        """Serve until a signal raises SystemExit. Raises ServerError for a problem that a person must solve."""
        settings = self.settings
        self.state.mkdir(parents=True, exist_ok=True)
        scraped = lambda: server_families(self.journal, self.queue.app.folders)  # noqa: E731
        (self.state / LOCK).touch(mode=0o600)
        refusal = ServerError(
            f"another `tepal server` runs with the state folder {self.state}; stop it first, or use another folder"
        )
        with locked(self.state / LOCK, refusal), serving(settings.metrics, scraped):
            self.journal = self.queue.journal = Journal.read(self.state / STATE)
            self._check_credentials()
            self.queue.app.prepare()
            (self.state / "log").mkdir(exist_ok=True)
            # Those of runs that a crash has interrupted; the others are in the run directories.
            left = sorted((self.state / "log").glob("run-*.log"), key=lambda path: path.stat().st_mtime)
            for path in left[:-_KEPT_LOGS]:
                path.unlink()
            self.journal.pid, self.journal.since = os.getpid(), timestamp()
            self.journal.control, self.journal.fleet = settings.control, settings.fleet
            self.journal.root_certificates = str(settings.root_certificates or "")
            self.journal.superlink_starts, self.journal.nodes = 0, []
            connect(self.queue.app.home, settings.control, settings.root_certificates)
            try:
                with tailed(self.state / "log" / "superlink.log"):
                    self._keep_superlink_running()
            finally:
                self.journal.superlink = "stopped"
                self.journal.beat(at_once=True)

    def _keep_superlink_running(self) -> None:
        failures, ever = 0, False
        while True:
            try:
                self._check_ports(ProcessError if ever else ServerError)
                self._serve_once()
            except (ProcessError, TimeoutError) as error:
                self.journal.error(f"The SuperLink is restarted: {error}")
            ever = ever or self._answered is not None
            settled = self._answered is not None and time.monotonic() - self._answered > _SETTLED
            failures = 1 if settled else failures + 1
            if not ever and failures >= _STARTS:
                raise ServerError(
                    f"the SuperLink did not start in {failures} attempts. {self.journal.last_error['text']}"
                )
            self._pause(pause(failures, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.journal.superlink = "waiting"
        while time.monotonic() < end:
            self.journal.beat()
            time.sleep(min(_TICK, max(end - time.monotonic(), 0)))

    def _check_ports(self, refusal: type[Exception]) -> None:
        """Raise `refusal` if a port is taken: another server there may answer as if it were the SuperLink."""
        settings = self.settings
        for address, option in (f"{settings.host}:{settings.port}", "--port"), (settings.fleet, "--fleet-api-address"):
            if why := why_taken(address, _FREE):
                raise refusal(f"{why}: choose another with {option}, or free this one")
            self.journal.beat()  # each may have taken the longest time

    def _serve_once(self) -> None:
        """Run a SuperLink until its end raises ProcessError."""
        settings, self._answered = self.settings, None
        self.journal.superlink, self.journal.superlink_starts = "starting", self.journal.superlink_starts + 1
        self.journal.beat(at_once=True)
        self._served = self._certificate()
        with started(
            superlink_command(settings),
            log=self.state / "log" / "superlink.log",
            env=superlink_environment(self.queue.app.home, settings.host),
            cwd=self.state,
            name="SuperLink",
            grace=_GRACE,
        ) as superlink:
            scheme = "https" if settings.credentials else "http"
            context = ssl.create_default_context(cafile=settings.root_certificates) if settings.credentials else None
            end = time.monotonic() + _START
            while self._answered is None:
                try:
                    health = f"{scheme}://{settings.control}/health"
                    wait_for_http(health, timeout=HEARTBEAT, process=superlink, context=context)
                    self._answered = time.monotonic()
                except TimeoutError:
                    if time.monotonic() > end:
                        raise
                    self.journal.beat()
            log.info("The SuperLink runs: control %s, fleet %s.", settings.control, settings.fleet)
            self.journal.superlink = "running"
            with open_fleet(settings.control, settings.root_certificates) as fleet:
                self._serve(superlink, fleet, Keys(settings.credentials, fleet) if settings.credentials else None)

    def _serve(self, superlink: Process, fleet: Fleet, keys: Keys | None) -> None:
        watches: dict[int, Watch] = {}
        done: set[int] = set()
        next_keys = next_runs = 0.0
        check = time.monotonic() + 24 * 3600
        last_answer = time.monotonic()
        statuses: dict[int, RunStatus] = {}
        self.queue.due = self.queue.plan()
        try:
            while True:
                now = time.monotonic()
                if not superlink.running:
                    raise ProcessError(f"it ended with status {superlink.returncode}.\n{superlink.tail()}")
                try:
                    if keys and now >= next_keys:
                        keys.update()
                        self.journal.nodes, next_keys = keys.names, now + _KEYS_INTERVAL
                    if now >= next_runs:
                        statuses, next_runs = fleet.runs(), now + _RUNS_INTERVAL
                    last_answer = now
                except (FleetError, OSError) as error:  # of the Control API, or of the folder of keys
                    if isinstance(error, FleetError) and not isinstance(error, Unreachable):
                        log.error("%s", error)
                    elif now - last_answer > _SILENT:
                        raise ProcessError(f"it has not answered for {_SILENT:g} s ({error})") from error
                self.queue.submit(superlink, watches)
                for run_id in statuses:
                    # A run that this server submits is watched when its id is known.
                    if run_id not in watches and run_id not in done and self.queue.submitting is None:
                        watches[run_id] = self.queue.watch(run_id, superlink, None)
                for run_id, watch in list(watches.items()):
                    if self.queue.check(watch, statuses.get(run_id, RunStatus()), fleet):
                        done.add(run_id)
                        del watches[run_id]
                self._check_pending(watches, statuses)
                if now >= check:
                    self._check_credentials(again=True)
                    check = now + 24 * 3600
                self.journal.beat()
                time.sleep(_TICK)
        except SystemExit:
            if time.monotonic() - last_answer < _ANSWERS:
                self._note_stops(watches, fleet)
            self.queue.interrupted(watches.values())
            raise
        except ProcessError:
            self.queue.broken_off(watches.values())
            raise
        finally:
            for watch in watches.values():
                self.queue.record_directory(watch)
                if watch.end:
                    self.queue.conclude(watch, *watch.end)
                watch.leave()

    def _note_stops(self, watches: Mapping[int, Watch], fleet: Fleet) -> None:
        """Note which runs a person has stopped. The threads that follow them may not know it yet."""
        if not any(watch.end is None for watch in watches.values()):
            return
        statuses: dict[int, RunStatus] = {}

        def ask() -> None:
            with contextlib.suppress(Exception):
                statuses.update(fleet.runs())

        asking = threading.Thread(target=ask, name="last-answer", daemon=True)
        asking.start()
        asking.join(_LAST_ANSWER)
        for run_id, watch in watches.items():
            status = statuses.get(run_id, RunStatus())
            if status.ended == "stopped" and watch.end is None:
                watch.end = status.ended, status.details

    def _check_pending(self, watches: Mapping[int, Watch], statuses: Mapping[int, RunStatus]) -> None:
        """Raise ProcessError if an accepted run does not start: the SuperLink's executor can die without an error."""
        busy = any(each.status in ("starting", "running") for each in statuses.values())
        for run_id, watch in watches.items():
            if busy or statuses.get(run_id, RunStatus()).status != "pending":
                watch.pending_since = time.monotonic()
            elif time.monotonic() - watch.pending_since > _PENDING:
                raise ProcessError(f"it has accepted run {run_id} and did not start it within {_PENDING:g} s")

    def _certificate(self) -> bytes:
        """Return the content of the server's certificate file, b"" without one."""
        try:
            return self.settings.credentials.certificate.read_bytes() if self.settings.credentials else b""
        except OSError:
            return b""

    def _check_credentials(self, again: bool = False) -> None:
        from cryptography.x509 import load_pem_x509_certificate

        settings = self.settings
        if settings.credentials is None:
            return
        try:
            if self._served and self._certificate() not in (self._served, b""):
                log.warning(
                    "%s was replaced, and the SuperLink still uses the former one, which expires on %s UTC: restart "
                    "this server",
                    settings.credentials.certificate,
                    f"{load_pem_x509_certificate(self._served).not_valid_after_utc:%Y-%m-%d %H:%M}",
                )
            warnings = check_credentials(settings.credentials, reachable(settings.host), datetime.now(UTC))
        except (ServerError, OSError, ValueError) as error:
            if not again:
                raise
            self.journal.error(str(error))
            return
        for warning in warnings:
            log.warning(warning)
