"""What the server decides: which run goes on and when, whose key counts, and whether it is well."""

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from typer.testing import CliRunner

from tepal.host.processes import ProcessError, free_port
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import KEPT_IN, RunDirectory
from tepal.tools.cli.server import app as server
from tepal.tools.cli.server import describe, why_dead, why_unhealthy
from tepal.tools.deploy import provision
from tepal.tools.deploy.app import COPY
from tepal.tools.deploy.doctor import clock
from tepal.tools.deploy.fleet import FleetError, NodeKey, RunStatus, Unreachable, open_fleet
from tepal.tools.deploy.journal import STATE, Journal
from tepal.tools.deploy.node_keys import Keys, ServerError, check_credentials, vanished
from tepal.tools.deploy.provision import ServerFolder, make
from tepal.tools.deploy.provision.certificates import authority, new_key, pem, server_certificate
from tepal.tools.deploy.recovery import (
    Due,
    JournalEntry,
    RunOnDisk,
    config_digest,
    find_submitted,
    next_attempt,
    outcome_of,
    pause,
    read_run,
    unfinished,
)
from tepal.tools.deploy.run_queue import RunQueue, _deleted
from tepal.tools.deploy.settings import Settings, superlink_command
from tepal.tools.deploy.superlink_log import pass_on
from tepal.tools.deploy.supervisor import Supervisor
from tepal.tools.deploy.watch import Watch
from tepal.tools.init import write_app

CONFIG = {"strategy": "fedfrozen", "num-server-rounds": 4, "seed": 1}


@pytest.fixture
def new_run(tmp_path):
    """Makes a run directory with this many finished rounds, begun at a time (seconds since 1970)."""

    def make_run(name, rounds=0, *, begun=1000.0, folder=tmp_path / "runs", **config):
        run = RunDirectory.create(folder, name, {**CONFIG, **config})
        for number in range(1, rounds + 1):
            run.append(RoundRecord(round=number, clients_replied=2))
            (run.path / "checkpoint" / f"round-{number:06d}").mkdir(parents=True)
        os.utime(run.path / "config.toml", (begun, begun))
        return run

    return make_run


def run_on_disk(path, *, begun=0.0, newest=1, ended=False, **more):
    return RunOnDisk(path, begun, newest, ended, **more)


# ---- what a run directory says -----------------------------------------------------------------------------------


def test_a_run_is_unfinished_until_it_has_a_summary(new_run):
    run = new_run("a", rounds=3)
    assert read_run(run.path) == RunOnDisk(run.path, 1000.0, 3, ended=False)
    run.write_summary()
    assert read_run(run.path).ended


def test_a_run_that_failed_says_why(new_run):
    run = new_run("a", rounds=2)
    run.write_summary(stopped_by="too few clients")
    assert read_run(run.path) == RunOnDisk(run.path, 1000.0, 2, ended=True, stopped_by="too few clients")


def test_a_summary_from_before_the_run_was_resumed_is_no_end(new_run):
    """A person prolonged it, or mended what had stopped it; `run` keeps the summary of before until the new end."""
    run = new_run("a", rounds=2)
    run.write_summary(stopped_by="too few clients")
    later = time.time() + 5
    os.utime(run.path / "config.toml", (later, later))
    assert read_run(run.path).ended is False
    assert read_run(run.path).stopped_by is None
    run.append(RoundRecord(round=3, clients_replied=2))
    os.utime(run.path / "config.toml", (1000, 1000))
    (run.path / "checkpoint" / "round-000003").mkdir()
    assert read_run(run.path).ended is False, "a round that the summary does not know"


def test_a_finished_run_whose_files_were_copied_is_still_finished(new_run):
    run = new_run("a", rounds=4)
    run.write_summary()
    later = time.time() + 5
    os.utime(run.path / "config.toml", (later, later))
    assert read_run(run.path).ended


