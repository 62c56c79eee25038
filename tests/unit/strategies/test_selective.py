"""Selective layers over whole rounds: who is asked what, what travels, what is merged, and who is refused with what."""

import itertools
import math
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from tepal.client_app import apply_plan
from tepal.exchange import partial_exchange, received
from tepal.exchange.header import Header
from tepal.exchange.manifest import PARTS, Manifest
from tepal.exchange.mod import PartialExchange
from tepal.exchange.parts import unpack
from tepal.exchange.plan import MODEL, Reply
from tepal.models.blocks import find_blocks
from tepal.server_app.config import ConfigError, defaults
from tepal.server_app.run import run as run_config
from tepal.strategies import FedEnsemble, MethodError, RoundFailed, SelectiveLayers, join_modes, modes_of
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.layer_selection import choose
from tepal.strategies.method import Run, ServerModel
from tepal.strategies.selective import SelectiveLayersMethod
from tepal.training.probing import probe_layers
from tests.answers import returned_by
from tests.lines import read_lines
from tests.packages import ROOT

LAYERS = 5


class Net(nn.Module):
    """Five layers of different sizes between an embedding and a head, with a norm that is neither."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Linear(6, 4)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, w), nn.Tanh(), nn.Linear(w, 4)) for w in range(2, 7))
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def nbytes(module):
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


NET = Net()
FULL, HEAD = nbytes(NET), nbytes(NET.head)
LAYER_BYTES = [nbytes(block) for block in NET.blocks]


def block_of(name):
    """The block of an entry of `Net`, told by its name alone."""
    parts = name.split(".")
    return {"embed": "embedding", "norm": "rest", "blocks": f"layer/{parts[1]}"}.get(parts[0], parts[0])


def scores_of(client, server_round):
    """Squared norms that a client reports: its own in every round."""
    return np.random.default_rng([client, server_round, 1]).exponential(size=LAYERS).tolist()


def durations_of(client, server_round):
    return np.random.default_rng([client, server_round, 2]).uniform(1, 4, LAYERS).tolist()


class Clients:
    """Clients that report what a table says and make a random step in all that the plan trains; what they did is kept.

    Args:
        answer: (client, round, metrics of its probe) → the metrics that it answers with instead.
        momentum: of the steps; a client keeps it for itself, from round to round.
        disobeys: whether it trains everything, whatever the plan says.
    """

    def __init__(self, answer=lambda client, server_round, metrics: metrics, momentum=0.0, disobeys=False):
        self.answer = answer
        self.momentum = momentum
        self.disobeys = disobeys
        self.sent = []
        """(round, client, action, blocks of the model that came, their bytes), message by message."""
        self.probed = {}
        """(round, client) → the metrics with which it answered the probe."""
        self.uploads = {}
        """(round, client) → (examples, entries that came back)."""

    def app(self):
        app = ClientApp(mods=[self.spy, PartialExchange(self.introduce)])

        @app.train("probe")
        def probe(msg, context):
            manifest, client = received(msg).manifest, int(context.node_config["partition-id"])
            metrics = {"num-examples": 3 * client + 1, **self.declared(context)}
            if manifest.plan.options["probe.score"] != "none":
                metrics["layer-scores"] = scores_of(client, manifest.plan.round)
            if manifest.plan.options["probe.timed"]:
                metrics["layer-milliseconds"] = durations_of(client, manifest.plan.round)
            metrics = self.answer(client, manifest.plan.round, metrics)
            self.probed[manifest.plan.round, manifest.plan.client] = metrics
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

        @app.train()
        def train(msg, context):
            came, client = received(msg), int(context.node_config["partition-id"])
            steps, model = came.personal.load() if self.momentum else {}, dict(came.model)
            rng = np.random.default_rng([client, came.plan.round])
            for name in came.layout.names:
                steps[name] = self.momentum * steps.get(name, 0.0) + rng.normal(size=model[name].shape)
                if name in came.plan.trains or self.disobeys:
                    model[name] = np.asarray(model[name] - steps[name], dtype=model[name].dtype)
            if self.momentum:
                came.personal.save(steps)
            arrays = came.layout.join(model)
            record = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
            metrics = MetricRecord({"num-examples": 3 * client + 1})
            return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)

        @app.evaluate()
        def evaluate(msg, context):
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

        return app

    @staticmethod
    def declared(context):
        return {key: context.node_config[key] for key in ("layer-budget",) if key in context.node_config}

    def introduce(self, msg, context):
        return {"num-examples": 3 * int(context.node_config["partition-id"]) + 1, **self.declared(context)}

    def spy(self, msg, context, call_next):
        manifest = Manifest.from_content(msg.content)
        if manifest.parcels:
            blocks = [parcel.part.block for parcel in manifest.parcels if parcel.sent]
            data = sum(len(array.data) for array in msg.content.get(PARTS, {}).values())
            self.sent.append((manifest.plan.round, manifest.plan.client, manifest.plan.action, blocks, data))
        reply = call_next(msg, context)
        if manifest.plan.action == "train" and PARTS in reply.content:
            (tree, shaped), *_ = returned_by(msg).items()
            examples = next(iter(reply.content.metric_records.values()))["num-examples"]
            at = manifest.plan.round, manifest.plan.client
            self.uploads[at] = examples, unpack(reply.content[PARTS][tree], shaped)
        return reply

    def blocks_to(self, client, server_round, action):
        """Blocks that the client got in the messages of this action, in this round."""
        sent = [blocks for number, name, what, blocks, _ in self.sent if (number, name, what) ==
                (server_round, client, action)]  # fmt: skip
        return sorted(itertools.chain(*sent))


def nodes_of(clients, count=4, **configs):
    """`configs`: further node config of some of them, by `client_<number>`, or of `all` of them."""
    app = clients.app()
    return [
        Node(app, {"partition-id": k, **configs.get("all", {}), **configs.get(f"client_{k}", {})}) for k in range(count)
    ]


def run(clients=None, nodes=4, rounds=2, spoil=None, make=SelectiveLayers, start=None, timeout=60, **options):
    """Outcome: clients, reports by round, entries of the model after each round."""
    clients = clients or Clients()
    reports, models = {}, {}
    options = {"model": NET, "fraction_evaluate": 0, **options}
    if make is SelectiveLayers:
        options = {"coupling": 0.0, **options}
    strategy = make(**options, on_round=lambda report: reports.update({report.round: report}))
    nodes = nodes_of(clients, nodes) if isinstance(nodes, int) else nodes

    def keep(number, arrays):
        models[number] = {name: array.numpy().copy() for name, array in arrays.items()}

    result, failure = None, None
    try:
        initial = ArrayRecord(NET.state_dict()) if start is None else start
        grid = InProcessGrid(nodes, spoil=spoil)
        result = strategy.start(grid, initial, num_rounds=rounds, timeout=timeout, evaluate_fn=keep)
    except RoundFailed as error:
        failure = error
    reports.pop(0, None)
    return SimpleNamespace(clients=clients, reports=reports, models=models, result=result, failure=failure)


def masks_of(report):
    """Client → numbers of its layers, as the report's record says."""
    record = report.record
    return {
        str(client): np.flatnonzero(mask).tolist()
        for client, mask in zip(record["clients"], record["masks"], strict=True)
    }


