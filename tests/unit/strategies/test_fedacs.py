"""FedACS over whole rounds. What must come out is simulated here, client by client and pair by pair, over dicts.

Clients move their model by a step that follows from their number and the round, so that a run is the same whoever
replies first. Some of them share a direction: their models become alike, and are mixed.
"""

import errno
import gc
import math
import os
import random
import shutil
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import Layout, partial_exchange, received
from tepal.exchange.manifest import PARTS, RECORD, Manifest
from tepal.exchange.modes import join_modes
from tepal.exchange.plan import Reply
from tepal.models.blocks import find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.strategies import FedACS, FedAvg, MethodError, RoundFailed
from tepal.strategies.fedacs import FedACSMethod
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.method import Run, ServerModel
from tepal.strategies.personal import storage as personal_storage
from tepal.strategies.personal import store as model_store
from tepal.strategies.personal.models import PersonalMerger
from tepal.strategies.personal.storage import STORE, PersonalStorage
from tepal.strategies.personal.store import ModelStore
from tepal.strategies.rounds import checkpoint
from tepal.strategies.rounds.checkpoint import STATE, Checkpoints
from tepal.strategies.rounds.report import SERVER
from tepal.strategies.rounds.state_json import CheckpointError
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_resume import flip, in_child

_RNG = np.random.default_rng(0)
START = {
    "layer.weight": _RNG.normal(size=(3, 4)).astype(np.float32),
    "count": np.array(7),
    "layer.bias": _RNG.normal(size=5).astype(np.float32),
}
SIZE = sum(array.nbytes for array in START.values())


# ---- the clients -----------------------------------------------------------------------------------------------------


def moved(model, partition, number, tied=()):
    """What a client makes of a model in a round. `tied`: tensors that are other ones under another name."""
    step = np.random.default_rng([partition, number])
    direction = np.random.default_rng(100 + partition % 3)
    made = {}
    for name, value in model.items():
        if name in tied:
            made[name] = made[tied[name]]
        elif value.dtype.kind == "f":
            to = direction.normal(size=value.shape) + 0.5 * step.normal(size=value.shape)
            made[name] = np.asarray(value + to, dtype=value.dtype)
        else:
            made[name] = np.asarray(value + 1 + partition, dtype=value.dtype)
    return made


def score_of(model):
    """An accuracy, from 0 to 1, that differs from model to model."""
    total = float(next(iter(model.values())).astype(np.float64).sum())
    return 0.5 + math.atan(total / 20) / math.pi


def client_app(seen, *, tied=(), fails=lambda client, number: False, scores=False, make=moved):
    app = ClientApp(mods=[seen.spy, partial_exchange])

    def came(msg, context):
        number, partition = msg.content["config"]["server-round"], int(context.node_config["partition-id"])
        return partition, number, {name: array.numpy() for name, array in msg.content["arrays"].items()}

    @app.train()
    def train(msg, context):
        partition, number, model = came(msg, context)
        seen.received[f"client-{partition}", number] = model
        if fails(partition, number):
            raise RuntimeError("not now")
        made = make(model, partition, number, tied)
        figures = {"num-examples": 10 * partition + 1, "train-loss": float(partition)}
        if scores:
            figures |= {"trained-accuracy": score_of(made), "test-examples": 3 * partition + 2}
        arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in made.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(figures)}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        partition, number, model = came(msg, context)
        seen.scored[f"client-{partition}", number] = model
        of = received(msg).plan.options["scored"]
        figures = {"num-examples": 5 * partition + 1, f"{of}-accuracy": score_of(model)}
        return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=msg)

    return app


@dataclass
class Seen:
    """What happened in a run, as the clients saw it and as the server did."""

    received: dict = field(default_factory=dict)
    """(client, round) → u, the model that it trained from."""
    scored: dict = field(default_factory=dict)
    """(client, round) → the model that it was asked to score."""
    sent: dict = field(default_factory=dict)
    """(client, round, action) → bytes of the model that were sent to it."""
    held: dict = field(default_factory=dict)
    """Round → client → w, the model that the server has of it after the round."""
    reports: dict = field(default_factory=dict)
    arrays: dict = field(default_factory=dict)
    history: dict = field(default_factory=dict)

    def spy(self, msg, context, call_next):
        if RECORD in msg.content:
            of = Manifest.from_content(msg.content).plan
            nbytes = sum(len(array.data) for array in msg.content.get(PARTS, {}).values())
            self.sent[of.client, of.round, of.action] = self.sent.get((of.client, of.round, of.action), 0) + nbytes
        return call_next(msg, context)


def watch(strategy, seen, start):
    """Keep a copy of the models that the server has after every round."""
    method, merger = strategy.method, strategy.method.merger
    layout = strategy.blocks.layout if strategy.blocks is not None else Layout.of_arrays(start)

    def watched(state, number):
        keeper = merger(state, number)
        finish = keeper.finish

        def finished():
            after = finish()
            models = {client: layout.join(method.personal(after, client)) for client in after.clients}
            seen.held[number] = {c: {name: np.array(a) for name, a in model.items()} for c, model in models.items()}
            return after

        keeper.finish = finished
        return keeper

    method.merger = watched


def record_of(arrays):
    return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})


def run(strategy, clients=range(5), rounds=3, *, start=START, grid=InProcessGrid, on_round=None, spoil=None, config=(),
        **app):  # fmt: skip
    seen = Seen()
    if isinstance(strategy, FedACS):
        watch(strategy, seen, start)
    made = client_app(seen, **app)
    network = grid([Node(made, {"partition-id": k, **dict(config)}) for k in clients], spoil=spoil)

    def reported(report):
        seen.reports[report.round] = report
        if on_round is not None:
            on_round(report, network, made)

    strategy.on_round = reported
    result = strategy.start(network, record_of(start), num_rounds=rounds, timeout=60)
    seen.arrays = {name: array.numpy() for name, array in result.arrays.items()}
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp")
    seen.history = {kind: {number: dict(m) for number, m in getattr(result, kind).items()} for kind in kinds}
    return seen


# ---- the simulation --------------------------------------------------------------------------------------------------