def test_a_run_in_use_is_seen_and_not_disturbed(new_run):
    run = new_run("a", rounds=1)
    assert not read_run(run.path).in_use
    with run.in_use():
        assert read_run(run.path).in_use
    assert not read_run(run.path).in_use
    handle = os.open(run.path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no lock was left behind
    os.close(handle)


@pytest.mark.parametrize("summary", ["", "{", "[1]"])
def test_a_damaged_summary_is_none(new_run, summary):
    run = new_run("a", rounds=1)
    (run.path / "summary.json").write_text(summary)
    assert read_run(run.path).ended is False


def test_what_is_no_run_directory_is_none(tmp_path):
    assert read_run(tmp_path) is None
    assert read_run(tmp_path / "nothing") is None


# ---- which run goes on, and when ---------------------------------------------------------------------------------


def test_unfinished_runs_come_with_the_one_begun_last_first(tmp_path):
    old, new, done, bare, stopped = (tmp_path / name for name in ("old", "new", "done", "bare", "stopped"))
    runs = [
        run_on_disk(old, begun=1),
        run_on_disk(new, begun=2),
        run_on_disk(done, begun=3, ended=True),
        run_on_disk(bare, begun=4, newest=None),
        run_on_disk(stopped, begun=5),
    ]
    entries = {str(stopped): JournalEntry(outcome="stopped"), str(old): JournalEntry(attempts=2)}
    assert [run.path for run in unfinished(runs, entries)] == [new, old]


@pytest.mark.parametrize(
    ("status", "run", "reason", "expected"),
    [
        ("completed", {"ended": True}, "", "ended"),
        ("failed", {"ended": True, "stopped_by": "too few"}, "RoundFailed: too few", "failed"),
        ("stopped", {}, "", "stopped"),
        ("stopped", None, "", "stopped"),
        ("failed", {}, "ConfigError: resume: it has no checkpoint", "failed"),
        ("failed", None, "ConfigError: model='x'", "failed"),
        ("failed", {}, "Task failed with unknown error.", "again"),
        ("failed", {}, "OSError: disk", "again"),
        ("failed", None, "no reason", "again"),
        ("lost", {}, "", "again"),
        ("lost", {"ended": True}, "", "ended"),
        ("completed", None, "", "ended"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_run(tmp_path, status, run, reason, expected):
    assert outcome_of(status, None if run is None else run_on_disk(tmp_path, **run), reason) == expected


def test_pauses_double_up_to_the_longest():
    assert [pause(times, 30) for times in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert pause(10**6, 30) == 30


def test_attempts_are_counted_until_a_round_is_finished():
    entry, now, when = JournalEntry(), 100.0, []
    for _ in range(3):
        when.append(next_attempt(entry, 2, 3, now))
        entry.attempts, entry.tried = entry.attempts + 1, now
    assert when == [100.0, 105.0, 130.0]
    assert next_attempt(entry, 2, 3, now) is None
    assert next_attempt(entry, 3, 3, now) == 100.0, "another round was finished: at once"
    assert entry == JournalEntry(attempts=0, round=3, tried=100.0)


@pytest.mark.parametrize(("attempts", "pause"), [(1, 5.0), (2, 30.0), (3, 120.0), (4, 120.0), (40, 120.0)])
def test_the_pause_before_another_attempt_begins_when_the_last_one_has_failed(attempts, pause):
    """Each further plan, as after a reboot, leaves it as it is."""
    for failed, when in (
        (998.0, 998.0 + pause),
        (1e9, 1000.0 + pause),  # the clock was set back
        (700.0, 1000.0),
        (0.0, 1000.0),  # the server was stopped
    ):
        entry = JournalEntry(attempts=attempts, round=2, tried=failed)
        assert next_attempt(entry, 2, 50, 1000.0) == when
        assert entry.tried == failed


@pytest.mark.parametrize("error", [KeyError("run-id"), TypeError("no TOML"), OSError("no room")])
def test_a_submission_that_fails_in_any_way_has_its_error_as_the_result(error):
    def submit(config, superlink):
        raise error

    result = Future()
    RunQueue._submit_now(SimpleNamespace(app=SimpleNamespace(submit=submit)), None, {}, result)
    assert result.exception(timeout=0) is error


def test_a_submitted_run_is_found_again_by_its_config(new_run):
    before = read_run(new_run("before", 1, begun=10.0).path)
    other = read_run(new_run("other", 1, begun=30.0, seed=2).path)
    own = read_run(new_run("own", 1, begun=20.0).path)
    given = {"seed": 1, "runs": "elsewhere"}
    assert find_submitted([before, other, own], given, 15.0) == own
    assert find_submitted([before, other], given, 15.0) is None


def test_a_run_config_is_remembered_by_its_values():
    assert config_digest({"a": 1, "b": "x"}) == config_digest({"b": "x", "a": 1})
    assert len({config_digest({"a": value}) for value in (1, 2, "1", True)}) == 4


# ---- what a server plans, without a SuperLink --------------------------------------------------------------------


def new_queue(**settings):
    given = Settings(**settings)
    return RunQueue(given, Journal(given.state / STATE))


@pytest.fixture
def queue(tmp_path):
    """Makes a run queue for an app that can resume, with the given run config; the state folder is `tmp_path`."""
    app = tmp_path / "own-app"
    app.mkdir()
    (app / "pyproject.toml").write_text('[tool.flwr.app.config]\nresume = ""\nruns = "runs"\nseed = 0\n')

    def make_queue(run_config=None, **more):
        made = new_queue(state=tmp_path, app=app, run_config=run_config, **more)
        made.app.prepare()
        return made

    return make_queue


def planned(made):
    return [due.directory for due in made.plan()]


def test_the_newest_unfinished_run_goes_on_and_the_others_are_left(queue, new_run, caplog):
    old, new = new_run("old", 1, begun=10).path, new_run("new", 2, begun=20).path
    made = queue()
    assert planned(made) == [new]
    assert made.journal.runs[str(old)].outcome == "left"
    assert f"{old} is unfinished, and a newer run is resumed" in caplog.text and f'resume="{old}"' in caplog.text
    RunDirectory(new, CONFIG).write_summary()
    assert planned(made) == [], "the old one does not come back when the newer has ended"


def test_a_run_config_is_started_once(queue, new_run):
    made = queue({"seed": 1})
    assert planned(made) == [None]
    entry = made._entry(Due(None, 0))
    entry.attempts, entry.begun = 1, 5.0
    assert planned(made) == [None], "it never came to anything"
    run = new_run("own", 1, begun=20)
    assert planned(made) == [run.path], "it was begun, and goes on"
    assert entry.directory == str(run.path)
    run.write_summary()
    assert planned(made) == []
    changed = queue({"seed": 2})
    changed.journal = made.journal
    assert planned(changed) == [None], "another run config is another run"


@pytest.mark.parametrize("noted", ["end", "round", "nothing"])
def test_a_run_config_is_not_started_again_when_its_run_was_deleted_after_a_round(queue, new_run, caplog, noted):
    """Folders of finished runs may be deleted, also of a run that was resumed, whose end is noted for its directory."""
    caplog.set_level("INFO")
    made = queue({"seed": 1})
    run = new_run("own", 0 if noted == "nothing" else 1, begun=20)
    watch = FakeWatch(made.app.state / "none.log", run.path, Due(None, 0))
    made.record_directory(watch)
    if noted == "end":
        run.write_summary()
        assert planned(made) == [] and made._entry(watch.due).outcome == "ended"
    else:
        made.check(watch, RunStatus("running"), FakeRuns())
    shutil.rmtree(run.path)
    assert planned(made) == ([None] if noted == "nothing" else [])
    if noted != "nothing":
        state = "ended" if noted == "end" else "cannot be found; if its disk is away, mount it and restart the server"
        last = caplog.records[-1]
        assert f"The run of --run-config was started before ({run.path}: {state})" in last.message
        assert last.levelname == ("INFO" if noted == "end" else "WARNING")


def test_a_new_run_config_waits_for_the_run_that_goes_on(queue, new_run):
    run = new_run("before", 1, seed=7).path
    assert planned(queue({"seed": 1})) == [run, None]


def test_a_run_that_is_tried_too_often_is_given_up_and_it_is_said_how_to_go_on(queue, new_run, caplog):
    run = new_run("a", 2).path
    made = queue(attempts=2)
    made.journal.runs[str(run)] = JournalEntry(attempts=2, round=2, reason="OSError: no room")
    assert planned(made) == []
    assert made.journal.runs[str(run)].outcome == "given up"
    assert "tried 2 times" in made.journal.last_error["text"] and "OSError: no room" in caplog.text
    assert f"--run-config 'resume=\"{run}\"'" in caplog.text


@pytest.mark.parametrize("config", [None, "seed = 1\n"])
def test_without_an_app_that_can_resume_nothing_goes_on_and_it_is_said(tmp_path, new_run, caplog, config):
    run = new_run("a", 2).path
    app = tmp_path / "app-of-others"
    if config:
        app.mkdir()
        (app / "pyproject.toml").write_text(f"[tool.flwr.app.config]\n{config}")
    made = new_queue(state=tmp_path, app=app if config else None)
    made.app.prepare()
    assert planned(made) == []
    assert f"{run} is unfinished and cannot be resumed" in caplog.text
    assert ("--app" if config is None else "no run config key 'resume'") in caplog.text


def test_a_run_that_was_in_progress_is_not_said_to_be_running_when_nothing_runs(queue, new_run):
    run = new_run("a", 2)
    made = queue()
    for state in ("unfinished", "ended"):
        made.journal.run = {"directory": str(run.path), "state": "running"}
        made.plan()
        assert made.journal.run["state"] == state
        run.write_summary()


def test_what_was_noted_of_run_directories_goes_with_them(queue, new_run):
    made = queue()
    here = str(new_run("a", 2).path)
    made.journal.runs = {here: JournalEntry("stopped"), "/nowhere": JournalEntry("stopped")}
    made.plan()
    assert list(made.journal.runs) == [here]


@pytest.mark.parametrize("mount_point", [True, False])
def test_what_was_noted_of_run_directories_stays_while_their_disk_is_away(queue, tmp_path, mount_point):
    made = queue()
    if mount_point:
        (tmp_path / "disk").mkdir()
    there = str(tmp_path / "disk" / "a")
    made.journal.runs = {there: JournalEntry("stopped")}
    made.plan()
    assert list(made.journal.runs) == [there]


def test_to_find_the_runs_that_were_deleted_each_folder_is_listed_once(monkeypatch):
    listed, kept = [], {"/one": ["a"], "/two": ["a"], "/empty": []}
    monkeypatch.setattr("tepal.tools.deploy.run_queue.os.listdir", lambda path: listed.append(path) or kept[path])
    assert _deleted(["/one/a", "/one/b", "/two/a", "/one/c", "/two/b", "/empty/a"]) == {"/one/b", "/one/c", "/two/b"}
    assert sorted(listed) == ["/empty", "/one", "/two"]


def prepared(state, app):
    """Prepare the app as the start of a server does; return the names of the files that are submitted."""
    made = new_queue(state=state, app=app).app
    made.prepare()
    return sorted(path.relative_to(made.bundle).as_posix() for path in made.bundle.rglob("*") if path.is_file())


@pytest.mark.parametrize("state", ["state", "."])
def test_a_state_folder_in_the_apps_folder_never_travels_with_the_app(tmp_path, state):
    app = tmp_path / "ward"
    write_app(app)
    (app / ".gitignore").unlink(missing_ok=True)  # as in an app that has none
    bundled = ["pyproject.toml", *(f"ward/{name}.py" for name in ("__init__", "client_app", "server_app", "task"))]
    state = (app / state).resolve()
    state.mkdir(exist_ok=True)
    for start in range(3):
        assert prepared(state, app) == bundled, f"start {start}"
        Journal(state / STATE, nodes=["clinic-a"]).write()
        for kept in ("flower/apps/a/task.py", "runs/run-1/config.toml", "flower/config.toml"):
            (state / kept).parent.mkdir(parents=True, exist_ok=True)
            (state / kept).write_text("")


def test_a_folder_that_no_server_has_made_is_never_removed(tmp_path):
    app = tmp_path / "ward"
    write_app(app)
    mine = tmp_path / "app" / "model.py"
    mine.parent.mkdir()
    mine.write_text("mine")
    copied = prepared(tmp_path, app)
    assert mine.read_text() == "mine", "a package of the user's, in the folder where the server was started"
    shutil.rmtree(tmp_path / COPY)
    (tmp_path / COPY / "app").mkdir(parents=True)
    with pytest.raises(ServerError, match=f"{COPY} is not a folder that `tepal server` has made.*--state"):
        prepared(tmp_path, app)
    (tmp_path / COPY / "app").rmdir()
    assert prepared(tmp_path, app) == copied, "an empty folder has nothing to lose"
    (tmp_path / COPY / "app" / "old.py").touch()
    assert prepared(tmp_path, app) == copied, "its own copy is replaced"


def test_the_command_that_resumes_a_run_can_be_pasted_into_a_shell(tmp_path):
    made = new_queue(state=tmp_path / "my state", app=tmp_path / "it's mine").app
    run = tmp_path / "my state" / "runs" / "a"
    home, *command = shlex.split(made.resume_command(run))
    assert home == f"FLWR_HOME={made.home}"
    assert command == ["flwr", "run", str(tmp_path / "it's mine"), "tepal", "--run-config", f'resume="{run}"']


class FakeWatch:
    """A run that has ended, as `Watch` sees it."""

    def __init__(self, log, directory=None, due=None):
        self.run_id, self.directory, self.due, self.recorded, self.end = 7, directory, due, False, None
        self.log, self.lost, self.free_since = log, False, None

    def leave(self):
        pass


class FakeRuns:
    """The part of a fleet that stops runs. `stopped`: each with the end that its watch had by then."""

    def __init__(self, watch=None):
        self.watch, self.stopped = watch, []

    def stop_run(self, run_id):
        self.stopped.append((run_id, self.watch.end))


def test_a_run_is_dead_when_its_directory_is_free_for_some_seconds_without_an_end(
    queue, new_run, tmp_path, monkeypatch
):
    monkeypatch.setattr("tepal.tools.deploy.run_queue._DEAD_AFTER", 0.05)
    run, made = new_run("a", 2), queue()
    watch = FakeWatch(tmp_path / "none.log", run.path)
    runs = FakeRuns(watch)
    running = RunStatus("running")
    with run.in_use():
        assert not made.check(watch, running, runs) and watch.free_since is None
    assert not made.check(watch, running, runs), "it may be about to say that it has ended"
    assert not made.check(watch, RunStatus("finished", "failed"), runs), "Flower knows already"
    assert watch.free_since is None
    assert not made.check(watch, running, runs)
    time.sleep(0.1)
    assert made.check(watch, running, runs)
    end = "lost", "its process died"
    assert runs.stopped == [(7, end)], "its messages are not to keep the nodes busy; that stop is not a person's"
    assert [due.directory for due in made.due] == [run.path]


def test_an_end_that_becomes_known_when_a_dead_run_is_left_counts_with_its_log(queue, new_run, tmp_path, monkeypatch):
    monkeypatch.setattr("tepal.tools.deploy.run_queue._DEAD_AFTER", 0.0)
    run, log = new_run("a", 2).path, tmp_path / "run.log"
    log.write_text(CONFIG_ERROR)

    class Leaving(FakeWatch):
        def leave(self):
            self.end = "failed", "ServerApp failed with exception: …"
            log.rename(run / "flower.log")

    made, watch = queue(), Leaving(log, run)
    assert made.check(watch, RunStatus("running"), FakeRuns(watch))
    assert made.due == [] and made.journal.runs[str(run)].outcome == "failed"
    assert "model='x': known are a, b" in made.journal.last_error["text"]


def test_a_run_whose_log_cannot_be_followed_ends_as_flower_says(queue, new_run, tmp_path):
    run = new_run("a", 2).path
    made = queue()
    watch = FakeWatch(tmp_path / "none.log", run)
    watch.lost = True
    assert not made.check(watch, RunStatus("running"), FakeRuns())
    assert made.check(watch, RunStatus("finished", "stopped"), FakeRuns())
    assert made.journal.runs[str(run)].outcome == "stopped" and made.due == []


@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_in_a_folder_behind_a_symbolic_link_is_one_run(queue, new_run, tmp_path, stopped):
    """A ServerApp logs the directory without links, and the server finds it through the link."""
    run = new_run("a", 2, folder=tmp_path / "disk" / "runs").path
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    made = queue()
    watch = FakeWatch(tmp_path / "none.log", run)
    made.record_directory(watch)
    if stopped:
        made.conclude(watch, "stopped", "")
    assert planned(made) == ([] if stopped else [run])
    assert {path: entry.outcome for path, entry in made.journal.runs.items()} == {
        str(run): "stopped" if stopped else ""
    }
    assert made.journal.entry(tmp_path / "runs" / run.name) is made.journal.runs[str(run)]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_folder_of_runs_that_becomes_a_link_while_the_server_runs_has_the_same_runs(
    queue, new_run, tmp_path, resumed
):
    made, run = queue({"seed": 1}), new_run("a", 2).path
    watch = FakeWatch(tmp_path / "none.log", run, Due(None, 0))
    made.record_directory(watch)
    made.conclude(watch, "stopped", "")
    assert planned(made) == []
    (tmp_path / "runs").rename(tmp_path / "disk")
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    there = tmp_path / "disk" / run.name
    if resumed:
        made.record_directory(FakeWatch(tmp_path / "none.log", there))
    assert planned(made) == ([there] if resumed else [])
    assert list(made.journal.runs) == [str(there)]
    assert made._entry(Due(None, 0)).directory == made.journal.run["directory"] == str(there)


def test_the_directory_in_a_runs_log_is_kept_without_symbolic_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    watch = SimpleNamespace(directory=None)
    Watch._on_event(watch, "log", f"INFO :      {KEPT_IN}{tmp_path / 'runs' / 'a'}")
    assert watch.directory == tmp_path / "disk" / "a"


@pytest.mark.parametrize("ours", [True, False])
def test_a_run_whose_process_died_goes_on_whoever_started_it(queue, new_run, tmp_path, ours):
    run = new_run("a", 2).path
    made = queue()
    watch = FakeWatch(tmp_path / "none.log", run, Due(run, 0) if ours else None)
    made.record_directory(watch)
    made.conclude(watch, "lost", "its process died")
    assert [due.directory for due in made.due] == [run]
    assert made.journal.run["state"] == "unfinished"


def test_an_attempt_that_fails_after_minutes_is_followed_by_the_whole_pause(queue, new_run, tmp_path):
    """And a server that is started meanwhile goes on with that pause."""
    run, made = new_run("a", 2).path, queue()
    entry = made.journal.entry(run)
    entry.attempts, entry.round, entry.tried = 2, 2, time.time() - 600
    before = time.time()
    made.conclude(FakeWatch(tmp_path / "none.log", run, Due(run, 0)), "lost", "its process died")
    (due,) = made.due
    assert before + 30 <= due.when <= time.time() + 30
    time.sleep(0.01)
    assert [each.when for each in made.plan()] == [due.when]


def test_a_run_that_a_person_stopped_stays_stopped_until_a_person_resumes_it(queue, new_run, tmp_path):
    run = new_run("a", 2).path
    made = queue()
    watch = FakeWatch(tmp_path / "none.log", run)
    made.record_directory(watch)
    made.conclude(watch, "stopped", "")
    assert made.due == [] and planned(made) == []
    made.journal.write()
    again = queue()
    again.journal = Journal.read(made.journal.path)
    assert planned(again) == [], "after a restart, too"
    again.record_directory(FakeWatch(tmp_path / "none.log", run))
    assert planned(again) == [run]


@pytest.fixture
def serve(queue, new_run, tmp_path, monkeypatch):
    """Serves one run, resumed by the server if `ours`, until `runs` raises an exception; returns the run's entry."""

    def serve_run(runs, ours, superlink=None):
        run = new_run("a", 2).path
        monkeypatch.setattr("tepal.tools.deploy.supervisor._TICK", 0.0)
        monkeypatch.setattr("tepal.tools.deploy.supervisor._RUNS_INTERVAL", 0.0)
        supervisor = Supervisor(Settings(state=tmp_path))
        supervisor.queue = queue()
        supervisor.journal = supervisor.queue.journal
        entry = supervisor.journal.entry(run)
        entry.attempts, entry.round, entry.tried = 2, 2, 1000.0
        watch = FakeWatch(tmp_path / "none.log", run, Due(run, 0) if ours else None)
        monkeypatch.setattr(supervisor.queue, "plan", list)
        monkeypatch.setattr(supervisor.queue, "watch", lambda *_: watch)
        with pytest.raises((SystemExit, ProcessError)):
            supervisor._serve(superlink or SimpleNamespace(running=True), SimpleNamespace(runs=runs), None)
        return supervisor.journal.runs[str(run)]

    return serve_run


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(RunStatus("finished", "stopped"), "stopped"), (RunStatus("running"), ""), (Unreachable("no answer"), ""),
     (ValueError("no JSON"), ""), (None, "")],
)  # fmt: skip
def test_a_stop_just_before_the_end_of_the_server_is_noted(serve, tmp_path, monkeypatch, answer, outcome, ours):
    """The thread that follows the run does not know it yet. The journal is written at once."""
    asked, done = [], threading.Event()
    monkeypatch.setattr("tepal.tools.deploy.supervisor._LAST_ANSWER", 5.0 if answer else 0.05)

    def runs():
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise SystemExit  # as a signal does
        if len(asked) == 3 and answer is None:
            done.wait(10)
        if len(asked) == 3 and isinstance(answer, Exception):
            raise answer
        return {7: RunStatus("running") if len(asked) == 1 else answer}

    begun = time.monotonic()
    entry = serve(runs, ours)
    assert len(asked) == 3 and time.monotonic() - begun < 5
    done.set()
    assert entry.outcome == outcome
    if ours:
        assert (entry.attempts, entry.tried) == ((2, 1000.0) if outcome else (1, 0.0)), "it goes on at once"
    if outcome:
        (kept,) = Journal.read(tmp_path / STATE).runs.values()
        assert kept.outcome == outcome


def test_an_attempt_that_ends_with_its_superlink_has_failed_then(serve):
    superlink, before = SimpleNamespace(running=True, returncode=1, tail=str), time.time()

    def runs():
        superlink.running = False
        return {7: RunStatus("running")}

    entry = serve(runs, True, superlink)
    assert entry.attempts == 2 and entry.outcome == "" and before <= entry.tried <= time.time()


CONFIG_ERROR = (
    "ERROR :     ServerApp raised an exception\nTraceback (most recent call last):\n"
    '  File "/x/apps/a.b.c/server_app/config/reading.py", line 3, in f\n    raise\n'
    "tepal.server_app.config.errors.ConfigError: model='x': known are a, b\n"
)


def test_an_error_of_configuration_is_not_tried_again(queue, tmp_path, caplog):
    made = queue({"seed": 1})
    log = tmp_path / "run.log"
    log.write_text(CONFIG_ERROR)
    due = Due(None, 0)
    made.conclude(FakeWatch(log, due=due), "failed", "ServerApp failed with exception: …")
    assert made.due == [] and made._entry(due).outcome == "failed"
    assert "model='x': known are a, b" in made.journal.last_error["text"]
    assert planned(made) == []


def test_a_run_of_the_run_config_that_died_before_its_first_checkpoint_is_started_anew(queue, new_run, tmp_path):
    made = queue({"seed": 1}, attempts=2)
    due = Due(None, 0)
    for attempt in (1, 2):
        made._entry(due).attempts = attempt
        made.conclude(FakeWatch(tmp_path / "none.log", new_run("a").path, due), "lost", "its process died")
    assert [each.directory for each in made.due] == [None], "twice in all"
    assert made._entry(due).outcome == "given up"


@pytest.mark.parametrize(
    ("more", "said"),
    [({"run_config": {"sed": 1}}, "no run config key sed. It has: resume, runs, seed"),
     ({"run_config": {"seed": 1}, "app": None}, "without --app"),
     ({"app": "nowhere"}, "is not a Flower app")],
)  # fmt: skip
def test_an_app_or_run_config_that_cannot_be_run_is_refused_in_words(queue, tmp_path, more, said):
    given = {"state": tmp_path, "app": queue().settings.app, **more}
    given["app"] = given["app"] and tmp_path / given["app"]
    with pytest.raises(ServerError, match=said):
        new_queue(**given).app.prepare()


# ---- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_counts_as_gone_when_it_was_missing_for_a_minute():
    assert vanished({b"a", b"b"}, {b"a"}, {}, 5.0) == (set(), {b"b": 5.0})
    assert vanished({b"a", b"b"}, {b"a"}, {b"b": 5.0}, 64.9) == (set(), {b"b": 5.0})
    assert vanished({b"a", b"b"}, {b"a"}, {b"b": 5.0}, 65.0) == ({b"b"}, {})
    assert vanished({b"a", b"b"}, {b"a", b"b", b"c"}, {b"b": 5.0}, 65.0) == (set(), {}), "it is back"


@pytest.fixture
def later():
    """Lets time pass for the keys, by so many seconds."""
    now = [1000.0]

    def wait(seconds):
        now[0] += seconds

    with pytest.MonkeyPatch.context() as own:  # not the test's, which it may undo
        own.setattr("tepal.tools.deploy.node_keys.time", SimpleNamespace(monotonic=lambda: now[0]))
        yield wait


class FakeFleet:
    """A SuperLink's keys: like Flower's, it never takes a revoked one again."""

    def __init__(self):
        self.known, self.asked, self.away = {}, 0, False

    def node_keys(self):
        self.asked += 1
        if self.away:
            raise Unreachable("no SuperLink answers")
        return list(self.known.values())

    def register(self, public_key, name):
        if any(node.public_key == public_key for node in self.known.values()):
            raise FleetError("already in use")
        self.known[len(self.known)] = NodeKey(len(self.known), name, "registered", public_key)
        return len(self.known) - 1

    def unregister(self, node_id):
        node = self.known[node_id]
        self.known[node_id] = NodeKey(node_id, node.name, "unregistered", node.public_key)

    def names(self):
        return [node.name for node in self.known.values() if node.status == "registered"]


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "deployment", hosts=["server.example.org"], sites=["site-0", "site-1"]).server


def test_keys_are_registered_once_and_those_that_vanish_are_unregistered(folder, caplog, later):
    caplog.set_level("INFO")
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    assert fleet.names() == keys.names == ["site-0", "site-1"]
    assert "Node site-0: registered." in caplog.text
    asked = fleet.asked
    keys.update()
    assert fleet.asked == asked, "nothing has changed, so nobody is asked"
    path = folder.nodes / "site-1.pub"
    content = path.read_bytes()
    path.unlink()
    for _ in range(20):
        keys.update()
        assert fleet.names() == ["site-0", "site-1"], "the folder may be being copied"
        later(3)
    keys.update()
    assert fleet.names() == keys.names == ["site-0"]
    assert "Node site-1: unregistered: its key was removed" in caplog.text
    path.write_bytes(content)
    for _ in range(3):
        keys.update()
    assert fleet.names() == keys.names == ["site-0"]
    assert caplog.text.count("accepted again only after the SuperLink (`tepal server`) is") == 1, "it is said once"
    restarted = FakeFleet()
    Keys(folder, restarted).update()
    assert restarted.names() == ["site-0", "site-1"], "which is true"


def test_a_key_that_comes_back_within_a_minute_was_never_unregistered(folder, later):
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    path = folder.nodes / "site-1.pub"
    content = path.read_bytes()
    for _ in range(3):  # each absence is counted anew
        path.unlink()
        for _ in range(10):
            keys.update()
            later(3)
        path.write_bytes(content)
        keys.update()
        later(3)
    assert fleet.names() == keys.names == ["site-0", "site-1"]


def test_a_key_that_is_replaced_is_registered_and_the_old_one_is_not_any_more(folder, tmp_path, later):
    other = make(tmp_path / "other", hosts=["x"], sites=["site-0"]).server
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    (folder.nodes / "site-0.pub").write_bytes((other.nodes / "site-0.pub").read_bytes())
    keys.update()
    later(60)
    keys.update()
    assert sorted(fleet.names()) == ["site-0", "site-1"]
    assert [node.status for node in fleet.known.values() if node.name == "site-0"] == ["unregistered", "registered"]


def test_revoking_by_tepal_provision_unregisters_at_the_next_look(folder):
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    provision.revoke(folder, "site-1")
    keys.update()
    assert fleet.names() == ["site-0"]


def test_a_revoked_key_that_was_cut_and_is_completed_unregisters_its_site(folder):
    """The old file in nodes/ stays, as in a copy of the server's folder over an earlier one; no time tells of it."""
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    key = (folder.nodes / "site-1.pub").read_bytes()
    revoked = folder.revoked / "site-1-20260101T000000.000000Z.pub"
    revoked.write_bytes(key[:50] + b"x" * len(key[50:]))
    before = revoked.stat()
    keys.update()
    assert fleet.names() == ["site-0", "site-1"] and keys.names == ["site-0"]
    revoked.write_bytes(key)
    os.utime(revoked, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.update()
    assert fleet.names() == keys.names == ["site-0"]


def test_a_new_key_that_becomes_readable_is_registered(folder, caplog, monkeypatch):
    """`chown` changes neither the time of a file nor its size, and what root has copied is the server's after it."""
    fleet, read, closed = FakeFleet(), Path.read_bytes, folder.nodes / "site-1.pub"

    def refuse(path):
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    keys = Keys(folder, fleet)
    for _ in range(3):
        keys.update()
    assert fleet.names() == keys.names == ["site-0"]
    assert caplog.text.count(f"{closed} cannot be read by this user (uid {os.geteuid()}) and belongs to uid") == 1
    monkeypatch.undo()
    keys.update()
    assert fleet.names() == keys.names == ["site-0", "site-1"]


def test_a_name_whose_revoked_key_cannot_be_read_is_not_authorised(folder, caplog, later):
    fleet = FakeFleet()
    (folder.revoked / "site-1-20260101T000000.000000Z.pub").write_bytes(b"half a ke")
    keys = Keys(folder, fleet)
    keys.update()
    assert fleet.names() == keys.names == ["site-0"] and "is not registered while a key of it" in caplog.text
    (folder.revoked / "site-0-20260101T000000.000000Z.pub").write_bytes(b"half a ke")
    keys.update()
    assert fleet.names() == ["site-0"] and keys.names == [], "it may be being copied"
    later(60)
    keys.update()
    assert fleet.names() == keys.names == []


def test_a_renewed_key_stays_registered_while_the_revoked_one_cannot_be_read(folder, tmp_path, later):
    """Where the SuperLink knows the old key, and where the revoked file was read before."""
    new = (make(tmp_path / "other", hosts=["x"], sites=["site-0"]).server.nodes / "site-0.pub").read_bytes()
    revoked = folder.revoked / "site-0-20260101T000000.000000Z.pub"
    old = (folder.nodes / "site-0.pub").read_bytes()
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    (folder.nodes / "site-0.pub").write_bytes(new)
    keys.update()
    for content in (b"half a ke", old, b"half a ke"):
        revoked.write_bytes(content)
        for _ in range(3):
            keys.update()
            later(60)
        assert sorted(fleet.names()) == keys.names == ["site-0", "site-1"]
    fleet = FakeFleet()
    revoked.write_bytes(old)
    keys = Keys(folder, fleet)
    keys.update()
    revoked.write_bytes(b"half a ke")
    for _ in range(3):
        keys.update()
        later(60)
    assert fleet.names() == keys.names == ["site-0", "site-1"]


def test_a_folder_of_revoked_keys_that_is_closed_changes_nothing(folder, caplog, monkeypatch):
    fleet, listed = FakeFleet(), Path.iterdir

    def refuse(path):
        if path == folder.revoked:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    keys = Keys(folder, fleet)
    keys.update()
    assert fleet.names() == [] and f"{folder.revoked} cannot be read (Permission denied)" in caplog.text
    monkeypatch.undo()
    keys.update()
    assert fleet.names() == ["site-0", "site-1"]


@pytest.mark.parametrize("closed", ["nodes", "revoked"])
def test_a_server_does_not_start_with_a_folder_of_keys_that_is_closed(folder, monkeypatch, closed):
    path, listed = getattr(folder, closed), Path.iterdir

    def refuse(asked):
        if asked == path:
            raise PermissionError(13, "Permission denied", str(asked))
        return listed(asked)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ServerError, match=f"{path} cannot be read by this user .*chown"):
        check_credentials(folder, "localhost", datetime.now(UTC))


def test_nobody_is_revoked_when_the_folder_or_a_file_cannot_be_read(folder, caplog, later):
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    keys.update()
    (folder.nodes / "site-1.pub").write_bytes(b"half a ke")
    for _ in range(3):
        keys.update()
        later(60)
    folder.nodes.rename(folder.folder / "away")
    for _ in range(3):
        keys.update()
        later(60)
    assert fleet.names() == ["site-0", "site-1"]
    assert caplog.text.count("the registered nodes stay as they are") == 1


def test_a_superlink_that_is_away_is_asked_again(folder):
    fleet = FakeFleet()
    fleet.away = True
    keys = Keys(folder, fleet)
    with pytest.raises(Unreachable):
        keys.update()
    fleet.away = False
    keys.update()
    assert fleet.names() == ["site-0", "site-1"]


def test_a_key_whose_registration_was_not_answered_is_logged_when_the_superlink_has_it(folder, caplog, monkeypatch):
    caplog.set_level("INFO")
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    register = fleet.register

    def answer_is_lost(public_key, name):
        register(public_key, name)
        raise Unreachable("timed out")

    monkeypatch.setattr(fleet, "register", answer_is_lost)
    for _ in range(2):
        with pytest.raises(Unreachable):
            keys.update()
    monkeypatch.undo()
    assert "registered" not in caplog.text
    keys.update()
    (folder.nodes / "site-1.pub").touch()
    keys.update()
    assert [line for line in caplog.messages if "registered" in line] == [
        "Node site-0: registered.", "Node site-1: registered.",
    ]  # fmt: skip
    Keys(folder, fleet).update()
    assert len(caplog.messages) == 2, "a server that is started again registers nothing"


def test_what_was_registered_is_logged_when_unregistering_fails_after_it(folder, caplog, monkeypatch, later):
    caplog.set_level("INFO")
    fleet = FakeFleet()
    keys = Keys(folder, fleet)
    (folder.nodes / "site-1.pub").rename(folder.folder / "later")
    keys.update()
    (folder.folder / "later").rename(folder.nodes / "site-1.pub")
    (folder.nodes / "site-0.pub").unlink()
    monkeypatch.setattr(fleet, "unregister", lambda node_id: (_ for _ in ()).throw(Unreachable("timed out")))
    keys.update()
    later(60)
    for _ in range(2):
        with pytest.raises(Unreachable):
            keys.update()
    monkeypatch.undo()
    keys.update()
    assert fleet.names() == ["site-1"]
    assert [line.partition(":")[::2] for line in caplog.messages if line.startswith("Node")] == [
        ("Node site-0", " registered."), ("Node site-1", " registered."),
        ("Node site-0", f" unregistered: its key was removed from {folder.nodes}, or replaced."),
    ]  # fmt: skip


# ---- certificates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "said"),
    [(0, None), (340, "expires in 24 days"), (366, "server.crt expired on"), (3660, "ca.crt expired on"),
     (-1, "Set the clock")],
)  # fmt: skip
def test_certificates_that_end_soon_or_have_ended_are_told(folder, days, said):
    now = datetime.now(UTC) + timedelta(days=days)
    if said and "expires" in said:
        (warning,) = check_credentials(folder, "127.0.0.1", now)
        assert said in warning and "tepal provision renew FOLDER --server" in warning
    elif said:
        with pytest.raises(ServerError, match=said) as error:
            check_credentials(folder, "127.0.0.1", now)
        assert ("renew" in str(error.value)) == ("server.crt expired" in said)
    else:
        assert check_credentials(folder, "127.0.0.1", now) == []


def test_an_authority_that_ends_soon_needs_a_new_deployment(tmp_path):
    """`renew` makes no certificate of an authority, and none of the server that is valid for longer."""
    made = make(tmp_path / "fl", hosts=["x"], sites=["a"], days=19, ca_days=19)
    of_ca, of_server = check_credentials(made.server, "127.0.0.1", datetime.now(UTC))
    assert "ca.crt expires" in of_ca and "`tepal provision make`" in of_ca and "renew" not in of_ca
    assert "server.crt expires" in of_server and "renew FOLDER --server" in of_server


def test_credentials_that_lack_something_are_refused(folder):
    now = datetime.now(UTC)
    with pytest.raises(ServerError, match=r"server.example.org.* and not for 10\.0\.0\.1"):
        check_credentials(folder, "10.0.0.1", now)
    folder.certificate.write_text("nonsense")
    with pytest.raises(ServerError, match=r"certificate cannot be read: .* is not a certificate"):
        check_credentials(folder, "127.0.0.1", now)
    folder.key.unlink()
    with pytest.raises(ServerError, match=r"has no server\.key"):
        check_credentials(folder, "127.0.0.1", now)


def test_the_daily_check_of_the_credentials_ends_no_server(folder, tmp_path, monkeypatch):
    there = Path.exists

    def refuse(path):
        if path == folder.root_certificates:
            raise PermissionError(13, "Permission denied", str(path))
        return there(path)

    monkeypatch.setattr(Path, "exists", refuse)
    supervisor = Supervisor(Settings(state=tmp_path, credentials=folder))
    said = f"{folder.root_certificates} cannot be read by this user "
    with pytest.raises(ServerError, match=f"{said}.*chown"):
        supervisor._check_credentials()
    supervisor._check_credentials(again=True)
    assert said in supervisor.journal.last_error["text"]

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "exists", broken)
    with pytest.raises(OSError, match="Input/output error"):  # which the command reports, as each OSError
        supervisor._check_credentials()
    supervisor._check_credentials(again=True)
    assert supervisor.journal.last_error["text"] == "[Errno 5] Input/output error"