def uploaded_layers(out, server_round, client):
    blocks = {block_of(name) for name in out.clients.uploads[server_round, client][1]}
    return sorted(int(block.removeprefix("layer/")) for block in blocks - {"head"})


# ---- what a round sends ----------------------------------------------------------------------------------------------


def test_a_round_is_a_probe_that_brings_the_model_and_a_train_message_that_brings_none():
    out = run(nodes=1, rounds=1, min_available_nodes=1)
    assert [(action, data) for _, _, action, _, data in out.clients.sent] == [("probe", FULL), ("train", 0)]


@pytest.mark.parametrize("fraction_evaluate", [0, 1.0])
def test_a_block_travels_to_a_client_when_it_has_changed_since_its_last_visit_and_at_no_other_time(fraction_evaluate):
    out = run(rounds=8, fraction_train=0.5, min_replies=2, budget=1, fraction_evaluate=fraction_evaluate, seed=5)
    has = {}  # client → the model that it saw last
    seen = set()
    for number, client, action, blocks, data in out.clients.sent:
        model = out.models[number if action == "evaluate" else number - 1]
        then = has.get(client, {})
        changed = {name for name in model if name not in then or not np.array_equal(then[name], model[name])}
        assert blocks == list(dict.fromkeys(b for b in blocks)) and set(blocks) == {block_of(name) for name in changed}
        assert data == sum(model[name].nbytes for name in model if block_of(name) in blocks)
        has[client] = model
        seen.add((action, len(blocks)))
    assert ("train", 0) in seen and not any(action == "train" and count for action, count in seen)
    assert any(action == "probe" and 0 < count < LAYERS for action, count in seen) or fraction_evaluate


def test_a_client_that_can_keep_nothing_gets_the_model_in_both_messages_and_trains_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    kept = run(deterministic=True)
    clients = Clients()
    out = run(clients, nodes_of(clients, client_1={"cache-path": str(tmp_path / "file")}), deterministic=True)
    got = [(action, data) for _, client, action, _, data in clients.sent if client == "client-1"]
    assert got == [("probe", FULL), ("train", FULL)] * 2
    assert all(data == 0 for _, client, action, _, data in clients.sent if client != "client-1" and action == "train")
    for name, array in kept.models[2].items():
        assert out.models[2][name].tobytes() == array.tobytes()
    assert {client for client, _ in out.reports[1].notes} == {"node 2", "client-1"}, "and says why"


def test_a_client_without_room_for_the_model_gets_it_again_with_the_train_message(tmp_path):
    """What the client says that it still holds, the block that it wrote last, stays away."""
    clients = Clients()
    nodes = nodes_of(clients, **{
        f"client_{k}": {"cache-path": str(tmp_path / f"cache-{k}"), "cache-megabytes": 0} for k in range(4)
    })  # fmt: skip
    out = run(clients, nodes)
    for number, client in itertools.product((1, 2), out.reports[1].replied):
        blocks = clients.blocks_to(client, number, "train")
        assert {f"layer/{layer}" for layer in range(LAYERS)} < set(blocks) and len(set(blocks)) == len(blocks)
    assert [len(out.reports[number].replied) for number in (1, 2)] == [4, 4]


def test_clients_that_share_a_cache_without_room_for_the_model_take_part(tmp_path):
    """As simulated clients do: what one of them keeps drives out what another one has."""
    clients = Clients()
    out = run(clients, nodes_of(clients, all={"cache-path": str(tmp_path / "small"), "cache-megabytes": 0}), rounds=1)
    assert len(out.reports[1].replied) == 4, out.reports[1].refused


def test_a_client_that_loses_its_cache_between_the_two_messages_gets_the_model_again_in_the_same_round(tmp_path):
    def lose(node, message, reply):
        header = Header.from_content(reply.content, len(NET.state_dict()))
        if (header.client, header.round, header.action) == ("client-2", 1, "probe"):
            shutil.rmtree(tmp_path / "cache-2")
        return reply

    clients = Clients()
    nodes = nodes_of(clients, client_2={"cache-path": str(tmp_path / "cache-2")})
    out = run(clients, nodes, spoil=lose)
    got = [(action, data) for _, client, action, _, data in clients.sent if client == "client-2"]
    assert got[:3] == [("probe", FULL), ("train", 0), ("train", FULL)]
    assert clients.blocks_to("client-2", 2, "probe") == clients.blocks_to("client-1", 2, "probe"), "and keeps it"
    assert out.reports[1].resent == 1 and "client-2" in out.reports[1].replied


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_clients_upload_their_layers_and_the_head_and_nothing_else(budget):
    out = run(budget=budget, rounds=3)
    for number, report in out.reports.items():
        expected = 0
        for client in report.replied:
            layers = masks_of(report)[client]
            assert len(layers) == budget
            _, entries = out.clients.uploads[number, client]
            assert {block_of(name) for name in entries} == {"head", *(f"layer/{layer}" for layer in layers)}
            expected += HEAD + sum(LAYER_BYTES[layer] for layer in layers)
        assert report.up.payload == expected
        assert report.fedavg_up == report.fedavg_down == 4


# ---- what is merged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", [0.0, 0.3])
def test_a_layer_is_the_mean_over_those_who_trained_it_weighted_by_their_examples(coupling):
    """w_l ← Σ n_i w_{i,l} / Σ n_i over the clients that have l in their mask; who has not counts for nothing."""
    out = run(rounds=4, nodes=5, budget=1, coupling=coupling)
    unselected = 0
    for number in range(1, 5):
        before, after = out.models[number - 1], out.models[number]
        replies = [reply for (r, _), reply in out.clients.uploads.items() if r == number]
        assert len(replies) == 5
        for name in after:
            having = [(n, entries[name]) for n, entries in replies if name in entries]
            if having:
                total = sum(n for n, _ in having)
                mean = sum(n * array.astype(np.float64) for n, array in having) / total
                np.testing.assert_allclose(after[name], mean, rtol=1e-6)
                assert not np.array_equal(after[name], before[name])
            else:
                assert after[name].tobytes() == before[name].tobytes()
            assert bool(having) or block_of(name) != "head"
            assert not having or block_of(name) not in ("embedding", "rest")
            unselected += not having and block_of(name).startswith("layer/")
    assert unselected


