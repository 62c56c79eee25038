"""Clients on other machines: what belongs to a client goes with it, and paths are those of its machine."""

import pickle
import shutil
import threading
import time
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.client_app.elsewhere import Asked, FarClients, Lacking, answered, with_paths
from tepal.exchange import layouts, partial_exchange, received
from tepal.exchange.manifest import Manifest
from tepal.exchange.plan import INTRODUCE
from tepal.host.request_files import END, READY, Workers, answer_all
from tepal.strategies import FedAvg
from tepal.strategies.in_process import InProcessGrid, Node

START = ArrayRecord({"w": Array(np.zeros(9000, np.float32))})


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
    tmp_path, monkeypatch, app
):
    folder, here, used = tmp_path / "asked", tmp_path / "here", []
    monkeypatch.setenv("TEPAL_CACHE", str(here))
    workers = Workers(folder, 2)

    def on(worker):
        """Answer with a cache of its own, as on another machine."""

        def answer(asked):
            own = tmp_path / f"there-{worker}"
            monkeypatch.setenv("TEPAL_CACHE", str(own))
            reply = answered(app, {}, str, asked)
            monkeypatch.setenv("TEPAL_CACHE", str(here))
            used.append((worker, asked.node_config["name"], asked.files))
            return reply

        return threading.Thread(target=answer_all, args=[folder / str(worker), answer])

    threads = [on(worker) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    while not all((folder / str(worker) / READY).exists() for worker in (0, 1)):
        time.sleep(0.001)

    def at_the_end_of(report):
        if report.round == 2:
            (folder / "1" / READY).unlink()
        if report.round == 3:  # as if its process went on on another machine
            shutil.rmtree(tmp_path / "there-0")

    # Resumed after the first round, so that each client introduces itself again.
    for rounds in (1, 9):
        far = FarClients(workers.ask)
        grid = InProcessGrid([Node(far, {"name": f"c{k}"}) for k in range(2)])
        strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0, checkpoints=tmp_path / "c", resume=rounds == 9)
        strategy.on_round = at_the_end_of
        strategy.start(grid, START, num_rounds=rounds)
    for worker, thread in enumerate(threads):
        (folder / str(worker) / END).touch()
        thread.join(10)
    assert sorted(app.rounds) == [(f"c{k}", float(count), "") for k in range(2) for count in range(1, 10)]
    workers_of = {name: [worker for worker, of, _ in used if of == name] for name in ("c0", "c1")}
    assert set(workers_of["c0"]) == {0} and workers_of["c1"] == sorted(workers_of["c1"], reverse=True)
    sent = [(worker, name, len(files)) for worker, name, files in used if files is not None]
    assert sent[0] == (0, "c1", 1), "after the second round"
    assert sorted(sent[1:]) == [(0, "c0", 1), (0, "c1", 1)], "after the third"

    def versions(root):
        return {path.relative_to(root): path.read_bytes() for path in root.glob("*/personal/*/*")}

    assert versions(here) == versions(tmp_path / "there-0") and 4 <= len(versions(here)) < 2 * 9
    assert {node.context.state["seen"]["rounds"] for node in grid.nodes.values()} == {9.0}


def test_a_layout_that_a_machine_has_not_read_goes_with_the_client(tmp_path, monkeypatch, app):
    """All clients introduce themselves on the first machine that is ready. Nothing is sent twice for it."""
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "here"))
    memories = [OrderedDict(), OrderedDict()]
    lacking = []

    def ask(client, asked):
        introduces = Manifest.from_content(asked.message.content).plan.action == INTRODUCE
        machine = 0 if introduces else client
        with monkeypatch.context() as there:
            there.setenv("TEPAL_CACHE", str(tmp_path / f"there-{machine}"))
            there.setattr(layouts, "_read", memories[machine])
            answer = answered(app, {}, str, pickle.loads(pickle.dumps(asked)))
        lacking.extend([client] * isinstance(answer, Lacking))
        return answer

    grid = InProcessGrid([Node(FarClients(ask), {"name": f"c{k}"}) for k in range(2)])
    strategy, reports = FedAvg(min_available_nodes=2, fraction_evaluate=0), []
    strategy.on_round = reports.append
    strategy.start(grid, START, num_rounds=3)
    assert lacking == [1] and [report.resent for report in reports] == [0] * 3
    assert [report.down.payload for report in reports] == [2 * 9000 * 4] * 3
    assert len(list(tmp_path.glob("there-1/*/layout-*.json"))) == 1


