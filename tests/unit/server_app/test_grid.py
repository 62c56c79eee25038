"""The grid that does not wait, over a runtime that hands out what has arrived so far."""

import hashlib
import re
import threading
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse, PushAppMessagesResponse
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from tepal.host.flower.patches import FLOWER, SHORTEST_PAUSE
from tepal.host.flower.single import plain, written
from tepal.server_app import grid as grid_module
from tepal.server_app import http_grid
from tepal.server_app.grid import prompt
from tepal.server_app.http_grid import PromptGrid
from tepal.strategies.in_process import InProcessGrid


class Runtime:
    """Announces a reply once, and has as many of its objects as have arrived."""

    def __init__(self):
        self.announced, self.trees, self.objects = {}, {}, {}
        self.arrived, self.gone, self.confirmed = set(), set(), []
        self.asked = 0

    def announce(self, answers: str, size: int = 3) -> Message:
        reply = self.reply(answers, size)
        self.announced[answers] = reply
        self.objects |= {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
        return reply

    def reply(self, answers: str, size: int) -> Message:
        arrays = ArrayRecord({name: Array(np.full(size, ord(name), np.float32)) for name in "ab"})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"of": float(len(answers))})})
        reply = Message(content, dst_node_id=1, message_type="train")
        reply.metadata.__dict__["_reply_to_message_id"] = answers
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return reply

    def upload(self, reply: Message, *, but: int = 0) -> None:
        ids = [node.object_id for node in iterate_object_tree(get_object_tree(reply))]
        self.arrived |= set(ids[: len(ids) - but])

    def PullMessages(self, request):
        self.asked += 1
        found = [self.announced.pop(each) for each in list(request.message_ids) if each in self.announced]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(reply)) for reply in found],
            message_object_trees=[get_object_tree(reply) for reply in found],
        )

    def PullObject(self, request):
        key = request.object_id
        if key in self.gone:
            return PullObjectResponse(object_found=False)
        here = key in self.arrived
        return PullObjectResponse(
            object_found=True, object_available=here, object_content=self.objects[key] if here else b""
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 7)


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def grid(runtime):
    flower = HttpGrid(token="x")
    flower._client = runtime
    flower.set_run(Run.create_empty(7))
    made = prompt(flower)
    assert isinstance(made, PromptGrid)
    return made


def quickly(call):
    time.sleep(SHORTEST_PAUSE)  # between two looks at the SuperLink
    begun = time.monotonic()
    result = call()
    assert time.monotonic() - begun < 5, "Flower itself waits for minutes"
    return result


def test_a_reply_that_is_on_its_way_is_not_waited_for(grid, runtime):
    assert quickly(lambda: grid.pull_messages(["m1"])) == []
    reply = runtime.announce("m1")
    assert quickly(lambda: grid.pull_messages(["m1"])) == []
    runtime.upload(reply, but=1)
    assert quickly(lambda: grid.pull_messages(["m1"])) == []
    runtime.upload(reply)
    (came,) = quickly(lambda: grid.pull_messages(["m1"]))
    assert came.metadata.reply_to_message_id == "m1" and came.metadata.message_id == reply.object_id
    np.testing.assert_array_equal(came.content["arrays"]["b"].numpy(), np.full(3, ord("b"), np.float32))
    assert runtime.confirmed == [reply.object_id]
    assert grid.pull_messages(["m1"]) == [] and not grid._announced


class Sending(Runtime):
    """Takes messages, too, and keeps their trees."""

    def __init__(self):
        super().__init__()
        self.pushed = []

    def PushMessages(self, request):
        (tree,) = request.message_object_trees
        self.pushed.append(tree)
        wanted = [node.object_id for node in iterate_object_tree(tree)]
        ids = [each.metadata.message_id for each in request.messages_list]
        return PushAppMessagesResponse(message_ids=ids, objects_to_push=wanted, session_id="s")

    def PushObject(self, request):
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def GetNodes(self, request):
        return GetNodesResponse(nodes=[NodeInfo(node_id=5, last_activated_at=self.started)])

    started = "noon"