def test_the_order_of_replies_does_not_change_the_merge():
    method = SelectiveLayersMethod()
    blocks = find_blocks(NET)
    model = ServerModel("Net", blocks.layout, ({n: t.numpy() for n, t in NET.state_dict().items()},), blocks)
    rng = np.random.default_rng(0)
    replies = []
    for k, masks in enumerate([(0,), (0, 3), (3,), (0, 4)]):
        names = [name for layer in masks for name in blocks.layers[layer]] + list(blocks.head)
        part = {name: rng.normal(size=blocks.layout.by_name[name].shape).astype(np.float32) for name in names}
        replies.append(Reply(client=f"client-{k}", parts={MODEL: part}, examples=10**k, metrics={}))
    merged = []
    for order in itertools.permutations(replies):
        merger = method.merger(method.init(model, Run()), 1)
        for reply in order:
            merger.add(reply)
        merged.append(merger.finish().entries)
    for other in merged[1:]:
        for name, array in merged[0].items():
            np.testing.assert_allclose(other[name], array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("coupling", [0.0, 0.3])
def test_names_of_clients_do_not_change_what_they_learn(coupling):
    """The same clients under names in the reverse order: they are planned, solved and merged in another order."""
    outcomes = []
    for names in ("abcde", "edcba"):
        clients = Clients()
        nodes = nodes_of(clients, 5, **{f"client_{k}": {"name": name} for k, name in enumerate(names)})
        outcomes.append(run(clients, nodes, rounds=3, budget=2, coupling=coupling, deterministic=True))
        number_of = {name: k for k, name in enumerate(names)}
        outcomes[-1].masks = [
            {number_of[client]: layers for client, layers in masks_of(report).items()}
            for report in outcomes[-1].reports.values()
        ]
    one, other = outcomes
    assert one.masks == other.masks
    for name, array in one.models[3].items():
        np.testing.assert_allclose(other.models[3][name], array, rtol=1e-6, atol=1e-6)


# ---- who trains what -------------------------------------------------------------------------------------------------

BUDGETS = {"layers": 2, "bytes": 400, "milliseconds": 5.0}


@pytest.mark.parametrize("costs", BUDGETS)
@pytest.mark.parametrize("selection", ["gradient", "snr", "rgn", "top", "bottom", "both", "full"])
def test_masks_are_chosen_from_what_the_clients_reported_and_are_what_comes_back(selection, costs):
    budget = BUDGETS[costs]
    out = run(rounds=1, selection=selection, costs=costs, budget=budget, absolute_coupling=0.2, distance="squared")
    for number, report in out.reports.items():
        cohort = [f"client-{k}" for k in range(4)]
        assert report.record["masks"].shape == (4, LAYERS) and report.record["masks"].dtype == bool
        assert report.record["clients"].tolist() == cohort
        scores = np.array([scores_of(k, number) for k in range(4)])
        prices = {
            "layers": None,
            "bytes": LAYER_BYTES,
            "milliseconds": [durations_of(k, number) for k in range(4)],
        }[costs]
        expected = choose(selection, scores, [budget] * 4, coupling=0.2, distance="squared", costs=prices)
        np.testing.assert_array_equal(report.record["masks"], expected)
        for client in cohort:
            assert uploaded_layers(out, number, client) == masks_of(report)[client]
        if selection != "full":
            price = np.broadcast_to(1.0 if prices is None else prices, (4, LAYERS))
            assert ((price * report.record["masks"]).sum(axis=1) <= budget + 1e-9).all()
        else:
            assert report.record["masks"].all()


def test_the_coupling_and_the_distance_of_the_objective_are_those_given():
    """Three clients with one favourite each: alone they take it; coupled, all take the layer that is best for all."""
    favourite = [[3.0, 0.0, 2.0, 0.0, 0.0], [0.0, 3.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0, 3.0]]
    clients = {}
    for coupling, distance in ((0.0, "hamming"), (0.6, "hamming"), (0.3, "hamming"), (0.3, "squared")):
        table = Clients(lambda client, number, metrics: {**metrics, "layer-scores": favourite[client]})
        out = run(table, 3, rounds=1, coupling=0.0, absolute_coupling=coupling, distance=distance)
        clients[coupling, distance] = list(masks_of(out.reports[1]).values())
    # Agreement loses 1 a client, so 3; disagreement costs λ for each of the three pairs, times 2 or 4.
    assert clients[0.0, "hamming"] == clients[0.3, "hamming"] == [[0], [1], [4]]
    assert clients[0.6, "hamming"] == clients[0.3, "squared"] == [[2]] * 3


@pytest.mark.parametrize(("selection", "score"), [("gradient", "gradient"), ("snr", "snr"), ("rgn", "rgn"),
                                                  ("top", "none"), ("full", "none")])  # fmt: skip
def test_a_probe_asks_for_what_the_selection_needs_and_no_more(selection, score):
    asked = []

    class Looking(InProcessGrid):
        def push_messages(self, messages):
            (message,) = messages
            plan = Manifest.from_content(message.content).plan
            if plan.action == "probe":
                asked.append((dict(plan.options), plan.trains, plan.returns, sorted(plan.groups)))
            return super().push_messages([message])

    strategy = SelectiveLayers(model=NET, selection=selection, probe_batches=3, costs="milliseconds", budget=9.0,
                               fraction_evaluate=0)  # fmt: skip
    strategy.start(Looking(nodes_of(Clients(), 2)), ArrayRecord(NET.state_dict()), num_rounds=1)
    groups = ["head", *(f"layer/{layer}" for layer in range(LAYERS))]
    assert asked == [({"probe.score": score, "probe.batches": 3, "probe.timed": True}, (), {}, groups)] * 2


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_a_budget_that_a_client_declares_goes_before_the_one_for_all():
    clients = Clients()
    nodes = nodes_of(clients, client_1={"layer-budget": 3}, client_3={"layer-budget": 1.0})
    out = run(clients, nodes, rounds=3, budget=2)
    for report in out.reports.values():
        assert report.record["masks"].sum(axis=1).tolist() == [2, 3, 2, 1]


def test_a_declared_budget_is_in_the_unit_of_the_costs():
    clients = Clients()
    nodes = nodes_of(clients, client_0={"layer-budget": LAYER_BYTES[0] - 1}, client_1={"layer-budget": 1e9})
    out = run(clients, nodes, rounds=1, costs="bytes", budget=LAYER_BYTES[0], selection="bottom")
    assert masks_of(out.reports[1]) == {"client-0": [], "client-1": [0, 1, 2, 3, 4], "client-2": [0], "client-3": [0]}
    assert [len(out.clients.uploads[1, f"client-{k}"][1]) for k in range(3)] == [2, 2 + 4 * 5, 2 + 4], "heads always"


def test_drawn_budgets_are_a_function_of_seed_and_name_alone():
    drawn = {}
    for seed, count, rounds in ((1, 12, 2), (1, 5, 1), (2, 12, 1)):
        out = run(nodes=count, rounds=rounds, budget="drawn", seed=seed)
        budgets = [
            dict(zip(report.record["clients"].tolist(), report.record["masks"].sum(axis=1).tolist(), strict=True))
            for report in out.reports.values()
        ]
        assert all(found == budgets[0] for found in budgets), "and not of the round"
        drawn[seed, count] = budgets[0]
    assert drawn[1, 5].items() <= drawn[1, 12].items(), "and not of the other clients"
    assert drawn[1, 12] != drawn[2, 12]
    assert set(drawn[1, 12].values()) <= {1, 2, 3, 4} and len(set(drawn[1, 12].values())) > 1


def test_drawn_budgets_end_at_the_number_of_layers_and_give_way_to_declared_ones():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.head = nn.Linear(2, 2)

    two = Two()
    clients = Clients(lambda client, number, metrics: {**metrics, "layer-scores": [1.0, 2.0]})
    names = {f"client_{k}": {"name": f"site {k}"} for k in range(30)}
    names["client_0"]["layer-budget"] = 1
    out = run(clients, nodes_of(clients, 30, **names), rounds=1, budget="drawn", model=two, seed=3,
              start=ArrayRecord(two.state_dict()))  # fmt: skip
    taken = out.reports[1].record["masks"].sum(axis=1)
    assert len(out.reports[1].replied) == 30 and set(taken.tolist()) == {1, 2} and taken[0] == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("costs", ["bytes", "milliseconds"])
def test_no_client_is_ever_over_its_budget(costs, seed):
    rng = np.random.default_rng(seed)
    clients = Clients()
    own = {f"client_{k}": {"layer-budget": float(rng.uniform(1, 8) * (60 if costs == "bytes" else 1))} for k in (0, 2)}
    out = run(clients, nodes_of(clients, **own), rounds=3, costs=costs, budget=BUDGETS[costs], coupling=0.5, seed=seed)
    trained = 0
    for number, report in out.reports.items():
        for k, layers in enumerate(masks_of(report).values()):
            prices = LAYER_BYTES if costs == "bytes" else durations_of(k, number)
            budget = own.get(f"client_{k}", {}).get("layer-budget", BUDGETS[costs])
            assert math.fsum(prices[layer] for layer in layers) <= budget
            trained += len(layers)
    assert trained


# ---- what is refused before anything starts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "budget is 0; it must be a number, above 0, or 'drawn'"),
        ({"budget": 0.5}, "a budget of 0.5 layers: it must be a whole number from 1 to 5, the layers of Net"),
        ({"budget": 6}, "budget of 6 layers"),
        ({"budget": 1.5}, "budget of 1.5 layers"),
        ({"budget": math.nan}, "budget is nan"),
        ({"budget": math.inf}, "budget is inf"),
        ({"budget": math.inf, "costs": "bytes"}, "budget is inf"),
        ({"budget": "two"}, "budget is 'two'; it must be a number, above 0, or 'drawn'"),
        ({"draw_budgets": True, "costs": "bytes"}, "drawn budgets are numbers of layers, and costs is 'bytes'"),
        ({"budget": "drawn", "costs": "bytes"}, "drawn budgets are numbers of layers, and costs is 'bytes'"),
        ({"budget": "drawn", "costs": "milliseconds"}, "drawn budgets"),
        ({"coupling": -0.1}, "coupling is -0.1; it must be a number, at least 0"),
        ({"coupling": math.nan}, "coupling is nan"),
        ({"coupling": math.inf}, "coupling is inf"),
        ({"distance": "l2"}, "distance is 'l2'; it must be one of hamming, squared"),
        ({"selection": "random"}, "selection is 'random'; it must be one of gradient, snr, rgn, top"),
        ({"costs": "joules"}, "costs is 'joules'; it must be one of layers, bytes, milliseconds"),
        ({"probe_batches": -1}, "probe_batches is -1; it must be a whole number, at least 0"),
        ({"probe_batches": math.nan}, "probe_batches is nan"),
        ({"probe_batches": 1.5}, "probe_batches is 1.5"),
    ],
)
def test_options_out_of_range_are_errors(options, said):
    with pytest.raises(ValueError) as error:
        SelectiveLayers(model=NET, **options)
    assert said in str(error.value)


