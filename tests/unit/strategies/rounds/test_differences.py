"""Rounds in which clients are sent differences from what they have."""

import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange import partial_exchange, received
from tepal.exchange.encodings import CODECS, FIXED, Encoding
from tepal.exchange.files import read_arrays, write_arrays
from tepal.exchange.plan import Reply
from tepal.exchange.sender import Sender
from tepal.models.blocks import find_blocks
from tepal.records.round_record import RoundRecord
from tepal.strategies import FedACS, FedAvg, FedEnsemble, FedFrozen, join_modes
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.tasks import IMAGES
from tests.quiet import quiet  # noqa: F401
from tests.unit.strategies.rounds.test_encoding import MATRIX, REST, START, moving_app, start, step, vit  # noqa: F401

SCALES = 4 * len(START["w"])
SIGNS = MATRIX // 8 + SCALES
WHOLE = MATRIX + SCALES + REST
"""Bytes of the model as int8."""


def nearest(values, most):
    """Integers from -most to most in units of max|row| / most."""
    unit = np.abs(values).max(axis=1, keepdims=True) / most
    return np.rint(values / unit) * unit


def signs(values):
    return np.where(values >= 0, 1, -1) * np.abs(values).mean(axis=1, keepdims=True)


def as_sent(node, message, reply):
    """Replies as they are; a grid that may spoil them has its clients verify every digest."""
    return reply