def an_exchange(grid, runtime, *, single, node=5):
    """Send node 5 a message, and have it answered; whether the message was sent in one object."""
    content = RecordDict({"arrays": ArrayRecord({"a": Array(np.ones(3, np.float32))})})
    (sent,) = grid.push_messages([Message(content, dst_node_id=5, message_type="train")])
    tree = runtime.pushed[-1]
    assert sent == tree.object_id == hashlib.sha256(runtime.objects[sent]).hexdigest()
    reply = runtime.reply(sent, 3)
    reply.metadata.__dict__["_src_node_id"] = node
    root = written(reply, single=True) if single else plain(reply)
    reply.metadata.__dict__["_message_id"] = root.object_id
    runtime.announced[sent] = reply
    runtime.objects |= {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
    runtime.objects[root.object_id] = root.content
    runtime.arrived |= set(runtime.objects)
    (came,) = quickly(lambda: grid.pull_messages([sent]))
    assert came.content == reply.content
    return not tree.children


@pytest.fixture
def sending():
    return Sending()


@pytest.fixture
def over(sending):
    flower = HttpGrid(token="x")
    flower._client = sending
    flower.set_run(Run.create_empty(7))
    return prompt(flower)


def test_a_node_that_answers_in_one_object_gets_small_messages_in_one_object(over, sending):
    assert [an_exchange(over, sending, single=True) for _ in range(3)] == [False, True, True]


def test_a_node_that_answers_as_flower_does_gets_trees(over, sending):
    assert [an_exchange(over, sending, single=False) for _ in range(3)] == [False] * 3


def test_a_reply_says_nothing_about_another_node(over, sending):
    an_exchange(over, sending, single=True, node=6)
    content = RecordDict({"arrays": ArrayRecord({"a": Array(np.ones(3, np.float32))})})
    over.push_messages([Message(content, dst_node_id=6, message_type="train")])
    assert sending.pushed[-1].children


def test_a_node_that_was_started_again_may_be_another_program(over, sending):
    list(over.get_nodes())
    an_exchange(over, sending, single=True)
    list(over.get_nodes())
    assert an_exchange(over, sending, single=True)
    sending.started = "one o'clock"
    list(over.get_nodes())
    assert not an_exchange(over, sending, single=True)


def test_a_node_that_fails_with_a_message_in_one_object_gets_a_tree(over, sending):
    an_exchange(over, sending, single=True)
    (sent,) = over.push_messages([Message(RecordDict(), dst_node_id=5, message_type="train")])
    asked = Message(RecordDict(), dst_node_id=5, message_type="train")
    asked.metadata.__dict__["_message_id"] = sent
    error = Message(Error(8, "it has ended"), reply_to=asked)
    error.metadata.__dict__["_message_id"] = error.object_id
    sending.announced[sent], sending.objects[error.object_id] = error, error.deflate()
    sending.arrived.add(error.object_id)
    (came,) = quickly(lambda: over.pull_messages([sent]))
    assert came.error.reason == "it has ended"
    assert not an_exchange(over, sending, single=True)


def test_the_superlink_is_asked_once_for_all_replies_that_are_awaited(grid, runtime, monkeypatch):
    ids = [f"m{k}" for k in range(40)]
    monkeypatch.setattr(HttpGrid, "push_messages", lambda self, messages: [*ids, None])
    assert grid.push_messages([]) == [*ids, None]
    monkeypatch.setattr(http_grid, "SHORTEST_PAUSE", 60.0)
    for number, message_id in enumerate(ids):
        runtime.upload(runtime.announce(message_id, size=number + 1))
    came = [reply for message_id in ids for reply in grid.pull_messages([message_id])]
    assert [reply.metadata.reply_to_message_id for reply in came] == ids and runtime.asked == 1
    assert not grid._announced and not grid._awaited


def test_threads_do_not_ask_for_the_same_replies_at_the_same_time(grid, runtime, monkeypatch):
    """The SuperLink forgets what it has announced; it answers a second request with an error."""
    ids, together, slow = [f"m{k}" for k in range(8)], [], threading.Semaphore(1)

    def pull(request, pull=runtime.PullMessages):
        together.append(not slow.acquire(blocking=False))
        time.sleep(0.1)
        slow.release()
        return pull(request)

    monkeypatch.setattr(runtime, "PullMessages", pull)
    monkeypatch.setattr(HttpGrid, "push_messages", lambda self, messages: ids)
    grid.push_messages([])
    for number, message_id in enumerate(ids):
        runtime.upload(runtime.announce(message_id, size=number + 1))
    came = []
    threads = [threading.Thread(target=lambda own=each: came.extend(grid.pull_messages([own]))) for each in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(together) and sorted(reply.metadata.reply_to_message_id for reply in came) == ids


def test_a_reply_answers_the_message_that_it_was_asked_for_whatever_it_says(grid, runtime):
    reply = runtime.reply("another", 3)
    runtime.announce("m1")
    runtime.announced["m1"].metadata.__dict__["_message_id"] = reply.object_id
    runtime.objects |= {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
    runtime.upload(reply)
    (came,) = quickly(lambda: grid.pull_messages(["m1"]))
    assert came.metadata.reply_to_message_id == "m1"


def test_a_reply_that_nobody_asks_for_is_looked_for_no_more(grid, runtime, monkeypatch):
    monkeypatch.setattr(http_grid, "_FORGOTTEN", 0.1)
    quickly(lambda: grid.pull_messages(["m1"]))
    time.sleep(0.15)
    quickly(lambda: grid.pull_messages(["m2"]))
    assert [*grid._awaited] == ["m2"]


def test_a_superlink_that_does_not_answer_fails_for_every_reply(grid, runtime, monkeypatch):
    def fails(request):
        raise ConnectionError("busy")

    monkeypatch.setattr(runtime, "PullMessages", fails)
    for message_id in ("m1", "m2", "m1", "m2"):
        with pytest.raises(ConnectionError):
            grid.pull_messages([message_id])


def test_others_come_while_one_is_slow(grid, runtime):
    slow, quick = runtime.announce("m1"), runtime.announce("message-2")
    runtime.upload(quick)
    (came,) = quickly(lambda: grid.pull_messages(["m1", "message-2"]))
    assert came.metadata.reply_to_message_id == "message-2" and came.content["metrics"]["of"] == 9
    runtime.upload(slow)
    assert len(grid.pull_messages(["m1", "message-2"])) == 1


def test_a_reply_whose_upload_was_given_up_is_an_error_of_that_message(grid, runtime):
    reply = runtime.announce("m1")
    runtime.gone |= set(get_all_nested_objects(reply))
    (came,) = quickly(lambda: grid.pull_messages(["m1"]))
    assert came.has_error() and came.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert came.metadata.reply_to_message_id == "m1" and "its upload is incomplete" in came.error.reason
    assert runtime.confirmed == [reply.object_id]


def test_a_reply_that_is_too_large_is_an_error_of_that_message_and_is_deleted(grid, runtime):
    large, small = runtime.announce("m1", size=1000), runtime.announce("m2")
    runtime.upload(large)
    runtime.upload(small)
    limits = [5000]
    grid.limit_replies(lambda: limits[0])
    came, other = quickly(lambda: grid.pull_messages(["m1", "m2"]))
    assert came.error.code == ErrorCode.MESSAGE_UNAVAILABLE and came.metadata.reply_to_message_id == "m1"
    assert re.search(r"has at least [5-9],\d{3} bytes; at most 5,000 are allowed", came.error.reason)
    assert not other.has_error() and runtime.confirmed == [large.object_id, small.object_id]
    assert not grid._announced and not grid._awaited
    limits[0] = 50_000
    runtime.upload(runtime.announce("m3", size=1001))
    assert not quickly(lambda: grid.pull_messages(["m3"]))[0].has_error()
    grid.limit_replies(None)
    runtime.upload(runtime.announce("m4", size=100_000))
    assert not quickly(lambda: grid.pull_messages(["m4"]))[0].has_error()


@pytest.mark.parametrize("error", [IndexError("out of range"), ValueError("not a message"), KeyError("dtype")])
def test_a_reply_that_is_no_message_is_an_error_at_once_and_is_deleted(grid, runtime, monkeypatch, error):
    def fetch(*_):
        raise error

    runtime.upload(reply := runtime.announce("m1"))
    monkeypatch.setattr("tepal.server_app.http_grid.fetch", fetch)
    (came,) = quickly(lambda: grid.pull_messages(["m1"]))
    assert came.error.code == ErrorCode.MESSAGE_UNAVAILABLE and "malformed" in came.error.reason
    assert runtime.confirmed == [reply.object_id]


def test_send_and_receive_comes_back_with_the_last_reply_or_at_its_limit(grid, runtime, monkeypatch):
    monkeypatch.setattr(grid, "push_messages", lambda messages: ["m1", None, "m2"], raising=False)
    first, second = runtime.announce("m1"), runtime.announce("m2", size=4)
    runtime.upload(first)
    threading.Timer(0.3, runtime.upload, [second]).start()
    begun = time.monotonic()
    replies = grid.send_and_receive([])
    assert 0.3 <= time.monotonic() - begun < 10 and len(replies) == 2
    assert quickly(lambda: grid.send_and_receive([], timeout=0.1)) == []


def test_several_threads_may_pull_at_once(grid, runtime):
    replies = [runtime.announce(f"m{k}", size=k + 1) for k in range(20)]
    came, lock = [], threading.Lock()

    def pull(k):
        for each in range(k, 20, 4):
            while not (found := grid.pull_messages([f"m{each}"])):
                time.sleep(0.001)
            with lock:
                came.extend(found)

    threads = [threading.Thread(target=pull, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for reply in replies:
        runtime.upload(reply)
    for thread in threads:
        thread.join(20)
    assert {reply.metadata.reply_to_message_id for reply in came} == {f"m{k}" for k in range(20)} and len(came) == 20


def test_another_flower_and_another_grid_stay_as_they_are(monkeypatch, caplog):
    other = InProcessGrid([])
    assert prompt(other) is other
    flower = HttpGrid(token="x")
    monkeypatch.setattr(grid_module, "version", lambda name: "1.41.0")
    with caplog.at_level("WARNING", logger="flwr"):
        assert prompt(flower) is flower
    assert FLOWER in caplog.text and "1.41.0" in caplog.text


@pytest.mark.parametrize("error", ["node_unavail", "msg_unavail"])
def test_the_superlink_forgets_a_message_that_its_node_never_fetched(grid, runtime, error):
    """It would keep the whole model of the round until the run ends."""
    sent = Message(RecordDict(), dst_node_id=5, message_type="train")
    sent.metadata.__dict__.update(_message_id="m1", _run_id=7)
    given_up = create_message_error_unavailable_res_message(sent.metadata, error)
    runtime.announced["m1"] = given_up
    runtime.objects[given_up.object_id] = given_up.deflate()
    runtime.arrived.add(given_up.object_id)
    (came,) = quickly(lambda: grid.pull_messages(["m1"]))
    assert came.has_error() and runtime.confirmed == [given_up.object_id, "m1"]