@pytest.mark.parametrize("make", [
    SelectiveLayers, lambda **options: FedEnsemble(modes=1, member=SelectiveLayers(), **options)
])  # fmt: skip
def test_without_the_model_nobody_is_asked_anything(make):
    clients = Clients()
    with pytest.raises(MethodError, match=r"must know the model's layers.*SelectiveLayers\(budget=\.\.\., model=model"):
        run(clients, make=make, model=None)
    assert not clients.sent


def test_a_model_without_layers_is_refused_by_name():
    blocks = SimpleNamespace(**{**vars(find_blocks(NET)), "layers": (), "rest": ()})
    with pytest.raises(MethodError, match="chooses among a model's layers, and Net has none"):
        SelectiveLayers(model=blocks)


def test_a_members_budget_is_held_against_the_model_that_the_ensemble_was_given():
    clients = Clients()
    with pytest.raises(MethodError, match="budget of 6 layers"):
        run(clients, make=lambda **options: FedEnsemble(modes=1, member=SelectiveLayers(budget=6), **options))
    assert not clients.sent


# ---- who is refused alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "declared", "said"),
    [
        ("layers", 0, "its node config declares, as layer-budget, a budget of 0 layers: .* from 1 to 5"),
        ("layers", 6, "a budget of 6 layers"),
        ("layers", 1.5, "a budget of 1.5 layers"),
        ("layers", -2, "a budget of -2 layers"),
        ("bytes", 0.0, "a budget of 0 bytes: it must be a positive number"),
        ("milliseconds", -1.0, "a budget of -1 milliseconds"),
    ],
)
def test_a_client_that_declares_an_impossible_budget_is_refused_alone_when_it_is_introduced(
    costs, declared, said, caplog
):
    clients = Clients()
    nodes = nodes_of(clients, client_2={"layer-budget": declared})
    out = run(clients, nodes, costs=costs, budget=BUDGETS[costs])
    assert len(out.reports[1].refused) == 1 and not out.reports[2].refused
    assert re.search(said, out.reports[1].refused[0][1]) and re.search(said, caplog.text)
    for report in out.reports.values():
        assert report.asked == report.replied == ["client-0", "client-1", "client-3"]


