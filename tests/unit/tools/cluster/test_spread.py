"""A run whose clients are on a cluster: its jobs, which are fakes here, and when one waits, is lost or fails."""

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tepal.host.request_files import CRASHED, END, GONE, READY, REQUESTS
from tepal.host.superlink import EndedRun, RunError
from tepal.tools.cluster import ahead as ahead_module
from tepal.tools.cluster import inputs as inputs_module
from tepal.tools.cluster import spread as spread_module
from tepal.tools.cluster.connection import Cluster, ClusterLost, Resources
from tepal.tools.cluster.inputs import Inputs
from tepal.tools.cluster.job import JobFailed, Place
from tepal.tools.cluster.spread import SpreadEngine
from tepal.tools.own_app import own_app
from tepal.tools.simulation.engine import RunStopped

PLACE = Place("far", "/tmp/tepal-job-x", "/tmp/tepal-inputs-7")


class Server:
    """In the place of the process with the ServerApp: it does what a test wants with the workers' folder."""

    does = staticmethod(lambda folder: None)

    def __init__(self, app, clients, *, others):
        self.others, self.cache = others, None

    def run(self, config, *, on_event, log):
        log.write_text("the server's\n")
        on_event("stage", "Running with 3 clients in one process ...")
        on_event("log", "a line")
        Server.does(Path(self.others["asks"]))
        return EndedRun(1, "completed", log)

    def start_ahead(self, runs):
        self.begun = True

    def stop(self):
        self.stopped = True


def on_a_machine(folder, tell):
    tell("stage", "on far")
    (folder / READY).touch()  # it has come from there


@pytest.fixture
def jobs(monkeypatch):
    """What the jobs do: `jobs.do(folder, tell)`, each in a thread; by default they end when they are to."""
    found = SimpleNamespace(all=[], do=on_a_machine)

    def done(cluster, job, tell):
        found.all.append(job)
        folder = job.folders["worker"]
        assert not (folder / READY).exists()
        found.do(folder, tell)
        while not (folder / END).exists():
            if cluster.stopped.wait(0.01):
                raise RunStopped

    monkeypatch.setattr(spread_module, "done", done)
    return found


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(inputs_module, "_code", lambda _copy: {})
    monkeypatch.setattr(spread_module, "ProcessEngine", Server)
    monkeypatch.setattr(Server, "does", staticmethod(lambda folder: None))
    monkeypatch.delenv("TEPAL_CACHE", raising=False)
    with Inputs() as inputs:
        cluster = Cluster("here:1", Resources(2.0), (Resources(4.0), Resources(5.0)), inputs)
        with SpreadEngine(own_app(), 3, cluster) as made:
            yield made


@pytest.fixture
def config(tmp_path):
    (tmp_path / "x.npz").write_text("data")
    (tmp_path / "w.pt").write_text("weights")
    return {
        "strategy": "fedavg", "runs": str(tmp_path / "runs"), "dataset": str(tmp_path / "x.npz"),
        "pretrained": f"{tmp_path}/w.pt,tiny-vit",
    }  # fmt: skip


def states(folder):
    """Of each worker why it never is ready again, else whether it is."""
    workers = [folder / str(worker) for worker in range(3)]
    return [(of / GONE).read_text() if (of / GONE).exists() else (of / READY).exists() for of in workers]


