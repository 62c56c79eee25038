"""Rounds whose values travel encoded. Clients move what they get by steps that follow from partition and round."""

import contextlib
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange, received
from tepal.exchange.encodings import Encoding
from tepal.exchange.files import read_arrays
from tepal.exchange.mod import PartialExchange
from tepal.exchange.sender import Sender
from tepal.models.blocks import find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.strategies import (
    Ditto,
    FedACS,
    FedAvg,
    FedAvgM,
    FedBE,
    FedDyn,
    FedEnsemble,
    FedFrozen,
    LocalOnly,
    RoundFailed,
    Scaffold,
    join_modes,
)
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.cohort import Cohorts
from tests.quiet import quiet  # noqa: F401

START = {
    "w": np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32),
    "bias": np.zeros(40, np.float32),
    "count": np.array(0),
}
MATRIX, REST = START["w"].size, 4 * 40 + 8


def step(partition, number, scale=1e-2):
    return scale * np.random.default_rng([partition, number]).normal(size=START["w"].shape).astype(np.float32)


def moving_app(seen=None, scale=1e-2, exchange=partial_exchange):
    """`seen` gets (partition, round, action) → the model as it came."""
    app = ClientApp(mods=[exchange])
    seen = {} if seen is None else seen

    def came(msg, context, action):
        partition, number = int(context.node_config["partition-id"]), msg.content["config"]["server-round"]
        model = {name: array.numpy() for name, array in msg.content["arrays"].items()}
        seen[partition, number, action] = model
        return partition, number, model

    @app.train()
    def train(msg, context):
        partition, number, model = came(msg, context, "train")
        trains = received(msg).plan.trains
        moved = {
            name: value + step(partition, number, scale) if name == "w" else
            value + np.float32(0.01) if name in trains and value.dtype.kind == "f" else value
            for name, value in model.items()
        }  # fmt: skip
        record = ArrayRecord({name: Array(np.asarray(value)) for name, value in moved.items()})
        metrics = MetricRecord({"num-examples": partition + 1, "trained-accuracy": 0.5, "test-examples": 4})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        came(msg, context, "evaluate")
        metrics = {"num-examples": 2, "personal-accuracy": 0.25, "received-accuracy": 0.25}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return app


def start(strategy, app, clients=1, rounds=1, arrays=START, **options):
    history = []
    strategy.on_round = history.append
    strategy.rules = replace(strategy.rules, min_available_nodes=1)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(clients)], **options)
    initial = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    result = strategy.start(grid, initial, num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}, history


def bfloat16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float().numpy()


def test_differences_come_back_rounded_and_are_added_to_the_servers_values():
    made, history = start(FedAvg(encoding=Encoding(up="bfloat16")), moving_app(), clients=3, rounds=4)
    expected = START["w"].astype(float)
    for number in range(1, 5):
        expected += sum((k + 1) / 6 * bfloat16(step(k, number)).astype(float) for k in range(3))
    # w + step − w is the step but for the last bits, which now and then decide to which side it is rounded.
    close = np.abs(made["w"] - expected) < 1e-6
    assert close.mean() > 0.9 and np.abs(made["w"] - expected).max() < 5e-5
    np.testing.assert_allclose(made["bias"], 0.04, rtol=1e-5)
    assert [report.up.payload for report in history] == [3 * (2 * MATRIX + REST)] * 4
    assert history[0].down.payload == 3 * (4 * MATRIX + REST)


@pytest.mark.parametrize("down", ["bfloat16", "float16", "int8"])
def test_what_is_smaller_than_a_step_of_the_way_down_is_not_lost(down):
    seen = {}
    strategy = FedAvg(encoding=Encoding(down=down), fraction_evaluate=0)
    made, history = start(strategy, moving_app(seen, scale=1e-5), rounds=50)
    expected = START["w"] + sum(step(0, number, 1e-5).astype(float) for number in range(1, 51))
    np.testing.assert_allclose(made["w"], expected, atol=2e-6)
    assert np.abs(made["w"] - START["w"]).max() > 1e-4
    assert {2: 2 * MATRIX, 1: MATRIX + 4 * 6}[1 if down == "int8" else 2] + REST == history[0].down.payload
    first = seen[0, 1, "train"]["w"]
    if down == "bfloat16":
        np.testing.assert_array_equal(first, bfloat16(START["w"]))
    assert 0 < np.abs(first - START["w"]).max() < 0.02