def test_the_report_names_the_client_whose_declared_budget_is_refused():
    clients = Clients()
    out = run(clients, nodes_of(clients, client_2={"layer-budget": 9}), rounds=1)
    assert [client for client, _ in out.reports[1].refused] == ["node 3 (client-2)"]


@pytest.mark.parametrize("declared", [math.nan, math.inf])
def test_a_declared_budget_that_is_no_finite_number_is_refused_and_not_passed_over(declared):
    clients = Clients()
    out = run(clients, nodes_of(clients, client_2={"layer-budget": declared}), rounds=1)
    assert out.reports[1].replied == ["client-0", "client-1", "client-3"]


def test_a_run_in_which_every_client_declares_an_impossible_budget_fails_with_the_reason():
    clients = Clients()
    out = run(clients, nodes_of(clients, all={"layer-budget": 9}))
    assert "only 0 of 4 clients can take part" in str(out.failure) and "a budget of 9 layers" in str(out.failure)
    assert not clients.sent


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer-scores": [1.0, 2.0]}, "must have 5 finite positive numbers as 'layer-scores'"),
        ({"layer-scores": [1.0] * 6}, "'layer-scores'"),
        ({"layer-scores": [1.0, 2.0, -1e-9, 1.0, 1.0]}, "'layer-scores'"),
        ({"layer-scores": [1.0, math.nan, 1.0, 1.0, 1.0]}, "'layer-scores'"),
        ({"layer-scores": [1.0, math.inf, 1.0, 1.0, 1.0]}, "'layer-scores'"),
        ({"layer-scores": 3.0}, "'layer-scores'"),
        ({"layer-scores": None}, "'layer-scores'"),
        ({"layer-milliseconds": [1.0, 0.0, 1.0, 1.0, 1.0]}, "'layer-milliseconds'"),
        ({"layer-milliseconds": [1.0, -1.0, 1.0, 1.0, 1.0]}, "'layer-milliseconds'"),
        ({"layer-milliseconds": [1.0] * 4}, "'layer-milliseconds'"),
        ({"layer-milliseconds": None}, "'layer-milliseconds'"),
        ({"layer-budget": 0.0}, "a budget of 0 milliseconds"),
        ({"num-examples": None}, "num-examples"),
    ],
)
def test_a_probe_that_cannot_be_used_is_refused_alone(changed, said):
    def answer(client, server_round, metrics):
        if client == 1:
            metrics = {name: value for name, value in {**metrics, **changed}.items() if value is not None}
        return metrics

    out = run(Clients(answer), rounds=1, costs="milliseconds", budget=5.0, coupling=0.1)
    ((client, reason),) = out.reports[1].refused
    assert client == "client-1" and said in reason
    others = ["client-0", "client-2", "client-3"]
    assert out.reports[1].asked == out.reports[1].replied == out.reports[1].record["clients"].tolist() == others


@pytest.mark.parametrize(
    ("selection", "vector"),
    [
        ("top", "layer-scores"),
        ("full", "layer-scores"),
        ("top", "layer-milliseconds"),
        ("gradient", "layer-milliseconds"),
    ],
)
def test_a_vector_that_nobody_asked_for_does_not_end_the_run(selection, vector):
    """An app may answer every probe alike, with more than a selection by place looks at."""

    def answer(client, server_round, metrics):
        return {vector: [1.0, 2.0], **metrics} if client == 1 else metrics

    out = run(Clients(answer), rounds=1, selection=selection)
    assert out.reports[1].replied == [f"client-{k}" for k in range(4)]


@pytest.mark.parametrize("coupling", [0.0, 0.5])
@pytest.mark.parametrize(
    ("costs", "changed"),
    [
        ("layers", {"layer-scores": [1e308] * 5}),
        ("layers", {"layer-scores": [5e-324] * 5}),
        ("layers", {"layer-scores": [0.0] * 5}),
        ("milliseconds", {"layer-milliseconds": [1e308] * 5}),
        ("milliseconds", {"layer-milliseconds": [1e-8] * 5}),
        ("milliseconds", {"layer-budget": 1e308}),
        ("milliseconds", {"layer-budget": 5e-324}),
        ("bytes", {"layer-budget": 1e308}),
    ],
)
def test_extreme_numbers_of_one_client_do_not_end_the_run(costs, changed, coupling):
    clients = Clients(lambda client, number, metrics: {**metrics, **changed} if client == 1 else metrics)
    out = run(clients, rounds=1, costs=costs, budget=BUDGETS[costs], coupling=coupling)
    assert {"client-0", "client-2", "client-3"} <= set(out.reports[1].replied)


def test_one_bad_probe_is_not_held_against_a_client():
    out = run(Clients(lambda k, number, metrics: metrics if (k, number) != (1, 1) else {"num-examples": 1}))
    assert [len(out.reports[number].replied) for number in (1, 2)] == [3, 4]


def failing_probe(*failing):
    def answer(client, server_round, metrics):
        if client in failing:
            raise RuntimeError(f"the disk of site {client} is gone")
        return metrics

    return Clients(answer)


def test_a_client_whose_probe_is_lost_is_not_asked_to_train():
    out = run(failing_probe(2), rounds=1)
    assert [client for client, _ in out.reports[1].lost] == ["client-2"]
    assert "the disk of site 2 is gone" in out.reports[1].lost[0][1]
    assert out.reports[1].asked == out.reports[1].replied == ["client-0", "client-1", "client-3"]
    assert not [sent for sent in out.clients.sent if sent[1:3] == ("client-2", "train")]


