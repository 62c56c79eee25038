"""A hundred clients on one machine, with one cache folder: what they keep is on the disk once."""

from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import Layout, partial_exchange, received
from tepal.strategies import FedFrozen
from tepal.strategies.in_process import InProcessGrid, Node

CLIENTS, ROUNDS = 100, 3

ENTRIES = {
    name: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    for seed, (name, shape) in enumerate(
        {"query": (256, 384), "key": (256, 384), "value": (512, 384), "head": (512, 384), "bias": (512,)}.items()
    )
}
MODEL_BYTES = sum(array.nbytes for array in ENTRIES.values())


@dataclass
class Blocks:
    """The blocks of a model with one attention module."""

    layout = Layout.of_arrays(ENTRIES)
    model = "hand-made"
    query_key = ("query", "key")
    value = ("value", "head", "bias")
    value_projection = ("value",)
    buffers = ()


def disk_use(folder):
    """Bytes that the disk gives for a folder: every file once, however many names it has, and the folders too."""
    found = [path.stat() for path in [folder, *folder.rglob("*")] if path.exists()]
    return sum({file.st_ino: 512 * file.st_blocks for file in found}.values())


@pytest.fixture
def app(cache_folder):
    """Its training adds a little to what it may train; `app.most` is the disk use while it ran."""
    app = ClientApp(mods=[partial_exchange])
    app.most, app.calls = 0, 0

    def look():
        app.calls += 1
        if app.calls % 10 == 0:  # in the midst of a round some clients have the old model and some the new one
            app.most = max(app.most, disk_use(cache_folder))

    @app.train()
    def train(msg, context):
        look()
        frozen = set(received(msg).frozen)
        step = np.float32(1 + int(context.node_config["partition-id"])) / 1000
        arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        changed = {name: Array(array if name in frozen else array + step) for name, array in arrays.items()}
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(changed), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        look()
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=msg)

    return app


def test_a_hundred_clients_keep_what_two_would_at_most(app, cache_folder):
    """Query and key since they are frozen, and the whole model between scoring it and training it."""
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(CLIENTS)])
    history = []

    def look(report):
        history.append(report)
        app.most = max(app.most, disk_use(cache_folder))

    strategy = FedFrozen(warmup_rounds=1, model=Blocks(), on_round=look)
    arrays = ArrayRecord({name: Array(array) for name, array in ENTRIES.items()})
    strategy.start(grid, arrays, num_rounds=ROUNDS)

    assert [len(report.replied) for report in history] == [CLIENTS] * ROUNDS
    links = list(cache_folder.glob("*/clients/*/*.safetensors"))
    assert len({link.parent for link in links}) == CLIENTS and len(links) >= CLIENTS, "each holds something"
    assert MODEL_BYTES / 4 < app.most <= 2 * MODEL_BYTES
    assert disk_use(cache_folder) < 1.3 * MODEL_BYTES, "what nobody holds any more is gone"
    # It is kept to be used: what was scored is not sent again to be trained, and query and key never again.
    frozen = sum(ENTRIES[name].nbytes for name in Blocks.query_key)
    down = [report.down.payload for report in history]
    assert down == [CLIENTS * 2 * MODEL_BYTES] + [CLIENTS * (MODEL_BYTES - frozen)] * (ROUNDS - 1)
