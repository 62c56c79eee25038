"""Replies as they come: one that does not come keeps nobody waiting, and few are in memory at any time."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from tepal.strategies.rounds import inbox as module
from tepal.strategies.rounds.inbox import Inbox


class Reply:
    def __init__(self, message_id):
        self.message_id = message_id


def all_threads():
    return {thread for thread in threading.enumerate() if thread.name == "inbox"}


class FakeGrid:
    """Answers any message at once, but for those of which it was told something else."""

    def __init__(self):
        self.blocked = {}  # message id → event for which a pull waits
        self.in_vain = {}  # message id → how many pulls find nothing yet
        self.failing = {}  # message id → what its pulls raise
        self.pulls = []
        self.at_once = {}  # message id → pulls that are at it now
        self.most_at_once = {}
        self.alive = weakref.WeakSet()
        self._of_others = all_threads()
        self._lock = threading.Lock()

    def block(self, *message_ids):
        event = threading.Event()
        self.blocked.update(dict.fromkeys(message_ids, event))
        return event

    def threads(self):
        """The inbox's."""
        return all_threads() - self._of_others

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        with self._lock:
            self.pulls.append(message_id)
            self.at_once[message_id] = self.at_once.get(message_id, 0) + 1
            self.most_at_once[message_id] = max(self.most_at_once.get(message_id, 0), self.at_once[message_id])
            found = self.in_vain.get(message_id, 0) == 0
            if not found:
                self.in_vain[message_id] -= 1
        try:
            if message_id in self.blocked:
                assert self.blocked[message_id].wait(60)
            if message_id in self.failing:
                raise self.failing[message_id]
            if not found:
                return []
            reply = Reply(message_id)
            self.alive.add(reply)
            return [reply]
        finally:
            with self._lock:
                self.at_once[message_id] -= 1


def soon(what, seconds=20.0):
    """Whether something becomes true in good time."""
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def take_all(inbox, number, seconds=20.0):
    """The next `number` replies, by the ids of their messages."""
    deadline = time.monotonic() + seconds
    came = []
    while len(came) < number and time.monotonic() < deadline:
        if (one := inbox.take(0.1)) is not None:
            came.append(one)
    assert len(came) == number
    return came


@pytest.fixture
def grid(monkeypatch):
    """A pull is stuck after a tenth of a second. And no test leaves a thread behind."""
    monkeypatch.setattr(module, "_STUCK", 0.1)
    grid = FakeGrid()
    yield grid
    assert soon(lambda: not grid.threads()), "a thread remains"


@pytest.fixture
def inbox(grid):
    return Inbox(grid)


def test_every_reply_comes_once_under_the_id_of_its_message(inbox, grid):
    ids = [str(k) for k in range(50)]
    inbox.expect(ids)
    inbox.expect(ids[:10])
    came = take_all(inbox, 50)
    assert sorted(message_id for message_id, _ in came) == sorted(ids)
    assert all(reply.message_id == message_id for message_id, reply in came)
    assert inbox.take(0.2) is None
    assert sorted(grid.pulls) == sorted(ids)


def test_replies_come_in_the_order_in_which_they_are_there(inbox, grid):
    grid.in_vain = {"a": 6, "b": 3, "c": 0}
    inbox.expect(["a", "b", "c"])
    assert [message_id for message_id, _ in take_all(inbox, 3)] == ["c", "b", "a"]


def test_a_reply_that_does_not_come_keeps_the_others_not_waiting(inbox, grid):
    release = grid.block("slow")
    inbox.expect(["slow", *"abcdef"])
    assert sorted(message_id for message_id, _ in take_all(inbox, 6)) == list("abcdef")
    release.set()
    ((message_id, reply),) = take_all(inbox, 1)
    assert message_id == reply.message_id == "slow"


def test_several_that_do_not_come_keep_the_others_not_waiting(inbox, grid):
    slow = [f"slow {k}" for k in range(8)]
    release = grid.block(*slow)
    inbox.expect([*slow, "a", "b"])
    assert sorted(message_id for message_id, _ in take_all(inbox, 2)) == ["a", "b"]
    release.set()
    assert sorted(message_id for message_id, _ in take_all(inbox, 8)) == slow


def test_take_keeps_its_deadline_although_a_pull_does_not_end(inbox, grid):
    release = grid.block("slow")
    inbox.expect(["slow"])
    for timeout in (0.0, 0.5):
        began = time.monotonic()
        assert inbox.take(timeout) is None
        assert timeout <= time.monotonic() - began < timeout + 5
    release.set()
    assert take_all(inbox, 1)[0][0] == "slow"