def test_when_all_probes_are_lost_the_round_fails_with_the_reasons_and_the_model_before_it():
    out = run(failing_probe(0, 1), 2)
    assert "min_replies=1" in str(out.failure) and "3 attempts" in str(out.failure)
    assert "the disk of site 0 is gone" in str(out.failure) and "the disk of site 1 is gone" in str(out.failure)
    for name, tensor in NET.state_dict().items():
        assert out.failure.result.arrays[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert not [sent for sent in out.clients.sent if sent[2] == "train"]


@pytest.mark.parametrize("make", [
    SelectiveLayers, lambda **options: FedEnsemble(modes=1, member=SelectiveLayers(model=NET), **options)
])  # fmt: skip
def test_the_record_of_a_round_in_which_nobody_trains_has_no_clients_and_still_its_layers(make):
    out = run(failing_probe(0, 1), 2, make=make)
    assert out.reports[1].record["clients"].shape == (0,)
    assert out.reports[1].record["masks"].shape == (0, LAYERS)


def test_an_app_that_answers_no_probe_is_told_so():
    def app():
        app = ClientApp(mods=[partial_exchange])

        @app.train()
        def train(msg, context):
            raise AssertionError("nothing is trained")

        return app

    out = run(nodes=[Node(app(), {"partition-id": k}) for k in range(2)])
    assert "probe" in str(out.failure)


def test_an_app_that_trains_more_than_its_layers_is_refused_with_the_cure():
    out = run(Clients(disobeys=True), 2)
    assert "call `apply_plan(model, msg)`" in str(out.failure)


# ---- cohorts, retries, resuming --------------------------------------------------------------------------------------


def test_a_share_of_the_clients_trains_in_a_round():
    out = run(nodes=6, rounds=6, fraction_train=0.5)
    for number, report in out.reports.items():
        assert len(report.replied) == 3 and report.record["masks"].shape == (3, LAYERS)
        assert {client for r, client, *_ in out.clients.sent if r == number} == set(report.replied)
    assert {client for report in out.reports.values() for client in report.replied} == {f"client-{k}" for k in range(6)}


def test_replies_beyond_max_replies_are_not_merged():
    out = run(rounds=3, max_replies=2)
    for number, report in out.reports.items():
        assert len(report.replied) == 2 and len(report.record["clients"]) == len(report.asked) == 4
        replies = [out.clients.uploads[number, client] for client in report.replied]
        for name, array in out.models[number].items():
            having = [(n, entries[name].astype(float)) for n, entries in replies if name in entries]
            if having:
                mean = sum(n * value for n, value in having) / sum(n for n, _ in having)
                np.testing.assert_allclose(array, mean, rtol=1e-6)
            else:
                assert array.tobytes() == out.models[number - 1][name].tobytes()


def test_a_round_with_too_few_replies_is_tried_again_with_a_probe_of_its_own():
    lost = []

    def lose(node, message, reply):
        header = Header.from_content(reply.content, len(NET.state_dict()))
        if header.action != "train" or lost:
            return reply
        lost.append(header.client)
        return Message(Error(2, "RuntimeError: out of memory"), reply_to=message)

    out = run(nodes=3, rounds=1, min_replies=3, spoil=lose)
    report = out.reports[1]
    assert len(lost) == 1 and [client for client, _ in report.lost] == lost
    assert report.replied == ["client-0", "client-1", "client-2"] and report.record["masks"].shape == (3, LAYERS)
    actions = [(action, data) for _, client, action, _, data in out.clients.sent if client == lost[0]]
    assert actions == [("probe", FULL), ("train", 0), ("probe", 0), ("train", 0)], "the model travels once"


ROUNDS = 4
RESUMED = {"gradient": {"budget": 2, "coupling": 0.3}, "drawn": {"budget": "drawn", "fraction_train": 0.5},
           "bytes": {"costs": "bytes", "budget": 400, "selection": "both"}}  # fmt: skip


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_that_is_resumed_ends_as_if_it_had_not_been_stopped(kind, tmp_path):
    """The clients go on with the momentum that they keep for themselves."""

    def part(name, rounds, **options):
        clients = Clients(momentum=0.9)
        nodes = nodes_of(clients, 5, all={"cache-path": str(tmp_path / name / "cache")})
        return run(clients, nodes, rounds, deterministic=True, seed=3, checkpoints=tmp_path / name / "checkpoints",
                   **RESUMED[kind], **options)  # fmt: skip

    whole = part("whole", ROUNDS)
    part("stopped", 2)
    resumed = part("stopped", ROUNDS, resume=True)
    assert sorted(resumed.reports) == list(range(3, ROUNDS + 1))
    for name, array in whole.models[ROUNDS].items():
        assert resumed.models[ROUNDS][name].tobytes() == array.tobytes()
    for number, report in resumed.reports.items():
        assert masks_of(report) == masks_of(whole.reports[number])
        assert report.up.payload == whole.reports[number].up.payload
        assert report.down.payload == whole.reports[number].down.payload, "the clients still hold what they held"


def test_a_budget_may_be_a_numpy_integer_where_checkpoints_are_written(tmp_path):
    run(rounds=1, budget=np.int64(2), checkpoints=tmp_path / "checkpoints")


# ---- models ----------------------------------------------------------------------------------------------------------


class Stages(nn.Module):
    """A small CNN with BatchNorm in its stem and its stages."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.stages = nn.ModuleList(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)
            )
            self.head = nn.Linear(4, 10)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def torch_app(make):
    """Probes and trains as an app does that was written from the tutorial, with the two lines that it needs."""
    app = ClientApp(mods=[partial_exchange])

    def load(msg, context):
        k = int(context.node_config["partition-id"])
        generator = torch.Generator().manual_seed(k)
        model = make()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        images = 3 * torch.rand(8 + k, 1, 8, 8, generator=generator)
        return model, images, torch.randint(0, 10, (8 + k,), generator=generator)

    @app.train("probe")
    def probe(msg, context):
        model, images, labels = load(msg, context)
        metrics = {"num-examples": len(labels), **probe_layers(model, msg, [(images, labels)])}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    @app.train()
    def train(msg, context):
        model, images, labels = load(msg, context)
        apply_plan(model, msg)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return app


@pytest.mark.parametrize("selection", ["gradient", "top"])
def test_the_statistics_of_a_stage_that_nobody_chose_stay_as_they_are(selection):
    app = torch_app(Stages)
    nodes = [Node(app, {"partition-id": k}) for k in range(2)]
    model = Stages()
    out = run(nodes=nodes, model=model, start=ArrayRecord(model.state_dict()), budget=1, selection=selection)
    idle = 0
    for number, report in out.reports.items():
        assert report.replied == ["client-0", "client-1"], report.refused
        chosen = set(np.flatnonzero(report.record["masks"].any(axis=0)).tolist())
        for name, array in out.models[number].items():
            before = out.models[number - 1][name]
            stage = int(name.split(".")[1]) if name.startswith("stages.") else None
            trained = name.startswith("head.") or stage in chosen
            if trained and not name.endswith("1.num_batches_tracked"):
                assert not np.array_equal(array, before), name
            if trained and name.endswith("num_batches_tracked"):
                assert array == before + 3 and array.dtype == np.int64
            if not trained:
                assert array.tobytes() == before.tobytes(), name
            idle += not trained and name.endswith("running_var") and stage is not None
    assert idle


class SpectralNormed(nn.Module):
    """Layers whose buffers change in each forward pass in train mode, whatever is frozen, and a counter."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            norm = nn.utils.parametrizations.spectral_norm
            self.blocks = nn.ModuleList(norm(nn.Linear(8, 8), n_power_iterations=1) for _ in range(3))
            self.head = nn.Linear(8, 10)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x):
        self.passes += self.training
        x = x.flatten(1)[:, :8]
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def test_a_frozen_layer_may_have_buffers_that_change_in_training():
    app, model = torch_app(SpectralNormed), SpectralNormed()
    nodes = [Node(app, {"partition-id": k}) for k in range(2)]
    out = run(nodes=nodes, model=model, start=ArrayRecord(model.state_dict()), budget=1)
    idle = 0
    for number, report in out.reports.items():
        assert report.replied == ["client-0", "client-1"], report.refused
        chosen = set(np.flatnonzero(report.record["masks"].any(axis=0)).tolist())
        for name, array in out.models[number].items():
            stage = int(name.split(".")[1]) if name.startswith("blocks.") else None
            if not name.startswith("head.") and stage not in chosen:
                assert array.tobytes() == out.models[number - 1][name].tobytes(), name
                idle += name.endswith("_u")
    assert idle and out.models[len(out.reports)]["passes"] == 0


