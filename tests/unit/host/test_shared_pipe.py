"""A pipe of two forked processes: what arrives is what was sent, and an Array that is sent again is not copied."""

import gc
import os
import weakref

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

if not hasattr(os, "fork"):
    pytest.skip("it is for forked processes", allow_module_level=True)

from tepal.host.shared_pipe import shared_pipe

LARGE = 20_000  # float32 values: more bytes than a pipe holds


@pytest.fixture
def ends():
    pair = shared_pipe()
    yield pair
    for end in pair:
        end.close()


def array(value, size=LARGE):
    return Array(np.full(size, value, np.float32))


def test_what_arrives_is_what_was_sent(ends):
    here, there = ends
    content = RecordDict({"arrays": ArrayRecord({"a": array(1), "b": array(2, 3)}), "config": ConfigRecord({"x": 1.5})})
    here.send((content, "text"))
    received, text = there.recv()
    assert text == "text" and received == content
    assert [each.numpy()[0] for each in received["arrays"].values()] == [1, 2]


def test_an_array_that_is_sent_again_is_the_other_ends_own(ends):
    here, there = ends
    sent = array(1)
    arrived = []
    for _ in range(2):
        here.send([sent, array(2, 3)])
        arrived.append(there.recv()[0])
        there.send(None)
        here.recv()
    assert arrived[0] is arrived[1]


def test_an_array_that_is_gone_here_is_forgotten_there(ends):
    here, there = ends
    sent = array(1)
    here.send(sent)
    kept = weakref.ref(there.recv())
    gc.collect()
    assert kept() is not None
    del sent
    here.send("anything")
    there.recv()
    gc.collect()
    assert kept() is None


def test_an_array_of_a_reply_is_kept_by_nobody(ends):
    here, there = ends
    here.send("request")
    there.recv()
    reply = array(1)
    there.send([reply, reply])
    first, second = here.recv()
    assert first is second
    gone = weakref.ref(first)
    del first, second
    gc.collect()
    assert gone() is None


def test_a_python_without_memfd_has_a_file(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    here, there = shared_pipe()
    here.send(array(5))
    assert there.recv().numpy()[-1] == 5
    here.close()
    there.close()


def test_two_arrays_in_one_message_keep_their_places_and_equal_ones_are_one(ends):
    here, there = ends
    first, second = array(1), array(2, 2 * LARGE)
    here.send([second, first, second])
    received = there.recv()
    assert [each.numpy()[0] for each in received] == [2, 1, 2] and received[0] is received[2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * LARGE)), max_size=12))
def test_any_sequence_of_sizes_in_both_directions(steps):
    ends = shared_pipe()
    kept = []
    for number, (keeps, size) in enumerate(steps):
        here, there = ends[::-1] if number % 2 else ends
        thing = array(number, size)
        here.send([thing, *kept])
        received = there.recv()
        expected = [np.full(size, number, np.float32), *(each.numpy() for each in kept)]
        assert all(np.array_equal(got.numpy(), want) for got, want in zip(received, expected, strict=True))
        if keeps and number % 2 == 0:
            kept.append(thing)
    for end in ends:
        end.close()


def test_another_process_answers_with_arrays_of_its_own(ends):
    here, there = ends
    child = os.fork()
    if child == 0:
        here.close()
        try:
            while True:
                there.send(Array(there.recv().numpy() * 2))
        except EOFError:
            os._exit(0)
        os._exit(1)
    there.close()
    for value in range(3):
        here.send(array(value, LARGE * (value + 1)))
        assert np.array_equal(here.recv().numpy(), np.full(LARGE * (value + 1), 2 * value, np.float32))
    here.close()
    assert os.waitpid(child, 0)[1] == 0


def test_a_closed_end_is_noticed():
    here, there = shared_pipe()
    there.close()
    with pytest.raises(EOFError):
        here.recv()
    with pytest.raises(OSError):
        here.send(array(1))
    here.close()
