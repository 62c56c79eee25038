"""Jobs on machines that are lost, unreachable or stopped: a fake of Ray, with real actors and processes."""

import os
import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tepal.tools.cluster import actors as actors_module
from tepal.tools.cluster import inputs as inputs_module
from tepal.tools.cluster import job as job_module
from tepal.tools.cluster import machine as machine_module
from tepal.tools.cluster.connection import ClusterLost
from tepal.tools.cluster.inputs import Input
from tepal.tools.cluster.job import PROCESS, Job, JobFailed, done
from tepal.tools.cluster.machine import digest_of
from tepal.tools.simulation.engine import RunStopped
from tests.unit.tools.cluster.fake_ray import ObjectLostError, OutOfMemoryError, RaySystemError, a_job, fake


def nothing_left(tmp_path, digests):
    return sorted(path.name for path in (tmp_path / "tmp").glob("*/*")) == sorted(digests)


# --- results --------------------------------------------------------------------------------------------------------


def test_a_job_gets_its_inputs_files_and_arguments_and_its_value_comes_back(cluster, tmp_path, monkeypatch, code):
    ray, told = fake(monkeypatch), []
    monkeypatch.setattr(inputs_module, "_PART", 4)
    (tmp_path / "data").write_bytes(b"0123456789")
    files = {"data": tmp_path / "data"}
    data = Input(digest_of(files), files, "the data", "data")
    (tmp_path / "trial" / "a").mkdir(parents=True)
    (tmp_path / "trial" / "a" / "x").write_text("long content")
    (tmp_path / "trial" / "empty").touch()
    (tmp_path / "trial" / ".writing-1").write_text("torn")
    job = Job(
        function="jobs:told", arguments=lambda place: {"data": data.on(place.store), "at": place.folder, "n": 2.5},
        inputs=(data,), folders={"trial": tmp_path / "trial"}, files=("trial/*",), renewed=True,
        returned=lambda place, name, content: content.replace(b"lines", b"LINES"),
    )  # fmt: skip
    value = done(cluster, job, lambda kind, text: told.append((kind, text)))
    store = tmp_path / "tmp" / Path(value["data"]).parts[-3]
    assert Path(value["data"]) == store / data.digest / "data" and Path(value["data"]).read_bytes() == b"0123456789"
    assert value["n"] == 2.5 and Path(value["at"]).parent == tmp_path / "tmp"
    assert value["files"] == ["job.json", "trial/a/x", "trial/empty"]
    assert [text for kind, text in told if kind == "log"] == ["two", "LINES, and a torn one"]
    assert [text.split(" to ")[0] for kind, text in told if kind == "stage"][1:] == [
        "sending the code", "sending the data",
    ]  # fmt: skip
    assert (tmp_path / "trial" / "a" / "x").read_text() == "long content"
    assert ray.options == [
        {"num_cpus": 1.0, "num_gpus": 0.0, "memory": 500_000_000, "max_concurrency": 4, "max_restarts": 0}
    ]
    (actor,) = ray.actors
    assert actor.calls[-1] == "renew" and Path(value["at"]).exists()
    cluster.actors.close()
    assert actor.calls[-2:] == ["stop", "kill"] and nothing_left(tmp_path, [code.digest, data.digest])


@pytest.mark.parametrize(
    ("function", "message", "kind"),
    [
        ("fails", "no luck", "RunError"),
        ("wrong", "'a key'", "KeyError"),
        ("killed", "its process on .* was killed by signal 9", PROCESS),
        ("exits", "its process on .* ended with status 3", PROCESS),
    ],
)
def test_a_job_that_fails_says_why(cluster, monkeypatch, function, message, kind):
    ray, told = fake(monkeypatch), []
    with pytest.raises(JobFailed, match=f"^{message}$") as failed:
        done(cluster, a_job(function), lambda *event: told.append(event))
    assert failed.value.kind == kind and len(ray.actors) == 1 and ray.actors[0].calls[-2:] == ["stop", "kill"]
    assert (("log", "about to end") in told) == (function == "killed")


def test_an_error_of_the_actor_is_the_jobs(cluster, monkeypatch):
    def fate(_actor, name, _arguments):
        return OSError(28, "No space left on device") if name == "write_input" else None

    ray = fake(monkeypatch, fate)
    with pytest.raises(JobFailed, match=r"on .*: \[Errno 28\] No space left on device"):
        done(cluster, a_job("told"), lambda *_: None)
    assert ray.actors[0].calls[-2:] == ["stop", "kill"]