@pytest.mark.parametrize("encoding", [None, Encoding(down="int8", up="bfloat16"), Encoding(up="int8", top_k=0.25)])
def test_plain_bytes_are_those_of_the_same_entries_without_an_encoding(encoding):
    _, history = start(FedAvg(encoding=encoding), moving_app(), clients=3, rounds=2)
    model = sum(value.nbytes for value in START.values())
    trains = START["w"].nbytes + START["bias"].nbytes
    for report in history:
        assert report.up.plain in (3 * model, 3 * trains)
        assert report.down.plain % model == 0 and report.down.plain >= 3 * model
        if encoding is None:
            assert (report.down.plain, report.up.plain) == (report.down.payload, report.up.payload)
        else:
            assert report.down.plain + report.up.plain > report.down.payload + report.up.payload


def left_out(cache_folder, partition, entry="w"):
    (folder,) = cache_folder.glob(f"*/personal/client-{partition}")
    newest = max(folder.glob("*.safetensors"))
    kept = read_arrays(newest)
    assert kept.keys() <= {"left out/model/w", "left out/model/bias"}, "a vector's only in auto and ranks"
    return kept[f"left out/model/{entry}"]


@pytest.mark.parametrize(
    "encoding",
    [
        Encoding(up="int8"), Encoding(top_k=0.05), Encoding("int8", "int8", 0.1), Encoding(up="int4"),
        Encoding(up="ternary"), Encoding("bfloat16", "sign"), Encoding(up="sign", top_k=0.2), Encoding("auto", "auto"),
        Encoding("rank1", "rank2"),
    ],
)  # fmt: skip
def test_error_feedback_brings_everything_in_the_end(cache_folder, encoding):
    made, _ = start(FedAvg(encoding=encoding), moving_app(), rounds=12)
    expected = START["w"] + sum(step(0, number).astype(float) for number in range(1, 13))
    kept = left_out(cache_folder, 0)
    assert np.abs(kept).max() > 1e-5
    np.testing.assert_allclose(made["w"] + kept, expected, atol=3e-6)


@pytest.mark.parametrize("clients, share, expected", [(2, 1.0, 0.5), (8, 1.0, 0.5), (3, 2 / 3, 0.5 / 1.5)])
def test_auto_with_feedback_leaves_out_less_of_a_client_that_takes_part_rarely(cache_folder, clients, share, expected):
    strategy = FedAvg(encoding=Encoding(up="auto", left_out=0.5), fraction_train=share, fraction_evaluate=0, seed=1)
    _, (report,) = start(strategy, moving_app(), clients=clients)
    kept = [left_out(cache_folder, name.removeprefix("client-")) for name in report.replied]
    assert len(kept) == round(share * clients)
    moved = [step(int(name.removeprefix("client-")), 1) for name in report.replied]
    found = np.mean([np.square(of).sum() / np.square(by).sum() for of, by in zip(kept, moved, strict=True)])
    assert 0.6 * expected < found < 1.3 * expected + 0.03
    partitions = [name.removeprefix("client-") for name in report.replied]
    of_vectors = [np.square(left_out(cache_folder, k, "bias")).sum() for k in partitions]
    shares = [
        (np.square(of).sum() + vector) / (np.square(by).sum() + 40 * 0.01**2)
        for of, vector, by in zip(kept, of_vectors, moved, strict=True)
    ]
    assert report.mean_left_out == (None, pytest.approx(np.mean(shares), rel=1e-3)), "and the report has it"