class Simulation:
    """FedACS by loops. `buffers`: tensors that are mixed and not compared; `tied`: counted once, as another one."""

    def __init__(self, quantile, alpha=1.0, start=START, buffers=(), tied=(), newcomers="mean"):
        self.newcomers = newcomers
        self.quantile, self.alpha, self.start, self.tied = quantile, alpha, start, tied
        self.compared = [name for name in start if start[name].dtype.kind == "f" and name not in (*buffers, *tied)]
        self.models = {}
        self.factor = 1.0
        self._dots = {}

    def dot(self, i, j):
        a, b = self.models[i], self.models[j]
        if (id(a), id(b)) not in self._dots:
            numbers = (
                x * y
                for name in self.compared
                for x, y in zip(a[name].ravel().tolist(), b[name].ravel().tolist(), strict=True)
            )
            self._dots[id(a), id(b)] = math.fsum(numbers), a, b  # with the models, so that their ids stay theirs
        return self._dots[id(a), id(b)][0]

    def similarity(self, i, j):
        return 1.0 if i == j else self.dot(i, j) / math.sqrt(self.dot(i, i) * self.dot(j, j))

    def threshold(self):
        every = sorted(self.similarity(i, j) for i in self.models for j in self.models)
        place = (len(every) - 1) * self.quantile
        below = math.floor(place)
        return every[below] + (every[min(below + 1, len(every) - 1)] - every[below]) * (place - below)

    def weights(self, client):
        """Client → its weight, in the mixture of one of them."""
        delta = self.threshold()
        found = {other: self.similarity(client, other) for other in self.models}
        taken = {other: s for other, s in found.items() if other == client or (s > delta and s > 0)}
        alpha = self.alpha * self.factor
        shares = {other: alpha * s / sum(taken.values()) for other, s in taken.items()}
        shares[client] += 1 - alpha
        return shares

    def mixture(self, client):
        own = self.models.get(client)
        if own is None and (not self.models or self.newcomers == "initial"):
            return self.start
        shares = self.weights(client) if own is not None else dict.fromkeys(self.models, 1 / len(self.models))
        own = self.start if own is None else own
        return {
            name: sum(share * self.models[other][name].astype(np.float64) for other, share in shares.items())
            .astype(value.dtype)
            if value.dtype.kind == "f" else value
            for name, value in own.items()
        }  # fmt: skip

    def round(self, number, asked, replied=None):
        """What every client that is asked gets; the models of those that reply are replaced."""
        mixtures = {client: self.mixture(client) for client in asked}
        for client in asked if replied is None else replied:
            self.models[client] = moved(mixtures[client], int(client.removeprefix("client-")), number, self.tied)
        return mixtures


def assert_alike(model, expected, tolerance=2e-5):
    assert list(model) == list(expected)
    for name, value in expected.items():
        assert (model[name].dtype, model[name].shape) == (value.dtype, value.shape)
        if value.dtype.kind == "f":
            close = 4e-3 if value.dtype == np.float16 else tolerance
            np.testing.assert_allclose(model[name], value, rtol=close, atol=close, err_msg=name)
        else:
            np.testing.assert_array_equal(model[name], value, err_msg=name)


def assert_identical(model, expected):
    assert {name: value.tobytes() for name, value in model.items()} == {n: v.tobytes() for n, v in expected.items()}


def assert_simulated(seen, simulation, factors=()):
    """What every client received, what the server holds and what it recorded is what the simulation says."""
    mixed = 0
    for number, report in seen.reports.items():
        simulation.factor = factors[number - 1] if factors else 1.0
        record, clients = report.record, list(report.record["clients"])
        assert sorted(clients) == sorted(simulation.models)
        if clients:
            pairs = [[simulation.similarity(i, j) for j in clients] for i in clients]
            np.testing.assert_allclose(record["similarity"], pairs, atol=1e-5)
            assert float(record["threshold"]) == pytest.approx(simulation.threshold(), abs=1e-5)
            assert sorted(record["cohort"]) == sorted({*report.asked} & {*clients})
            for client, weights in zip(record["cohort"], record["weights"], strict=True):
                expected = simulation.weights(client)
                np.testing.assert_allclose(weights, [expected.get(other, 0) for other in clients], atol=1e-5)
                mixed += len(expected) > 1
        else:
            assert not {"similarity", "threshold", "weights"} & {*record} and not len(record["cohort"])
        for client, mixture in simulation.round(number, report.asked, report.replied).items():
            if (client, number) in seen.received:
                assert_alike(seen.received[client, number], mixture)
        assert {*seen.held[number]} == {*simulation.models}
        for client, model in simulation.models.items():
            assert_alike(seen.held[number][client], model)
    return mixed


# ---- what is mixed, and for whom -------------------------------------------------------------------------------------


class AnyOrder(InProcessGrid):
    """Replies come in an order of their own."""

    def __init__(self, nodes, **options):
        super().__init__(nodes, **options)
        self.random, self.put_off = random.Random(3), {}

    def pull_messages(self, message_ids):
        ready = []
        for message_id in message_ids:
            self.put_off.setdefault(message_id, self.random.randint(0, 2))
            self.put_off[message_id] -= 1
            if self.put_off[message_id] < 0:
                ready.append(message_id)
        return super().pull_messages(ready)


@pytest.mark.parametrize(
    ("quantile", "alpha", "fraction"),
    [(0.5, 1.0, 1.0), (0.5, 1.0, 0.5), (0.1, 1.0, 0.7), (0.62, 0.3, 1.0), (0.5, 0.9, 0.4)],
)
@pytest.mark.parametrize("grid", [InProcessGrid, AnyOrder], ids=["in order", "in any order"])
def test_every_client_trains_the_mixture_of_the_models_like_its_own(quantile, alpha, fraction, grid):
    strategy = FedACS(quantile=quantile, alpha=alpha, fraction_train=fraction, min_replies=2)
    seen = run(strategy, range(6), rounds=5, grid=grid)
    assert assert_simulated(seen, Simulation(quantile, alpha)) >= 3, "few models were mixed at all"
    if fraction < 1:
        assert 0 < len(seen.held[1]) < 6, "who has not been asked yet has no model, and is nobody's neighbour"
    mean = {name: np.mean([model[name] for model in seen.held[5].values()], 0) for name in START if name != "count"}
    for name, value in mean.items():
        np.testing.assert_allclose(seen.arrays[name], value, rtol=1e-5, atol=1e-6)
    assert_identical({"": seen.arrays["count"]}, {"": START["count"]})


@pytest.mark.parametrize("follow_rate", [True, False])
def test_the_share_of_the_mixture_falls_with_the_learning_rate(follow_rate):
    seen = run(FedACS(quantile=0.3, alpha=0.8, schedule="cosine", follow_rate=follow_rate), rounds=4)
    of_rate = [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]  # a half cosine from 1 to 0, in quarters
    assert assert_simulated(seen, Simulation(0.3, 0.8), of_rate if follow_rate else ()) >= 3


def test_the_order_of_replies_leaves_no_trace_down_to_the_last_bit():
    runs = [run(FedACS(quantile=0.4), rounds=4, grid=grid) for grid in (InProcessGrid, AnyOrder)]
    orders = [[report.replied for report in seen.reports.values()] for seen in runs]
    assert orders[0] != orders[1]
    for client, model in runs[0].held[4].items():
        assert_identical(runs[1].held[4][client], model)
    assert_identical(runs[0].arrays, runs[1].arrays)


@pytest.mark.parametrize("newcomers", ["mean", "initial"])
def test_who_joins_starts_as_newcomers_do_and_who_left_still_counts(newcomers):
    def change(report, network, app):
        if report.round == 2:
            network.add(Node(app, {"partition-id": 6}))
            network.remove(2)  # client-1
        if report.round == 3:
            network.add(Node(app, {"partition-id": 3}))

    seen = run(FedACS(quantile=0.3, newcomers=newcomers), [0, 1, 2, 4], rounds=6, on_round=change)
    assert_simulated(seen, Simulation(0.3, newcomers=newcomers))
    assert seen.reports[3].asked == ["client-0", "client-2", "client-4", "client-6"]
    if newcomers == "initial":
        assert_identical(seen.received["client-6", 3], START)
        assert_identical(seen.received["client-3", 4], START)
    else:
        later, earlier = (seen.received[who]["layer.bias"] for who in (("client-3", 4), ("client-6", 3)))
        assert not np.array_equal(later, earlier), "the models of which they are the mean were trained between"
    assert_identical(seen.held[6]["client-1"], seen.held[2]["client-1"])
    record = seen.reports[6].record
    column = list(record["clients"]).index("client-1")
    assert "client-1" not in record["cohort"] and record["weights"][:, column].max() > 0, "it is mixed into others'"