@pytest.mark.parametrize("days", [365, 20])
def test_a_replaced_certificate_that_the_superlink_does_not_use_yet_is_told(tmp_path, monkeypatch, caplog, days):
    made = make(tmp_path / "fl", hosts=["x"], sites=["a"], days=days)
    supervisor = Supervisor(Settings(state=tmp_path, credentials=made.server))
    ends = x509.load_pem_x509_certificate(made.server.certificate.read_bytes()).not_valid_after_utc

    def failing(*_, **__):
        raise ProcessError("it does not start")

    def told():
        caplog.clear()
        supervisor._check_credentials(again=True)
        return [message for message in caplog.messages if "was replaced" in message]

    monkeypatch.setattr("tepal.tools.deploy.supervisor.started", failing)
    assert not told(), "no SuperLink was started"
    for _ in range(2):
        with pytest.raises(ProcessError):
            supervisor._serve_once()
        assert not told(), "it uses the present one"
        provision.renew_server(made.folder)
        (said,) = told()
        assert f"{made.server.certificate} was replaced" in said and "restart this server" in said
        assert f"the former one, which expires on {ends.strftime('%Y-%m-%d %H:%M')} UTC" in said
        ends = x509.load_pem_x509_certificate(made.server.certificate.read_bytes()).not_valid_after_utc
    made.server.certificate.unlink()
    assert not told() and "has no server.crt" in supervisor.journal.last_error["text"]


