"""The grid of Flower's simulation runtime, over Flower's own state and without Ray."""

import pickle
import threading
import time

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from tepal.exchange.local import is_local
from tepal.server_app.grid import prompt
from tepal.server_app.simulated_grid import SimulatedGrid

RUN, TASK, NODES = 7, 8, 3


@pytest.fixture
def flower(monkeypatch):
    for name, value in (("_run_id", RUN), ("_node_id", SUPERLINK_NODE_ID), ("_task_id", TASK)):
        monkeypatch.setattr(TaskIdentity, name, value)
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    run = Run.create_empty(RUN)
    run.primary_task_id, run.federation_id = TASK, NOOP_FEDERATION_ID
    state = factory.state()
    state.run_ids[RUN] = RunRecord(run=run)
    state.task_store[TASK] = Task(task_id=TASK, run_id=RUN)
    _register_nodes(NODES, factory)
    grid = InMemoryGrid(factory)
    grid.set_run(run)
    return grid


@pytest.fixture
def grid(flower):
    made = prompt(flower)
    assert type(made) is SimulatedGrid
    return made


def messages(grid):
    return [Message(RecordDict(), node, "train", ttl=60) for node in sorted(grid.get_node_ids())]


def answer(grid, node, content):
    """The runtime's part, with pickled objects: a reply to the next message for a node. Returns the message."""
    (message,) = grid.state.get_message_ins(node_id=node, limit=1)
    asked = pickle.loads(pickle.dumps(message))
    reply = pickle.loads(pickle.dumps(Message(content, reply_to=asked)))
    reply.metadata.__dict__["_message_id"] = f"reply of {node}"
    assert grid.state.store_message_res(reply)
    return asked


def test_replies_come_one_by_one_with_the_ids_of_their_messages(grid):
    ids = dict(zip(sorted(grid.get_node_ids()), grid.push_messages(messages(grid)), strict=True))
    first, second, third = ids
    for node in (second, third):
        answer(grid, node, RecordDict({"metrics": MetricRecord({"node": node})}))
    came = dict(grid.pull_next(ids.values(), 5) for _ in range(2))
    assert {key: reply.content["metrics"]["node"] for key, reply in came.items()} == {
        ids[second]: second, ids[third]: third
    }  # fmt: skip
    assert grid.pull_next([ids[first]], 0.05) is None
    later = threading.Timer(0.1, answer, (grid, first, RecordDict()))
    later.start()
    began = time.monotonic()
    assert grid.pull_next([ids[first]], 60)[0] == ids[first]
    assert time.monotonic() - began < 30
    later.join()


def test_a_message_whose_time_is_over_has_an_error_and_the_others_their_replies(grid):
    first, second, _ = sorted(grid.get_node_ids())
    ids = grid.push_messages(
        [Message(RecordDict(), first, "train", ttl=0.2), Message(RecordDict(), second, "train", ttl=60)]
    )
    answer(grid, second, RecordDict())
    time.sleep(0.3)
    came = dict(grid.pull_next(ids, 5) for _ in ids)
    assert [came[number].has_error() for number in ids] == [True, False]


def test_messages_and_replies_are_marked_as_local_in_every_process(grid):
    ids = grid.push_messages(messages(grid))
    assert is_local(answer(grid, sorted(grid.get_node_ids())[0], RecordDict()))
    _, reply = grid.pull_next(ids, 5)
    assert is_local(reply)


def test_each_message_is_delivered_once_and_only_to_its_node(grid):
    nodes = sorted(grid.get_node_ids())
    pushed = [*messages(grid), *messages(grid)[:2]]
    ids = grid.push_messages(pushed)
    due = [(message.metadata.dst_node_id, number) for message, number in zip(pushed, ids, strict=True)]
    got = []
    for _ in range(3):  # one message for each node at a time, as the runtime takes them
        for node in nodes:
            got += [(node, one.metadata.message_id) for one in grid.state.get_message_ins(node_id=node, limit=1)]
    assert sorted(got) == sorted(due)


def test_messages_that_were_pushed_before_are_delivered_and_a_grid_is_made_prompt_twice(flower):
    (early,) = flower.push_messages(messages(flower)[:1])
    node = sorted(flower.get_node_ids())[0]
    prompt(flower)
    (late,) = prompt(flower).push_messages(messages(flower)[:1])
    found = [flower.state.get_message_ins(node_id=node, limit=1)[0].metadata.message_id for _ in range(2)]
    assert found == [early, late] and not flower.state.get_message_ins(node_id=node, limit=1)


def test_messages_of_the_given_grid_are_delivered_too(flower, grid):
    (number,) = flower.push_messages(messages(grid)[:1])
    (found,) = grid.state.get_message_ins(node_id=sorted(grid.get_node_ids())[0], limit=None)
    assert found.metadata.message_id == number