def test_a_model_without_a_head_of_its_own_trains_layers_alone_and_nothing_where_nothing_fits():
    """A language model's head may be its embedding, which no client trains."""
    blocks = find_blocks(NET)
    headless = SimpleNamespace(**{**vars(blocks), "head": (), "rest": (*blocks.head, *blocks.rest)})
    smallest = LAYER_BYTES[0]
    clients = Clients()
    nodes = nodes_of(clients, 3, client_1={"layer-budget": smallest - 1})
    out = run(clients, nodes, model=headless, costs="bytes", budget=smallest, selection="bottom")
    assert out.failure is None
    for report in out.reports.values():
        assert masks_of(report) == {"client-0": [0], "client-1": [], "client-2": [0]}
        assert report.up.payload == 2 * smallest and len(report.replied) == 3, report.refused
    assert {block_of(n) for n in NET.state_dict() if (out.models[2][n] != out.models[0][n]).any()} == {"layer/0"}


class ClipClassifier(nn.Module):
    """CLIP's image model and a classifier of its embeddings, ViT-B/32 as configured by default; on the meta device."""

    def __init__(self, classes=10):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.clip = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig())
        self.classifier = nn.Linear(self.clip.config.projection_dim, classes, bias=False)


@pytest.fixture(scope="module")
def clip():
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        sys.modules.setdefault("torchvision", None)
    with torch.device("meta"):
        return ClipClassifier()


@pytest.mark.parametrize(("budget", "percent"), [(1, 8.52), (2, 16.59)])
def test_uploads_of_clip_are_the_published_shares_of_the_full_model(clip, budget, percent):
    """arXiv:2408.15600: the head is CLIP's final norm and projection, and the classifier."""
    width, mlp, classes = 768, 3072, 10
    # By hand: a layer has four projections, an MLP and two norms, all with biases.
    layer = 4 * (width * width + width) + 2 * width * mlp + width + mlp + 4 * width
    head = 2 * width + width * 512 + 512 * classes
    embedding = width + 3 * 32 * 32 * width + 50 * width + 2 * width
    full = embedding + 12 * layer + head
    assert round(100 * (budget * layer + head) / full, 2) == percent

    blocks = find_blocks(clip)
    assert sum(parameter.numel() for parameter in clip.parameters()) == full
    assert blocks.layout.nbytes() == 4 * full and blocks.layout.nbytes(blocks.head) == 4 * head
    assert [blocks.layout.nbytes(names) for names in blocks.layers] == [4 * layer] * 12

    method = SelectiveLayersMethod(budget)
    zeros = {entry.name: np.broadcast_to(np.float32(0), entry.shape) for entry in blocks.layout.entries}
    state = method.init(ServerModel("CLIP", blocks.layout, (zeros,), blocks), Run())
    probe = Reply(client="a", parts={}, examples=1, metrics={}, vectors={"layer-scores": tuple(range(12))})
    (plan,) = method.plan(state, 1, "train", ["a"], {"a": probe})
    assert blocks.layout.nbytes(plan.returns[MODEL]) == 4 * (budget * layer + head)
    assert round(100 * blocks.layout.nbytes(plan.returns[MODEL]) / blocks.layout.nbytes(), 2) == percent
    assert plan.trains == plan.returns[MODEL]
    assert all(f".layers.{11 - k}." in " ".join(plan.trains) for k in range(budget)), "those with the largest norms"


# ---- the member of an ensemble ---------------------------------------------------------------------------------------


def ensemble(**options):
    return FedEnsemble(modes=2, member=SelectiveLayers(budget=1, coupling=0.0, model=NET), **options)


def starts():
    return join_modes([ArrayRecord(Net(seed).state_dict()) for seed in range(2)])


def mode_in(models, mode):
    return {name: array for name, array in models.items() if name.startswith(f"mode/{mode}/")}


def test_the_modes_of_an_ensemble_are_trained_by_layers():
    out = run(make=ensemble, start=starts(), rounds=4, strata=4)
    others = 0
    for number, report in out.reports.items():
        mode_of = dict(zip(report.record["clients"].tolist(), report.record["modes"].tolist(), strict=True))
        assert len(report.replied) == 4
        assert report.up.payload == sum(
            HEAD + sum(LAYER_BYTES[layer] for layer in layers) for layers in masks_of(report).values()
        )
        for mode in range(2):
            members = [client for client, had in mode_of.items() if had == mode]
            scores = [scores_of(int(client[-1]), number) for client in members]
            assert [masks_of(report)[client] for client in members] == [[int(np.argmax(s))] for s in scores]
            uploads = [out.clients.uploads[number, client][1] for client in members]
            for name, array in mode_in(out.models[number], mode).items():
                having = [entries[name[7:]].astype(float) for entries in uploads if name[7:] in entries]
                if having:  # weighted alike
                    np.testing.assert_allclose(array, sum(having) / len(having), rtol=1e-6, atol=1e-7)
                else:
                    assert array.tobytes() == out.models[number - 1][name].tobytes()
                    others += block_of(name[7:]).startswith("layer/")
    assert others
    assert [action for r, client, action, _, _ in out.clients.sent if client == "client-0"] == ["probe", "train"] * 4
    assert all(data == 0 for *_, action, _, data in out.clients.sent if action == "train")
    assert len(modes_of(out.result.arrays)) == 2


def test_a_mode_that_nobody_had_in_a_round_stays_as_it_is():
    """One stratum: all clients of a round have the same mode."""
    out = run(make=ensemble, start=starts(), rounds=4, strata=1)
    for number, report in out.reports.items():
        (had,) = set(report.record["modes"].tolist())
        for mode in range(2):
            same = all(
                array.tobytes() == out.models[number - 1][name].tobytes()
                for name, array in mode_in(out.models[number], mode).items()
            )
            assert same == (mode != had)


