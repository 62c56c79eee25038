"""Messages in one object, against the trees that Flower makes of them."""

import hashlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from tepal.host.flower import single
from tepal.host.flower.single import plain, read_single, reads_single, written


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 7)


def message(content: RecordDict) -> Message:
    return Message(content, dst_node_id=9, message_type="train.probe", group_id="3", ttl=12.5)


def arrays(*sizes: int) -> ArrayRecord:
    return ArrayRecord({f"a{k}": Array(np.arange(size, dtype=np.float32)) for k, size in enumerate(sizes)})


NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
VALUES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=5), st.binary(max_size=5))
RECORDS = st.one_of(
    st.lists(st.integers(0, 9), max_size=3).map(lambda sizes: arrays(*sizes)),
    st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3).map(MetricRecord),
    st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(ConfigRecord),
)


@given(st.dictionaries(st.text(max_size=5), RECORDS, max_size=4))
def test_a_small_message_is_read_as_it_was_written(records):
    sent = message(RecordDict(records))
    root = written(sent, single=True)
    assert root.children == {} and root.object_id == hashlib.sha256(root.content).hexdigest()
    validate_object_content(root.content)  # as the SuperLink does
    came = read_single(root.content)
    assert list(came.content) == list(sent.content) and came.content == sent.content
    assert [type(record) for record in came.content.values()] == [type(record) for record in sent.content.values()]
    for name in ("run_id", "src_node_id", "dst_node_id", "group_id", "ttl", "message_type", "created_at"):
        assert getattr(came.metadata, name) == getattr(sent.metadata, name)


def test_types_of_numbers_stay():
    sent = message(RecordDict({"m": MetricRecord({"i": 1, "f": 1.0}), "c": ConfigRecord({"b": True, "l": [1, 2]})}))
    came = read_single(written(sent, single=True).content).content
    assert [type(each) for each in (*came["m"].values(), came["c"]["b"])] == [int, float, bool]
    assert came["c"]["l"] == [1, 2]


def test_a_large_message_is_a_tree_that_flower_reads_and_that_says_what_its_sender_reads():
    sent = message(RecordDict({"a": arrays(single.LARGEST // 4 + 1)}))
    root = written(sent, single=True)
    assert list(root.children) == [sent.content.object_id]
    assert read_single(root.content) is None and reads_single(root.content)
    objects = {key: each.deflate() for key, each in get_all_nested_objects(sent.content).items()}
    came = inflate_object_from_contents(root.object_id, objects | {root.object_id: root.content})
    assert came.content == sent.content and came.metadata.message_type == "train.probe"


def test_who_has_not_said_that_it_reads_one_object_gets_a_tree():
    sent = message(RecordDict({"a": arrays(3)}))
    root = written(sent, single=False)
    assert list(root.children) == [sent.content.object_id] and reads_single(root.content)


def test_flowers_own_messages_say_nothing():
    sent = message(RecordDict({"a": arrays(3)}))
    assert plain(sent).content == sent.deflate() and plain(sent).object_id == sent.object_id
    assert not reads_single(sent.deflate()) and read_single(sent.deflate()) is None


def test_an_error_is_written_as_flower_does():
    sent = message(RecordDict())
    sent.metadata.__dict__["_message_id"] = sent.object_id
    reply = Message(Error(2, "why"), reply_to=sent)
    assert written(reply, single=True).content == reply.deflate()
    assert read_single(reply.deflate()) is None and not reads_single(reply.deflate())