def until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def test_each_place_has_a_job_that_is_sent_messages_and_sends_replies(engine, jobs, config, tmp_path):
    assert engine.description == (
        "Engine: Ray cluster here:1: 2 machines with 9 cores; the server here, 3 clients at once, each with 2 cores"
    )
    assert engine.options == "--ray here:1 --spread"
    told = []
    Server.does = staticmethod(lambda folder: until(lambda: states(folder) == [True] * 3))
    ended = engine.run(config, on_event=lambda *event: told.append(event), log=tmp_path / "a.log")
    assert ended.status == "completed" and len(jobs.all) == 3
    assert told.count(("stage", "on far")) == 3 and ("log", "a line") in told and len(told) == 4
    assert len({job.folders["worker"] for job in jobs.all}) == 3
    for job in jobs.all:
        assert job.folders["clients"] == tmp_path / "runs" / ".clients" == engine._server.cache
        assert job.files == ("clients/secret", "worker/ready") and (job.folders["clients"] / "secret").exists()
        assert job.made == ("worker/replies/*",)
        assert job.fed == ("worker/arrays/*", "worker/requests/*", "worker/end") and not job.renewed
    arguments = job.arguments(PLACE)
    there = {each.what: f"{PLACE.store}/{each.digest}/{each.what}" for each in job.inputs if each.entry}
    assert arguments["paths"] == {str(tmp_path / name): path for name, path in there.items()}
    assert arguments["clients"] == 3 and arguments["config"] == {
        **config, "dataset": there["x.npz"], "pretrained": f"{there['w.pt']},tiny-vit",
    }  # fmt: skip
    json.dumps(arguments)