@pytest.mark.parametrize("clients", [10, 40])
def test_auto_without_feedback_keeps_nothing_and_is_right_along_the_update(cache_folder, clients):
    """One client of many in a round: its error is an eighth of what feedback would leave, and so of its update."""
    encoding = Encoding(up="auto", left_out=0.5)
    strategy = FedAvg(encoding=encoding, fraction_train=1 / clients, fraction_evaluate=0, seed=1)
    made, (report,) = start(strategy, moving_app(), clients=clients)
    (name,) = report.replied
    assert [read_arrays(path) for path in cache_folder.glob(f"*/personal/{name}/*.safetensors")] == [{}]
    moved = np.append(step(int(name.removeprefix("client-")), 1), np.full(40, 0.01)).astype(float)
    came = np.append(made["w"] - START["w"], made["bias"]).astype(float)
    assert came @ moved == pytest.approx(moved @ moved, rel=1e-3)
    error = np.square(came - moved).sum() / (moved @ moved)
    assert 0.08 < error < 0.2
    assert report.mean_left_out == (None, pytest.approx(error / (1 + error), rel=1e-3)), "without the scale"


def averaged(strategy, monkeypatch, clients=4, arrays=START, **options):
    """Client → `Outgoing.averaged` of the last message to it for training, and the encoding of its answer."""
    found = {}
    content = Sender.content

    def noted(self, outgoing, *rest):
        made = content(self, outgoing, *rest)
        if outgoing.plan.action == "train":
            found[outgoing.plan.client] = outgoing.averaged, made[1].upload
        return made

    monkeypatch.setattr(Sender, "content", noted)
    with contextlib.suppress(RoundFailed):  # this app has no control variates
        start(strategy, moving_app(**options), clients, rounds=1, arrays=arrays)
    return found


