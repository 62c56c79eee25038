"""The runs of a server: which are due, their submission, and what follows from their ends."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from tepal.host.processes import Process
from tepal.host.superlink import explain
from tepal.host.toml import Value
from tepal.tools.deploy.app import ServedApp
from tepal.tools.deploy.fleet import Fleet, RunStatus
from tepal.tools.deploy.journal import Journal
from tepal.tools.deploy.recovery import (
    RESUMES,
    Due,
    JournalEntry,
    RunOnDisk,
    config_digest,
    find_submitted,
    next_attempt,
    outcome_of,
    read_run,
    unfinished,
)
from tepal.tools.deploy.settings import Settings
from tepal.tools.deploy.watch import Watch

log = logging.getLogger("tepal.server")

_DEAD_AFTER = 3.0  # seconds after which a run whose directory no process uses counts as dead


class RunQueue:
    """The runs that a server submits to its SuperLink. Each decision is recorded in the journal."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.settings = settings
        self.journal = journal
        self.app = ServedApp(settings)
        self.due: list[Due] = []
        self.submitting: tuple[Due, Future[int]] | None = None
        """The run that a thread is submitting, and the id that it will get."""
        self._digest = None if settings.run_config is None else config_digest(settings.run_config)

    def plan(self) -> list[Due]:
        """Return the runs to submit to a SuperLink that has just been started, and so has no runs."""
        now = time.time()
        self.journal.locate()
        runs = self.app.runs(self.journal.runs)
        # A run that was being submitted when the SuperLink died is found like any other.
        self.submitting = None
        deleted = _deleted(self.journal.runs)
        self.journal.runs = {path: entry for path, entry in self.journal.runs.items() if path not in deleted}
        if self.journal.run.get("state") in ("submitted", "running"):
            last = next((run for run in runs if str(run.path) == self.journal.run.get("directory")), None)
            self.journal.run["state"] = "ended" if last and last.ended else "unfinished"
        due: list[Due] = []
        started_run = self._plan_run_config(runs, now)
        candidates = unfinished(runs, self.journal.runs)
        for run in candidates[1:]:
            self.journal.entry(run.path).outcome = "left"
            how = self.app.resume_command(run.path)
            log.warning("%s is unfinished, and a newer run is resumed. To resume this one: %s", run.path, how)
        if candidates:
            due += self._again(candidates[0].path, now)
        if due and started_run:
            log.info("The run of --run-config starts when %s has ended.", due[0])
        return due + started_run

    def _plan_run_config(self, runs: Sequence[RunOnDisk], now: float) -> list[Due]:
        if self._digest is None or self.settings.run_config is None:
            return []
        entry = self.journal.started.get(self._digest)
        if entry is None:
            return [Due(None, now)]
        if not entry.directory and not entry.outcome and entry.begun:
            found = find_submitted(runs, self.settings.run_config, entry.begun)
            entry.directory = str(found.path) if found else ""
        run = read_run(Path(entry.directory)) if entry.directory else None
        if run is not None and run.round is not None:
            entry.round = run.round
        if run is not None and run.ended and not entry.outcome:  # its directory may be deleted later
            entry.outcome = "failed" if run.stopped_by else "ended"
        if entry.outcome or entry.round is not None:
            known = entry.outcome or run is not None
            lost = "cannot be found; if its disk is away, mount it and restart the server"
            log.log(
                logging.INFO if known else logging.WARNING,
                "The run of --run-config was started before (%s: %s) and is not started again. For another run, change "
                "the run config, or use `flwr run`.", entry.directory or "no run directory",
                (entry.outcome or "unfinished") if known else lost,
            )  # fmt: skip
            return []
        return self._again(None, now)

    def _again(self, directory: Path | None, now: float, reason: str = "") -> list[Due]:
        """Return when to resume a run or, for None, to start the run of --run-config; [] after too many attempts."""
        due = Due(directory, now)
        entry = self._entry(due)
        if directory is not None and (why_not := self.app.cannot_resume()):
            self.journal.error(f"{directory} is unfinished and cannot be resumed: {why_not}")
            return []
        run = read_run(directory) if directory else None
        when = next_attempt(entry, run.round if run else None, self.settings.attempts, now)
        if when is None:
            entry.outcome, entry.reason = "given up", reason or entry.reason
            start = "change the run config, or start it with `flwr run`"
            how = self.app.resume_command(directory) if directory else start
            self.journal.error(
                f"{due} was tried {entry.attempts} times without finishing another round, and is not tried again"
                f"{': ' + entry.reason if entry.reason else ''}. See {self.app.state / 'log'} and its flower.log; "
                f"when the cause is removed: {how}"
            )
            return []
        entry.reason = reason or entry.reason
        due.when = when
        if when > now:
            log.info("%s is submitted in %.0f s (attempt %d of %d).", due, when - now, entry.attempts + 1,
                     self.settings.attempts)  # fmt: skip
        return [due]

    def _try_again(self, directory: Path | None, reason: str) -> None:
        """As `_again`, for an attempt that has failed just now."""
        now = time.time()
        self._entry(Due(directory, now)).tried = now
        self.due += self._again(directory, now, reason)

    def _entry(self, due: Due) -> JournalEntry:
        if due.directory is not None:
            return self.journal.entry(due.directory)
        assert self._digest is not None
        return self.journal.started.setdefault(self._digest, JournalEntry())

    def submit(self, superlink: Process, watches: dict[int, Watch]) -> None:
        """Submit the runs that are due, one at a time, in a thread: `flwr run` takes seconds."""
        if self.submitting is not None:
            due, result = self.submitting
            if not result.done():
                return
            self.submitting = None
            if error := result.exception():
                self.journal.error(f"{due} could not be submitted: {error}")
                self._try_again(due.directory, str(error))
            else:
                watches[result.result()] = self.watch(result.result(), superlink, due)
            return
        for due in list(self.due):
            if due.when > time.time():
                continue
            if due.directory is None:
                # The run of --run-config waits for a resumed run.
                if len(self.due) > 1 or any(watch.due for watch in watches.values()):
                    continue
                config = self.app.own_run_config()
            else:
                run = read_run(due.directory)
                taken_up = any(watch.directory == due.directory for watch in watches.values())
                if run is None or run.ended or taken_up or self._entry(due).outcome:
                    self.due.remove(due)
                    continue
                if run.in_use:
                    if not due.logged:
                        log.info("%s is still in use by another process; it is resumed afterwards.", due)
                    due.logged = True
                    continue
                config = {RESUMES: str(due.directory)}
            self.due.remove(due)
            entry = self._entry(due)
            entry.attempts, entry.tried = entry.attempts + 1, time.time()
            entry.begun = entry.tried
            self.journal.run = {"directory": str(due.directory or ""), "state": "submitted", "attempt": entry.attempts}
            self.journal.beat(at_once=True)  # counted also if this process is killed now
            action = "is resumed" if due.directory else "starts"
            log.info("%s %s (attempt %d of %d).", due, action, entry.attempts, self.settings.attempts)
            self.submitting = due, Future()
            given = (superlink, config, self.submitting[1])
            threading.Thread(target=self._submit_now, args=given, name="submit", daemon=True).start()
            return

    def _submit_now(self, superlink: Process, config: Mapping[str, Value], result: Future[int]) -> None:
        try:
            result.set_result(self.app.submit(config, superlink))
        except Exception as error:  # without a result no other run would be submitted
            result.set_exception(error)

    def watch(self, run_id: int, superlink: Process, due: Due | None) -> Watch:
        """Start to follow a run."""
        log.info("Following run %d%s.", run_id, f": {due}" if due else "")
        path = self.app.state / "log" / f"run-{run_id}.log"
        return Watch(run_id, self.settings.control, superlink, path, self.settings.root_certificates, due)

    def check(self, watch: Watch, status: RunStatus, fleet: Fleet) -> bool:
        """Record the progress of a run. Returns whether the run has ended."""
        self.record_directory(watch)
        if watch.lost and status.status == "finished":
            watch.end = status.ended, status.details
        if watch.end is not None:
            self.conclude(watch, *watch.end)
            watch.leave()
            return True
        run = read_run(watch.directory) if watch.recorded and watch.directory else None
        self._note_round(watch, run)
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
        text = _text(watch)  # before the log is moved
        watch.leave()
        # Set also for the case that this server ends now: the stop below is not a person's.
        watch.end = watch.end or ("lost", "its process died")
        self.conclude(watch, *watch.end, text)
        fleet.stop_run(watch.run_id)
        return True

    def _note_round(self, watch: Watch, run: RunOnDisk | None) -> None:
        """Note the last round of the run of --run-config: after one it is not started again, also if it is deleted."""
        if watch.due is not None and watch.due.directory is None and run is not None and run.round is not None:
            self._entry(watch.due).round = run.round

    def record_directory(self, watch: Watch) -> None:
        """Record the directory of a run."""
        if watch.directory is None or watch.recorded:
            return
        watch.recorded = True
        due = watch.due
        if due is None:
            # A person started or resumed it: the earlier entry, under whatever name, no longer counts.
            self.journal.locate()
            self.journal.runs[os.path.realpath(watch.directory)] = JournalEntry(begun=time.time())
        elif due.directory is None:
            self._entry(due).directory = str(watch.directory)
            self.journal.entry(watch.directory)
        log.info("Run %d is kept in %s.", watch.run_id, watch.directory)
        entry = self.journal.entry(watch.directory)
        self.journal.run = {
            "directory": str(watch.directory), "run_id": watch.run_id, "state": "running", "attempt": entry.attempts,
        }  # fmt: skip

    def conclude(self, watch: Watch, status: str, details: str, text: str | None = None) -> None:
        """Decide what follows from the end of a run, and record it. `text`: its log, if that was moved."""
        directory = watch.directory or (watch.due.directory if watch.due else None)
        run = read_run(directory) if directory else None
        self._note_round(watch, run)
        reason = explain(_text(watch) if text is None else text, details) if status == "failed" else details
        what = outcome_of(status, run, reason)
        where = directory or f"run {watch.run_id}"
        if self.journal.run.get("directory") == str(directory or ""):
            state = "unfinished" if what == "again" else what
            self.journal.run |= {"state": state, "round": run.round if run else None}
        if what == "again":
            self.journal.error(f"{where} was interrupted: {reason}")
            own = watch.due is not None and watch.due.directory is None
            if directory is not None and run is not None and run.round is not None:
                self._try_again(directory, reason)
            elif own:  # it has no checkpoint
                self._try_again(None, reason)
            else:
                log.error("%s finished no round, so it cannot be resumed: start it again.", where)
            return
        records = [self.journal.entry(directory)] if directory else []
        if watch.due is not None:
            records.append(self._entry(watch.due))
        for entry in records:
            entry.outcome, entry.reason = what, "" if what == "ended" else reason
        if what == "failed":
            reason = (run.stopped_by if run else None) or reason
            resumable = directory if run and run.round is not None else None
            how = self.app.resume_command(resumable) if resumable else "start it again"
            self.journal.error(f"{where} failed, and is not resumed: {reason}\nWhen the cause is removed: {how}")
        elif what == "stopped" and directory and run and run.round is not None:
            log.info("%s was stopped. To resume it: %s", where, self.app.resume_command(directory))
        else:
            log.info("%s has %s.", where, "been stopped" if what == "stopped" else what)
        self.journal.beat(at_once=True)  # it counts also if this process is killed now

    def interrupted(self, watches: Iterable[Watch]) -> None:
        """Do not count the present attempts: the end of the server is not a failure of the runs."""
        for entry in self._present(watches):
            entry.attempts, entry.tried = max(0, entry.attempts - 1), 0.0

    def broken_off(self, watches: Iterable[Watch]) -> None:
        """Note that the present attempts have failed now, with their SuperLink."""
        for entry in self._present(watches):
            entry.tried = time.time()

    def _present(self, watches: Iterable[Watch]) -> list[JournalEntry]:
        runs = [watch.due for watch in watches if watch.due and not watch.end]
        runs += [self.submitting[0]] if self.submitting else []
        return [*map(self._entry, runs)]


def _text(watch: Watch) -> str:
    return watch.log.read_text(encoding="utf-8", errors="replace") if watch.log.exists() else ""


def _deleted(directories: Iterable[str]) -> set[str]:
    """Return which run directories were deleted. An empty folder, or none, may be that of a disk without its mount."""
    inside: dict[str, list[str]] = {}
    for path in directories:
        inside.setdefault(os.path.dirname(path), []).append(path)
    deleted = set[str]()
    for folder, paths in inside.items():
        with contextlib.suppress(OSError):
            if kept := {*os.listdir(folder)}:
                deleted |= {path for path in paths if os.path.basename(path) not in kept}
    return deleted