def test_what_a_client_holds_of_one_mode_survives_the_rounds_of_another():
    """In the second age a mode's blocks travel only where somebody trained them in the first."""
    out = run(make=ensemble, start=starts(), rounds=4, strata=1, nodes=1, min_available_nodes=1)
    had = [int(report.record["modes"][0]) for report in out.reports.values()]
    for number in (3, 4):
        before = had.index(had[number - 1]) + 1
        layers = masks_of(out.reports[before])["client-0"]
        got = out.clients.blocks_to("client-0", number, "probe")
        assert got == sorted(["head", *(f"layer/{layer}" for layer in layers)])


def test_an_ensemble_of_layers_is_resumed_bit_for_bit(tmp_path):
    def part(name, rounds, **options):
        clients = Clients()
        nodes = nodes_of(clients, all={"cache-path": str(tmp_path / name / "cache")})
        return run(clients, nodes, rounds, make=ensemble, start=starts(), deterministic=True,
                   checkpoints=tmp_path / name / "checkpoints", **options)  # fmt: skip

    whole = part("whole", 4)
    part("stopped", 2)
    resumed = part("stopped", 4, resume=True)
    assert {n: a.tobytes() for n, a in resumed.models[4].items()} == {n: a.tobytes() for n, a in
                                                                     whole.models[4].items()}  # fmt: skip


# ---- the project's own app -------------------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Runs the project's own app, server and clients, on the digits that scikit-learn brings."""
    monkeypatch.syspath_prepend(str(ROOT))

    def start(*own, **values):
        from client_app.app import app

        given = {"num-server-rounds": 2, "local-epochs": 1, "strategy": "selective", "selective.coupling": 0.0}
        config = {**defaults(), **given, "runs": str(tmp_path / "runs"), **values}
        nodes = [{"partition-id": k, "num-partitions": len(own), **config} for k, config in enumerate(own)]
        return run_config(InProcessGrid([Node(app, node) for node in nodes], config), config)

    return start


def digits_bytes(*layers):
    from tepal.models import build

    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    return nbytes(model), sum(nbytes(model.blocks[layer]) for layer in layers) + nbytes(model.head)


def test_the_projects_own_app_trains_layers_of_digits(digits):
    """Three clients, of which one declares in its node config that it can train both layers."""
    path = digits({}, {"layer-budget": 2}, {})
    metrics = [line for line in read_lines(path) if line["round"]]
    full, one = digits_bytes(0)
    _, two = digits_bytes(0, 1)
    assert [line["bytes_up"] for line in metrics] == [2 * one + two] * 2
    assert metrics[0]["bytes_down"] == 3 * full and metrics[1]["bytes_down"] < 2 * 3 * full
    assert [line["clients_replied"] for line in metrics] == [3, 3]


def test_the_projects_own_app_measures_how_long_layers_take(digits):
    path = digits({}, {"layer-budget": 1e-6}, **{
        "selective.costs": "milliseconds", "selective.budget": 1e6, "selective.selection": "top",
        "num-server-rounds": 1, "local-steps": 1,
    })  # fmt: skip
    (first,) = [line for line in read_lines(path) if line["round"]]
    assert first["bytes_up"] == digits_bytes(0, 1)[1] + digits_bytes()[1]


IMPOSSIBLE = {
    0: "a budget of 0 layers",
    3: "a budget of 3 layers: it must be a whole number from 1 to 2, the layers of TinyViT",
    "two": "this node's config has layer-budget='two', which is not a finite number",
    True: "this node's config has layer-budget=True, which is not a finite number",
}


def test_the_projects_own_app_declares_impossible_budgets_and_is_refused_alone(digits, caplog):
    wrong = [{"layer-budget": declared} for declared in IMPOSSIBLE]
    path = digits({}, {}, *wrong, **{"num-server-rounds": 1, "local-steps": 1})
    (first,) = [line for line in read_lines(path) if line["round"]]
    assert first["clients_replied"] == 2
    refused = {refusal["client"]: refusal["reason"] for refusal in first["refused"]}
    for number, said in enumerate(IMPOSSIBLE.values(), 2):
        assert said in refused[f"node {number + 1} (client-{number})"] and said in caplog.text


def test_the_projects_own_app_refuses_a_budget_that_is_no_finite_number(digits):
    wrong = [{"layer-budget": declared} for declared in (math.nan, math.inf)]
    path = digits({}, {}, *wrong, **{"num-server-rounds": 1, "local-steps": 1})
    (first,) = [line for line in read_lines(path) if line["round"]]
    assert first["clients_replied"] == 2


def test_a_budget_that_the_model_does_not_have_stops_the_run_before_it_starts(digits, tmp_path):
    with pytest.raises(ConfigError, match="budget of 3 layers: it must be a whole number from 1 to 2"):
        digits({}, {}, **{"selective.budget": 3})
    assert not (tmp_path / "runs").exists()


def test_layers_that_take_microseconds_are_chosen_among():
    clients = Clients(lambda client, number, metrics: {**metrics, "layer-milliseconds": [1e-3] * LAYERS})
    out = run(clients, rounds=1, costs="milliseconds", budget=2e-3)
    assert out.reports[1].record["masks"].sum(axis=1).tolist() == [2] * 4


def test_the_run_returns_to_the_model_before_one_that_no_client_can_probe():
    """The liar's own app accepts its model: alone of five it answers the probe, and it would train alone."""

    def app_of(honest):
        app = ClientApp(mods=[PartialExchange()])

        @app.train("probe")
        def probe(msg, context):
            if honest and max(np.abs(array).max() for array in received(msg).model.values()) > 5:
                raise FloatingPointError("the loss is nan")
            metrics = {"num-examples": 10, "layer-scores": [1.0] * LAYERS}
            return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

        @app.train()
        def train(msg, context):
            came = received(msg)
            factor = 1.0 if honest or came.plan.round > 1 else 400.0
            trained = set(came.plan.trains)
            model = {
                name: np.asarray(array + factor * 0.1, array.dtype) if name in trained else array
                for name, array in came.model.items()
            }
            record = ArrayRecord({name: Array(np.asarray(array)) for name, array in came.layout.join(model).items()})
            metrics = MetricRecord({"num-examples": 10})
            return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)

        return app

    nodes = [Node(app_of(honest=k != 1), {"partition-id": k}) for k in range(5)]
    out = run(nodes=nodes, rounds=6, min_replies=1)
    assert out.failure is None and max(np.abs(array).max() for array in out.models[1].values()) > 5
    assert out.reports[2].went_back and "client-1" not in out.reports[2].replied
    assert all(len(report.replied) >= 2 for report in out.reports.values())
    assert max(np.abs(array).max() for array in out.models[6].values()) < 5