def test_a_worker_is_ready_when_it_says_so_until_its_machine_is_lost_or_it_fails(
    engine, jobs, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(spread_module, "_GRACE", 0.1)  # the first one never ends by itself
    steps, told, failed = [threading.Event() for _ in range(3)], [], "its process on far was killed by signal 9"

    def do(folder, tell):
        if folder.name == "0":
            tell("stage", "waits for a machine with room")
            engine._cluster.stopped.wait(10)
            raise RunStopped
        on_a_machine(folder, tell)
        if folder.name == "1":
            steps[0].wait(10)
            tell("note", "far was lost; it goes on elsewhere")
            steps[1].wait(10)
            on_a_machine(folder, tell)
            tell("log", "Client 1 trains")
        else:
            steps[2].wait(10)
            raise JobFailed(failed, "process")

    def does(folder):
        expected = [[False, True, True], [False, False, True], [False, True, True], [False, True, failed]]
        for step, states_then in zip([None, *steps], expected, strict=True):
            if step is not None:
                step.set()
            until(lambda states_then=states_then: states(folder) == states_then)

    jobs.do, Server.does = do, staticmethod(does)
    engine.run(config, on_event=lambda *event: told.append(event), log=tmp_path / "a.log")
    assert ("note", f"{failed}; no client trains there any more") in told
    first, *lines = (tmp_path / "a.log").read_text().splitlines()
    noted = "INFO : Ray cluster: place"
    assert first == "the server's" and sorted(lines) == sorted([
        f"{noted} 0: waits for a machine with room", f"{noted} 1: on far", f"{noted} 2: on far",
        f"{noted} 1: far was lost; it goes on elsewhere", f"{noted} 1: on far", "Client 1 trains",
        f"{noted} 2: {failed}; no client trains there any more",
    ])  # fmt: skip
    assert not [thread for thread in threading.enumerate() if "_follow" in thread.name]


def test_the_server_begins_when_clients_can_train_somewhere(engine, jobs, config, tmp_path):
    begun = threading.Event()

    def do(folder, tell):
        if folder.name == "2":
            time.sleep(0.2)
            assert not begun.is_set()
            on_a_machine(folder, tell)

    jobs.do, Server.does = do, staticmethod(lambda folder: begun.set())
    engine.run(config, log=tmp_path / "a.log")
    assert begun.is_set()


def test_each_place_waits_for_one_that_was_made_ready(engine, jobs, config, tmp_path, monkeypatch):
    ready = []

    def done(cluster, job, tell):
        assert job.ahead and job.renewed
        time.sleep(0.1)
        ready.append(len(jobs.all))

    monkeypatch.setattr(ahead_module, "done", done)
    engine.start_ahead()
    Server.does = staticmethod(lambda folder: until(lambda: states(folder) == [True] * 3))
    engine.run(config, log=tmp_path / "a.log")
    assert engine._server.begun and len(ready) == len(jobs.all) == 3 and ready[0] == 0


def test_if_clients_can_train_nowhere_the_reason_is_the_error(engine, jobs, config, tmp_path):
    def do(folder, tell):
        raise JobFailed("no machine of the cluster has room for it any more")

    jobs.do, Server.does = do, staticmethod(lambda folder: pytest.fail("it begins"))
    with pytest.raises(RunError, match="clients can train nowhere: no machine of the cluster has room"):
        engine.run(config, log=tmp_path / "a.log")


def test_a_run_finds_nothing_of_the_one_before(engine, jobs, config, tmp_path):
    def does(folder):
        assert not any((folder / str(worker) / REQUESTS / "0").exists() for worker in range(3))
        (folder / "0" / REQUESTS / "0").touch()

    Server.does = staticmethod(does)
    engine.run(config, log=tmp_path / "a.log")
    engine._cluster.stopped.clear()
    engine.run(config, log=tmp_path / "b.log")


def test_a_cluster_that_is_lost_is_the_error_and_not_what_follows_from_it(engine, jobs, config, tmp_path):
    def do(folder, tell):
        on_a_machine(folder, tell)
        until(lambda: begun)
        raise ClusterLost("no longer a part")

    begun = []

    def does(folder):
        begun.append(True)
        until(lambda: states(folder) == ["it has ended"] * 3)
        raise RunError("too few replies")

    jobs.do, Server.does = do, staticmethod(does)
    with pytest.raises(ClusterLost, match="no longer a part"):
        engine.run(config, log=tmp_path / "a.log")


def test_an_error_that_nobody_expected_is_told_and_no_clients_fault(engine, jobs, config, tmp_path):
    told, crashed, begun = [], [], []

    def do(folder, tell):
        on_a_machine(folder, tell)
        until(lambda: begun)
        raise JobFailed("killed", "process") if folder.name == "1" else OSError(28, "No space left on device")

    def does(folder):
        begun.append(True)
        until(lambda: states(folder) == [text, "killed", text])
        crashed.extend(path.parent.name for path in folder.glob(f"*/{CRASHED}"))

    text = "OSError: [Errno 28] No space left on device"
    jobs.do, Server.does = do, staticmethod(does)
    engine.run(config, on_event=lambda *event: told.append(event), log=tmp_path / "a.log")
    assert told.count(("note", f"{text}; no client trains there any more")) == 2 and crashed == ["1"]


def test_a_place_that_never_had_a_machine_delays_no_end(engine, jobs, config, tmp_path, monkeypatch):
    monkeypatch.setattr(spread_module, "_GRACE", 60)

    def do(folder, tell):
        if folder.name == "0":
            return on_a_machine(folder, tell)
        tell("stage", "waits for a machine with room")
        engine._cluster.stopped.wait(30)
        raise RunStopped

    jobs.do = do
    before = time.monotonic()
    engine.run(config, log=tmp_path / "a.log")
    assert time.monotonic() - before < 20


def test_folders_of_killed_commands_are_removed_and_those_of_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, age in (("left", 61), ("new", 0)):
        (tmp_path / f"tepal-spread-{name}").mkdir()
        os.utime(tmp_path / f"tepal-spread-{name}", (time.time() - age,) * 2)
    with spread_module._own_folder() as first, spread_module._own_folder() as second:
        os.utime(first, (0, 0))
        with spread_module._own_folder() as third:
            assert sorted(tmp_path.iterdir()) == sorted([first, second, third, tmp_path / "tepal-spread-new"])
    assert list(tmp_path.iterdir()) == [tmp_path / "tepal-spread-new"]


def test_clients_that_train_together_are_refused(engine, jobs, config, tmp_path):
    with pytest.raises(RunError, match="train-together=4 is for clients of one process"):
        engine.run({**config, "train-together": 4}, log=tmp_path / "a.log")
    assert not jobs.all


def test_all_files_are_removed_at_the_end(monkeypatch, engine, jobs, config, tmp_path):
    engine.run(config, log=tmp_path / "a.log")
    engine.stop()
    assert engine._server.stopped and engine._cluster.stopped.is_set() and not engine._folder.exists()
