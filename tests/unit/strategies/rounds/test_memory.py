"""Messages and states are freed as soon as nobody needs them: not when Python's garbage collector happens to run."""

import gc
import time
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange
from tepal.host.flower.contents import records_of
from tepal.host.flower.objects import hash_chunks, tree_of
from tepal.host.flower.single import plain
from tepal.strategies import FedAvg
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.state_json import to_json


@contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def arrays_of(value=0.0):
    return ArrayRecord({"w": Array(np.full(1000, value, np.float32))})


def alive(references):
    """How many of them are in memory. A thread that has just made one may still be about to let it go."""
    end = time.monotonic() + 5
    while (count := sum(reference() is not None for reference in references)) and time.monotonic() < end:
        time.sleep(0.01)
    return count


class Watched(InProcessGrid):
    """Counts the contents of messages and replies that are in memory."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.messages, self.replies = [], []  # weak references; a RecordDict has no hash for a WeakSet
        self.most = 0
        """Replies in memory when the next one was asked for."""

    def push_messages(self, messages):
        messages = list(messages)
        self.messages += [weakref.ref(message.content) for message in messages]
        return super().push_messages(messages)

    def pull_next(self, message_ids, timeout):
        self.most = max(self.most, alive(self.replies))
        came = super().pull_next(message_ids, timeout)
        if came is not None:
            self.replies.append(weakref.ref(came[1].content))
        return came


@pytest.fixture
def app():
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        assert set(msg.content["arrays"]) == {"w"}
        return Message(RecordDict({"arrays": arrays_of(1), "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=msg)

    return app


@pytest.mark.parametrize("way", ["as they are", "checked", "with checkpoints"])
def test_no_reply_is_in_memory_when_the_next_one_is_asked_for_and_no_message_after_its_round(tmp_path, way, app):
    spoil = None if way == "as they are" else lambda node, message, reply: reply
    grid = Watched([Node(app, {"partition-id": k}) for k in range(5)], spoil=spoil)
    left = []
    checkpoints = tmp_path if way == "with checkpoints" else None
    strategy = FedAvg(checkpoints=checkpoints, on_round=lambda _: left.append(alive(grid.messages)))
    with without_collector():
        strategy.start(grid, arrays_of(), num_rounds=3, timeout=20)
    assert grid.most == 0
    assert left == [0] * 3


def test_nothing_of_a_run_that_has_ended_is_in_memory(app):
    with without_collector():
        before = {id(each) for each in gc.get_objects()}
        FedAvg().start(InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)]), arrays_of(), num_rounds=2)
        kinds = [type(each).__name__ for each in gc.get_objects() if id(each) not in before]
    assert not {"RoundRunner", "Messenger", "Sender", "Past", "ModelState", "Reply"}.intersection(kinds)


def test_records_are_found_by_their_kind():
    arrays, metrics = arrays_of(), MetricRecord({"a": 1})
    content = RecordDict({"one": arrays, "two": metrics})
    assert records_of(content, ArrayRecord) == dict(content.array_records) == {"one": arrays}
    assert records_of(content, MetricRecord) == dict(content.metric_records) == {"two": metrics}


def test_a_content_whose_records_were_read_is_freed():
    content = RecordDict({"arrays": arrays_of()})
    gone = weakref.ref(content)
    with without_collector():
        assert records_of(content, ArrayRecord)
        del content
        assert gone() is None


def test_a_message_that_was_sent_is_freed():
    message = Message(RecordDict({"arrays": arrays_of()}), 1, "train")
    gone = weakref.ref(message.content)
    with without_collector():
        hash_chunks(message)
        tree, objects = tree_of(plain(message), "id")
        assert len(objects) > 3
        del message, tree, objects
        assert gone() is None


def test_the_arrays_of_a_state_that_was_saved_are_freed():
    array = np.zeros(3)
    gone = weakref.ref(array)
    with without_collector():
        arrays = {}
        to_json({"w": [array, (array,)]}, arrays)
        assert len(arrays) == 1
        del arrays, array
        assert gone() is None
