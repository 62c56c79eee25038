"""Requests in files: who is asked, what arrives, what is written once, and what happens when a worker goes away."""

import gc
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tepal.host import request_files
from tepal.host.request_files import (
    ARRAYS,
    CRASHED,
    END,
    GONE,
    READY,
    REPLIES,
    REQUESTS,
    WorkerEnded,
    Workers,
    answer_all,
)

LARGE = 20_000  # float32 values: more bytes than an Array without a file of its own has


def array(value, size=LARGE):
    return Array(np.full(size, value, np.float32))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(request_files, "_LONG_PAUSE", 0.01)


def names_in(*parts):
    folder = parts[0].joinpath(*map(str, parts[1:]))
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def answering(folder, *workers, answer=lambda asked: asked):
    """Workers in threads, which answer with themselves and what `answer` makes of what they are asked."""
    threads = []
    for worker in workers:
        own = folder / str(worker)
        (own / END).unlink(missing_ok=True)
        threads.append(threading.Thread(target=answer_all, args=[own, lambda asked, by=worker: (by, answer(asked))]))
        threads[-1].start()
    while not all((folder / str(worker) / READY).exists() for worker in workers):
        time.sleep(0.001)
    try:
        yield
    finally:
        for worker in workers:
            (folder / str(worker) / END).touch()
            (folder / str(worker) / READY).unlink(missing_ok=True)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_what_arrives_is_what_was_asked_and_what_comes_back_is_the_reply(tmp_path):
    content = RecordDict({
        "arrays": ArrayRecord({"large": array(1), "small": array(2, 3)}), "config": ConfigRecord({"x": 1.5}),
    })  # fmt: skip
    workers = Workers(tmp_path, 1)
    with answering(tmp_path, 0, answer=lambda asked: (asked[0], asked[1] + 1)):
        _, (came, number) = workers.ask(0, (content, 6))
    assert came == content and number == 7
    assert [float(each.numpy()[0]) for each in came["arrays"].values()] == [1, 2]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 4))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_key_has_its_worker(tmp_path, keys, count):
    shutil.rmtree(tmp_path)
    workers = Workers(tmp_path, count)
    with answering(tmp_path, *range(count)):
        for key in keys:
            assert workers.ask(key, key) == (key % count, key)
    for worker in range(count):
        assert [names_in(tmp_path, worker, name) for name in (REQUESTS, REPLIES, ARRAYS)] == [[], [], []]


def test_threads_get_their_own_replies_and_a_worker_answers_in_order(tmp_path):
    workers, answered = Workers(tmp_path, 2), {0: [], 1: []}
    begun = []
    for worker in (0, 1):
        ready(tmp_path, worker)
    with ThreadPoolExecutor(12) as pool:
        for key in range(12):
            begun.append(pool.submit(workers.ask, key, key))
            while sum(len(names_in(tmp_path, worker, REQUESTS)) for worker in (0, 1)) <= key:
                time.sleep(0.001)
        with answering(tmp_path, 0, 1, answer=lambda asked: answered[asked % 2].append(asked) or -asked):
            found = [each.result(10) for each in begun]
    assert found == [(key % 2, -key) for key in range(12)]
    assert answered == {0: [0, 2, 4, 6, 8, 10], 1: [1, 3, 5, 7, 9, 11]}


def test_an_array_is_written_once_for_each_worker_that_is_asked_it_and_until_it_is_freed(tmp_path):
    workers, shared, seen = Workers(tmp_path, 3), array(1), []
    with answering(tmp_path, 0, 1, 2, answer=lambda asked: seen.append(id(asked[0])) or float(asked[0].numpy()[0])):
        for key in (0, 1, 0, 0):
            assert workers.ask(key, [shared, array(2)]) == (key, 1.0)
        gc.collect()
        (number,) = names_in(tmp_path, 0, ARRAYS)  # the others were freed
        assert names_in(tmp_path, 1, ARRAYS) == [number] and names_in(tmp_path, 2, ARRAYS) == []
        files = [tmp_path / str(worker) / ARRAYS / number for worker in (0, 1)]
        assert files[0].samefile(files[1]) and files[0].read_bytes() == shared.data
        assert seen[0] == seen[2] == seen[3], "a worker has it once"
        del shared
        gc.collect()
        assert not any(file.exists() for file in files)
        assert workers.ask(0, [array(3)]) == (0, 3.0)