def test_too_little_memory_is_said_and_not_tried_again(cluster, monkeypatch):
    ray = fake(monkeypatch, lambda _actor, name, _: OutOfMemoryError("killed") if name == "ask" else None)
    with pytest.raises(JobFailed, match="had too little memory for it"):
        done(cluster, a_job("waits"), lambda *_: None)
    assert len(ray.actors) == 1


@pytest.mark.parametrize("room", [True, False])
def test_a_job_waits_for_a_machine_with_room_while_one_is_there(cluster, monkeypatch, room):
    """It waits for a long time where one is busy, and fails if there is none any more."""
    looks, told = [], []

    def nodes():
        looks.append(None)
        if len(looks) == 40:
            cluster.stopped.set()
        return [{"Alive": room, "Resources": {"CPU": 4.0, "memory": 1e9}}]

    monkeypatch.setattr(job_module, "_LOOK", 0.001)
    ray = fake(monkeypatch, lambda _actor, name, _arguments: "lost after" if name == "place" else None)
    ray.nodes = nodes
    with pytest.raises(RunStopped if room else JobFailed, match=None if room else "no machine of the cluster has room"):
        done(cluster, a_job("waits"), lambda *event: told.append(event))
    assert told == [("stage", "waits for a machine with room")] and len(looks) == (40 if room else 12)
    assert ray.actors[0].calls[-2:] == ["stop", "kill"], "it may have begun just now, and made its folder"


# --- one job after the other ----------------------------------------------------------------------------------------


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def lines_of(told):
    return [text for kind, text in told if kind == "log"]


def test_a_process_does_several_jobs_and_finds_nothing_of_the_last_one(cluster, tmp_path, monkeypatch, code):
    ray, told = fake(monkeypatch), []
    found = [done(cluster, a_job("who", number=number), lambda *event: told.append(event)) for number in range(3)]
    assert len(ray.actors) == 1 and {(pid, read) for pid, read, _ in found} == {(found[0][0], "")}
    assert len({count for *_, count in found}) == 1 and lines_of(told) == [f"job {{'number': {n}}}" for n in range(3)]
    assert ray.actors[0].calls.count("write_input") == 1 and ray.actors[0].calls.count("begin") == 3
    (tmp_path / "trial" / "x").parent.mkdir()
    (tmp_path / "trial" / "x").touch()
    assert done(cluster, a_job("told", tmp_path=tmp_path), lambda *_: None) == {"files": ["job.json", "trial/x"]}
    cluster.actors.close()
    assert gone(found[0][0]) and nothing_left(tmp_path, [code.digest])


def together(count):
    """Told of a job's machine, it waits until as many jobs have one."""
    apart = threading.Barrier(count)
    return lambda _kind, text: apart.wait(30) if text.startswith("on ") else None


