"""Places that are made ready before there are jobs: who gets them, and what follows if they fail. A fake of Ray."""

import threading
import time
from dataclasses import replace

import pytest

from tepal.tools.cluster import actors as actors_module
from tepal.tools.cluster import ahead as ahead_module
from tepal.tools.cluster import job as job_module
from tepal.tools.cluster.ahead import Ahead
from tepal.tools.cluster.connection import ClusterLost
from tepal.tools.cluster.inputs import Input
from tepal.tools.cluster.job import JobFailed, done
from tepal.tools.cluster.machine import digest_of
from tepal.tools.simulation.engine import RunStopped
from tests.unit.tools.cluster.fake_ray import a_job, fake

THERE = """
import os
from pathlib import Path

def start_there(folder, *, app, clients):
    if (Path(app) / "fails").exists():
        raise RuntimeError("it cannot be imported")
    (folder.parent / f"started-{os.getpid()}").write_text(str(clients))
"""


@pytest.fixture
def ahead(cluster, tmp_path):
    """Places for an app with seven clients; a file `fails` in the folder `app` lets them fail."""
    (tmp_path / "there.py").write_text(THERE)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").touch()
    files = {**cluster.inputs.code.files, "tepal/tools/cluster/there.py": tmp_path / "there.py"}
    cluster.inputs.code = Input(digest_of(files), files, "the code")

    def of_app(app):
        found = {path.name: path for path in app.iterdir()}
        return Input(digest_of(found), found, "the app")

    cluster.inputs.of_app = of_app
    made = Ahead(cluster, tmp_path / "app", 7)
    yield made
    cluster.stopped.set()
    made.join()


def started(tmp_path):
    return {int(path.name.partition("-")[2]): path.read_text() for path in (tmp_path / "tmp").glob("started-*")}


def test_each_job_finds_an_actor_and_a_process_that_were_made_ready_for_it(ahead, cluster, tmp_path, monkeypatch):
    ray, told, pids = fake(monkeypatch), [], []
    apart = threading.Barrier(2)

    def tell(kind, text):
        told.append((kind, text))
        if text.startswith("on "):
            apart.wait(30)  # both jobs are under way

    def run():
        ahead.wait_for_one(tell)
        pids.append(done(cluster, a_job("who"), tell)[0])

    ahead.start(2)
    ahead.join()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ray.actors) == 2 and started(tmp_path) == dict.fromkeys(pids, "7")
    assert [kind for kind, text in told if text.startswith("on ")] == ["stage"] * 2
    assert not any(text.startswith("sending the app") for _, text in told), "nobody waited for that"


def test_a_job_waits_for_a_place_that_is_not_ready_yet_and_none_for_more_than_were_begun(
    ahead, cluster, tmp_path, monkeypatch
):
    ready = threading.Event()
    ray = fake(monkeypatch, lambda actor, name, _: ready.wait(120) and None if name == "place" else None)
    ahead.start(1)
    told = []
    waiting = threading.Thread(target=ahead.wait_for_one, args=[lambda *event: told.append(event)])
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not started(tmp_path)
    ready.set()
    waiting.join(20)
    assert not waiting.is_alive() and len(started(tmp_path)) == 1 and ray.actors[0].calls[-1] == "renew"
    sent = {text.split(" to ")[0] for kind, text in told if kind == "stage"}
    assert sent == {"sending the code", "sending the app"}, "what is done meanwhile is told to one that waits"
    ahead.wait_for_one(lambda *_: pytest.fail("there is nothing to tell"))


def test_what_was_made_ready_is_kept_while_others_wait_and_ended_with_the_command(ahead, cluster, monkeypatch):
    monkeypatch.setattr(actors_module, "_IDLE", 0.01)
    ray = fake(monkeypatch)
    ahead.start(1)
    with cluster.actors.waiting():
        ahead.join()
        with cluster.actors.waiting():
            time.sleep(0.1)
    assert ray.actors[0].calls[-1] == "renew"
    cluster.actors.close()
    assert ray.actors[0].calls[-2:] == ["stop", "kill"] and not ray.actors[0].made.folder.exists()


def test_whichever_place_is_ready_first_is_the_next_jobs(ahead, cluster, tmp_path, monkeypatch):
    """Else a job could wait for room that a place has which is ready, and which nobody waits for."""
    ready = threading.Event()

    def fate(actor, name, _arguments):
        if (actor.number, name) == (0, "place"):
            ready.wait(120)

    ray = fake(monkeypatch, fate)
    ahead.start(2)
    ahead.wait_for_one(lambda *_: None)
    assert len(started(tmp_path)) == 1 and ray.actors[0].calls == ["place"]
    ready.set()
    ahead.wait_for_one(lambda *_: None)
    assert len(started(tmp_path)) == 2


