"""Clients on other machines: what belongs to a client goes with it, and paths are those of its machine."""

import gc
import shutil
import threading

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange, received
from tepal.host.request_files import AWAY, END, Workers, answer_all
from tepal.strategies import FedAvg
from tepal.strategies.in_process import InProcessGrid, Node

START = ArrayRecord({"w": Array(np.zeros(9000, np.float32))})


@pytest.fixture(scope="module")
def one_process():
    """The module, which is a program: it turns off garbage collection."""
    from tepal.tools.simulation import one_process

    gc.enable()
    return one_process


@pytest.fixture
def app():
    """Clients that count their rounds in their personal state. `app.rounds`: (name, count, lost) of each training."""
    made, rounds = ClientApp(mods=[partial_exchange]), []

    @made.train()
    def train(msg, context):
        own = received(msg).personal
        count = float(own.load().get("count", np.zeros(1))[0]) + 1
        own.save({"count": np.array([count])})
        context.state["seen"] = ConfigRecord({"rounds": count})
        rounds.append((context.node_config["name"], count, own.lost))
        content = {"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=msg)

    made.rounds = rounds
    return made


def test_a_client_that_goes_on_elsewhere_has_its_personal_state_and_is_sent_what_it_has_lost(
    tmp_path, monkeypatch, one_process, app
):
    folder, here, used = tmp_path / "asked", tmp_path / "here", []
    monkeypatch.setenv("TEPAL_CACHE", str(here))
    workers = Workers(folder, 2)

    def on(worker):
        """Answer with a cache of its own, whose personal state comes back, as from another machine."""

        def answer(asked):
            own = tmp_path / f"there-{worker}"
            monkeypatch.setenv("TEPAL_CACHE", str(own))
            reply = one_process._answered(app, {}, {}, asked)
            for personal in own.glob("*/personal"):
                shutil.copytree(personal, here / personal.relative_to(own), dirs_exist_ok=True)
            monkeypatch.setenv("TEPAL_CACHE", str(here))
            used.append((worker, asked[2]["name"], sorted(asked[4])))
            return reply

        return threading.Thread(target=answer_all, args=[folder / str(worker), answer])

    threads = [on(worker) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    # Resumed after the first round, so that each client introduces itself again; in the third one moves.
    for rounds in (1, 4):
        far = one_process.FarClients(workers)
        grid = InProcessGrid([Node(far, {"name": f"c{k}"}) for k in range(2)])
        strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0, checkpoints=tmp_path / "c", resume=rounds == 4)
        strategy.on_round = lambda report: (folder / "1" / AWAY).touch() if report.round == 2 else None
        strategy.start(grid, START, num_rounds=rounds)
    for worker, thread in enumerate(threads):
        (folder / str(worker) / END).touch()
        thread.join(10)
    assert sorted(app.rounds) == [(f"c{k}", float(count), "") for k in range(2) for count in range(1, 5)]
    workers_of = {name: [worker for worker, of, _ in used if of == name] for name in ("c0", "c1")}
    assert set(workers_of["c0"]) == {0} and workers_of["c1"] == sorted(workers_of["c1"], reverse=True)
    # Only to a client that was not there before, in the run that was resumed too.
    assert [(worker, name, len(files)) for worker, name, files in used if files] == [
        (0, "c0", 1), (1, "c1", 1), (0, "c1", 1),
    ]  # fmt: skip
    assert {node.context.state["seen"]["rounds"] for node in grid.nodes.values()} == {4.0}


def test_paths_in_settings_are_those_of_the_clients_machine(one_process):
    made, seen = ClientApp(), []

    @made.train()
    def train(msg, context):
        seen.append((dict(msg.content["config"]), dict(context.run_config)))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    paths = {"/here/x": "/there/y", "/here/w,2.pt": "/there/w"}
    sent = ConfigRecord({
        "dataset": "/here/x", "pretrained": "tiny,/here/x", "weights": "/here/w,2.pt", "rate": 0.5, "other": "/here/xy",
        "client-settings": '{"3": {"data-path": "/here/x", "model-path": "/here/xy"}}',
    })  # fmt: skip
    message = Message(RecordDict({"config": sent}), 3, "train")
    context = Context(1, 3, {"partition-id": 2}, RecordDict(), {"dataset": "/here/x"})
    asked = (message, context.node_id, context.node_config, context.state, {})
    reply, state = one_process._answered(made, {"dataset": "/there/y"}, paths, asked)
    assert reply.metadata.dst_node_id == message.metadata.src_node_id and not state
    assert seen == [(
        {"dataset": "/there/y", "pretrained": "tiny,/there/y", "weights": "/there/w", "rate": 0.5, "other": "/here/xy",
         "client-settings": '{"3": {"data-path": "/there/y", "model-path": "/here/xy"}}'},
        {"dataset": "/there/y"},
    )]  # fmt: skip


def test_an_app_that_raises_answers_with_an_error(one_process):
    made = ClientApp()

    @made.train()
    def train(msg, context):
        raise ValueError("no data")

    asked = (Message(RecordDict(), 3, "train"), 3, {}, RecordDict(), {})
    reply, _ = one_process._answered(made, {}, {}, asked)
    assert reply.error.code == 2 and reply.error.reason == "ValueError: no data"