MEANS = {
    "fedavg": (lambda **of: FedAvg(**of), 4), "fedavgm": (lambda **of: FedAvgM(**of), 4),
    "ditto": (lambda **of: Ditto(**of), 4), "clipped": (lambda **of: FedAvg(robust="clip", **of), 4),
    "median": (lambda **of: FedAvg(robust="median", **of), 0), "scaffold": (lambda **of: Scaffold(**of), 0),
    "feddyn": (lambda **of: FedDyn(**of), 0), "fedacs": (lambda **of: FedACS(quantile=0.5, **of), 0),
    "fedbe": (lambda **of: FedBE(distil=False, **of), 0), "local": (lambda **of: LocalOnly(**of), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_methods_that_need_a_mean_alone(monkeypatch, name):
    make, expected = MEANS[name]
    strategy = make(encoding=Encoding(up="auto"), fraction_train=0.25, fraction_evaluate=0)
    found = averaged(strategy, monkeypatch, clients=16)
    assert {count for count, _ in found.values()} == {expected} and len(found) == 4
    for _, wire in found.values():
        assert wire.unbiased == (expected > 0)
        assert wire.feedback == (name != "local")


def test_of_an_ensemble_the_clients_of_a_mode_are_averaged(monkeypatch):
    modes = [{name: value + k if value.dtype.kind == "f" else value for name, value in START.items()} for k in range(3)]
    arrays = {name: array.numpy() for name, array in join_modes(
        [{name: Array(array) for name, array in mode.items()} for mode in modes]).items()}  # fmt: skip
    strategy = FedEnsemble(modes=3, strata=6, encoding=Encoding(up="auto"), fraction_train=0.5, fraction_evaluate=0)
    found = averaged(strategy, monkeypatch, clients=12, arrays=arrays)
    of_a_mode = Counter(count for count, _ in found.values())
    assert sum(of_a_mode.values()) == 6 and all(number % count == 0 for count, number in of_a_mode.items())


def test_of_selected_layers_the_fewest_clients_of_a_layer_count(monkeypatch):
    layers = {f"layer{k}": np.zeros((3, 4), np.float32) for k in range(3)}
    chosen = {"client-0": ["layer0"], "client-1": ["layer0", "layer1"], "client-2": ["layer0", "layer1"]}

    def plan(self, state, round, phase, cohort, probe_replies):
        plans = plan_all(self, state, round, phase, cohort, probe_replies)
        return [replace(one, trains=tuple(chosen[one.client]), returns={"model": tuple(chosen[one.client])})
                for one in plans]  # fmt: skip

    plan_all = FedAvgMethod.plan
    monkeypatch.setattr(FedAvgMethod, "plan", plan)
    found = averaged(FedAvg(encoding=Encoding(up="auto"), fraction_evaluate=0), monkeypatch, 3, layers, seen={})
    assert {client: count for client, (count, _) in found.items()} == {"client-0": 3, "client-1": 2, "client-2": 2}


@pytest.mark.parametrize(
    ("sizes", "share", "weights"),
    [
        ([100, 10, 10, 10, 10], 1.0, [100, 10, 10, 10, 10]),
        ([100, 10, 10, 10, 10], 0.5, [40, 10, 10, 10, 10]),  # the largest has half of all
        ([10**15, 10, 10, 10, 10], 0.5, [40, 10, 10, 10, 10]),
        ([10**15, 10**9, 10, 10, 10], 0.3, [22.5, 22.5, 10, 10, 10]),  # each of two has 0.3 of all
    ],
)
def test_clients_of_unequal_weights_count_as_fewer_of_equal_ones(monkeypatch, sizes, share, weights):
    exchange = PartialExchange(lambda msg, context: {"num-examples": sizes[context.node_config["partition-id"]]})
    strategy = FedAvg(encoding=Encoding(up="auto"), fraction_evaluate=0, max_weight_share=share)
    found = averaged(strategy, monkeypatch, 5, exchange=exchange)
    # The variance of their weighted mean is that of a mean of so many.
    shares = np.array(weights) / sum(weights)
    assert [count for count, _ in found.values()] == pytest.approx([1 / np.square(shares).sum()] * 5)


def test_replies_that_are_not_awaited_are_not_averaged(monkeypatch):
    strategy = FedAvg(encoding=Encoding(up="auto"), fraction_train=0.5, fraction_evaluate=0, max_replies=2)
    found = averaged(strategy, monkeypatch, 16)
    assert len(found) == 8 and {count for count, _ in found.values()} == {2}


@pytest.mark.parametrize("feedback", [True, False])
def test_within_a_budget_what_is_left_out_is_fed_back_and_nothing_is_scaled_up(monkeypatch, feedback):
    encoding = Encoding("auto", "auto", budget=100_000, error_feedback=feedback)
    found = averaged(FedAvg(encoding=encoding, fraction_train=0.25, fraction_evaluate=0), monkeypatch, 16)
    assert {(wire.unbiased, wire.feedback, wire.left_out) for _, wire in found.values()} == {(False, True, 0.6 / 4)}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_without_error_feedback_auto_has_it_where_it_cannot_scale_up(monkeypatch, name, share):
    """Otherwise most of each update would be lost for good."""
    make, expected = MEANS[name]
    strategy = make(encoding=Encoding(up="auto", error_feedback=False), fraction_train=share, fraction_evaluate=0)
    for _, wire in averaged(strategy, monkeypatch, clients=16).values():
        assert (wire.unbiased, wire.feedback) == ((True, False) if expected else (False, name != "local"))
        if wire.feedback:
            assert wire.left_out == pytest.approx(0.6 * share)


@pytest.mark.parametrize(("options", "budget"), [({"robust": "median"}, 0), ({}, 500)])
def test_without_error_feedback_everything_arrives_in_the_end(cache_folder, options, budget):
    encoding = Encoding("auto", "auto", budget=budget, error_feedback=False)
    made, _ = start(FedAvg(encoding=encoding, **options), moving_app(), rounds=12)
    expected = START["w"] + sum(step(0, number).astype(float) for number in range(1, 13))
    np.testing.assert_allclose(made["w"] + left_out(cache_folder, 0), expected, atol=3e-6)


@pytest.mark.parametrize("robust, unbiased", [("none", True), ("median", False)])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_what_is_never_fed_back_is_scaled_up_in_a_mean(monkeypatch, robust, unbiased, share):
    encoding = Encoding(up="auto", left_out=0.5, error_feedback=False)
    strategy = FedAvg(encoding=encoding, robust=robust, fraction_train=share, fraction_evaluate=0)
    for count, wire in averaged(strategy, monkeypatch, 16).values():
        assert (wire.unbiased, wire.feedback) == (unbiased, not unbiased)
        assert wire.left_out == pytest.approx(count / 8 / (1 + count / 8) if unbiased else 0.5 * share)


def test_what_was_left_out_waits_while_uploads_are_scaled_up(cache_folder, monkeypatch):
    """In rounds 3 and 4 the client is one of ten, in the others the only one."""
    kept = {}
    strategy = FedAvg(encoding=Encoding(up="auto"), fraction_evaluate=0)
    monkeypatch.setattr(Cohorts, "count", lambda self: 10 if len(kept) in (2, 3) else 1)
    history = []

    class Noting(list):
        def append(self, report):
            super().append(report)
            if report.round:
                kept[report.round] = left_out(cache_folder, 0).copy()

    history = Noting()
    strategy.on_round = history.append
    strategy.rules = replace(strategy.rules, min_available_nodes=1)
    grid = InProcessGrid([Node(moving_app(), {"partition-id": 0})])
    initial = ArrayRecord({name: Array(array) for name, array in START.items()})
    strategy.start(grid, initial, num_rounds=6)
    assert not any(report.notes for report in history)
    np.testing.assert_array_equal(kept[3], kept[2])
    np.testing.assert_array_equal(kept[4], kept[2])
    assert all((kept[later] != kept[number]).any() for number, later in ((1, 2), (4, 5), (5, 6)))


def test_without_it_what_is_never_among_the_largest_is_never_sent():
    def same_step(partition, number, scale):
        return scale * np.arange(START["w"].size, dtype=np.float32).reshape(START["w"].shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "step", same_step)
        without, _ = start(FedAvg(encoding=Encoding(top_k=0.1, error_feedback=False)), moving_app(), rounds=30)
        fed_back, _ = start(FedAvg(encoding=Encoding(top_k=0.1)), moving_app(), rounds=30)
    assert (without["w"] != START["w"]).sum() == MATRIX // 10
    assert (fed_back["w"] != START["w"]).sum() > MATRIX / 2


def test_a_reply_that_was_refused_leaves_nothing_behind(cache_folder):
    """Client 0's second reply is spoilt: what it had left out counts from its first."""

    def spoil(node, message, reply):
        if message.metadata.group_id == "2" and node.config["partition-id"] == 0:
            reply.content["metrics"]["num-examples"] = -1
        return reply

    made, history = start(FedAvg(encoding=Encoding(top_k=0.05)), moving_app(), clients=2, rounds=3, spoil=spoil)
    assert [len(report.refused) for report in history] == [0, 1, 0]
    sums = {k: sum(step(k, n).astype(float) for n in (1, 2, 3) if (k, n) != (0, 2)) for k in (0, 1)}
    # Rounds 1 and 3 weigh the clients 1 : 2, round 2 is client 1's alone. So only client 0's books are simple.
    assert np.isfinite(made["w"]).all()
    sent = sums[0] - left_out(cache_folder, 0)
    assert np.count_nonzero(np.abs(sent) > 1e-6) <= 2 * 12, "what was sent in two rounds"


def test_the_same_seed_gives_the_same_bits_whoever_replies_first():
    def run(order, seed=7):
        strategy = FedAvg(encoding=Encoding("bfloat16", "int8", seed=seed), deterministic=True)
        strategy.rules = replace(strategy.rules, min_available_nodes=3)
        grid = InProcessGrid([Node(moving_app(), {"partition-id": k}) for k in order])
        initial = ArrayRecord({name: Array(array) for name, array in START.items()})
        return strategy.start(grid, initial, num_rounds=3).arrays["w"].numpy()

    np.testing.assert_array_equal(run([0, 1, 2]), run([2, 0, 1]))
    assert (run([0, 1, 2]) != run([0, 1, 2], seed=8)).any()


def test_what_float16_cannot_hold_ends_the_run_in_words_and_keeps_the_model():
    arrays = {**START, "w": np.full((2, 2), 1e6, np.float32)}
    said = r"round 1 cannot be sent: entry 'w' cannot be sent as float16.*bfloat16"
    with pytest.raises(RoundFailed, match=said) as info:
        start(FedAvg(encoding=Encoding("float16")), moving_app(), arrays=arrays)
    np.testing.assert_array_equal(info.value.result.arrays["w"].numpy(), arrays["w"])


def test_a_client_whose_changes_do_not_fit_is_refused_alone():
    def huge(partition, number, scale):
        return np.full(START["w"].shape, 1e6 if partition == 1 else 0.5, np.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "step", huge)
        made, (report,) = start(FedAvg(encoding=Encoding(up="float16")), moving_app(), clients=2)
    assert [name for name, _ in report.refused] == ["client-1"] and "65504" in report.refused[0][1]
    np.testing.assert_allclose(made["w"], START["w"] + 0.5, rtol=1e-6)


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    model = TinyViT(image_shape=(1, 8, 8), classes=10)
    return model, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_what_is_frozen_goes_down_exactly_and_once(vit, cache_folder):
    model, arrays = vit
    blocks = find_blocks(model)
    seen = {}
    history = []

    def forget(report):
        history.append(report)
        if report.round == 3:  # and a client that has lost it gets the same again
            shutil.rmtree(cache_folder)

    strategy = FedFrozen(
        warmup_rounds=1, model=model, encoding=Encoding("int8"), fraction_evaluate=0, min_available_nodes=1,
        on_round=forget,
    )  # fmt: skip
    grid = InProcessGrid([Node(moving_app(seen), {"partition-id": 0})])
    result = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in arrays.items()}), num_rounds=5)
    final = blocks.layout.split({name: array.numpy() for name, array in result.arrays.items()})
    phi = blocks.layout.nbytes(blocks.query_key)
    for number in range(2, 6):
        came = blocks.layout.split(seen[0, number, "train"])
        for name in blocks.query_key:
            np.testing.assert_array_equal(came[name], final[name])
    down = [report.down.payload for report in history]
    assert down[1] == down[2] + phi == down[3] == down[4] + phi
    assert down[2] < 0.35 * blocks.layout.nbytes(blocks.value)
    assert [len(report.refused) + len(report.lost) for report in history] == [0] * 5


@pytest.mark.parametrize(
    "encoding",
    [Encoding(up="bfloat16"), Encoding("bfloat16", "int8"), Encoding("int8", "int8", 0.2), Encoding("int8", "sign")],
)
def test_a_client_and_the_server_know_a_personal_model_to_the_bit(encoding):
    """So the server need not send what it asks a client to score. What a run delivers is the mean of these models."""
    seen = {}
    mean, history = start(FedACS(quantile=0.5, encoding=encoding), moving_app(seen), clients=3, rounds=3)
    assert history[-1].evaluate_metrics["personal-accuracy"] == 0.25
    scored = [seen[partition, 3, "evaluate"]["w"] for partition in range(3)]
    np.testing.assert_array_equal(mean["w"], np.mean(scored, axis=0, dtype=np.float64).astype(np.float32))
    each = {"float32": 4 * MATRIX, "bfloat16": 2 * MATRIX, "int8": MATRIX + 4 * 6}[encoding.down] + REST
    assert history[0].down.payload == 3 * each, "all get the same to train, and nothing to score"
    assert history[-1].down.payload <= 3 * each