def test_the_personal_state_of_a_message_whose_layout_is_not_known_is_found(tmp_path, monkeypatch, app):
    """Its place is in the manifest."""
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "here"))

    def ask(client, asked):
        with monkeypatch.context() as there:
            there.setenv("TEPAL_CACHE", str(tmp_path / "there"))
            answer = answered(app, {}, str, pickle.loads(pickle.dumps(asked)))
        layouts._read.clear()
        return answer

    grid = InProcessGrid([Node(FarClients(ask), {"name": "c0"})])
    FedAvg(min_available_nodes=1, fraction_evaluate=0).start(grid, START, num_rounds=3)
    assert [count for _, count, _ in app.rounds] == [1.0, 2.0, 3.0]
    assert len(list(tmp_path.glob("here/*/personal/c0/*"))) == len(list(tmp_path.glob("there/*/personal/c0/*"))) > 0


def test_paths_in_settings_are_those_of_the_clients_machine():
    made, seen = ClientApp(), []

    @made.train()
    def train(msg, context):
        seen.append((dict(msg.content["config"]), dict(context.run_config)))
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    paths = {"/here/x": "/there/y", "/here/w,2.pt": "/there/w"}
    sent = ConfigRecord({
        "dataset": "/here/x", "pretrained": "tiny,/here/x", "weights": "/here/w,2.pt", "rate": 0.5, "other": "/here/xy",
        "client-settings": '{"3": {"data-path": "/here//x/", "model-path": "/here/xy", "local-epochs": 2}}',
    })  # fmt: skip
    message = Message(RecordDict({"config": sent}), 3, "train")
    context = Context(1, 3, {"partition-id": 2}, RecordDict(), {"dataset": "/here/x"})
    asked = Asked(message, context.node_id, context.node_config, context.state, {})
    found = answered(made, {"dataset": "/there/y"}, partial(with_paths, paths), asked)
    assert found.reply.metadata.dst_node_id == message.metadata.src_node_id
    assert not found.state and not found.files
    assert seen == [(
        {"dataset": "/there/y", "pretrained": "tiny,/there/y", "weights": "/there/w", "rate": 0.5, "other": "/here/xy",
         "client-settings": '{"3": {"data-path": "/there/y", "model-path": "/here/xy", "local-epochs": 2}}'},
        {"dataset": "/there/y"},
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "there"),
    [("", ""), ("a,b", "a,b"), ("/x", "/y"), ("/x/", "/y"), ("/xx", "/xx"), ("/x,,/x,b", "/y,,/y,b"), ("/a,b", "/c"),
     ("{/x", "{/x"), ('{"1": "/x"}', '{"1": "/x"}'), ('{"1": {"k": "/x"}, "2": {}}', '{"1": {"k": "/y"}, "2": {}}')],
)  # fmt: skip
def test_a_setting_with_other_paths(text, there):
    assert with_paths({"/x": "/y", "/a,b": "/c"}, text) == there


def test_an_app_that_raises_answers_with_an_error():
    made = ClientApp()

    @made.train()
    def train(msg, context):
        raise ValueError("no data")

    asked = Asked(Message(RecordDict(), 3, "train"), 3, {}, RecordDict(), {})
    error = answered(made, {}, str, asked).reply.error
    assert error.code == 2 and error.reason == "ValueError: no data"