def test_a_key_that_is_not_the_certificates_is_refused(folder, tmp_path):
    other = make(tmp_path / "other", hosts=["x"], sites=["a"]).server
    shutil.copy(other.key, folder.key)
    with pytest.raises(ServerError, match=f"{folder.key} does not belong to {folder.certificate}: copy both"):
        check_credentials(folder, "127.0.0.1", datetime.now(UTC))
    shutil.copy(other.certificate, folder.certificate)
    with pytest.raises(ServerError, match=f"{folder.certificate} was not issued by {folder.root_certificates}, which"):
        check_credentials(folder, "127.0.0.1", datetime.now(UTC))
    shutil.copy(other.root_certificates, folder.root_certificates)
    assert check_credentials(folder, "127.0.0.1", datetime.now(UTC)) == []


def test_a_key_that_cannot_be_used_is_refused(folder, monkeypatch):
    now, key = datetime.now(UTC), load_pem_private_key(folder.key.read_bytes(), None)
    for form in (PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL):
        folder.key.write_bytes(key.private_bytes(Encoding.PEM, form, BestAvailableEncryption(b"secret")))
        with pytest.raises(ServerError, match="is encrypted, which the server cannot open: store it without"):
            check_credentials(folder, "127.0.0.1", now)
    for content in (b"", b"nonsense", folder.certificate.read_bytes(), pem(key)[:90]):
        folder.key.write_bytes(content)
        with pytest.raises(ServerError, match=f"{folder.key} is not a private key in PEM: copy it again"):
            check_credentials(folder, "127.0.0.1", now)
    read = Path.read_bytes

    def refuse(path):
        if path == folder.key:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read all
    with pytest.raises(ServerError, match=f"{folder.key} cannot be read by this user .*chown"):
        check_credentials(folder, "127.0.0.1", now)


