"""Work that is shared among threads."""

import os
import threading
from concurrent.futures import Future

import pytest

from tepal.exchange.threads import WORTH, in_threads

several = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)


def names(_):
    return threading.current_thread().name


def test_results_are_in_the_order_of_the_items():
    assert in_threads(lambda x: x * x, range(100), WORTH) == [x * x for x in range(100)]


@several
def test_little_work_is_done_here_and_much_in_threads_that_stay():
    here = threading.current_thread().name
    assert set(in_threads(names, range(10), WORTH - 1)) == {here}
    first, second = (set(in_threads(names, range(1000), WORTH)) for _ in range(2))
    assert here not in first | second
    assert len(first | second) <= min(len(os.sched_getaffinity(0)), 4)


def test_work_that_asks_for_threads_itself_does_not_wait_for_ever():
    def outer(k):
        return sum(in_threads(lambda x: x + k, range(3), WORTH))

    assert in_threads(outer, range(20), WORTH) == [3 + 3 * k for k in range(20)]


def test_an_error_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda x: 1 // x, [1, 0], WORTH)


@several
def test_after_an_error_no_thread_is_still_at_work():
    """The caller may free the arrays, or read what was written to them."""
    begun, may_end, at_work = threading.Event(), threading.Event(), set()

    def work(k):
        if k == 0:
            begun.wait(10)
            threading.Timer(0.1, may_end.set).start()
            raise ZeroDivisionError
        at_work.add(k)
        begun.set()
        may_end.wait(10)
        at_work.discard(k)

    with pytest.raises(ZeroDivisionError):
        in_threads(work, range(8), WORTH)
    assert not at_work


@several
def test_when_the_caller_is_interrupted_the_threads_begin_nothing_more(monkeypatch):
    begun, interrupted = [], threading.Event()

    def result(self, timeout=None):
        interrupted.set()
        raise KeyboardInterrupt

    def work(k):
        begun.append(k)
        interrupted.wait(10)

    monkeypatch.setattr(Future, "result", result)
    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(1000), WORTH)
    assert len(begun) < 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_threads_of_its_own():
    in_threads(names, range(10), WORTH)
    child = os.fork()
    if child == 0:
        os._exit(0 if in_threads(lambda x: x, range(10), WORTH) == list(range(10)) else 1)
    assert os.waitpid(child, 0)[1] == 0