def test_a_place_that_is_prepared_again_leaves_the_others_theirs(ahead, cluster, tmp_path, monkeypatch):
    ray = fake(monkeypatch, lambda actor, name, _: "died" if (actor.number, name) == (1, "begin") else None)
    for _ in range(2):
        ahead.start(1)
        ahead.join()
    pids = {done(cluster, a_job("who"), lambda *_: None)[0]}
    assert len(ray.actors) == 3 and len(started(tmp_path)) == 2 and pids < started(tmp_path).keys()


def test_a_place_that_no_job_takes_is_free_again_after_a_while(ahead, cluster, monkeypatch):
    monkeypatch.setattr(actors_module, "_CHECKING", 0.01)
    ray = fake(monkeypatch)
    ahead.start(1)
    until = time.monotonic() + 20
    while not ray.actors or ray.actors[0].calls[-2:] != ["stop", "kill"]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_app_that_cannot_start_is_left_to_the_job_whose_error_it_is(ahead, cluster, tmp_path, monkeypatch):
    (tmp_path / "app" / "fails").touch()
    ray, told = fake(monkeypatch), []
    ahead.start(1)
    ahead.wait_for_one(lambda *event: told.append(event))
    assert not started(tmp_path) and {kind for kind, _ in told} <= {"stage"}, "the job has a traceback of its own"
    with pytest.raises(JobFailed, match="no luck"):
        done(cluster, a_job("fails"), lambda *_: None)
    assert [actor.calls[-1] for actor in ray.actors] == ["kill", "kill"]


@pytest.mark.parametrize(
    "error", [JobFailed("no machine has room"), RunStopped(), ClusterLost("ended")], ids=lambda error: type(error)
)
def test_failures_of_machines_are_those_of_the_job_that_waits(ahead, monkeypatch, error):
    """Else it would wait for room again, and lose as many machines again."""

    def fails(*_):
        raise error

    monkeypatch.setattr(ahead_module, "done", fails)
    ahead.start(1)
    with pytest.raises(type(error)) as raised:
        ahead.wait_for_one(lambda *_: None)
    assert raised.value is error


@pytest.mark.parametrize("error", [JobFailed("killed", "process"), OSError("the app cannot be read")], ids=str)
def test_other_failures_are_left_to_the_job(ahead, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(ahead_module, "done", fails)
    ahead.start(1)
    ahead.wait_for_one(lambda *_: None)


def test_a_machine_that_is_lost_is_replaced_and_told_to_the_job(ahead, cluster, tmp_path, monkeypatch):
    ray = fake(monkeypatch, lambda actor, name, _: "died" if (actor.number, name) == (0, "complete_input") else None)
    told = []
    ahead.start(1)
    ahead.wait_for_one(lambda *event: told.append(event))
    assert len(ray.actors) == 2 and len(started(tmp_path)) == 1
    assert [text.partition(" was lost")[2] for kind, text in told if kind == "note"] == [
        " (The actor died.); it goes on elsewhere"
    ]  # fmt: skip
    assert done(cluster, a_job("who"), lambda *_: None)[0] in started(tmp_path)


@pytest.mark.parametrize("unanswered", ["place", "missing"])
def test_stopping_ends_what_is_being_made_ready(ahead, cluster, tmp_path, monkeypatch, unanswered):
    """As after a mistake in the run config, or Ctrl-C while an actor begins."""
    monkeypatch.setitem(job_module._Attempt._answers.__kwdefaults__, "repeat", 60.0)
    ray = fake(monkeypatch, lambda actor, name, _: "lost after" if name == unanswered else None)
    ahead.start(2)
    until = time.monotonic() + 20
    while sum(unanswered in actor.calls for actor in ray.actors) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    cluster.stopped.set()
    ahead.join()
    assert [actor.calls[-2:] for actor in ray.actors] == [["stop", "kill"]] * 2
    assert not any((tmp_path / "tmp").glob("tepal-job-*"))
    with pytest.raises(RunStopped):
        ahead.wait_for_one(lambda *_: None)


def test_a_job_of_another_kind_does_not_keep_its_actor_so(cluster, monkeypatch):
    monkeypatch.setattr(actors_module, "_IDLE", 60)
    ray = fake(monkeypatch)
    for ahead, last in ((True, "renew"), (False, "kill")):
        done(cluster, replace(a_job("who"), ahead=ahead), lambda *_: None)
        with cluster.actors.waiting():
            assert ray.actors[0].calls[-1] == last