def ready(folder, worker):
    """A worker that is ready and answers nothing yet."""
    (folder / str(worker) / READY).touch()


def lose(folder, worker, why=""):
    if why:
        (folder / str(worker) / GONE).write_text(why)
    (folder / str(worker) / READY).unlink()


def test_while_a_worker_is_not_ready_another_one_is_asked(tmp_path):
    workers = Workers(tmp_path, 3)

    def asked():
        return workers.ask(4, "a")[0]

    with answering(tmp_path, 0, 1, 2):
        assert asked() == 1
        lose(tmp_path, 1)
        assert asked() == 0
        lose(tmp_path, 0, "for good")
        assert asked() == 2
        ready(tmp_path, 1)
        assert asked() == 1


def asked_of(tmp_path, worker, count=1):
    end = time.monotonic() + 10
    while len(names_in(tmp_path, worker, REQUESTS)) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_a_lost_worker_has_not_answered_is_asked_elsewhere(tmp_path):
    workers = Workers(tmp_path, 2)
    ready(tmp_path, 0)
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(workers.ask, 0, what) for what in "ab"]
        asked_of(tmp_path, 0, 2)
        with answering(tmp_path, 1):
            lose(tmp_path, 0)
            assert sorted(each.result(10) for each in begun) == [(1, "a"), (1, "b")]
    assert names_in(tmp_path, 0, REQUESTS) == []


def test_a_worker_that_has_another_machine_at_once_is_not_asked_again(tmp_path, monkeypatch):
    """The request is still there, and is sent to that machine."""
    workers, looks = Workers(tmp_path, 1), iter([True, False, False])
    monkeypatch.setattr(type(workers._workers[0]), "is_ready", property(lambda self: next(looks, True)))
    asked = []
    with answering(tmp_path, 0, answer=lambda thing: time.sleep(0.1) or asked.append(thing)):
        assert workers.ask(0, "a") == (0, None)
    assert asked == ["a"]


def test_a_reply_that_came_before_its_worker_was_lost_counts(tmp_path, monkeypatch):
    workers, looks = Workers(tmp_path, 1), []

    def is_ready(worker):
        """It is chosen, then its reply comes, and then it is lost."""
        looks.append(None)
        if len(looks) == 1:
            return True
        (number,) = names_in(tmp_path, 0, REQUESTS)
        (tmp_path / "0" / REPLIES / number).write_bytes(pickle.dumps("the reply"))
        return False

    monkeypatch.setattr(type(workers._workers[0]), "is_ready", property(is_ready))
    assert workers.ask(0, "a") == "the reply"
    assert names_in(tmp_path, 0, REQUESTS) == names_in(tmp_path, 0, REPLIES) == []


def test_a_worker_that_crashed_fails_the_first_request_it_had_not_answered_alone(tmp_path):
    workers = Workers(tmp_path, 2)
    ready(tmp_path, 0)
    answered, _ = workers._workers[0].ask("answered", workers._arrays)  # nobody has taken back its reply yet
    (tmp_path / "0" / REPLIES / f"{answered:012d}").write_bytes(pickle.dumps("yes"))
    with ThreadPoolExecutor(3) as pool:
        begun = []
        for what in "abc":
            begun.append(pool.submit(workers.ask, 0, what))
            asked_of(tmp_path, 0, len(begun) + 1)
        with answering(tmp_path, 1):
            (tmp_path / "0" / CRASHED).touch()
            lose(tmp_path, 0, "killed by signal 9")
            with pytest.raises(WorkerEnded, match="killed by signal 9"):
                begun[0].result(10)
            assert [each.result(10) for each in begun[1:]] == [(1, "b"), (1, "c")]
            assert workers.ask(0, "d") == (1, "d")
        (tmp_path / "1" / GONE).write_text("no disk")
        with pytest.raises(WorkerEnded, match="no worker is left: killed by signal 9"):
            workers.ask(0, "e")