def test_jobs_at_the_same_time_have_a_process_each_and_no_more_are_made(cluster, monkeypatch):
    ray, pids, tell = fake(monkeypatch), [], together(3)

    def jobs():
        for number in range(3):
            pids.append((number, done(cluster, a_job("who"), tell)[0]))

    threads = [threading.Thread(target=jobs) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 9 and len(ray.actors) == 3
    for number in range(3):
        assert len({pid for of, pid in pids if of == number}) == 3
    assert len({pid for _, pid in pids}) == 3


def test_after_a_job_that_failed_its_actor_has_no_other(cluster, monkeypatch):
    ray = fake(monkeypatch)
    with pytest.raises(JobFailed, match="no luck"):
        done(cluster, a_job("fails"), lambda *_: None)
    done(cluster, a_job("who"), lambda *_: None)
    assert [actor.calls[-1] for actor in ray.actors] == ["kill", "renew"]


def test_an_actor_that_was_lost_without_a_job_is_replaced_and_no_loss_of_the_next_one(cluster, monkeypatch):
    """Also if more are lost at once than a job may lose."""
    ray, told, tell = fake(monkeypatch), [], together(4)
    threads = [threading.Thread(target=done, args=(cluster, a_job("who"), tell)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [actor.calls[-1] for actor in ray.actors] == ["renew"] * 4
    for actor in ray.actors:
        actor.die()
    done(cluster, a_job("who"), lambda *event: told.append(event))
    assert len(ray.actors) == 5 and not [text for kind, text in told if kind == "note"]


def test_a_process_that_has_ended_without_a_job_is_replaced(cluster, monkeypatch):
    ray = fake(monkeypatch)
    before, *_ = done(cluster, a_job("who"), lambda *_: None)
    process = ray.actors[0].made._process
    process.kill()
    process.wait()
    after, *_ = done(cluster, a_job("who"), lambda *_: None)
    assert len(ray.actors) == 1 and after != before and gone(before)


def test_an_actor_without_a_job_is_ended_after_a_while(cluster, tmp_path, monkeypatch, code):
    monkeypatch.setattr(actors_module, "_IDLE", 0.05)
    ray = fake(monkeypatch)
    pid, *_ = done(cluster, a_job("who"), lambda *_: None)
    until = time.monotonic() + 20
    while ray.actors[0].calls[-1] != "kill" and time.monotonic() < until:
        time.sleep(0.01)
    assert ray.actors[0].calls[-3:] == ["renew", "stop", "kill"] and gone(pid) and nothing_left(tmp_path, [code.digest])
    assert cluster.actors.take() is None


def test_the_end_of_a_command_waits_for_an_actor_that_is_just_ended(cluster, monkeypatch):
    ending = threading.Event()

    def fate(_actor, name, _arguments):
        if name == "stop":
            ending.set()
            time.sleep(0.5)

    monkeypatch.setattr(actors_module, "_IDLE", 0.01)
    ray = fake(monkeypatch, fate)
    done(cluster, a_job("who"), lambda *_: None)
    assert ending.wait(20) and ray.actors[0].calls[-1] == "stop"
    cluster.actors.close()
    assert ray.actors[0].calls[-2:] == ["stop", "kill"] and not ray.actors[0].made.folder.exists()


def test_none_is_kept_while_a_job_waits_for_a_machine_with_room(cluster, monkeypatch):
    """The cores are given to it; else they would do nothing until the actor is ended."""
    room = threading.Event()
    ray = fake(monkeypatch, lambda actor, name, _: "lost after" if actor.number == 1 and name == "place" else None)
    ray.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9}}]
    monkeypatch.setattr(job_module, "_LOOK", 0.01)
    waits = threading.Event()

    def first(_kind, text):
        if text.startswith("on "):  # it has the only core
            waiting.start()
            waits.wait(20)

    def second():
        with pytest.raises(RunStopped):
            done(cluster, a_job("who"), lambda _kind, text: waits.set())
        room.set()

    waiting = threading.Thread(target=second)
    done(cluster, a_job("who"), first)
    assert ray.actors[0].calls[-3:] == ["renew", "stop", "kill"]
    cluster.stopped.set()
    assert room.wait(20)
    waiting.join()
    cluster.stopped.clear()
    done(cluster, a_job("who"), lambda *_: None)
    assert ray.actors[2].calls[-1] == "renew", "none waits any more"
    with cluster.actors.waiting():
        assert ray.actors[2].calls[-1] == "kill"


@pytest.mark.parametrize("why", ["the job", "its age"])
def test_no_other_job_is_done_where_a_job_or_the_age_does_not_allow_it(cluster, monkeypatch, why):
    if why == "its age":
        monkeypatch.setattr(machine_module, "_OLD", -1)
    ray = fake(monkeypatch)
    done(cluster, replace(a_job("who"), renewed=why != "the job"), lambda *_: None)
    assert ray.actors[0].calls[-2:] == ["stop", "kill"]


def test_none_is_kept_once_the_command_ends(cluster, tmp_path, monkeypatch, code):
    ray = fake(monkeypatch)
    cluster.actors.close()
    pid, *_ = done(cluster, a_job("who"), lambda *_: None)
    assert ray.actors[0].calls[-3:] == ["renew", "stop", "kill"] and gone(pid) and nothing_left(tmp_path, [code.digest])


def test_a_job_is_asked_the_more_rarely_the_longer_it_takes(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "_SHARE", 0.5)
    monkeypatch.setattr(job_module, "_RAREST", 0.2)
    asked = []

    def fate(actor, name, _arguments):
        if name == "ask":
            asked.append(time.monotonic())
            if asked[-1] > asked[0] + 1:
                (actor.made.folder / "allow-1").touch()

    fake(monkeypatch, fate)
    assert done(cluster, a_job("counts", tmp_path=tmp_path, to=1), lambda *_: None) == 0
    gaps = [second - first for first, second in pairwise(asked)]
    assert all(gap >= min(0.2, 0.5 * (moment - asked[0])) for moment, gap in zip(asked, gaps, strict=False))
    assert len(asked) < 20 and min(gaps) < 0.2, "at first it is asked often"