@pytest.mark.parametrize("dtype", ["sign", "int4"])
def test_clients_have_what_the_paper_has_them_have(dtype):
    """EF21-P: w ← w + C(x − w), from w = x as int8. The server's x never has an error."""
    seen = {}
    strategy = FedAvg(encoding=Encoding(down=dtype), fraction_evaluate=0)
    made, history = start(strategy, moving_app(seen), rounds=6, spoil=as_sent)
    x = START["w"].astype(float)
    w = nearest(x, 127)
    for number in range(1, 7):
        if number > 1:
            w += signs(x - w) if dtype == "sign" else nearest(x - w, 7)
        np.testing.assert_allclose(seen[0, number, "train"]["w"], w, atol=2e-6)
        np.testing.assert_allclose(seen[0, number, "train"]["bias"], 0.01 * (number - 1), atol=1e-6)
        x += step(0, number)
    np.testing.assert_allclose(made["w"], x, atol=2e-6)
    each = {"sign": SIGNS, "int4": MATRIX // 2 + SCALES}[dtype] + REST
    assert [report.down.payload for report in history] == [WHOLE, *[each] * 5]
    assert [report.down.plain for report in history] == [4 * MATRIX + REST] * 6


def test_of_the_largest_changes_all_arrive_in_the_end():
    seen = {}
    strategy = FedAvg(encoding=Encoding("int8", top_k_down=0.1), fraction_evaluate=0)

    def still(partition, number, scale):
        return step(partition, number, scale if number <= 8 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moving_app.__globals__, "step", still)
        made, _ = start(strategy, moving_app(seen, scale=1.0), rounds=40)
    changed = [np.count_nonzero(seen[0, n + 1, "train"]["w"] != seen[0, n, "train"]["w"]) for n in range(1, 40)]
    assert np.median(changed) == 24 and max(changed) <= 30, "a tenth of 240 values, and those of equal magnitude"
    apart = [np.abs(seen[0, number, "train"]["w"] - made["w"]).max() for number in (9, 40)]
    assert apart[1] < 0.01 * apart[0]


def test_all_clients_of_a_round_have_the_same_and_it_is_packed_once(monkeypatch):
    packed = []
    write = CODECS["sign"].write
    monkeypatch.setattr(type(CODECS["sign"]), "write", lambda self, *of: packed.append(1) or write(*of))
    seen = {}
    strategy = FedAvg(encoding=Encoding("sign"), fraction_evaluate=0)
    start(strategy, moving_app(seen), clients=3, rounds=4, spoil=as_sent)
    for number in range(1, 5):
        for client in (1, 2):
            np.testing.assert_array_equal(seen[client, number, "train"]["w"], seen[0, number, "train"]["w"])
    assert len(packed) == 3


def test_a_model_that_is_scored_and_then_trained_is_sent_once(monkeypatch):
    seen = {}
    monkeypatch.setattr("tepal.strategies.rounds.runner.ON_TESTS", "never")  # clients score in a phase of its own
    made, history = start(FedAvg(encoding=Encoding("sign")), moving_app(seen), rounds=4)
    sent = [report.down.payload for report in history]
    assert sent == [WHOLE + SIGNS + REST, *[SIGNS + REST] * 2, WHOLE], "round 1: to train, and to score; then to score"
    for number in range(1, 4):
        scored, trained = seen[0, number, "evaluate"], seen[0, number + 1, "train"]
        np.testing.assert_array_equal(scored["w"], trained["w"])
    # The result is a difference in int8: a 254th of a difference, not of a value.
    apart = np.abs(seen[0, 4, "evaluate"]["w"] - made["w"]).max()
    assert apart < 2e-4 < np.abs(seen[0, 3, "evaluate"]["w"] - made["w"]).max()


@pytest.mark.parametrize(
    "encoding",
    [Encoding("sign"), Encoding("ternary"), Encoding("sign", top_k_down=0.1), Encoding("rank1"), Encoding("auto")],
)
def test_values_that_stay_the_same_are_approached(encoding):
    """Sent in the round in which they came to be, and in every other round after it."""
    seen = {}

    def still(partition, number, scale):
        return step(partition, number, 1.0 if number <= 3 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moving_app.__globals__, "step", still)

        without_bias = {name: START[name] for name in ("w", "count")}
        strategy = FedAvg(encoding=encoding, fraction_evaluate=0)
        made, history = start(strategy, moving_app(seen), rounds=40, arrays=without_bias)
    apart = [np.abs(seen[0, number, "train"]["w"] - made["w"]).max() for number in (4, 12, 40)]
    assert apart[0] > 1.5 * apart[1] > 2 * apart[2]
    assert [report.down.payload > 8 for report in history[3:9]] == [True, False] * 3


class Grid(InProcessGrid):
    """A grid whose nodes come and go: `here(round, partition)` tells which are connected."""

    def __init__(self, *args, here=lambda number, partition: True, **options):
        super().__init__(*args, **options)
        self.here, self.number = here, 1

    def get_nodes(self):
        there = {node_id for node_id, node in self.nodes.items() if self.here(self.number, node.config["partition-id"])}
        return [node for node in super().get_nodes() if node.node_id in there]


def rounds_of(strategy, grid, rounds, **options):
    history = []

    def next_round(report):
        history.append(report)
        grid.number = report.round + 1

    strategy.on_round = next_round
    strategy.rules = replace(strategy.rules, min_available_nodes=1)
    initial = ArrayRecord({name: Array(array) for name, array in START.items()})
    result = strategy.start(grid, initial, num_rounds=rounds, **options)
    return result, history


def test_a_client_that_missed_rounds_is_sent_one_difference_and_a_newcomer_the_whole():
    seen = {}
    strategy = FedAvg(encoding=Encoding("sign"), fraction_evaluate=0)
    here = {0: range(1, 9), 1: (1, 5, 6), 2: range(4, 9)}
    grid = Grid(
        [Node(moving_app(seen), {"partition-id": k}) for k in here], here=lambda number, k: number in here[k],
        spoil=as_sent,
    )  # fmt: skip
    _, history = rounds_of(strategy, grid, 8)
    difference = SIGNS + REST
    assert [report.down.payload for report in history] == [
        2 * WHOLE, difference, difference, difference + WHOLE, 3 * difference, 3 * difference, 2 * difference,
        2 * difference,
    ]  # fmt: skip
    assert not any(report.lost or report.refused or report.resent for report in history)
    # Its difference is from what it had, and has the error of one encoding.
    assert (seen[1, 5, "train"]["w"] != seen[0, 5, "train"]["w"]).any()
    moved = np.abs(seen[0, 5, "train"]["w"] - seen[1, 1, "train"]["w"]).max()
    assert np.abs(seen[1, 5, "train"]["w"] - seen[0, 5, "train"]["w"]).max() < moved


@pytest.mark.parametrize("missed", [0, 1, 4, 9])
def test_auto_leaves_out_a_smaller_share_of_missed_rounds_than_of_one(missed):
    """Of the changes of m rounds 1 / √m of the share that is left out of one."""
    seen = {}
    strategy = FedAvg(encoding=Encoding("auto", left_out=0.5), fraction_evaluate=0)
    here = {0: range(1, 20), 1: (1, 2 + missed)}
    grid = Grid(
        [Node(moving_app(seen), {"partition-id": k}) for k in here], here=lambda number, k: number in here[k],
        spoil=as_sent,
    )  # fmt: skip
    models = {}
    with pytest.MonkeyPatch.context() as patch:
        content = Sender.content

        def noted(self, outgoing, *args):
            models[outgoing.plan.round] = {n: v.copy() for n, v in outgoing.values("model").items()}
            return content(self, outgoing, *args)

        patch.setattr(Sender, "content", noted)
        rounds_of(strategy, grid, 2 + missed)
    had, came, model = seen[1, 1, "train"]["w"], seen[1, 2 + missed, "train"]["w"], models[2 + missed]["w"]
    whole, left = np.square(model - had).sum(), np.square(model - came).sum()
    share = 0.5 / math.sqrt(1 + missed)
    assert 0.6 * share < left / whole < 1.3 * share + 0.03


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("budget", [0, 4_000, 1_500, 100])
def test_rounds_stay_within_a_budget(clients, budget):
    arrays = {"w": np.random.default_rng(0).normal(size=(60, 100)).astype(np.float32), "bias": np.zeros(5, np.float32)}

    def wide(partition, number, scale):
        return scale * np.random.default_rng([partition, number]).normal(size=(60, 100)).astype(np.float32)

    strategy = FedAvg(encoding=Encoding("auto", "auto", left_out=0.1, budget=budget), fraction_evaluate=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moving_app.__globals__, "step", wide)
        _, history = start(strategy, moving_app(), clients=clients, rounds=5, arrays=arrays, spoil=as_sent)
    for report in history[1:]:
        least = clients * (FIXED + 20)  # the head of a matrix, a value, and the bias
        for way in (report.down.payload, report.up.payload):
            if budget:
                assert way <= max(budget / 2, least)
            else:
                assert way > clients * 1_000
    assert not any(report.lost or report.refused or report.resent for report in history)


@pytest.mark.parametrize("budget", [18_000, 30_000, 60_000])
def test_several_blocks_share_a_budget_and_each_of_them_arrives(vit, budget):  # noqa: F811
    """FedFrozen has two blocks, and frozen entries that are sent once; the message has many matrices."""
    model, arrays = vit
    blocks, seen, history = find_blocks(model), {}, []
    strategy = FedFrozen(
        warmup_rounds=3, model=model, encoding=Encoding("auto", "auto", left_out=0.05, budget=budget),
        fraction_evaluate=0, min_available_nodes=1, on_round=history.append,
    )  # fmt: skip

    def everywhere(msg, context):
        came = received(msg)
        rng = np.random.default_rng(came.plan.round)
        moved = {
            name: value + 0.01 * rng.normal(size=value.shape).astype(value.dtype) if name in came.plan.trains else value
            for name, value in came.model.items()
        }
        seen[came.plan.round] = came.model
        record = ArrayRecord({name: Array(array) for name, array in came.layout.join(moved).items()})
        return Message(RecordDict({"arrays": record, "m": MetricRecord({"num-examples": 1})}), reply_to=msg)

    app = ClientApp(mods=[partial_exchange])
    app.train()(everywhere)
    grid = InProcessGrid([Node(app, {"partition-id": 0})], spoil=as_sent)
    strategy.start(grid, ArrayRecord({n: Array(a) for n, a in arrays.items()}), num_rounds=6)
    for report in history:
        assert report.up.payload <= budget / 2
        if report.round in (2, 3, 5, 6):  # 1: the whole; 4: the frozen entries, exactly
            assert report.down.payload <= budget / 2
    matrices = [entry.name for entry in blocks.layout.entries if len(entry.shape) > 1]
    assert len(matrices) > 5
    for name in matrices:
        last = 3 if name in blocks.query_key else 6
        assert any((seen[number][name] != seen[number - 1][name]).any() for number in range(2, last + 1)), name


def damage(folder):
    for file in list(folder.iterdir()):
        file.write_bytes(file.read_bytes()[:-8] + b"\1" * 8)


def other_values(folder):
    """Files that are whole, with other values than their names say."""
    for file in list(folder.iterdir()):
        file.unlink()
        write_arrays(file, {name: value + 1 for name, value in START.items()}, durable=False)


@pytest.mark.parametrize("what", [shutil.rmtree, damage, other_values])
def test_what_a_cache_lost_is_sent_in_the_same_round(cache_folder, what):
    seen, history = {}, []
    strategy = FedAvg(encoding=Encoding("sign"), fraction_evaluate=0)

    def befall(report):
        history.append(report)
        if report.round == 2:
            what(next(cache_folder.glob("*/clients/client-0")))

    strategy.on_round = befall
    strategy.rules = replace(strategy.rules, min_available_nodes=2)
    caches = [cache_folder, cache_folder / "other"]
    nodes = [Node(moving_app(seen), {"partition-id": k, "cache-path": str(caches[k])}) for k in (0, 1)]
    initial = ArrayRecord({name: Array(array) for name, array in START.items()})
    strategy.start(InProcessGrid(nodes, spoil=as_sent), initial, num_rounds=4)
    assert [len(report.replied) for report in history] == [2] * 4
    assert [report.resent for report in history] == [0, 0, 1, 0]
    assert history[2].down.payload == 2 * (SIGNS + REST) + WHOLE
    assert history[3].down.payload == 2 * (SIGNS + REST)
    assert np.abs(seen[0, 3, "train"]["w"] - seen[1, 3, "train"]["w"]).max() < 0.1


def test_a_tenth_of_refused_replies_costs_their_updates_and_nothing_else(monkeypatch, cache_folder):
    """The client is sent a difference again, and what encodings leave out of the merged updates still arrives."""
    refused, merged, read = set(), {}, Sender.read

    def spoil(node, message, reply):
        client, number = node.config["partition-id"], int(message.metadata.group_id)
        if "arrays" in message.content and np.random.default_rng([client, number]).random() < 0.1:
            refused.add((f"client-{client}", number))
            reply.content["metrics"]["num-examples"] = 99  # the checksum is of another number
        return reply

    def noted(self, exchange, message, *rest):
        reply = read(self, exchange, message, *rest)
        plan = exchange.outgoing.plan
        if plan.action == "train" and isinstance(reply, Reply):
            difference = reply.parts["model"]["w"] - exchange.outgoing.values("model")["w"]
            merged[plan.client] = merged.get(plan.client, 0) + difference.astype(float)
        return reply

    monkeypatch.setattr(Sender, "read", noted)
    strategy = FedAvg(encoding=Encoding("auto", "auto"), fraction_evaluate=0)
    grid = Grid([Node(moving_app(), {"partition-id": k}) for k in range(10)], spoil=spoil)
    _, history = rounds_of(strategy, grid, 12)
    assert {(name, report.round) for report in history for name, _ in report.refused} == refused
    assert 6 < len(refused) < 24 and not any(report.lost or report.left_out for report in history)
    # The server uses nothing of a refused reply: the client reports its parts again in the next round.
    later = [sum((f"client-{k}", number - 1) in refused for k in range(10)) for number in range(1, 13)]
    assert [report.resent for report in history[2:]] == later[2:]
    assert max(report.down.payload for report in history[2:]) < history[0].down.payload / 2
    for client in range(10):
        name = f"client-{client}"
        accepted = [number for number in range(1, 13) if (name, number) not in refused]
        newest = next(cache_folder.glob(f"*/personal/{name}/{accepted[-1]:06d}-*"))
        expected = sum(step(client, number).astype(float) for number in accepted)
        kept = read_arrays(newest)["left out/model/w"]
        np.testing.assert_allclose(merged[name] + kept, expected, atol=2e-5)


def test_a_lost_reply_leaves_client_and_server_with_the_same():
    """The client has the parts of round 2, and the server last heard of those of round 1."""
    seen = {}

    def lost(node, message, reply):
        if message.metadata.group_id == "2" and node.config["partition-id"] == 0:
            return None
        return reply

    strategy = FedAvg(encoding=Encoding("sign"), fraction_evaluate=0)
    grid = Grid([Node(moving_app(seen), {"partition-id": k}) for k in (0, 1)], spoil=lost)
    _, history = rounds_of(strategy, grid, 4, timeout=2)
    assert [len(report.replied) for report in history] == [2, 1, 2, 2]
    difference = SIGNS + REST
    assert [report.down.payload for report in history[1:]] == [2 * difference, 3 * difference, 2 * difference]
    for number in (3, 4):
        np.testing.assert_array_equal(seen[0, number, "train"]["w"], seen[1, number, "train"]["w"])


@pytest.mark.parametrize("dtype", ["int4", "ternary", "rank2", "auto"])
def test_a_client_catches_up_after_a_lost_reply_and_a_lost_cache(cache_folder, dtype):
    seen = {}

    def spoil(node, message, reply):
        if node.config["partition-id"] == 0 and message.metadata.group_id == "3":
            return None
        if node.config["partition-id"] == 0 and message.metadata.group_id == "5":
            shutil.rmtree(next(cache_folder.glob("*/clients/client-0")))
        return reply

    strategy = FedAvg(encoding=Encoding(dtype, dtype), fraction_evaluate=0)
    grid = Grid([Node(moving_app(seen), {"partition-id": k}) for k in (0, 1)], spoil=spoil)
    _, history = rounds_of(strategy, grid, 8, timeout=4)
    assert [len(report.replied) for report in history] == [2, 2, 1, 2, 2, 2, 2, 2]
    assert [report.resent for report in history] == [0, 0, 0, 1, 0, 1, 0, 0], "from older values, and the whole"
    apart = [np.abs(seen[0, number, "train"]["w"] - seen[1, number, "train"]["w"]).max() for number in range(1, 9)]
    assert apart[:5] == [0] * 5
    assert 0 < apart[7] < apart[5], "the whole is rounded, and the difference is sent in the rounds that follow"


@pytest.mark.parametrize("name", ["é" * 50, "病院" * 60])
def test_a_client_may_have_a_long_name_that_is_not_ascii(name):
    strategy = FedAvg(encoding=Encoding("sign", "sign"), fraction_evaluate=0)
    _, history = rounds_of(strategy, Grid([Node(moving_app(), {"partition-id": 0, "name": name})]), 3)
    assert [report.down.payload for report in history] == [WHOLE, SIGNS + REST, SIGNS + REST]
    assert [report.replied for report in history] == [[name]] * 3


def test_clients_that_cannot_cache_are_sent_the_whole(tmp_path):
    (tmp_path / "file").write_text("in place of a folder")
    seen = {}
    nodes = [Node(moving_app(seen), {"partition-id": 0, "cache-path": str(tmp_path / "file")})]
    _, history = rounds_of(FedAvg(encoding=Encoding("sign"), fraction_evaluate=0), Grid(nodes), 3)
    assert [report.down.payload for report in history] == [WHOLE] * 3


@pytest.mark.parametrize("models", [0, 2.5])
def test_beyond_the_limit_the_whole_is_sent(models):
    strategy = FedAvg(
        encoding=Encoding("sign", reference_megabytes=1e-6 + models * (4 * MATRIX + REST) / 1e6), fraction_evaluate=0
    )
    here = {0: (1, 3, 4), 1: range(1, 6)}
    grid = Grid([Node(moving_app(), {"partition-id": k}) for k in here], here=lambda number, k: number in here[k])
    _, history = rounds_of(strategy, grid, 5)
    difference = SIGNS + REST
    sent = [report.down.payload for report in history]
    if models:
        assert sent == [2 * WHOLE, difference, 2 * difference, 2 * difference, difference]
    else:  # what was sent in this round is kept in any case
        assert sent == [2 * WHOLE, difference, 2 * WHOLE, difference + WHOLE, difference]
    assert not any(report.lost or report.refused for report in history)


def test_references_are_in_the_folder_of_the_checkpoints_and_go_at_the_end(tmp_path):
    found = []
    strategy = FedAvg(encoding=Encoding("sign"), fraction_evaluate=0, checkpoints=tmp_path)
    grid = Grid([Node(moving_app(), {"partition-id": k}) for k in (0, 1)])
    strategy.on_progress = lambda report: found.append(len(list(tmp_path.glob("references/*.safetensors"))))
    rounds_of(strategy, grid, 12)
    assert max(found) <= 3 and found[-1] >= 1, "of this round and the last, and those that clients have"
    assert not (tmp_path / "references").exists()


# ---- methods -----------------------------------------------------------------------------------------------------


def test_a_client_and_the_server_know_a_personal_model_to_the_bit():
    seen = {}
    strategy = FedACS(quantile=0.1, encoding=Encoding("sign", "sign"))
    mean, history = start(strategy, moving_app(seen), clients=3, rounds=4, spoil=as_sent)
    scored = [seen[partition, 4, "evaluate"]["w"] for partition in range(3)]
    np.testing.assert_array_equal(mean["w"], np.mean(scored, axis=0, dtype=np.float64).astype(np.float32))
    assert [report.down.payload for report in history] == [3 * WHOLE, *[3 * (SIGNS + REST)] * 3]


def test_what_is_frozen_goes_down_exactly(vit):  # noqa: F811
    model, arrays = vit
    blocks, seen, history = find_blocks(model), {}, []
    strategy = FedFrozen(
        warmup_rounds=2, model=model, encoding=Encoding("sign", "ternary"), fraction_evaluate=0, min_available_nodes=1,
        on_round=history.append,
    )  # fmt: skip
    grid = InProcessGrid([Node(moving_app(seen), {"partition-id": 0})], spoil=as_sent)
    result = strategy.start(grid, ArrayRecord({n: Array(a) for n, a in arrays.items()}), num_rounds=5)
    final = blocks.layout.split({name: array.numpy() for name, array in result.arrays.items()})
    for number in range(3, 6):
        came = blocks.layout.split(seen[0, number, "train"])
        for name in blocks.query_key:
            np.testing.assert_array_equal(came[name], final[name])
    down = [report.down.payload for report in history]
    assert down[2] == down[3] + blocks.layout.nbytes(blocks.query_key) and down[3] == down[4] < 0.1 * down[0] * 4


def test_each_mode_is_sent_as_its_difference_from_the_same_mode():
    seen = {}
    strategy = FedEnsemble(modes=2, encoding=Encoding("int4"), fraction_evaluate=0)
    starts = [START, {**START, "w": START["w"] + 5}]
    record = join_modes([ArrayRecord({name: Array(array) for name, array in one.items()}) for one in starts])
    history = []
    strategy.on_round = history.append
    strategy.rules = replace(strategy.rules, min_available_nodes=2)
    grid = InProcessGrid([Node(moving_app(seen), {"partition-id": k}) for k in (0, 1)], spoil=as_sent)
    strategy.start(grid, record, num_rounds=8)
    difference = MATRIX // 2 + SCALES + REST
    assert [report.down.payload for report in history] == [2 * WHOLE, 2 * WHOLE, *[2 * difference] * 6]
    for client, number in ((c, n) for c in (0, 1) for n in range(1, 9)):
        came = seen[client, number, "train"]["w"]
        assert min(np.abs(came - START["w"]).max(), np.abs(came - START["w"] - 5).max()) < 0.3


def test_top_k_of_signs_both_ways():
    seen = {}
    encoding = Encoding("sign", "sign", 0.2, top_k_down=0.2)
    _, history = start(FedAvg(encoding=encoding, fraction_evaluate=0), moving_app(seen), rounds=3, spoil=as_sent)
    moved = seen[0, 2, "train"]["w"] - seen[0, 1, "train"]["w"]
    assert np.count_nonzero(moved) == 48 and len(np.unique(np.abs(moved).round(6))) <= 3
    assert history[-1].down.payload < SIGNS + 48 + REST


def test_modes_that_start_alike_are_apart():
    """Parts with equal values have one id, and belong to two trees."""
    strategy = FedEnsemble(modes=2, encoding=Encoding("int4"), fraction_evaluate=0)
    record = join_modes([ArrayRecord({name: Array(array) for name, array in START.items()}) for _ in range(2)])
    history = []
    strategy.on_round = history.append
    strategy.rules = replace(strategy.rules, min_available_nodes=2)
    grid = InProcessGrid([Node(moving_app(), {"partition-id": k}) for k in (0, 1)], spoil=as_sent)
    strategy.start(grid, record, num_rounds=5)
    assert [len(report.replied) for report in history] == [2] * 5 and not any(report.lost for report in history)


def test_a_message_that_was_damaged_on_its_way_is_sent_again():
    """Few bits have bytes that stand for no values."""
    damaged = []

    class Line(Grid):
        def push_messages(self, messages):
            messages = list(messages)
            for message in messages:
                if message.metadata.group_id == "3" and not damaged:
                    damaged.append(message)
                    array = message.content["tepal.parts"]["0"]
                    # Another Array: this one is shared with the other client's message.
                    bad = Array("uint8", array.shape, array.stype, b"\xff" * len(array.data))
                    message.content["tepal.parts"]["0"] = bad
            return super().push_messages(messages)

    seen = {}
    grid = Line([Node(moving_app(seen), {"partition-id": k}) for k in (0, 1)], spoil=as_sent)
    _, history = rounds_of(FedAvg(encoding=Encoding("ternary"), fraction_evaluate=0), grid, 4)
    assert damaged and [len(report.replied) for report in history] == [2] * 4
    assert [report.resent for report in history] == [0, 0, 1, 0]


def test_a_client_that_always_fails_has_no_more_references_than_another(tmp_path):
    def failing(message, context):
        raise RuntimeError("no memory")

    app = moving_app()
    broken = ClientApp(mods=[partial_exchange])
    broken.train()(failing)
    found = []
    strategy = FedAvg(encoding=Encoding("sign"), fraction_evaluate=0, checkpoints=tmp_path)
    strategy.on_progress = lambda report: found.append(len(list(tmp_path.glob("references/*.safetensors"))))
    grid = Grid([Node(app, {"partition-id": 0}), Node(broken, {"partition-id": 1})])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tepal.strategies.rounds.ledger.FAILURES", 1000)
        rounds_of(strategy, grid, 12)
    assert max(found) <= 4


def test_the_norm_of_a_personal_update_is_that_of_the_clients_steps():
    """A reply's difference is from what the client started from, and so is its norm."""
    norms = []
    strategy = FedACS(quantile=0.1, encoding=Encoding("sign"))
    with pytest.MonkeyPatch.context() as patch:
        read = Sender.read

        def noted(self, exchange, message, *args):
            reply = read(self, exchange, message, *args)
            if getattr(reply, "squares", None):
                (squares,) = reply.squares.values()
                norms.append((reply.client, exchange.outgoing.plan.round, squares["w"]))
            return reply

        patch.setattr(Sender, "read", noted)
        start(strategy, moving_app(), clients=2, rounds=4)
    assert len(norms) == 8
    for client, number, square in norms:
        expected = np.square(step(int(client[-1]), number).astype(float)).sum()
        assert square == pytest.approx(expected, rel=1e-3)


def test_no_more_files_are_open_than_are_in_use():
    clients = 80
    before = len(os.listdir("/proc/self/fd"))
    found = []
    strategy = FedACS(quantile=0.1, encoding=Encoding("sign"), fraction_evaluate=0)
    strategy.on_progress = lambda report: found.append(len(os.listdir("/proc/self/fd")))
    start(strategy, moving_app(), clients=clients, rounds=3)
    assert max(found) - before < 64 + 30


def changed(data, rng):
    """These bytes with some of them changed, cut off, doubled or put in."""
    data = bytearray(data)
    place, count = int(rng.integers(len(data))), int(rng.integers(1, 20))
    match int(rng.integers(4)):
        case 0:
            data[place] ^= int(rng.integers(1, 256))
        case 1:
            data[place : place + count] = rng.bytes(count)
        case 2:
            del data[place : place + count]
        case _:
            data[place:place] = data[place : place + count] or b"\0"
    return bytes(data)


class BadLine(Grid):
    """A grid that changes every part on its way to a client, the first time that it is sent."""

    def __init__(self, *args, rng, **options):
        super().__init__(*args, **options)
        self.rng, self.changed = rng, set()

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            parts = message.content.array_records.get("tepal.parts", {})
            key = message.metadata.group_id, message.metadata.dst_node_id
            if parts and key not in self.changed:
                self.changed.add(key)
                data = changed(parts["0"].data, self.rng)
                parts["0"] = Array("uint8", (len(data),), parts["0"].stype, data)
        return super().push_messages(messages)


def mutated(encoding, seeds):
    """The number of parts that were changed in runs with these seeds, which all ended as a clean one."""
    clean, _ = start(FedAvg(encoding=encoding, fraction_evaluate=0), moving_app(), clients=2, rounds=4, spoil=as_sent)
    changes = 0
    for seed in seeds:
        nodes = [Node(moving_app(), {"partition-id": k}) for k in (0, 1)]
        grid = BadLine(nodes, rng=np.random.default_rng(seed), spoil=as_sent)
        made, history = rounds_of(FedAvg(encoding=encoding, fraction_evaluate=0), grid, 4)
        changes += len(grid.changed)
        assert [len(report.replied) for report in history] == [2] * 4
        np.testing.assert_allclose(made.arrays["w"].numpy(), clean["w"], atol=5e-3)
    return changes


MUTATED = [
    Encoding("ternary"), Encoding("int4"), Encoding("sign", top_k_down=0.1), Encoding("rank1"),
    Encoding("auto", left_out=0.2),
]  # fmt: skip


@pytest.mark.parametrize("encoding", MUTATED)
def test_parts_that_were_changed_on_their_way_are_not_used(encoding):
    assert mutated(encoding, range(5)) == 40


@pytest.mark.long
@pytest.mark.parametrize("encoding", MUTATED)
def test_of_a_thousand_parts_that_were_changed_on_their_way_none_is_used(encoding):
    assert mutated(encoding, range(5, 48)) >= 340


# ---- what the records say --------------------------------------------------------------------------------------------


def record_of(report):
    return RoundRecord.of(report, 1, IMAGES)


def test_the_share_that_downloads_leave_out_is_that_of_what_the_clients_then_have():
    """By brute force from the models: what the client is off by, of what it was off by. The mean over two clients, one
    of which missed two rounds.
    """
    seen, models = {}, {}
    strategy = FedAvg(encoding=Encoding("auto", left_out=0.4), fraction_evaluate=0)
    here = {0: (1, 2, 3, 4), 1: (1, 4)}
    grid = Grid(
        [Node(moving_app(seen), {"partition-id": k}) for k in here], here=lambda number, k: number in here[k],
        spoil=as_sent,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        content = Sender.content

        def noted(self, outgoing, *args):
            models[outgoing.plan.round] = {n: v.astype(float) for n, v in outgoing.values("model").items()}
            return content(self, outgoing, *args)

        patch.setattr(Sender, "content", noted)
        _, history = rounds_of(strategy, grid, 4)
    lines = [record_of(report) for report in history]
    assert lines[0].wire_left_out_down is None, "the first message has the whole"

    def share(k, before, number):
        had, came = seen[k, before, "train"], seen[k, number, "train"]
        whole, rest = (
            sum(np.square(models[number][name] - has[name]).sum() for name in ("w", "bias")) for has in (had, came)
        )
        return rest / whole

    for number in (2, 3):
        assert lines[number - 1].wire_left_out_down == pytest.approx(share(0, number - 1, number), rel=1e-4)
    expected = np.mean([share(0, 3, 4), share(1, 1, 4)])
    assert lines[3].wire_left_out_down == pytest.approx(expected, rel=1e-4)
    assert all(line.wire_left_out_up is None for line in lines), "float32"


def test_a_message_that_is_packed_for_several_clients_counts_for_each():
    strategy = FedAvg(encoding=Encoding("auto"), fraction_evaluate=0)
    _, history = start(strategy, moving_app(), clients=3, rounds=2, spoil=as_sent)
    shares = history[1].left_out_down
    assert len(shares) == 3 and len(set(shares)) == 1
    assert record_of(history[1]).wire_left_out_down == pytest.approx(shares[0])


@pytest.mark.parametrize("evaluates", [0, 1])
def test_what_counts_in_a_budget_is_recorded(evaluates):
    """Not what is sent for the first time, nor a model that is only scored: the last one, or each if no client trains
    it then.
    """
    encoding = Encoding("auto", "auto", budget=4_000)
    _, history = start(
        FedAvg(encoding=encoding, fraction_evaluate=evaluates), moving_app(), clients=2, rounds=3, spoil=as_sent
    )
    lines = [record_of(report) for report in history]
    assert [line.wire_budget for line in lines] == [4_000] * 3
    assert [line.wire_budget_up for line in lines] == [line.bytes_up for line in lines]
    assert lines[0].wire_budget_down == 0 < lines[0].bytes_down
    assert lines[1].wire_budget_down == lines[1].bytes_down > 0
    assert (lines[2].wire_budget_down == lines[2].bytes_down) == (not evaluates), "the result is scored"