def test_no_request_fails_with_a_worker_whose_machines_were_lost(tmp_path):
    workers = Workers(tmp_path, 2)
    ready(tmp_path, 0)
    with answering(tmp_path, 1), ThreadPoolExecutor(1) as pool:
        begun = pool.submit(workers.ask, 0, "a")
        asked_of(tmp_path, 0)
        lose(tmp_path, 0, "its machine was lost 3 times")
        assert begun.result(10) == (1, "a")


def test_a_request_that_cannot_be_written_is_an_error_and_the_next_one_is_answered(tmp_path):
    workers = Workers(tmp_path, 1)
    with answering(tmp_path, 0):
        with pytest.raises(AttributeError, match="pickle"):
            workers.ask(0, lambda: 1)
        assert workers.ask(0, "a") == (0, "a")
    assert not workers._workers[0].is_asked


def test_nothing_looks_for_replies_when_nothing_is_asked(tmp_path):
    workers, before = Workers(tmp_path, 1), set(threading.enumerate())
    for _ in range(2):
        with answering(tmp_path, 0):
            assert workers.ask(0, "a") == (0, "a")
        end = time.monotonic() + 10
        while set(threading.enumerate()) - before:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_while_none_is_ready_a_request_waits(tmp_path):
    workers = Workers(tmp_path, 2)
    (tmp_path / "0" / GONE).write_text("ended")
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(workers.ask, 0, "a")
        time.sleep(0.1)
        assert not begun.done()
        with answering(tmp_path, 1):
            assert begun.result(10) == (1, "a")


def test_a_request_that_was_taken_back_is_not_answered_and_others_are(tmp_path, monkeypatch):
    """The asker takes back a request, with the Array that it names, while the worker reads it."""
    workers, load, gone = Workers(tmp_path, 1), pickle.loads, [array(1)]
    taken, _ = workers._workers[0].ask(gone[0], workers._arrays)

    def taken_back(content):
        monkeypatch.setattr(pickle, "loads", load)
        gone.clear()
        assert names_in(tmp_path, 0, ARRAYS) == []
        workers._workers[0].take_back(taken)
        return load(content)

    monkeypatch.setattr(pickle, "loads", taken_back)
    with answering(tmp_path, 0):
        assert workers.ask(0, "b") == (0, "b")


def test_a_reply_stays_until_its_request_is_gone(tmp_path):
    """On a machine of its own, the worker keeps a reply for as long as it may not have arrived."""
    workers = Workers(tmp_path / "here", 1)
    number, _ = workers._workers[0].ask("a", workers._arrays)
    name = f"{number:012d}"
    shutil.copytree(tmp_path / "here" / "0", tmp_path / "0")
    with answering(tmp_path, 0):
        while names_in(tmp_path, 0, REPLIES) != [name]:
            time.sleep(0.001)
        time.sleep(0.1)
        assert names_in(tmp_path, 0, REPLIES) == [name]
        (tmp_path / "0" / REQUESTS / name).unlink()
        end = time.monotonic() + 10
        while names_in(tmp_path, 0, REPLIES):
            assert time.monotonic() < end
            time.sleep(0.001)


def test_a_request_that_comes_again_after_its_reply_is_not_answered_again(tmp_path):
    workers, asked = Workers(tmp_path, 1), []
    with answering(tmp_path, 0, answer=asked.append):
        workers.ask(0, "a")
        (tmp_path / "0" / REQUESTS / f"{0:012d}").write_bytes(pickle.dumps("a"))
        workers.ask(0, "b")
    assert asked == ["a", "b"]


def test_a_worker_ends_with_its_parent(tmp_path, monkeypatch):
    Workers(tmp_path, 1)
    parents = iter([5, 5, 5, 1])
    monkeypatch.setattr(request_files.os, "getppid", lambda: next(parents))
    answer_all(tmp_path / "0", lambda asked: asked)
    assert next(parents, None) is None