def test_newcomers_get_the_same_arrays_which_are_packed_once():
    packed = []

    class Looking(FedACS):
        def start(self, *args, **options):
            values = self.method.values
            self.method.values = lambda *asked: packed.append((asked, found := values(*asked))) or found
            return super().start(*args, **options)

    run(Looking(quantile=0.3, fraction_train=0.5, min_replies=2), range(8), rounds=2)
    early = {client for (state, client, tree), _ in packed if not state.clients}
    late = [found for (state, client, tree), found in packed if state.clients and client not in state.slots]
    assert early and len(late) >= 2
    assert all(found["layer.bias"] is late[0]["layer.bias"] for found in late)


def test_a_client_that_comes_back_goes_on_from_its_own_model():
    def change(report, network, app):
        if report.round == 2:
            network.remove(1)
        if report.round == 4:
            network.add(Node(app, {"partition-id": 0}))

    seen = run(FedACS(quantile=0.9), range(4), rounds=5, on_round=change)
    assert_simulated(seen, Simulation(0.9))
    assert seen.reports[4].asked == ["client-1", "client-2", "client-3"]
    assert not np.array_equal(seen.received["client-0", 5]["layer.bias"], START["layer.bias"])


def test_who_fails_keeps_the_model_that_it_had():
    seen = run(FedACS(quantile=0.4), range(4), rounds=4, fails=lambda client, number: (client, number) == (2, 3))
    assert [client for client, _ in seen.reports[3].lost] == ["client-2"]
    assert_simulated(seen, Simulation(0.4))
    assert_identical(seen.held[3]["client-2"], seen.held[2]["client-2"])


def test_a_round_that_is_repeated_with_another_cohort_mixes_for_that_one():
    """What came in the attempt that was given up is nobody's model, also not where it was trained."""
    tries = []

    def fails(client, number):
        tries.append(number)
        return number == 3 and tries.count(3) <= 2

    seen = run(FedACS(quantile=0.3, fraction_train=0.5, min_replies=2, seed=1), range(6), rounds=4, fails=fails)
    assert tries.count(3) == 6 and len(seen.reports[3].lost) == 2 and len(seen.reports[3].replied) == 3
    given_up = {client for client, number in seen.received if number == 3} - {*seen.reports[3].replied}
    assert given_up - {client for client, _ in seen.reports[3].lost}, "somebody's good reply was given up"
    assert_simulated(seen, Simulation(0.3))
    for number, models in seen.held.items():
        scored_as_held(seen, number, [int(client[-1]) for client in models])


@pytest.mark.parametrize("checkpoints", [None, "a folder", "a full disk"])
def test_a_run_that_returns_to_the_state_before_a_merge_has_the_models_of_that_state(tmp_path, checkpoints):
    """Client k's model is 1 in place k. Most clients fail in round 3 until the run returns to the state of round 1."""
    tries, sent = {}, {}
    app = ClientApp(mods=[partial_exchange])

    @app.train()
    def train(msg, context):
        number, client = msg.content["config"]["server-round"], int(context.node_config["partition-id"])
        tries[client, number] = tries.get((client, number), 0) + 1
        sent[client, number] = msg.content["arrays"]["w"].numpy().copy()
        if number == 3 and client < 6 and tries[client, number] < 3:
            raise RuntimeError("out of memory")
        model = np.zeros(8, np.float32)
        model[client] = 10 + number
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(model)}), "metrics": metrics}), reply_to=msg)

    folder, history = None if checkpoints is None else Checkpoints(tmp_path, 3), []
    if checkpoints == "a full disk":
        folder = Full(tmp_path, 3)
        folder.rounds_without = range(4)
    strategy = FedACS(
        quantile=0.5, fraction_evaluate=0, deterministic=True, checkpoints=folder, on_round=history.append
    )
    grid = InProcessGrid([Node(app, {"partition-id": client}) for client in range(8)])
    strategy.start(grid, ArrayRecord({"w": Array(np.ones(8, np.float32))}), num_rounds=3)
    assert [report.round for report in history if report.went_back] == [3]
    returned = [client for client in range(8) if tries[client, 3] == 3]
    assert returned
    for client in returned:
        np.testing.assert_array_equal(sent[client, 3], 11 * np.eye(8)[client])


def test_replies_that_are_not_needed_any_more_are_nobodys_model():
    seen = run(FedACS(quantile=0.3, max_replies=3), rounds=3, grid=AnyOrder)
    assert [len(report.replied) for report in seen.reports.values()] == [3, 3, 3]
    assert_simulated(seen, Simulation(0.3))
    scored_as_held(seen, 3, [int(client[-1]) for client in seen.held[3]])


def test_equal_models_stay_what_they_are():
    seen = run(FedACS(quantile=0.5), rounds=3, make=lambda model, partition, number, tied: moved(model, 0, number))
    model = START
    for number in (1, 2, 3):
        for k in range(5):
            assert_alike(seen.received[f"client-{k}", number], model, tolerance=1e-6)
        model = moved(model, 0, number)


def test_from_a_quantile_of_one_less_a_share_on_every_client_trains_alone():
    seen = run(FedACS(quantile=0.8), range(5), rounds=4)
    alone = {f"client-{k}": START for k in range(5)}
    for number in range(1, 5):
        for k in range(5):
            assert_identical(seen.received[f"client-{k}", number], alone[f"client-{k}"])
            alone[f"client-{k}"] = moved(alone[f"client-{k}"], k, number)


def test_models_that_point_away_from_each_other_are_not_mixed_though_the_threshold_is_below_them():
    start = {"w": np.zeros(6, np.float32)}

    def make(model, partition, number, tied):
        away = (-1) ** partition * np.array([1, 2, 3, 0.1 * partition, number, 0.3])
        return {"w": np.asarray(model["w"] + away, np.float32)}

    seen = run(FedACS(quantile=0.2), range(4), rounds=3, start=start, make=make)
    for number in (2, 3):
        record = seen.reports[number].record
        assert record["threshold"] < -0.5
        np.testing.assert_array_equal(record["weights"] > 0, [[(i + j) % 2 == 0 for j in range(4)] for i in range(4)])
        w = {k: seen.held[number - 1][f"client-{k}"]["w"].astype(np.float64) for k in range(4)}
        for k in range(4):
            other = (k + 2) % 4
            s = w[k] @ w[other] / math.sqrt((w[k] @ w[k]) * (w[other] @ w[other]))
            expected = (w[k] + s * w[other]) / (1 + s)
            np.testing.assert_allclose(seen.received[f"client-{k}", number]["w"], expected, rtol=1e-5)