def intermediate(root, root_key):
    """A certificate that issues others and was itself issued by `root`, and its key."""
    key, now = new_key(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Company CA 2")])
    builder = x509.CertificateBuilder(root.subject, name, key.public_key(), x509.random_serial_number())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.not_valid_before(now).not_valid_after(now + timedelta(days=90)).sign(root_key, hashes.SHA384()), key


def test_a_certificate_of_another_authority_may_come_with_intermediate_ones(folder):
    root_key = new_key()
    root, stranger = authority(root_key, 90), authority(new_key(), 90)
    between, key = intermediate(root, root_key)
    last, last_key = intermediate(between, key)
    own, own_key = server_certificate(last, last_key, ["x"], 60)
    folder.key.write_bytes(own_key)
    own, root, between, last = own.decode(), *(pem(each).decode() for each in (root, between, last))
    for chain, trusted, good in (
        ([own, last, between], [root], True),
        ([own, between, last, root], [pem(stranger).decode(), root], True),  # in another order
        ([own, last], [between], True),
        ([own], [last], True),
        ([own], [own], True),  # as one that is signed by itself
        ([own], [root], False),
        ([own, between], [root], False),
        ([own, last, between], [pem(stranger).decode()], False),
    ):
        folder.certificate.write_text("A text before it.\n" + "".join(chain))
        folder.root_certificates.write_text("".join(trusted))
        if good:
            assert check_credentials(folder, "127.0.0.1", datetime.now(UTC)) == []
        else:
            with pytest.raises(ServerError, match=r"intermediate certificates belong into server\.crt"):
                check_credentials(folder, "127.0.0.1", datetime.now(UTC))
    folder.certificate.write_text(own + last.replace("M", "A"))
    with pytest.raises(ServerError, match=f"{folder.certificate} has a certificate that cannot be read: copy it again"):
        check_credentials(folder, "127.0.0.1", datetime.now(UTC))


# ---- server.json, the log, the command line ----------------------------------------------------------------------


def test_the_status_is_read_without_torch_flower_and_cryptography():
    code = (
        "import sys, tepal.tools.deploy.journal, tepal.tools.cli.server\n"
        "print([name for name in ('torch', 'flwr', 'cryptography') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_journal_survives_and_only_its_owner_may_read_it(tmp_path):
    journal = Journal(
        tmp_path / "server.json", pid=3, nodes=["site-0"], runs={"/a": JournalEntry("stopped", attempts=2)}
    )
    journal.started["digest"] = JournalEntry(directory="/a")
    journal.write()
    assert Journal.read(journal.path) == journal
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert Journal.read(tmp_path / "nothing.json") == Journal(tmp_path / "nothing.json")
    journal.path.write_text(json.dumps({"pid": 4, "a-key-of-later": 1}))
    assert Journal.read(journal.path).pid == 4
    for damaged in ("{", "[]", '{"runs": {"/a": {"nonsense": 1}}}'):
        journal.path.write_text(damaged)
        with pytest.raises(ServerError, match="cannot be read"):
            Journal.read(journal.path)


def test_a_state_folder_that_was_moved_keeps_what_was_noted_of_its_runs(tmp_path, new_run):
    """What is outside of it has not moved."""
    run = new_run("a", 2, folder=tmp_path / "one" / "runs").path
    noted = {str(run): JournalEntry("stopped"), "/elsewhere/b": JournalEntry("left")}
    journal = Journal(tmp_path / "one" / STATE, runs=noted, run={"directory": str(run)})
    journal.started["digest"] = JournalEntry(directory=str(run))
    journal.write()
    assert Journal.read(journal.path) == journal
    (tmp_path / "one").rename(tmp_path / "two")
    moved = Journal.read(tmp_path / "two" / STATE)
    here = str(tmp_path / "two" / "runs" / run.name)
    assert moved.runs == {here: JournalEntry("stopped"), "/elsewhere/b": JournalEntry("left")}
    assert moved.started["digest"].directory == moved.run["directory"] == here


@pytest.mark.parametrize("copied", [True, False])
def test_a_journal_that_was_moved_without_the_runs_finds_them_where_they_were(tmp_path, new_run, copied):
    run = new_run("a", 2, folder=tmp_path / "proj" / "results").path
    noted = {str(run): JournalEntry("stopped"), str(tmp_path / "proj" / "results" / "gone"): JournalEntry("left")}
    Journal(tmp_path / "proj" / STATE, runs=noted, run={"directory": str(run)}).write()
    state = tmp_path / "proj" / "state"
    state.mkdir()
    (tmp_path / "proj" / STATE).rename(state / STATE)
    if copied:
        shutil.copytree(tmp_path / "proj" / "results", state / "results")
    here = str(state / "results" / run.name) if copied else str(run)
    moved = Journal.read(state / STATE)
    assert moved.runs == {here: JournalEntry("stopped"), str(state / "results" / "gone"): JournalEntry("left")}
    assert moved.run["directory"] == here


def test_a_journal_that_names_a_run_through_a_link_and_without_it_keeps_its_outcome(tmp_path):
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    run, link = str(tmp_path / "disk" / "a"), str(tmp_path / "runs" / "a")
    for outcomes in ({run: "stopped", link: ""}, {run: "", link: "stopped"}):
        noted = {path: JournalEntry(outcome) for path, outcome in outcomes.items()}
        Journal(tmp_path / STATE, runs=noted, run={"directory": link}).write()
        journal = Journal.read(tmp_path / STATE)
        assert journal.runs == {run: JournalEntry("stopped")} and journal.run["directory"] == run


def test_a_journal_that_is_closed_to_this_user_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)  # root may read all
    done = invoke("status", "--state", str(tmp_path))
    said = f"{tmp_path / STATE} cannot be read by this user (uid {os.geteuid()}): use sudo, or the user that runs the"
    assert done.exit_code == 1 and said in done.output and "move it away" not in done.output


def test_one_server_for_each_state_folder(tmp_path):
    with (tmp_path / "server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServerError, match="another `tepal server` runs"):
            Supervisor(Settings(state=tmp_path)).run()
    assert not (tmp_path / "server.json").exists()


def test_the_logs_of_runs_that_crashed_last_are_kept(tmp_path, monkeypatch):
    (tmp_path / "log").mkdir()
    for number in range(8):
        (tmp_path / "log" / f"run-{number}.log").touch()
        os.utime(tmp_path / "log" / f"run-{number}.log", (number, number))
    monkeypatch.setattr(Supervisor, "_keep_superlink_running", lambda self: None)
    Supervisor(Settings(state=tmp_path)).run()
    kept = {path.name for path in (tmp_path / "log").glob("run-*.log")}
    assert kept == {f"run-{number}.log" for number in range(3, 8)}


@pytest.mark.parametrize("place", ["control", "fleet"])
def test_another_server_on_a_port_is_never_taken_for_the_superlink(tmp_path, monkeypatch, place):
    requests, ports = [], {"control": free_port(), "fleet": free_port()}

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.requestline)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    monkeypatch.setattr("tepal.tools.deploy.supervisor.superlink_command", lambda _: ["sleep", "60"])
    monkeypatch.setattr("tepal.tools.deploy.supervisor._FREE", 0.3)
    monkeypatch.setattr("tepal.tools.deploy.supervisor._START", 0.3)
    monkeypatch.setattr(Supervisor, "_serve", lambda *_: pytest.fail("it counts as the SuperLink"))
    with HTTPServer(("127.0.0.1", ports[place]), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        settings = Settings(state=tmp_path, port=ports["control"], fleet=f"127.0.0.1:{ports['fleet']}")
        option = "--port" if place == "control" else "--fleet-api-address"
        with pytest.raises(ServerError, match=f"port {ports[place]} is used by another program.*{option}"):
            Supervisor(settings).run()
        stranger.shutdown()
    assert requests == []
    assert why_dead(Journal.read(tmp_path / STATE), time.time(), True) == "the server was stopped"


def test_a_superlink_whose_port_is_taken_meanwhile_is_started_when_it_is_free(tmp_path, monkeypatch):
    supervisor, happened = Supervisor(Settings(state=tmp_path, port=free_port())), []
    answers = ["", "", "port 8000 is used", "", ""]  # for two ports at each start, until one is taken

    def serve_once():
        happened.append("served")
        if len(happened) > 1:
            raise SystemExit
        supervisor._answered = time.monotonic()
        raise ProcessError("it ended")

    monkeypatch.setattr(supervisor, "_serve_once", serve_once)
    monkeypatch.setattr(supervisor, "_pause", lambda _: None)
    monkeypatch.setattr("tepal.tools.deploy.supervisor.why_taken", lambda *_: answers.pop(0))
    with pytest.raises(SystemExit):
        supervisor._keep_superlink_running()
    assert happened == ["served", "served"] and not answers
    assert "port 8000 is used" in supervisor.journal.last_error["text"]


def unknown(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("asked", ["provision", "doctor"])
def test_where_no_server_answers_the_proxy_that_was_not_used_is_named(monkeypatch, asked):
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy.example.org:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    address = "fleet.invalid:9093"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    if asked == "doctor":
        said = clock(address).found
    else:
        with open_fleet(address, None) as fleet, pytest.raises(Unreachable) as error:
            fleet.runs()
        said = str(error.value)
    assert "proxy.example.org:3128 of https_proxy" in said and "secret" not in said


ACCESS = '2026-11-21T11:48:22.767Z INFO [uvicorn.access] 127.0.0.1:52856 - "POST /v1/control/list-runs HTTP/1.1" '


def test_the_superlinks_log_is_passed_on_in_whole_lines_without_routine(tmp_path, capsys):
    path = tmp_path / "superlink.log"
    path.write_text("INFO : one\nINFO : ControlServicer.ListRuns\n\n" + ACCESS + "200\nINFO : two\nINFO : th")
    position = pass_on(path, 0, 1000)
    assert capsys.readouterr().out == "INFO : one\nINFO : two\n"
    with path.open("a") as file:
        file.write("ree\n")
        file.flush()
        position = pass_on(path, position, 20)
        assert capsys.readouterr().out == "INFO : three\n"
        assert position == 0 and path.stat().st_size == 0, "it was long enough"
        assert path.with_name("superlink.log.1").read_text().endswith("three\n")
        file.write(f"{ACCESS}500\n")
    assert path.read_text() == f"{ACCESS}500\n", "the SuperLink goes on writing to it"
    pass_on(path, position, 1000)
    assert capsys.readouterr().out == f"{ACCESS}500\n"


def test_a_log_that_cannot_be_copied_to_a_full_disk_is_cut_and_no_line_comes_twice(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    path = tmp_path / "superlink.log"
    path.write_text("INFO : a long line\n")
    assert pass_on(path, 0, 10) == 0 and path.stat().st_size == 0
    assert pass_on(path, 0, 10) == 0
    assert capsys.readouterr().out == "INFO : a long line\n"


def healthy(**more):
    return Journal(**{"path": Path("none/server.json"), "pid": 1, "heartbeat": 100.0, "superlink": "running", **more})


@pytest.mark.parametrize(
    ("journal", "now", "alive", "said"),
    [
        (healthy(), 110.0, True, ""),
        (healthy(), 131.0, True, "stuck: its last heartbeat was 31 s ago"),
        (healthy(), 110.0, False, "is no longer running"),
        (healthy(superlink="waiting"), 110.0, True, "the SuperLink is not running: its state is waiting"),
        (healthy(superlink="stopped"), 110.0, False, "was stopped"),
        (healthy(pid=0), 110.0, False, "no server has been started"),
    ],
)  # fmt: skip
def test_what_makes_a_server_unhealthy(journal, now, alive, said):
    problem = why_unhealthy(journal, now, alive)
    assert said in problem and bool(said) == bool(problem)
    assert describe(journal, problem)[0] == (f"unhealthy: {problem}" if problem else "healthy")


@pytest.mark.parametrize("superlink", ["starting", "waiting", "running", "stopped"])
@pytest.mark.parametrize("age", [1, 100])
def test_a_server_that_restarts_its_superlink_is_alive_and_not_healthy(tmp_path, superlink, age):
    """A new process would not help it, as it would one that is stuck or has ended."""
    now = time.time()
    values = {"pid": os.getpid(), "heartbeat": now - age, "superlink": superlink, "control": "127.0.0.1:1"}
    (tmp_path / STATE).write_text(json.dumps(values))
    os.utime(tmp_path / STATE, (now - age, now - age))
    done = invoke("status", "--state", str(tmp_path), "--alive")
    first, rest = done.output.split("\n", 1)
    if age == 1 and superlink != "stopped":
        assert (done.exit_code, first) == (0, "alive") and superlink in rest
    else:
        assert done.exit_code == 1 and first.startswith("unhealthy: ")
    done = invoke("status", "--state", str(tmp_path))
    assert done.exit_code == 1 and done.output.startswith("unhealthy: "), "no SuperLink answers there"


def test_a_server_whose_disk_is_full_is_alive(tmp_path, monkeypatch, caplog):
    journal = healthy(path=tmp_path / STATE, heartbeat=1000.0)
    journal.write()
    os.utime(journal.path, (1000.0, 1000.0))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    now = time.time()
    assert "stuck" in why_dead(Journal.read(journal.path), now, True)
    journal.beat()
    assert why_dead(Journal.read(journal.path), now, True) == "" and "No space left" in caplog.text
    assert "stuck" in why_dead(Journal.read(journal.path), now + 60, True), "a server that is stuck beats no more"
    caplog.clear()
    journal.beat()
    assert caplog.text == "", "it is tried, and logged, every few seconds only"


def test_a_server_that_was_never_started_is_not_alive(tmp_path):
    done = invoke("status", "--state", str(tmp_path), "--alive")
    assert done.exit_code == 1 and "no server has been started" in done.output


def test_the_status_is_told_for_a_person():
    journal = healthy(
        nodes=["site-0"], root_certificates="/ca.crt",
        run={"directory": "/runs/a", "state": "running", "round": 3, "attempt": 1},
        runs={"/runs/b": JournalEntry("left"), "/runs/c": JournalEntry("ended")},
        last_error={"at": "now", "text": "no room"},
    )  # fmt: skip
    text = "\n".join(describe(journal, ""))
    for part in ("1 registered: site-0", "/runs/a: running, last finished round 3", "/runs/b: left", "now: no room"):
        assert part in text
    assert "/runs/c" not in text and "WITHOUT TLS" not in text
    assert "WITHOUT TLS" in "\n".join(describe(healthy(), ""))


def invoke(*arguments, **environment):
    return CliRunner().invoke(server, arguments, env=environment)


def test_the_command_refuses_to_run_without_credentials(tmp_path):
    done = invoke("--state", str(tmp_path))
    assert done.exit_code == 1 and "--credentials" in done.output and "--insecure" in done.output
    done = invoke("--insecure", "--credentials", str(tmp_path))
    assert done.exit_code == 1 and "contradict" in done.output
    done = invoke(TEPAL_CREDENTIALS=str(tmp_path), TEPAL_STATE=str(tmp_path))
    assert done.exit_code == 1 and "has no credentials" in done.output
    assert list(tmp_path.iterdir()) == []


def test_every_option_comes_from_the_environment_as_well(tmp_path, folder, monkeypatch):
    found = []
    monkeypatch.setattr(Supervisor, "run", lambda self: found.append(self.settings))
    monkeypatch.setattr("tepal.tools.cli.server.signal.signal", lambda *_: None)
    monkeypatch.setattr("tepal.tools.cli.server._log_to_stdout", lambda: None)
    (tmp_path / "config.toml").write_text("seed = 3\n")
    done = invoke(
        TEPAL_CREDENTIALS=str(folder.folder), TEPAL_STATE=str(tmp_path), TEPAL_APP=str(tmp_path / "app"),
        TEPAL_RUN_CONFIG=f"{tmp_path / 'config.toml'}\nstrategy='fed avg' rounds=2\n", TEPAL_HOST="0.0.0.0",
        TEPAL_FLEET_API_ADDRESS="0.0.0.0:9999", TEPAL_PORT="8001", TEPAL_ATTEMPTS="2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert found == [
        Settings(
            state=tmp_path, credentials=ServerFolder(folder.folder), app=tmp_path / "app", fleet="0.0.0.0:9999",
            run_config={"seed": 3, "strategy": "fed avg", "rounds": 2}, host="0.0.0.0", port=8001, attempts=2,
        )
    ]  # fmt: skip
    assert found[0].control == "127.0.0.1:8001"
    command = superlink_command(found[0])
    assert "--insecure" not in command and "--enable-supernode-auth" in command
    assert "--insecure" in superlink_command(Settings(state=tmp_path))
    done = invoke(TEPAL_INSECURE="true", TEPAL_STATE=str(tmp_path), TEPAL_CREDENTIALS="", TEPAL_RUN_CONFIG="")
    assert done.exit_code == 0, done.output
    assert found[1] == Settings(state=tmp_path)


def test_the_status_of_a_folder_where_nothing_runs_is_bad(tmp_path):
    for arguments in (("status", "--state", str(tmp_path)), ("--state", str(tmp_path), "status")):
        done = invoke(*arguments)
        assert done.exit_code == 1 and done.output.startswith("unhealthy: no server has been started")
    journal = Journal(
        tmp_path / "server.json", pid=os.getpid(), heartbeat=time.time(), superlink="running", control="127.0.0.1:1"
    )
    journal.write()
    done = invoke("status", TEPAL_STATE=str(tmp_path))
    assert done.exit_code == 1 and "the SuperLink does not answer at http://127.0.0.1:1/health" in done.output
