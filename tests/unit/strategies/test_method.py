"""The interface of a method, by toy methods that use what FedAvg does not: two phases, further trees, own values."""

from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import MODEL, Plan, partial_exchange, received
from tepal.exchange.manifest import PARTS, RECORD, Manifest
from tepal.strategies import MethodStrategy
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.in_process import InProcessGrid, Node

START = {"first": np.zeros(4, np.float32), "second": np.zeros(6, np.float32)}


def run(method, app, clients=3, rounds=1):
    history, sent = [], []

    def spy(msg, context, call_next):
        if RECORD in msg.content:
            manifest = Manifest.from_content(msg.content)
            if manifest.parcels:
                data = sum(len(array.data) for array in msg.content.get(PARTS, {}).values())
                sent.append((manifest.plan.client, msg.metadata.message_type, data))
        return call_next(msg, context)

    app = app([spy, partial_exchange])
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(clients)])
    strategy = MethodStrategy(method, fraction_evaluate=0, on_round=history.append)
    initial = ArrayRecord({name: Array(array) for name, array in START.items()})
    result = strategy.start(grid, initial, num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}, history, sent


class Selecting(FedAvgMethod):
    """Clients report a number in a first exchange; who said most trains `second`, the others `first`."""

    phases = ("probe", "train")

    def transfer_blocks(self, model):
        return {name: (name,) for name in model.layout.names}

    def plan(self, state, round, phase, cohort, probe_replies):
        names = tuple(state.entries)
        if phase == "probe":
            return [Plan(client=c, round=round, action="probe", needs={MODEL: names}, keeps={MODEL: names})
                    for c in cohort]  # fmt: skip
        most = max(probe_replies, key=lambda client: probe_replies[client].metrics["norm"])
        trains = {client: ("second",) if client == most else ("first",) for client in probe_replies}
        return [Plan(client=c, round=round, needs={MODEL: names}, trains=trains[c], returns={MODEL: trains[c]})
                for c in probe_replies]  # fmt: skip


def selecting_app(mods):
    app = ClientApp(mods=mods)

    @app.train("probe")
    def probe(msg, context):
        metrics = MetricRecord({"num-examples": 1, "norm": float(context.node_config["partition-id"])})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    @app.train()
    def train(msg, context):
        came = received(msg)
        arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        for name in came.plan.trains:
            arrays[name] = arrays[name] + 1 + int(context.node_config["partition-id"])
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app


def test_a_second_phase_carries_what_is_trained_and_not_the_model_again():
    model, history, sent = run(Selecting(), selecting_app, rounds=2)
    # In each round client-2 adds 3 to `second`, client-0 and client-1 add 1 and 2 to `first`.
    np.testing.assert_allclose(model["first"], 2 * 1.5)
    np.testing.assert_allclose(model["second"], 2 * 3)
    assert [(kind, data) for client, kind, data in sent if client == "client-2"] == [
        ("train.probe", 40), ("train", 0), ("train.probe", 40), ("train", 0)
    ]  # fmt: skip
    assert history[0].up.payload == 24 + 2 * 16


def test_a_client_lost_in_the_first_phase_is_not_asked_in_the_second():
    def app(mods):
        made = selecting_app(mods)
        probe = made._registered_funcs["train.probe"]

        def failing(msg, context):
            if context.node_config["partition-id"] == 2:
                raise RuntimeError("gone")
            return probe(msg, context)

        made._registered_funcs["train.probe"] = failing
        return made

    model, history, _ = run(Selecting(), app)
    assert history[0].asked == ["client-0", "client-1"]
    np.testing.assert_allclose(model["second"], 2)


@dataclass(frozen=True)
class Controlled:
    entries: dict
    control: dict


class WithControl(FedAvgMethod):
    """A second tree travels beside the model, both ways, as SCAFFOLD's variate does."""

    def init(self, model, run):
        return Controlled(model.entries, {"first": np.full(4, 5, np.float32)})

    def plan(self, state, round, phase, cohort, probe_replies):
        both = {MODEL: tuple(state.entries), "control": ("first",)}
        return [Plan(client=c, round=round, needs=both, trains=both[MODEL], returns=both) for c in cohort]

    def values(self, state, client, tree):
        return state.control if tree == "control" else state.entries

    def merger(self, state, round):
        means = {MODEL: WeightedMean(), "control": WeightedMean()}

        class Merger:
            def add(self, reply):
                for tree, mean in means.items():
                    mean.add(reply.parts[tree], reply.examples)

            def finish(self):
                return Controlled({**state.entries, **means[MODEL].result()}, means["control"].result())

        return Merger()


def controlled_app(mods):
    app = ClientApp(mods=mods)

    @app.train()
    def train(msg, context):
        control = msg.content["control"]["first"].numpy()
        arrays = {name: array.numpy() + control[0] for name, array in msg.content["arrays"].items()}
        content = {
            "arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()}),
            "control": ArrayRecord({"first": Array(control + 1)}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=msg)

    return app


def test_a_further_tree_travels_beside_the_model():
    model, history, _ = run(WithControl(), controlled_app, rounds=3)
    np.testing.assert_allclose(model["second"], 5 + 6 + 7)
    assert [report.up.payload for report in history] == [3 * (40 + 16)] * 3 == [r.down.payload for r in history]


class Own(FedAvgMethod):
    """Every client gets a model of its own, as in personalised methods."""

    def values(self, state, client, tree):
        number = int(client.removeprefix("client-"))
        return {name: array + np.float32(10 * number) for name, array in state.entries.items()}


def test_clients_may_get_different_values_of_one_tree():
    def app(mods):
        app = ClientApp(mods=mods)

        @app.train()
        def train(msg, context):
            return Message(RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}),
                           reply_to=msg)  # fmt: skip

        return app

    model, _, _ = run(Own(), app)
    np.testing.assert_allclose(model["first"], (0 + 10 + 20) / 3)


class TwoModes(FedAvgMethod):
    """Two models take turns, each with a frozen part: what a client holds of one mode survives the other's rounds."""

    def init(self, model, run):
        return {f"mode/{k}": {name: array + np.float32(k) for name, array in model.entries.items()} for k in range(2)}

    def plan(self, state, round, phase, cohort, probe_replies):
        tree = f"mode/{round % 2}"
        return [Plan(client=c, round=round, needs={tree: tuple(START)}, keeps={tree: ("first",)}, trains=("second",),
                     returns={tree: ("second",)}) for c in cohort]  # fmt: skip

    def transfer_blocks(self, model):
        return {"frozen": ("first",), "rest": ("second",)}

    def values(self, state, client, tree):
        return state[tree]

    def merger(self, state, round):
        mean, tree = WeightedMean(), f"mode/{round % 2}"

        class Merger:
            def add(self, reply):
                mean.add(reply.parts[tree], reply.examples)

            def finish(self):
                return {**state, tree: {**state[tree], **mean.result()}}

        return Merger()

    def models(self, state):
        return (state["mode/0"],)


def test_what_is_held_of_one_mode_survives_the_rounds_of_another():
    def app(mods):
        app = ClientApp(mods=mods)

        @app.train()
        def train(msg, context):
            arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
            arrays["second"] = arrays["second"] + 1
            record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
            return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

        return app

    model, history, _ = run(TwoModes(), app, rounds=4)
    assert [report.down.payload for report in history] == [3 * 40, 3 * 40, 3 * 24, 3 * 24]
    np.testing.assert_allclose(model["second"], 2)