def test_a_model_that_diverged_is_mixed_with_no_other(tmp_path, monkeypatch):
    """Its numbers are finite, and their squares are not."""
    monkeypatch.setattr("tepal.strategies.rounds.judging.LARGEST", math.inf)  # else its reply is refused

    def make(model, partition, number, tied):
        made = moved(model, partition, number)
        return {**made, "layer.bias": np.full(5, 3e38, np.float32)} if partition == 2 else made

    folder = tmp_path / "checkpoints"
    run(FedACS(quantile=0.3, checkpoints=folder), range(4), rounds=2, make=make)
    seen = run(FedACS(quantile=0.3, checkpoints=folder, resume=True), range(4), rounds=4, make=make)
    for number in (3, 4):
        record = seen.reports[number].record
        at = list(record["clients"]).index("client-2")
        np.testing.assert_array_equal(record["similarity"][at], np.eye(4)[at])
        np.testing.assert_array_equal(record["weights"][:, at], np.eye(4)[at])
        assert all(np.abs(seen.received[f"client-{k}", number]["layer.bias"]).max() < 100 for k in (0, 1, 3))
    assert_identical(seen.received["client-2", 4], seen.held[3]["client-2"])


def test_a_strategy_can_be_started_again_from_the_beginning():
    strategy = FedACS(quantile=0.4)
    first = run(strategy, rounds=3)
    strategy.experiment = "another"
    second = run(strategy, rounds=3)
    assert_identical(first.arrays, second.arrays)


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_participant_costs_what_it_costs_fedavg_both_ways(fraction):
    options = {"fraction_train": fraction, "fraction_evaluate": 0, "min_replies": 2}
    ours = run(FedACS(quantile=0.2, **options), range(6), rounds=4)
    theirs = run(FedAvg(**options), range(6), rounds=4)
    for number, report in theirs.reports.items():
        own = ours.reports[number]
        assert own.asked == report.asked
        assert own.up.payload == report.up.payload == len(report.asked) * SIZE
        alone = 0
        if number > 1:
            alone = sum((weights > 0).sum() == 1 for weights in own.record["weights"])
        assert own.down.payload == report.down.payload - alone * SIZE
        assert (own.fedavg_down, own.fedavg_up) == (report.fedavg_down, report.fedavg_up)


def test_a_model_that_is_mixed_with_no_other_does_not_travel_again_to_who_still_has_it(cache_folder):
    def lose(report, network, app):
        if report.round == 2:
            shutil.rmtree(next(cache_folder.glob("*/clients/client-1")))

    seen = run(FedACS(quantile=0.9, fraction_evaluate=0), range(4), rounds=3, on_round=lose)
    assert [seen.reports[number].down.payload for number in (1, 2, 3)] == [4 * SIZE, 0, SIZE]
    assert {client for (client, number, _), n in seen.sent.items() if number == 3 and n} == {"client-1"}
    for (client, number), model in seen.received.items():
        if number > 1:
            assert_identical(model, seen.held[number - 1][client])


# ---- what is scored --------------------------------------------------------------------------------------------------


def scored_as_held(seen, number, clients=range(5)):
    for k in clients:
        assert_identical(seen.scored[f"client-{k}", number], seen.held[number][f"client-{k}"])


def down_to_score(seen, number):
    """Client → bytes of its model that travelled for its score; those to which nothing did are left out."""
    return {client: n for (client, of, action), n in seen.sent.items() if of == number and action == "evaluate" and n}


@pytest.mark.parametrize("scores", [False, True], ids=["after every round", "after the last round"])
def test_each_client_scores_its_own_trained_model_which_it_still_has(scores):
    seen = run(FedACS(quantile=0.4), rounds=3, scores=scores)
    assert {number for _, number in seen.scored} == ({3} if scores else {1, 2, 3})
    for number in {number for _, number in seen.scored}:
        scored_as_held(seen, number)
        assert not down_to_score(seen, number)
    assert seen.reports[3].down.payload <= 5 * SIZE


@pytest.mark.parametrize("scores", [False, True])
def test_a_score_is_the_plain_mean_over_clients_with_its_spread(scores):
    seen = run(FedACS(quantile=0.4), rounds=2, scores=scores)
    accuracies = [score_of(model) for model in seen.held[2].values()]
    report = seen.reports[2]
    mean = sum(accuracies) / 5
    assert report.train_metrics_of == "trained"
    assert report.evaluate_metrics["personal-accuracy"] == pytest.approx(mean)
    assert seen.history["evaluate_metrics_clientapp"][2]["personal-accuracy"] == pytest.approx(mean)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in accuracies) / 5)
    assert report.over_clients["personal-accuracy"][1] == pytest.approx(deviation)
    assert np.std(report.record["accuracy"]) == pytest.approx(deviation)
    assert report.record["scored"].tolist() == sorted(report.record["scored"])
    # What is no score weighs by the examples: 1, 11, 21, 31 and 41 of them, with a loss of 0, 1, 2, 3 and 4.
    assert report.train_metrics["train-loss"] == pytest.approx((11 + 2 * 21 + 3 * 31 + 4 * 41) / 105)
    if scores:
        first = [score_of(model) for model in seen.held[1].values()]
        assert seen.reports[1].train_metrics["trained-accuracy"] == pytest.approx(sum(first) / 5)
        assert seen.reports[1].over_clients["trained-accuracy"][1] == pytest.approx(np.std(first))


def test_a_client_that_lost_its_model_gets_it_to_score_it(cache_folder):
    def lose(node, message, reply):
        if "metrics" in reply.content and PARTS in reply.content and node.config["partition-id"] == 2:
            shutil.rmtree(next(cache_folder.glob("*/clients/client-2")))
        return reply

    seen = run(FedACS(quantile=0.4), rounds=2, spoil=lose, scores=True)
    scored_as_held(seen, 2)
    assert down_to_score(seen, 2) == {"client-2": SIZE} and seen.reports[2].resent == 1


def loses(node, message, reply):
    return Message(Error(2, "the connection broke"), reply_to=message)


def breaks(node, message, reply):
    reply.content["metrics"]["num-examples"] = 99  # the checksum does not match any more
    return reply


@pytest.mark.parametrize(("spoils", "kind"), [(loses, "lost"), (breaks, "refused")])
@pytest.mark.parametrize("first", [2, 1], ids=["it had one before", "it had none before"])
def test_a_client_that_is_ahead_of_the_server_scores_the_model_that_the_server_has(spoils, kind, first):
    """The reply of client-1 did not arrive; what the client trained is nobody's model."""

    def spoil(node, message, reply):
        of_last = PARTS in reply.content and int(message.metadata.group_id) >= first
        return spoils(node, message, reply) if of_last and node.config["partition-id"] == 1 else reply

    seen = run(FedACS(quantile=0.4), rounds=2, spoil=spoil, scores=True)
    assert [client for client, _ in getattr(seen.reports[2], kind)] == ["client-1"]
    scored_as_held(seen, 2, [0, 2, 3, 4])
    if first == 1:
        assert ("client-1", 2) not in seen.scored and not down_to_score(seen, 2), "it has no model to be scored"
        return
    assert_identical(seen.scored["client-1", 2], seen.held[1]["client-1"])
    assert down_to_score(seen, 2) == {"client-1": SIZE}


def test_a_client_that_has_not_trained_has_no_model_to_be_scored():
    seen = run(FedACS(quantile=0.4, fraction_train=0.5), range(4), rounds=2)
    for number in (1, 2):
        assert {client for client, of in seen.scored if of == number} == {*seen.held[number]}
        accuracies = [score_of(model) for model in seen.held[number].values()]
        assert seen.reports[number].evaluate_metrics["personal-accuracy"] == pytest.approx(np.mean(accuracies))
        assert not down_to_score(seen, number)
    assert len(seen.held[1]) == 2


