"""Messages taken apart and put together, against Flower's own way of doing it."""

import gc
import json
import weakref

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import array as flowers_array
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from tepal.host.flower import objects
from tepal.host.flower.objects import ReleaseResponses, fetch, hash_chunks, new_bytes, push, tree_of
from tepal.host.flower.single import plain, written

CHUNK = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(flowers_array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", CHUNK)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 7)


def message(*datas: bytes) -> Message:
    arrays = ArrayRecord()
    for number, data in enumerate(datas):
        arrays[str(number)] = Array(dtype="uint8", shape=(len(data),), stype="x", data=data)
    content = {"arrays": arrays, "metrics": MetricRecord({"n": 1}), "config": ConfigRecord({"a": "b"})}
    return Message(RecordDict(content), dst_node_id=1, message_type="train")


def contents_of(sent: Message) -> dict[str, bytes]:
    return {object_id: each.deflate() for object_id, each in get_all_nested_objects(sent).items()}


DATA = st.one_of(
    st.integers(0, 5 * CHUNK).map(lambda size: np.random.default_rng(size).bytes(size)),
    st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]).map(bytes),  # chunks that are all alike
)


@given(st.lists(DATA, max_size=3))
def test_what_is_fetched_is_what_was_sent(datas):
    sent = message(*datas)
    contents = contents_of(sent)
    came = fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects)
    assert came.object_id == sent.object_id
    assert [array.data for array in came.content["arrays"].values()] == datas
    assert all(type(array.data) is bytes for array in came.content["arrays"].values())
    assert came.content["metrics"] == sent.content["metrics"] and came.content["config"] == sent.content["config"]


@given(st.lists(DATA, max_size=3))
def test_ids_trees_and_contents_are_flowers(datas):
    ours, flowers = message(*datas), message(*datas)
    ours.metadata.__dict__["_created_at"] = flowers.metadata.created_at
    hash_chunks(ours)
    tree, objects = tree_of(plain(ours), ours.object_id)
    assert tree == get_object_tree(flowers)
    assert list(objects) == list(get_all_nested_objects(flowers))
    pushed = {}
    push(objects, objects, pushed.__setitem__)
    assert pushed == contents_of(flowers)
    wanted = [node.object_id for node in iterate_object_tree(tree)][-2:]
    pushed.clear()
    push(objects, wanted, pushed.__setitem__)
    assert sorted(pushed) == sorted(set(wanted))


def test_each_chunk_is_pulled_once():
    sent, asked = message(bytes(range(200)), b"x" * 500), []
    contents = contents_of(sent)

    def pull(object_id):
        asked.append(object_id)
        return contents[object_id]

    fetch(contents[sent.object_id], sent.object_id, pull, pull_objects)
    assert sorted([*asked, sent.object_id]) == sorted(contents)


def test_chunks_of_another_size_are_refused():
    sent = message(bytes(range(200)))
    second = sent.content["arrays"]["0"].slice_array()[1][0]
    contents = contents_of(sent)
    contents[second] = b"ArrayChunk  3\x00abc"
    with pytest.raises(ObjectPullError, match="not of one size"):
        fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects)
    contents[second] = b"ArrayChunk  4\x00abc"
    with pytest.raises(ValueError, match="of 3 bytes, expected a chunk of an array of 4 bytes"):
        fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects)


def described_anew(sent: Message, places: list[int]) -> dict[str, bytes]:
    """The message's objects with another list of chunks in the description of its array, under the ids of before."""
    contents = contents_of(sent)
    array_id = sent.content["arrays"]["0"].object_id
    head, _, body = contents[array_id].partition(b"\x00")
    kind, children, _ = head.split(b" ")
    body = json.dumps(json.loads(body) | {"arraychunk_ids": places}).encode()
    contents[array_id] = b" ".join([kind, children, str(len(body)).encode()]) + b"\x00" + body
    return contents


@pytest.mark.parametrize("data", [bytes(CHUNK), b""], ids=["full", "empty"])
def test_a_chunk_in_many_places_is_refused_before_memory_is_allocated(monkeypatch, data):
    allocated = []
    monkeypatch.setattr(objects, "new_bytes", lambda size: allocated.append(size) or new_bytes(size))
    sent = message(b"x" * CHUNK)
    contents = described_anew(sent, [0] * 5000)
    (chunk,) = (object_id for object_id, content in contents.items() if content.startswith(b"ArrayChunk"))
    contents[chunk] = b"ArrayChunk  %d\x00" % len(data) + data
    counted = sum(len(content) for content in contents.values() if not content.startswith(b"ArrayChunk"))
    size = counted + max(5000 * len(data), 5000)
    with pytest.raises(ObjectPullError, match=f"at least {size:,} bytes; at most {size - 1:,} are allowed"):
        fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects, size - 1)
    assert not allocated
    came = fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects, size)
    assert came.content["arrays"]["0"].data == data * 5000


def test_the_arrays_and_records_of_a_message_are_counted_together():
    sent = message(bytes(range(200)), b"x" * 500)
    sent.content["config"]["long"] = "y" * 300
    contents = contents_of(sent)
    size = 700 + sum(len(content) for content in contents.values() if not content.startswith(b"ArrayChunk"))
    fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects, size)
    for most in (0, 10, 400, 700, size - 1):
        with pytest.raises(ObjectPullError, match=f"at most {most:,} are allowed"):
            fetch(contents[sent.object_id], sent.object_id, contents.__getitem__, pull_objects, most)


def test_no_more_objects_are_pulled_when_a_message_is_too_large():
    records = {str(k): ConfigRecord({"text": f"{k:03}" * 100}) for k in range(200)}
    sent, pulled = Message(RecordDict(records), dst_node_id=1, message_type="train"), []
    contents = contents_of(sent)

    def pull(object_id):
        pulled.append(object_id)
        return contents[object_id]

    most = len(contents[sent.object_id]) + 20_000
    with pytest.raises(ObjectPullError, match="at most"):
        fetch(contents[sent.object_id], sent.object_id, pull, pull_objects, most)
    assert len(pulled) < 150


def test_a_message_in_one_object_is_counted_too():
    sent = message(b"x" * 100)
    root = written(sent, single=True)
    assert fetch(root.content, root.object_id, {}.__getitem__, pull_objects, len(root.content)).content == sent.content
    with pytest.raises(ObjectPullError, match="at most 50 are"):
        fetch(root.content, root.object_id, {}.__getitem__, pull_objects, 50)


def test_what_is_no_message_is_refused():
    record = message(b"abc").content["config"]
    with pytest.raises(ValueError, match="do not match"):
        fetch(record.deflate(), record.object_id, {}.__getitem__, pull_objects)


def test_an_object_that_cannot_be_pushed_is_an_error_and_the_rest_is_not_sent():
    objects = tree_of(plain(sent := message(bytes(range(250)) * 40)), sent.object_id)[1]
    pushed = []

    def push_one(object_id, content):
        pushed.append(object_id)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        push(objects, objects, push_one)
    assert len(pushed) < len(objects) / 2


def test_an_answer_that_was_read_is_gone_when_nobody_has_it():
    with httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, content=b"x" * 10))) as client:
        answer = ReleaseResponses().intercept(None, lambda _: client.get("http://x/"))
        assert answer.content == b"x" * 10
        gc.collect()
        gc.disable()
        try:
            gone = weakref.ref(answer)
            del answer
            assert gone() is None
        finally:
            gc.enable()