def test_what_a_pull_raises_comes_out_and_may_be_tried_again(inbox, grid):
    error = grid.failing["b"] = ConnectionError("no route")
    inbox.expect(["a", "b", "c"])
    came = dict(take_all(inbox, 3))
    assert came["b"] is error and isinstance(came["a"], Reply) and isinstance(came["c"], Reply)
    inbox.expect(["b"])
    assert take_all(inbox, 1) == [("b", error)]
    del grid.failing["b"]
    inbox.expect(["b"])
    assert isinstance(take_all(inbox, 1)[0][1], Reply)
    assert inbox.take(0.1) is None and grid.pulls.count("b") == 3


def test_what_is_forgotten_is_not_pulled_any_more(inbox, grid):
    grid.in_vain = dict.fromkeys("abc", 10**9)
    inbox.expect("abc")
    assert inbox.take(0.2) is None
    inbox.forget()
    assert soon(lambda: not grid.threads())
    pulled = len(grid.pulls)
    grid.in_vain.clear()
    assert inbox.take(0.3) is None and len(grid.pulls) == pulled
    inbox.expect("bd")
    assert sorted(message_id for message_id, _ in take_all(inbox, 2)) == ["b", "d"]


def test_a_reply_that_was_being_pulled_when_it_was_forgotten_still_comes_out(inbox, grid):
    release = grid.block("slow")
    inbox.expect(["slow", "a"])
    assert take_all(inbox, 1)[0][0] == "a"
    inbox.forget()
    inbox.expect(["b"])
    assert take_all(inbox, 1)[0][0] == "b"
    release.set()
    ((message_id, reply),) = take_all(inbox, 1)
    assert message_id == "slow" and isinstance(reply, Reply)
    assert inbox.take(0.2) is None


def test_a_pull_that_fails_after_it_was_forgotten_comes_out_as_what_it_raised(inbox, grid):
    release = grid.block("slow")
    grid.failing["slow"] = TimeoutError()
    inbox.expect(["slow"])
    assert inbox.take(0.3) is None
    inbox.forget()
    release.set()
    assert isinstance(take_all(inbox, 1)[0][1], TimeoutError)


def test_one_that_is_expected_again_is_not_pulled_a_second_time_while_its_pull_goes_on(inbox, grid):
    """Every round looks again for the replies of earlier ones, and a pull may last longer than many rounds."""
    release = grid.block("slow")
    for number in range(5):
        inbox.expect([f"round {number}", "slow"])
        assert take_all(inbox, 1)[0][0] == f"round {number}"
        assert inbox.take(0.3) is None
        inbox.forget()
    most = grid.most_at_once["slow"]
    release.set()
    while inbox.take(0.3) is not None:
        pass
    assert most == 1, f"{most} threads are at one reply"


def test_one_slow_reply_does_not_end_all_looking_after_many_rounds(inbox, grid, monkeypatch):
    monkeypatch.setattr(module, "_MOST_THREADS", 4)
    release = grid.block("slow")
    came = []
    for number in range(8):
        inbox.expect(["slow", f"round {number}"])
        deadline = time.monotonic() + 3
        while (one := inbox.take(0.1)) is None and time.monotonic() < deadline:
            pass
        inbox.forget()
        if one is None:
            break
        came.append(one[0])
    release.set()
    while inbox.take(0.3) is not None:
        pass
    assert came == [f"round {number}" for number in range(8)]


def test_few_replies_are_in_memory_while_the_round_is_slow(inbox, grid):
    ids = [str(k) for k in range(40)]
    inbox.expect(ids)
    most, came = 0, 0
    while came < len(ids):
        one = inbox.take(5)
        assert one is not None
        came += 1
        time.sleep(0.01)  # the merge
        most = max(most, len(grid.alive))
    assert most <= 6
    del one
    gc.collect()
    assert not grid.alive


def test_few_replies_are_in_memory_while_others_do_not_come(inbox, grid):
    release = grid.block("slow 0", "slow 1", "slow 2")
    ids = [str(k) for k in range(30)]
    inbox.expect(["slow 0", "slow 1", "slow 2", *ids])
    most = 0
    for _ in range(30):
        assert inbox.take(5) is not None
        time.sleep(0.02)
        most = max(most, len(grid.alive))
    release.set()
    assert most <= 6
    assert len(take_all(inbox, 3)) == 3


def test_a_reply_that_was_taken_is_not_held_by_who_looks_for_the_others(inbox, grid):
    grid.in_vain["never"] = 10**9
    inbox.expect(["never", "a"])
    assert len(take_all(inbox, 1)) == 1
    assert soon(lambda: not grid.alive)
    assert grid.threads()
    inbox.forget()


def test_no_thread_remains_when_nothing_is_expected(inbox, grid):
    assert not grid.threads(), "there is none before something is expected"
    inbox.expect("ab")
    assert not grid.threads(), "and none before somebody takes"
    take_all(inbox, 2)
    assert soon(lambda: not grid.threads())
    inbox.expect("c")
    take_all(inbox, 1)
    assert soon(lambda: not grid.threads())