# ---- models of all kinds ---------------------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 2)


def raw_of(model):
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("given", [True, False], ids=["with the model", "by names"])
def test_statistics_of_batch_norm_are_mixed_and_not_compared_and_counters_are_each_clients_own(given):
    torch.manual_seed(0)
    model = Normed()
    start = raw_of(model)
    start["norm.running_mean"] += 50.0
    statistics = ("norm.running_mean", "norm.running_var")
    seen = run(FedACS(quantile=0.4, model=find_blocks(model) if given else None), range(6), rounds=4, start=start)
    simulation = Simulation(0.4, start=start, buffers=statistics)
    assert assert_simulated(seen, simulation) > 3
    naive = Simulation(0.4, start=start)
    naive.models = simulation.models
    pair = "client-0", "client-1"
    assert abs(naive.similarity(*pair) - simulation.similarity(*pair)) > 0.2, "comparing them would make a difference"
    for k in range(6):
        assert seen.held[4][f"client-{k}"]["norm.num_batches_tracked"] == 4 * (1 + k)
    assert seen.arrays["norm.num_batches_tracked"] == 0


WIDTHS = {
    "half": {"w": _RNG.normal(size=(4, 3)).astype(np.float16), "b": _RNG.normal(size=4).astype(np.float16)},
    "double": {"w": _RNG.normal(size=(4, 3)), "scale": np.array(0.7), "b": _RNG.normal(size=4)},
    "mixed": {
        "nothing": np.zeros((0, 3), np.float32),
        "w": _RNG.normal(size=(4, 3)).astype(np.float16),
        "seen": np.arange(3, dtype=np.uint8),
        "b": _RNG.normal(size=4),
        "flag": np.array(True),
        "v": np.asfortranarray(_RNG.normal(size=(2, 5)).astype(np.float32)),
    },
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_entries_of_any_width_keep_theirs(kind):
    seen = run(FedACS(quantile=0.4), rounds=4, start=WIDTHS[kind])
    simulation = Simulation(0.4, start=WIDTHS[kind])
    if kind == "double":
        assert assert_simulated(seen, simulation) > 3
        return
    mixed = 0
    for number, report in seen.reports.items():
        # A half that is rounded the other way is passed on: every round is held against what the one before left.
        for client, mixture in simulation.round(number, report.asked).items():
            assert_alike(seen.received[client, number], mixture)
            model = moved(seen.received[client, number], int(client[-1]), number)
            assert_identical(seen.held[number][client], model)
            simulation.models[client] = model
        mixed += sum(len(simulation.weights(client)) > 1 for client in simulation.models)
    assert mixed > 3
    assert [value.dtype for value in seen.arrays.values()] == [value.dtype for value in WIDTHS[kind].values()]


def test_double_precision_is_not_rounded_to_single():
    start = {"w": 1 + 1e-12 * _RNG.normal(size=(3, 2))}
    seen = run(FedACS(quantile=0.9), range(3), rounds=2, start=start)
    for k in range(3):
        assert_identical(seen.received[f"client-{k}", 2], moved(start, k, 1))


def test_fused_projections_come_back_fused():
    torch.manual_seed(0)
    model = TinyViT((1, 8, 8), 3, width=8, depth=1, heads=2, fused=True)
    start = raw_of(model)
    seen = run(FedACS(quantile=0.4, model=model), range(4), rounds=3, start=start)
    assert any("qkv" in name for name in start) and any(":q" in name for name in find_blocks(model).layout.names)
    assert assert_simulated(seen, Simulation(0.4, start=start)) > 1
    scored_as_held(seen, 3, range(4))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_count_once_and_stay_tied():
    torch.manual_seed(0)
    model = Tied()
    start, tied = raw_of(model), {"head.weight": "embed.weight"}
    seen = run(FedACS(quantile=0.4, model=model), range(6), rounds=4, start=start, tied=tied)
    assert assert_simulated(seen, Simulation(0.4, start=start, tied=tied)) > 3
    assert seen.reports[1].up.payload == 6 * (24 + 16 + 4) * 4
    assert_identical({"": seen.arrays["head.weight"]}, {"": seen.arrays["embed.weight"]})


# ---- the store, and runs that are resumed ----------------------------------------------------------------------------

QUANTILE, ROUNDS = 0.3, 5


def acs(folder, *, keep=3, resume=False, checkpoints=None, **options):
    made = {"quantile": QUANTILE, "fraction_train": 0.6, "min_replies": 2, "deterministic": True, "seed": 2, **options}
    return FedACS(checkpoints=checkpoints or Checkpoints(folder / "checkpoints", keep), resume=resume, **made)


def run_in(folder, *, rounds=ROUNDS, keep=3, resume=False, checkpoints=None, options=None, **others):
    """A run of five clients that keeps everything in a folder: its checkpoints and what its clients keep."""
    strategy = acs(folder, keep=keep, resume=resume, checkpoints=checkpoints, **(options or {}))
    return run(strategy, range(5), rounds, config={"cache-path": str(folder / "cache")}, **others)


def stored(folder, state, width=17, dtype=np.float32):
    """Client → bytes of its model in the store, of a checkpoint's state."""
    store = ModelStore(folder / "checkpoints" / STORE, width, dtype)
    try:
        return {client: store.row(state.slots[client]).tobytes() for client in state.clients}
    finally:
        store.close()


def floats_of(model):
    return b"".join(model[name].tobytes() for name in ("layer.weight", "layer.bias"))


@dataclass
class End:
    models: dict
    counters: dict
    gram: bytes
    arrays: dict
    history: dict


def end_of(folder, seen):
    state = Checkpoints(folder / "checkpoints").latest().state
    return End(
        stored(folder, state),
        {client: int(own["count"]) for client, own in state.counters.items()},
        state.gram.tobytes(),
        {name: array.tobytes() for name, array in seen.arrays.items()},
        seen.history,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run that nothing happened to, and how it ended."""
    folder = tmp_path_factory.mktemp("reference")
    seen = run_in(folder)
    end = end_of(folder, seen)
    assert len(end.models) == 5 and assert_simulated(seen, Simulation(QUANTILE)) > 3
    assert end.models == {client: floats_of(model) for client, model in seen.held[ROUNDS].items()}
    return seen, end


def assert_tidy(folder, rounds):
    """Nothing lies with the checkpoints but them and the store."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == sorted([STORE, *(f"round-{number:06d}" for number in rounds)])


@pytest.mark.parametrize("keep", [2, 3])
def test_a_run_leaves_its_store_with_its_checkpoints_and_nothing_else(tmp_path, keep, reference):
    seen = run_in(tmp_path, keep=keep)
    assert end_of(tmp_path, seen) == reference[1]
    assert_tidy(tmp_path, range(ROUNDS - keep + 1, ROUNDS + 1))


def test_without_checkpoints_the_store_is_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    seen = run(FedACS(quantile=0.4), rounds=3)
    assert_simulated(seen, Simulation(0.4))
    assert not list((tmp_path / "temporary").iterdir())


def dies(owner, name, count, after=False):
    """In a child: the process ends at the count-th call of a function."""
    function, calls = getattr(owner, name), []

    def called(*args, **options):
        calls.append(1)
        if len(calls) == count and not after:
            os._exit(9)
        result = function(*args, **options)
        if len(calls) == count:
            os._exit(9)
        return result

    setattr(owner, name, called)


DEATHS = {
    "between two replies of round 1": (PersonalMerger, "add", 2, False),
    "between two replies of round 3": (PersonalMerger, "add", 8, False),
    "between two replies of round 5": (PersonalMerger, "add", 14, False),
    "after the last reply of round 3": (PersonalMerger, "add", 9, True),
    "after the merge of round 4": (PersonalMerger, "finish", 4, True),
    "before the store is flushed": (PersonalStorage, "flush", 3, False),
    "before the checkpoint of round 2": (Checkpoints, "save", 2, False),
    "after the checkpoint of round 2": (Checkpoints, "save", 2, True),
    "after the checkpoint of round 4": (Checkpoints, "save", 4, True),
    "as the mixtures are written": (personal_storage, "write_at", 7, False),
}


@pytest.mark.parametrize(("death", "keep"), [(death, 2 + k % 2) for k, death in enumerate(DEATHS)])
def test_a_server_that_is_killed_and_resumed_ends_as_if_nothing_had_happened(reference, tmp_path, death, keep):
    def child():
        dies(*DEATHS[death])
        run_in(tmp_path, keep=keep)

    killed, _ = in_child(child)
    assert killed
    first = max(Checkpoints(tmp_path / "checkpoints").rounds(), default=0) + 1
    resumed = run_in(tmp_path, keep=keep, resume=True)
    assert end_of(tmp_path, resumed) == reference[1]
    for number in range(first, ROUNDS + 1):
        for name, array in reference[0].reports[number].record.items():
            np.testing.assert_array_equal(resumed.reports[number].record[name], array, err_msg=name)
        for client in resumed.reports[number].asked:
            assert_identical(resumed.received[client, number], reference[0].received[client, number])
    scored_as_held(resumed, ROUNDS)
    assert_tidy(tmp_path, range(ROUNDS - keep + 1, ROUNDS + 1))


def test_a_server_that_is_killed_anywhere_and_resumed_ends_as_if_nothing_had_happened(reference, tmp_path):
    killed, counted = in_child(lambda: run_in(tmp_path / "counted", keep=2))
    assert not killed
    rng, after = random.Random(5), set()
    for point in range(4):
        folder, n = tmp_path / str(point), rng.randint(1, counted["anywhere"])
        in_child(lambda folder=folder: run_in(folder, keep=2), n)
        after.add(max(Checkpoints(folder / "checkpoints").rounds(), default=0))
        resumed = run_in(folder, keep=2, resume=True)
        assert end_of(folder, resumed) == reference[1]
        assert_tidy(folder, [ROUNDS - 1, ROUNDS])
    assert len(after) >= 2, after


@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("troubled", [False, True], ids=["", "rounds are repeated"])
def test_no_model_that_a_checkpoint_refers_to_is_written_over(tmp_path, keep, troubled):
    """Looked at when all replies of a round are stored, and the checkpoint of the round is not written yet."""
    looked, tries, checkpoints = [], [], Checkpoints(tmp_path / "checkpoints", keep)
    strategy, seen = acs(tmp_path, checkpoints=checkpoints), Seen()

    def look(report):
        for number in checkpoints.rounds():
            models = stored(tmp_path, next(checkpoints.states(before=number + 1)))
            assert models == {client: floats_of(model) for client, model in seen.held[number].items()}
            looked.append((report.round, number))

    def fails(client, number):
        tries.append(number)
        return troubled and number % 2 == 0 and tries.count(number) in (1, 2)

    watch(strategy, seen, START)
    strategy.on_round = look
    app = client_app(seen, fails=fails)
    strategy.start(InProcessGrid([Node(app, {"partition-id": k}) for k in range(5)]), record_of(START), num_rounds=8)
    assert len(looked) == sum(min(number - 1, keep) for number in range(1, 9))
    assert not troubled or len(tries) > 8 * 3


@pytest.mark.parametrize(("damaged", "keep"), [(1, 2), (1, 3), (2, 3)])
def test_where_the_newest_checkpoints_are_damaged_the_models_of_the_one_before_are_there(
    reference, tmp_path, damaged, keep, caplog
):
    run_in(tmp_path, rounds=4, keep=keep)
    for number in range(5 - damaged, 5):
        flip(tmp_path / "checkpoints" / f"round-{number:06d}" / STATE)
    resumed = run_in(tmp_path, keep=keep, resume=True)
    assert sorted(resumed.reports) == list(range(5 - damaged, 6))
    assert "are damaged" not in caplog.text
    assert end_of(tmp_path, resumed) == reference[1]


def test_a_run_that_had_ended_has_its_result_still(reference, tmp_path):
    run_in(tmp_path)
    again = run(acs(tmp_path, resume=True), [], rounds=ROUNDS)
    assert not again.reports and end_of(tmp_path, again) == reference[1]


def test_checkpoints_that_were_kept_before_can_be_gone_back_to_though_fewer_are_kept_now(reference, tmp_path, caplog):
    run_in(tmp_path, rounds=4, keep=3)

    def child():
        dies(Checkpoints, "save", 1)
        run_in(tmp_path, keep=1, resume=True)

    assert in_child(child)[0] and Checkpoints(tmp_path / "checkpoints").rounds() == [2, 3, 4]
    flip(tmp_path / "checkpoints" / "round-000004" / STATE)
    resumed = run_in(tmp_path, keep=1, resume=True)
    assert "are damaged" not in caplog.text
    assert end_of(tmp_path, resumed) == reference[1]


def _fail(number):
    raise OSError(number, os.strerror(number))


class Full(Checkpoints):
    """There is no room for the checkpoints of some rounds."""

    rounds_without = ()

    def save(self, state):
        if state.round in self.rounds_without:
            _fail(errno.ENOSPC)
        super().save(state)


def test_all_checkpoints_that_are_there_can_be_gone_back_to_when_later_ones_found_no_room(reference, tmp_path, caplog):
    full = Full(tmp_path / "checkpoints", 3)
    full.rounds_without = (4, 5)
    run_in(tmp_path, checkpoints=full)
    for number in (2, 3):
        flip(tmp_path / "checkpoints" / f"round-{number:06d}" / STATE)
    resumed = run_in(tmp_path, resume=True)
    assert sorted(resumed.reports) == [2, 3, 4, 5] and "are damaged" not in caplog.text
    assert end_of(tmp_path, resumed) == reference[1]


def test_a_run_that_was_resumed_can_go_back_to_before_it_was(reference, tmp_path, caplog):
    run_in(tmp_path, rounds=3)

    def child():
        dies(Checkpoints, "save", 2)
        run_in(tmp_path, resume=True)

    assert in_child(child)[0] and Checkpoints(tmp_path / "checkpoints").rounds() == [2, 3, 4]
    for number in (3, 4):
        flip(tmp_path / "checkpoints" / f"round-{number:06d}" / STATE)
    resumed = run_in(tmp_path, resume=True)
    assert sorted(resumed.reports) == [3, 4, 5] and "are damaged" not in caplog.text
    assert end_of(tmp_path, resumed) == reference[1]


@pytest.mark.parametrize("keep", [2, 3])
def test_the_last_checkpoint_that_could_be_written_still_resumes_rounds_later(reference, tmp_path, keep, caplog):
    full = Full(tmp_path / "checkpoints", keep)
    full.rounds_without = (3, 4, 5)
    seen = run_in(tmp_path, checkpoints=full)
    assert "no checkpoint of round 3 could be written" in dict(seen.reports[4].notes)[SERVER]
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [1, 2]
    resumed = run_in(tmp_path, keep=keep, resume=True)
    assert sorted(resumed.reports) == [3, 4, 5] and "are damaged" not in caplog.text
    assert end_of(tmp_path, resumed) == reference[1]


@pytest.mark.parametrize("keep", [2, 3])
def test_a_checkpoint_whose_folder_could_not_be_synchronised_still_resumes_rounds_later(
    reference, tmp_path, keep, caplog, monkeypatch
):
    """It took the place of the others: it is the only one, and all later ones find no room."""
    monkeypatch.setattr(checkpoint, "sync_folder", lambda folder: failing and _fail(errno.EIO))
    failing, full = [], Full(tmp_path / "checkpoints", keep)
    full.rounds_without = (4, 5)
    run_in(tmp_path, checkpoints=full, on_round=lambda report, *_: report.round == 3 and failing.append(1))
    failing.clear()
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [3]
    resumed = run_in(tmp_path, keep=keep, resume=True)
    assert "are damaged" not in caplog.text
    assert end_of(tmp_path, resumed) == reference[1]


@pytest.mark.parametrize("keep", [2, 3])
def test_a_store_that_cannot_be_flushed_costs_the_checkpoint_alone(reference, tmp_path, keep, monkeypatch):
    flush, calls = ModelStore.flush, []

    def broken(store):
        calls.append(1)
        if len(calls) in (3, 4):
            _fail(errno.EIO)
        flush(store)

    monkeypatch.setattr(ModelStore, "flush", broken)
    seen = run_in(tmp_path, rounds=4, keep=keep)
    assert "Input/output error" in dict(seen.reports[4].notes)[SERVER]
    assert Checkpoints(tmp_path / "checkpoints").rounds() == [1, 2]
    assert end_of(tmp_path, run_in(tmp_path, keep=keep, resume=True)) == reference[1]


@pytest.mark.parametrize("keep", [2, 3])
def test_the_file_of_models_does_not_grow_with_the_rounds(tmp_path, keep, monkeypatch):
    monkeypatch.setattr(model_store, "_GROWTH", (0, 1))  # by one row at a time
    rows, tries = [], []
    path = tmp_path / "checkpoints" / STORE

    def fails(client, number):
        tries.append(number)
        return number % 3 == 0 and tries.count(number) <= 2

    run_in(tmp_path, rounds=12, keep=keep, fails=fails, options={"fraction_evaluate": 0},
           on_round=lambda report, network, app: rows.append(path.stat().st_size // (17 * 4)))  # fmt: skip
    assert max(rows) <= 5 + (keep + 1) * 3 + 1, "and the one good reply of an attempt that was given up"
    assert rows[8:] == rows[8:9] * len(rows[8:]), "it has its size after a few rounds"


def test_a_damaged_model_begins_anew_alone_and_is_named(tmp_path, caplog):
    seen = run_in(tmp_path, rounds=4, keep=2)
    state = Checkpoints(tmp_path / "checkpoints").latest().state
    with (tmp_path / "checkpoints" / STORE).open("r+b") as file:
        file.seek(state.slots["client-3"] * 17 * 4 + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    resumed = run_in(tmp_path, rounds=6, keep=2, resume=True)
    assert "The models of client-3 in models.bin are damaged: these clients start anew" in caplog.text
    simulation = Simulation(QUANTILE)
    simulation.models = {client: model for client, model in seen.held[4].items() if client != "client-3"}
    assert list(resumed.reports[5].record["clients"]) == [client for client in state.clients if client != "client-3"]
    assert_simulated(resumed, simulation)
    assert "client-3" in resumed.reports[5].asked
    scored_as_held(resumed, 6)


@pytest.mark.parametrize("lost", [5, 2], ids=["none is left", "some are left"])
def test_a_store_that_was_cut_off_loses_what_is_behind(tmp_path, lost, caplog, monkeypatch):
    monkeypatch.setattr(model_store, "_GROWTH", (0, 1))
    seen = run_in(tmp_path, rounds=4)
    state = Checkpoints(tmp_path / "checkpoints").latest().state
    left = sorted(state.slots.values())[-lost]
    os.truncate(tmp_path / "checkpoints" / STORE, left * 17 * 4 + 8)
    resumed = run_in(tmp_path, rounds=8, resume=True)
    simulation = Simulation(QUANTILE)
    simulation.models = {client: seen.held[4][client] for client in state.clients if state.slots[client] < left}
    assert len(simulation.models) == 5 - lost
    assert "are damaged" in caplog.text
    assert_simulated(resumed, simulation)
    assert_tidy(tmp_path, [6, 7, 8])


def test_a_damaged_model_can_be_resumed_from_twice(tmp_path, caplog):
    run_in(tmp_path, rounds=3)
    state = Checkpoints(tmp_path / "checkpoints").latest().state
    os.truncate(tmp_path / "checkpoints" / STORE, max(state.slots[client] for client in state.clients) * 17 * 4)
    run_in(tmp_path, rounds=4, resume=True)
    caplog.clear()
    again = run_in(tmp_path, rounds=6, resume=True)
    assert "are damaged" not in caplog.text
    scored_as_held(again, 6, [int(client[-1]) for client in again.held[6]])


# ---- disks that are full ---------------------------------------------------------------------------------------------


def test_a_reply_for_which_there_is_no_room_is_not_merged_and_the_run_goes_on(monkeypatch, tmp_path):
    write, calls = ModelStore.write, []

    def full(store, values):
        calls.append(1)
        if len(calls) in (7, 12):  # client-1 in round 2, and in round 3
            next(iter(values))
            _fail(errno.ENOSPC)
        return write(store, values)

    monkeypatch.setattr(ModelStore, "write", full)
    seen = run(FedACS(quantile=0.4, deterministic=True, checkpoints=tmp_path / "checkpoints"), rounds=4, scores=True)
    for number in (2, 3):
        assert seen.reports[number].replied == ["client-0", "client-2", "client-3", "client-4"]
        ((who, said),) = seen.reports[number].notes
        assert who == SERVER and "client-1" in said and "No space left" in said
        assert_identical(seen.held[number]["client-1"], seen.held[1]["client-1"])
    assert not seen.reports[4].notes
    assert_simulated(seen, Simulation(0.4))
    scored_as_held(seen, 4)
    assert_tidy(tmp_path, [2, 3, 4])


def test_a_client_whose_last_reply_could_not_be_stored_scores_the_one_before(monkeypatch):
    write, calls = ModelStore.write, []

    def full(store, values):
        calls.append(1)
        if len(calls) == 8:  # client-2 in round 2
            _fail(errno.ENOSPC)
        return write(store, values)

    monkeypatch.setattr(ModelStore, "write", full)
    seen = run(FedACS(quantile=0.4, deterministic=True), rounds=2, scores=True)
    assert_identical(seen.scored["client-2", 2], seen.held[1]["client-2"])
    assert down_to_score(seen, 2) == {"client-2": SIZE}


def test_a_disk_that_stays_full_ends_the_run_with_what_was_learned(monkeypatch):
    write, calls = ModelStore.write, []

    def full(store, values):
        calls.append(1)
        if len(calls) > 10:
            _fail(errno.ENOSPC)
        return write(store, values)

    monkeypatch.setattr(ModelStore, "write", full)
    with pytest.raises(RoundFailed, match="round 3") as failure:
        run(FedACS(quantile=0.4), rounds=4)
    assert set(failure.value.result.train_metrics_clientapp) == {1, 2}
    assert failure.value.result.arrays["count"].numpy() == 7


def test_a_disk_without_room_for_the_mixtures_ends_the_run_with_what_was_learned(monkeypatch):
    write, calls = personal_storage.write_at, []

    def full(*args):
        calls.append(1)
        if len(calls) > 7:
            _fail(errno.ENOSPC)
        write(*args)

    monkeypatch.setattr(personal_storage, "write_at", full)
    with pytest.raises(RoundFailed, match="No space left") as failure:
        run(FedACS(quantile=0.4), rounds=4)
    assert set(failure.value.result.train_metrics_clientapp) == {1, 2}


# ---- what is said before the first round -----------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_a_quantile_out_of_range_is_refused(quantile):
    with pytest.raises(ValueError, match=r"quantile is .*; it must be a number, above 0 and below 1"):
        FedACS(quantile=quantile)


@pytest.mark.parametrize("alpha", [0, -1, 1.01, float("nan")])
def test_an_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha is .*; it must be a number, above 0 and at most 1"):
        FedACS(quantile=0.5, alpha=alpha)


@pytest.mark.parametrize(
    "start",
    [{"ids": np.arange(4)}, {"norm.running_mean": np.ones(3, np.float32), "norm.num_batches_tracked": np.array(1)}],
    ids=["integers", "statistics"],
)
def test_a_model_with_nothing_to_compare_is_refused(start, tmp_path):
    with pytest.raises(MethodError, match="no floating-point parameters"):
        run(FedACS(quantile=0.5, checkpoints=tmp_path / "checkpoints"), start=start)
    assert not (tmp_path / "checkpoints").exists()


def test_the_models_of_an_ensemble_are_no_start():
    with pytest.raises(MethodError, match="of 2 models; FedACS starts from one"):
        FedACS(quantile=0.5).start(InProcessGrid([]), join_modes(record_of(START) for _ in range(2)))


def test_a_run_with_another_quantile_is_not_resumed(tmp_path):
    run_in(tmp_path, rounds=1)
    with pytest.raises(CheckpointError, match="another strategy"):
        run_in(tmp_path, resume=True, options={"quantile": 0.31})


class Scaled(torch.nn.Module):
    """A buffer that is no BatchNorm's stands before the last parameters."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.register_buffer("shift", torch.arange(3.0))
        self.head = torch.nn.Linear(2, 2)


def test_a_run_that_is_resumed_with_the_model_reads_its_models_right_or_says_why_not(tmp_path):
    """What counts as a buffer, and with it where entries lie in the store, follows from whether the model is given."""
    torch.manual_seed(0)
    start = raw_of(Scaled())
    options = {"quantile": 0.4, "checkpoints": tmp_path / "checkpoints", "fraction_evaluate": 0}
    before = run(FedACS(**options), range(3), rounds=2, start=start)
    try:
        after = run(FedACS(**options, model=Scaled(), resume=True), range(3), rounds=3, start=start,
                    fails=lambda client, number: client == 1)  # fmt: skip
    except (CheckpointError, MethodError):
        return
    assert_identical(after.held[3]["client-1"], before.held[2]["client-1"])


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_reply_is_let_go_of_when_it_is_stored(monkeypatch, quick_gc):
    add, alive = PersonalMerger.add, []

    def watched(keeper, reply):
        alive.extend(weakref.ref(array) for part in reply.parts.values() for array in part.values())
        add(keeper, reply)

    monkeypatch.setattr(PersonalMerger, "add", watched)
    left = []

    def count(report, network, app):
        gc.collect()
        left.append(sum(array() is not None for array in alive))

    seen = run(FedACS(quantile=0.4), rounds=3, on_round=count)
    assert len(alive) == 3 * 5 * len(START)
    # The one that came last is still on the stack of the round.
    assert max(left) <= len(START), left
    assert seen.held[3]


def own_bytes(array):
    """Bytes of process memory that an array keeps: none where it is a view of a file."""
    base = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap) and base.base is not None:
        base = base.base
    return 0 if isinstance(base, np.memmap) or type(base).__name__ == "mmap" else array.nbytes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_models_of_clients_pile_up_in_memory_when_they_have_been_sent(dtype, quick_gc):
    """A cohort may be large: what is made for one client to be sent must not stay until the round has ended."""
    start = {"w": _RNG.normal(size=(40, 5)).astype(dtype)}
    strategy = FedACS(quantile=0.2)
    values, made = strategy.method.values, []

    def watched(state, client, tree):
        found = values(state, client, tree)
        if client in state.slots:
            made.extend(weakref.ref(array) for array in found.values())
        return found

    strategy.method.values = watched
    left = []

    def count(report, network, app):
        gc.collect()
        left.append(sum(own_bytes(array()) for array in made if array() is not None))

    run(strategy, range(6), rounds=3, start=start, on_round=count)
    assert max(left) <= start["w"].nbytes, left


def unnamed_files(folder):
    """Inodes of files in a folder that have no name any more, and that this process has mapped."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {line[4] for line in lines if len(line) > 5 and line[5].startswith(str(folder)) and "(deleted)" in line[5]}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says what is mapped")
def test_only_one_rounds_mixtures_take_room_on_the_disk(tmp_path, quick_gc):
    files = []

    def count(report, network, app):
        gc.collect()
        files.append(len(unnamed_files(tmp_path)))

    strategy = FedACS(quantile=0.2, checkpoints=tmp_path / "checkpoints", fraction_evaluate=0)
    run(strategy, range(4), rounds=6, on_round=count)
    assert max(files[1:]) == 1, files
    assert not unnamed_files(tmp_path), "and none when the run has ended"


def test_attempts_that_fail_leave_nothing_in_the_store():
    """Of 60 clients each, in a store that has room for 64."""
    method = FedACSMethod(0.5)
    layout = Layout.of_arrays({"w": np.zeros(4, np.float32)})
    state = method.init(ServerModel("a model", layout, ({"w": np.zeros(4, np.float32)},), None), Run())
    for attempt in range(4):
        merger = method.merger(state, 1)
        for k in range(60):
            part = {"w": np.full(4, attempt + k, np.float32)}
            merger.add(Reply(client=f"client-{k}", parts={"mixture": part}, examples=1, metrics={}))
    assert len(method.storage._store) == 64
    state = merger.finish()
    assert method.personal(state, "client-7")["w"].tolist() == [10, 10, 10, 10]
    method.storage.close()