# --- files that are sent while a job goes on ------------------------------------------------------------------------


def echo(tmp_path):
    """A job that answers files, which are here, and the folder with them."""
    here = tmp_path / "trial"
    for name in ("asked", "said"):
        (here / name).mkdir(parents=True)
    files = {"made": ("trial/said/*",), "fed": ("trial/asked/*", "trial/end"), "answers": {"trial/asked": "trial/said"}}
    return here, Job("jobs:echoes", lambda _: {}, folders={"trial": here}, pause=0.01, **files)


def test_files_are_sent_whole_as_they_appear_and_removed_as_they_are_removed(cluster, tmp_path, monkeypatch):
    here, job = echo(tmp_path)
    there = []

    def fate(actor, name, _arguments):
        """What happens here meanwhile."""
        if name != "ask":
            return
        if (here / "said" / "1").exists():
            assert (here / "said" / "1").read_text() == "A LONG ONE" and not (here / "said" / "3").exists()
            for path in (here / "said" / "1", here / "asked" / "1"):
                path.unlink()
            (here / "asked" / "2").write_text("")
        if (here / "said" / "2").exists():
            there.append(sorted(os.listdir(actor.made.folder / "trial" / "asked")))
            (here / "end").touch()

    monkeypatch.setattr(inputs_module, "_PART", 4)
    (here / "asked" / "1").write_text("a long one")
    (here / "asked" / ".writing-3").write_text("torn")
    (here / "said" / "0").write_text("not sent")
    ray = fake(monkeypatch, fate)
    assert done(cluster, job, lambda *_: None) == ["2"] and there[0] == ["2"]
    assert ray.actors[0].calls.count("feed") == 3 + 1 + 1, "three parts; the removal with the next file; the end"
    assert sorted(path.name for path in here.rglob("*") if path.is_file()) == [".writing-3", "0", "2", "2", "end"]


def test_another_machine_is_sent_what_is_here_by_then(cluster, tmp_path, monkeypatch):
    here, job = echo(tmp_path)

    def fate(actor, name, _arguments):
        if name != "ask" or not (here / "said" / "1").exists():
            return None
        if not actor.number:
            (here / "said" / "1").unlink()
            return "died"
        (here / "end").touch()
        return None

    (here / "asked" / "1").write_text("one")
    ray = fake(monkeypatch, fate)
    assert done(cluster, job, lambda *_: None) == ["1"]
    assert [actor.calls.count("feed") for actor in ray.actors] == [1, 2]
    assert (here / "said" / "1").read_text() == "ONE"


# --- lost machines --------------------------------------------------------------------------------------------------


def allow(actor, number):
    (actor.made.folder / f"allow-{number}").touch()


def test_a_job_goes_on_on_another_machine_with_the_files_that_it_has_written(cluster, tmp_path, monkeypatch):
    told, here = [], tmp_path / "trial"

    def fate(actor, name, _arguments):
        """The first machine is lost once what the job has written in its second round is here."""
        if name == "ask":
            for number in range(1, 4 if actor.number else 2):
                allow(actor, number)
        return "died" if name == "ask" and not actor.number and (here / "checkpoint/round-2").exists() else None

    ray = fake(monkeypatch, fate)
    assert done(cluster, a_job("counts", tmp_path=tmp_path, to=3), lambda *event: told.append(event)) == 2
    assert len(ray.actors) == 2
    notes = [text for kind, text in told if kind == "note"]
    lost = [text for text in notes if "lost" in text]
    assert len(lost) == 1 and lost[0].endswith(" was lost (The actor died.); it goes on elsewhere")
    # What the first machine has written stays; the one that the second has removed is gone.
    files = {path.relative_to(here).as_posix(): path.read_text() for path in here.rglob("*") if path.is_file()}
    assert files == {"settings": "the same", "state/count": "3", "checkpoint/round-3": "from 2"}


@pytest.mark.parametrize("last_call", ["place", "missing", "begin"])
def test_machines_lost_three_times_in_a_row_end_the_job(cluster, monkeypatch, last_call):
    ray, told = fake(monkeypatch, lambda _actor, name, _arguments: "died" if name == last_call else None), []
    with pytest.raises(JobFailed, match=r"its machine was lost 3 times in a row: .*The actor died\.") as failed:
        done(cluster, a_job("waits"), lambda *event: told.append(event))
    assert failed.value.kind == "" and len(ray.actors) == 3
    assert sum("goes on elsewhere" in text for _, text in told) == 2