def test_nobody_looks_while_nobody_takes(inbox, grid):
    """A round may merge for long: a thread that has a reply waits with it."""
    inbox.expect([str(k) for k in range(20)])
    take_all(inbox, 1)
    time.sleep(0.3)
    assert len(grid.pulls) <= 4 and len(grid.threads()) <= 2
    take_all(inbox, 19)


def test_a_closed_inbox_drops_what_comes_and_ends_its_threads(inbox, grid):
    release = grid.block("slow")
    grid.in_vain["later"] = 10**9
    inbox.expect(["slow", "later", *"abcdef"])
    assert inbox.take(5) is not None
    time.sleep(0.2)  # one more reply waits in the inbox, and a thread has another
    inbox.close()
    release.set()
    assert soon(lambda: not grid.threads())
    assert len(grid.pulls) < 20


def test_how_long_pulling_a_reply_has_failed_is_counted_anew_after_a_pull_that_works(inbox, grid):
    now = time.monotonic()
    assert inbox.failing_since("a") >= now
    grid.failing["a"] = OSError()
    for _ in range(3):
        inbox.expect("a")
        take_all(inbox, 1)
    first = inbox.failing_since("a")
    assert now <= first <= time.monotonic() and inbox.failing_since("a") == first
    del grid.failing["a"]
    grid.in_vain["a"] = 1  # nothing is there yet, and that is no failure
    inbox.expect("a")
    take_all(inbox, 1)
    assert inbox.failing_since("a") > first


def test_waiting_costs_few_pulls(inbox, grid):
    grid.in_vain = dict.fromkeys("ab", 10**9)
    inbox.expect("ab")
    assert inbox.take(1) is None
    assert 4 <= len(grid.pulls) <= 60
    inbox.forget()


def test_any_weather(inbox, grid):
    """Some replies are there at once, some later, some never until the end; some pulls fail now and then."""
    rng = np.random.default_rng(1)
    ids = [str(k) for k in range(120)]
    grid.in_vain = {message_id: int(rng.integers(0, 4)) for message_id in ids}
    release = grid.block(*rng.choice(ids, 6, replace=False))
    grid.failing = {str(message_id): OSError(message_id) for message_id in rng.choice(ids, 20, replace=False)}
    inbox.expect(ids)
    good, deadline = [], time.monotonic() + 30
    while len(good) < len(ids) and time.monotonic() < deadline:
        if len(good) > 60:
            release.set()
        if (one := inbox.take(0.2)) is None:
            continue
        message_id, reply = one
        if isinstance(reply, Exception):
            assert reply is grid.failing.pop(message_id)
            inbox.expect([message_id])
        else:
            assert reply.message_id == message_id
            good.append(message_id)
    assert sorted(good) == sorted(ids) and not grid.failing


def test_no_pull_begins_while_a_reply_is_worked_on(inbox, grid):
    inbox.expect(["a", "b", "c"])
    (first,) = take_all(inbox, 1)
    time.sleep(0.4)
    assert grid.pulls == [first[0]] and len(grid.alive) == 1
    del first
    take_all(inbox, 2)
    assert sorted(grid.pulls) == ["a", "b", "c"]


def test_a_pull_whose_reply_is_coming_is_not_taken_for_stuck(inbox, grid):
    event = grid.block("large")
    inbox.expect(["large", "other"])
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        grid.moved_at = time.monotonic()
        assert inbox.take(0.02) is None
    assert grid.pulls == ["large"]
    take_all(inbox, 1)  # nothing of it comes any more
    assert grid.pulls == ["large", "other"]
    event.set()
    take_all(inbox, 1)


class Pauses:
    """Stands for the event that an inbox is closed: remembers how long it was waited for, and lets no time pass."""

    def __init__(self):
        self.asked = []

    def wait(self, seconds):
        self.asked.append(seconds)
        time.sleep(0.001)
        return False

    def is_set(self):
        return False

    def set(self):
        pass


@pytest.mark.parametrize(("waits", "first"), [([0.4, 2.0], 0.2), ([2.0, 0.1, 3.0], 0.05), ([60.0], 0.25)])
def test_replies_are_not_looked_for_in_the_first_half_of_the_shortest_wait(waits, first):
    grid = FakeGrid()
    grid.in_vain["m"] = 2
    inbox = Inbox(grid)
    for wait in waits:
        inbox._first_pause.waited(wait)
    inbox._closed = pauses = Pauses()
    inbox.expect(["m"])
    assert inbox.take(5)[0] == "m"
    assert pauses.asked[0] == pytest.approx(first) and len(grid.pulls) == 3
    assert inbox._first_pause.seconds < first, "its own wait is the shortest now"


def test_the_first_replies_of_all_are_looked_for_at_once():
    grid = FakeGrid()
    inbox = Inbox(grid)
    inbox._closed = pauses = Pauses()
    inbox.expect(["m"])
    assert inbox.take(5)[0] == "m"
    assert pauses.asked == []
