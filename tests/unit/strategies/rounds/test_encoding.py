"""Rounds whose values travel encoded. Clients move what they get by steps that follow from partition and round."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange, received
from tepal.exchange.encodings import Encoding
from tepal.exchange.files import read_arrays
from tepal.models.blocks import find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.strategies import FedACS, FedAvg, FedFrozen, RoundFailed
from tepal.strategies.in_process import InProcessGrid, Node
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


def left_out(cache_folder, partition):
    (folder,) = cache_folder.glob(f"*/personal/client-{partition}")
    newest = max(folder.glob("*.safetensors"))
    (kept,) = read_arrays(newest).items()
    assert kept[0] == "left out/model/w"
    return kept[1]


@pytest.mark.parametrize(
    "encoding",
    [
        Encoding(up="int8"), Encoding(top_k=0.05), Encoding("int8", "int8", 0.1), Encoding(up="int4"),
        Encoding(up="ternary"), Encoding("bfloat16", "sign"), Encoding(up="sign", top_k=0.2), Encoding("auto", "auto"),
    ],
)  # fmt: skip
def test_error_feedback_brings_everything_in_the_end(cache_folder, encoding):
    made, _ = start(FedAvg(encoding=encoding), moving_app(), rounds=12)
    expected = START["w"] + sum(step(0, number).astype(float) for number in range(1, 13))
    kept = left_out(cache_folder, 0)
    assert np.abs(kept).max() > 1e-5
    np.testing.assert_allclose(made["w"] + kept, expected, atol=3e-6)


@pytest.mark.parametrize("clients, share", [(2, 0.5), (6, 0.5), (8, 0.25), (8, 1.0)])
def test_auto_leaves_out_less_of_a_client_that_takes_part_rarely(cache_folder, clients, share):
    strategy = FedAvg(encoding=Encoding(up="auto", left_out=0.5), fraction_train=share, fraction_evaluate=0, seed=1)
    _, (report,) = start(strategy, moving_app(), clients=clients)
    kept = [left_out(cache_folder, name.removeprefix("client-")) for name in report.replied]
    assert len(kept) == share * clients
    moved = [step(int(name.removeprefix("client-")), 1) for name in report.replied]
    found = np.mean([np.square(of).sum() / np.square(by).sum() for of, by in zip(kept, moved, strict=True)])
    assert 0.6 * 0.5 * share < found < 1.3 * 0.5 * share + 0.03


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