def test_the_same_files_written_anew_by_each_attempt_are_no_progress(cluster, tmp_path, monkeypatch):
    """A run that takes down its machine does not do so for ever."""
    here = tmp_path / "trial" / "begun"

    def fate(actor, name, _arguments):
        there = actor.made.folder / "trial" / "begun"
        came = name == "ask" and here.exists() and there.exists() and here.read_text() == there.read_text()
        return "died" if came and actor.made._process else None

    ray = fake(monkeypatch, fate)
    with pytest.raises(JobFailed, match="3 times in a row"):
        done(cluster, a_job("waits", tmp_path=tmp_path), lambda *_: None)
    assert len(ray.actors) == 3, "the first wrote new files, the others none"


def test_losses_with_new_files_between_do_not_end_a_job(cluster, tmp_path, monkeypatch):
    here = tmp_path / "trial"

    def fate(actor, name, _arguments):
        if name == "ask":
            for number in range(1, actor.number + 1):
                allow(actor, number)
            if actor.number < 3 and (here / f"checkpoint/round-{actor.number + 1}").exists():
                return "died"
        return None

    ray = fake(monkeypatch, fate)
    assert done(cluster, a_job("counts", tmp_path=tmp_path, to=3), lambda *_: None) == 3
    assert len(ray.actors) == 4


# --- the network ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "trouble",
    [("unavailable", "lost after"), (ObjectLostError("lost"), RaySystemError("failed"))],
    ids=["of the network", "of Ray"],
)
def test_trouble_now_and_then_changes_nothing(cluster, tmp_path, monkeypatch, code, trouble):
    """The first two answers of every call are lost."""
    calls, here, seen = {}, tmp_path / "trial", []

    def fate(_actor, name, arguments):
        if name == "stop" or (name, trouble[-1]) == ("place", "lost after"):  # this may take as long as it takes
            return None
        key = (name, repr(arguments))
        calls[key] = calls.get(key, 0) + 1
        return trouble[calls[key] - 1] if calls[key] <= 2 else None

    monkeypatch.setitem(job_module._Attempt._answers.__kwdefaults__, "repeat", 0.002)
    ray = fake(monkeypatch, fate)
    job = a_job("told", tmp_path=tmp_path, n=1)
    here.mkdir()
    (here / "x").write_text("content")
    assert done(cluster, job, lambda *event: seen.append(event)) == {"n": 1, "files": ["job.json", "trial/x"]}
    assert len(ray.actors) == 1 and not [text for _, text in seen if "lost" in text]
    assert [text for kind, text in seen if kind == "log"] == ["two", "lines, and a torn one"]
    assert ray.actors[0].calls.count("begin") == 3 and ray.actors[0].calls.count("complete_input") == 3
    assert nothing_left(tmp_path, [code.digest]) and (here / "x").read_text() == "content"


def test_a_command_ends_if_ray_has_ended_on_its_machine(cluster, monkeypatch):
    ray = fake(monkeypatch)

    def broken(_refs, timeout):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(ray, "wait", broken)
    with pytest.raises(ClusterLost, match=r"--ray here:1: this machine is no longer a part .* --resume"):
        done(cluster, a_job("told"), lambda *_: None)


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [True, False])
def test_stopping_ends_the_process_and_the_actor(cluster, tmp_path, monkeypatch, answers, code):
    here = tmp_path / "trial"

    def fate(_actor, name, _arguments):
        return "lost after" if name == "ask" and not answers and (here / "begun").exists() else None

    ray, process = fake(monkeypatch, fate), []

    def stop():
        until = time.monotonic() + 20
        while not (here / "begun").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.append(ray.actors[0].made._process)
        cluster.stopped.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(RunStopped):
        done(cluster, a_job("waits", tmp_path=tmp_path), lambda *_: None)
    stopping.join()
    assert len(ray.actors) == 1 and ray.actors[0].calls[-2:] == ["stop", "kill"]
    assert process[0].returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert nothing_left(tmp_path, [code.digest]) and int((here / "begun").read_text()) == process[0].pid
    with pytest.raises(RunStopped):
        done(cluster, a_job("waits", tmp_path=tmp_path), lambda *_: None)
    assert ray.actors[1].calls == ["stop", "kill"]
