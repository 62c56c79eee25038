import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from tepal.exchange import PartialExchange, partial_exchange
from tepal.exchange.manifest import PARTS, RECORD, Manifest
from tepal.models import build
from tepal.models.blocks import canonical_state, find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.strategies import FedAvg, FedFrozen, NoAttentionError, RoundFailed
from tepal.strategies.fedfrozen import cost_ratio
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.state_json import CheckpointError
from tests.apps import quickstart_app

CONFIG = ConfigRecord({"lr": 0.02})


def make_split():
    return build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)


def make_fused():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TinyViT((1, 8, 8), 10, fused=True)


def entries(arrays, make):
    """Canonical entries of an ArrayRecord."""
    model = make()
    model.load_state_dict(arrays.to_torch_state_dict())
    return {name: tensor.numpy().copy() for name, tensor in canonical_state(model).items()}


def make_half_frozen():
    """A transformer of which the app itself trains the upper half only."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model = nn.Sequential(nn.Flatten(1, 2), encoder, nn.Flatten(), nn.Linear(64, 10))
    encoder.layers[0].requires_grad_(False)
    return model


class Spy:
    """A mod before the exchange's own: what the server sent to each client, per message."""

    def __init__(self):
        self.sent = []

    def __call__(self, msg, context, call_next):
        if RECORD in msg.content:
            manifest = Manifest.from_content(msg.content)
            names = [name for parcel in manifest.parcels for name in parcel.sent]
            data = sum(len(array.data) for array in msg.content.get(PARTS, {}).values())
            self.sent.append((manifest.plan.client, manifest.plan.round, manifest.plan.action, set(names), data))
        return call_next(msg, context)

    def rounds_with(self, client, names):
        return [r for who, r, _, sent, _ in self.sent if who == client and sent & set(names)]


def run(strategy, make, rounds=4, clients=3, grid=None, **app):
    spy = Spy()
    options = {"calls_apply_plan": True, **app}
    grid = grid or InProcessGrid(
        [Node(quickstart_app(make, [spy, partial_exchange], **options), {"partition-id": k}) for k in range(clients)]
    )
    history = []
    strategy.on_round = history.append
    model = make()
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds, train_config=CONFIG)
    return result, history, spy


def test_an_app_may_itself_freeze_a_fused_projection():
    result, history, _ = run(FedFrozen(warmup_rounds=1, model=make_half_frozen()), make_half_frozen, rounds=3)
    assert [len(report.replied) for report in history] == [3, 3, 3]
    start, end = make_half_frozen().state_dict(), result.arrays.to_torch_state_dict()
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved and not any(".layers.0." in name for name in moved)


@pytest.mark.parametrize("make", [make_split, make_fused], ids=["split", "fused"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_query_and_key_are_bit_identical_after_the_freeze_on_server_and_clients(make, clip):
    """AdamW with strong weight decay, momentum and clipping must leave no trace on a frozen row."""
    model = make()
    blocks = find_blocks(model)
    seen = []

    class Looking(PartialExchange):
        def __call__(self, msg, context, call_next):
            def look(msg, context):
                reply = call_next(msg, context)
                if "arrays" in reply.content:
                    seen.append((msg.metadata.group_id, entries(reply.content["arrays"], make)))
                return reply

            return super().__call__(msg, context, look)

    app = quickstart_app(make, [Looking()], calls_apply_plan=True, clip=clip)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    states = {}
    strategy = FedFrozen(warmup_rounds=1, model=model)
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=3,
        train_config=CONFIG,
        evaluate_fn=lambda r, arrays: states.update({r: entries(arrays, make)}),
    )
    start, frozen = states[0], states[1]
    assert len(blocks.query_key) == 8
    for name in blocks.query_key:
        if not name.endswith(("key.bias", "bias:k")):  # softmax does not see a key's bias: its gradient is zero
            assert not np.array_equal(start[name], frozen[name])
        for server_round in (2, 3):
            assert states[server_round][name].tobytes() == frozen[name].tobytes()
    assert len(seen) == 6
    for group, client in seen:
        if group != "1":
            for name in blocks.query_key:
                assert client[name].tobytes() == frozen[name].tobytes()
            assert any(not np.array_equal(client[name], frozen[name]) for name in blocks.value)


@pytest.mark.parametrize("make", [make_split, make_fused], ids=["split", "fused"])
def test_the_drift_of_a_round_is_recorded(make, monkeypatch):
    monkeypatch.setattr("tepal.strategies.fedfrozen._PIECE", 100)  # most entries are of several pieces
    model, states = make(), {}
    strategy = FedFrozen(warmup_rounds=1, model=model)
    history = []
    strategy.on_round = history.append
    app = quickstart_app(make, [partial_exchange], calls_apply_plan=True)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=2, train_config=CONFIG,
        evaluate_fn=lambda number, arrays: states.update({number: entries(arrays, make)}),
    )  # fmt: skip
    records = {report.round: report.record for report in history if report.round}
    blocks = find_blocks(model)
    for number in (1, 2):
        for key, names in (("query_key_drift", blocks.query_key), ("value_drift", blocks.value)):
            before, after = (np.concatenate([states[k][n].ravel() for n in names]) for k in (number - 1, number))
            drift = np.linalg.norm(after.astype(float) - before) / np.linalg.norm(before.astype(float))
            np.testing.assert_allclose(records[number][key], drift, rtol=1e-5)
    assert records[1]["query_key_drift"] > 0 == records[2]["query_key_drift"] < records[2]["value_drift"]


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_fused_and_split_models_end_equal(kind, clip):
    make_optimizer = {
        "adamw": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.3),
        "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.1),
    }[kind]
    results = []
    for make in (lambda: make_split().double(), lambda: make_fused().double()):  # Adam enlarges rounding errors
        strategy = FedFrozen(warmup_rounds=2, model=make())
        result, _, _ = run(strategy, make, clip=clip, optimizer=make_optimizer)
        results.append(entries(result.arrays, make))
    split, fused = results
    for name, array in fused.items():
        raw, _, which = name.partition(":")
        same = raw.replace("qkv", {"q": "query", "k": "key", "v": "value"}[which]) if which else name
        # Softmax does not see a key's bias: its gradient is nothing but rounding, and Adam makes whole steps of it.
        if not same.endswith("key.bias"):
            np.testing.assert_allclose(array, split[same], atol=1e-8)


@pytest.mark.parametrize("warmup", [4, 9])
def test_a_warm_up_as_long_as_the_run_is_fedavg(warmup):
    frozen, history, _ = run(FedFrozen(warmup_rounds=warmup, model=make_split()), make_split)
    plain, _, _ = run(FedAvg(), make_split)
    assert {report.phase for report in history} == {"warm-up"}
    for name, array in plain.arrays.items():
        np.testing.assert_array_equal(frozen.arrays[name].numpy(), array.numpy())


def test_without_warm_up_query_and_key_stay_as_they_start():
    model = make_split()
    result, history, _ = run(FedFrozen(warmup_rounds=0, model=model), make_split, rounds=2)
    assert {report.phase for report in history} == {"frozen"}
    start = canonical_state(model)
    for name in find_blocks(model).query_key:
        np.testing.assert_array_equal(result.arrays[name].numpy(), start[name].numpy())


def test_the_frozen_block_travels_once_to_each_client():
    model = make_split()
    phi = find_blocks(model).query_key
    _, history, spy = run(FedFrozen(warmup_rounds=2, model=model, fraction_evaluate=0), make_split, rounds=5)
    for client in ("client-0", "client-1", "client-2"):
        assert spy.rounds_with(client, phi) == [1, 2, 3]  # twice to be trained, once frozen
    layout = find_blocks(model).layout
    theta = layout.nbytes() - layout.nbytes(phi)
    assert [r.down.payload for r in history] == [3 * layout.nbytes()] * 3 + [3 * theta] * 2
    assert [r.up.payload for r in history] == [3 * layout.nbytes()] * 2 + [3 * theta] * 3


def test_the_frozen_block_travels_once_to_a_late_joiner_and_to_one_that_lost_its_cache(cache_folder):
    model = make_split()
    phi = find_blocks(model).query_key
    spy = Spy()
    app = quickstart_app(make_split, [spy, partial_exchange], calls_apply_plan=True)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])

    def between(report):
        if report.round == 3:
            grid.add(Node(app, {"partition-id": 7}))
        if report.round == 4:
            for link in cache_folder.rglob("clients/client-1/*.safetensors"):
                link.unlink()

    strategy = FedFrozen(warmup_rounds=1, model=model, fraction_evaluate=0, on_round=between)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=6, train_config=CONFIG)
    assert spy.rounds_with("client-0", phi) == [1, 2]
    assert spy.rounds_with("client-7", phi) == [4]
    assert spy.rounds_with("client-1", phi) == [1, 2, 5]
    lost = [s for s in spy.sent if s[0] == "client-1" and s[1] == 5 and s[2] == "train"]
    assert len(lost) == 2, "the lost block is sent in the same round"
    assert lost[0][3].isdisjoint(phi) and lost[1][3] == set(phi), "and nothing else is sent again"


def test_a_damaged_cache_file_is_healed_in_the_same_round(cache_folder):
    model = make_split()
    app = quickstart_app(make_split, [partial_exchange], calls_apply_plan=True)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    history = []

    def between(report):
        history.append(report)
        if report.round == 2:
            content = next(cache_folder.rglob("content/*.safetensors"))
            data = bytearray(content.read_bytes())
            data[-1] ^= 255
            content.write_bytes(data)

    strategy = FedFrozen(warmup_rounds=1, model=model, on_round=between)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3, train_config=CONFIG)
    assert [len(report.replied) for report in history] == [2, 2, 2]
    assert history[2].resent == 2 and not history[2].refused


def test_a_client_that_cannot_keep_anything_trains_all_the_same(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    spy = Spy()
    app = quickstart_app(make_split, [spy, partial_exchange], calls_apply_plan=True)
    nodes = [Node(app, {"partition-id": 0}), Node(app, {"partition-id": 1, "cache-path": str(tmp_path / "file")})]
    model = make_split()
    strategy = FedFrozen(warmup_rounds=1, model=model, fraction_evaluate=0)
    _, history, _ = run(strategy, make_split, grid=InProcessGrid(nodes))
    phi = find_blocks(model).query_key
    assert spy.rounds_with("client-0", phi) == [1, 2]
    assert spy.rounds_with("client-1", phi) == [1, 2, 3, 4]
    assert all(len(report.replied) == 2 for report in history)
    ((client, note),) = history[1].notes
    assert client == "client-1" and "block 'query_key' cannot be cached" in note and note in caplog.text


def test_an_app_without_apply_plan_is_refused_with_the_cure():
    with pytest.raises(RoundFailed, match=r"call `apply_plan\(model, msg\)`") as failure:
        run(FedFrozen(warmup_rounds=1, model=make_split()), make_split, calls_apply_plan=False)
    assert set(failure.value.result.arrays) == set(make_split().state_dict()), "what was learned is not lost"


def test_an_app_without_the_mod_is_refused_with_the_cure():
    app = quickstart_app(make_split, [], calls_apply_plan=False)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    with pytest.raises(RoundFailed, match=r"mods=\[partial_exchange\]"):
        run(FedFrozen(warmup_rounds=1, model=make_split()), make_split, grid=grid)


def test_the_ridge_is_on_the_weights_of_the_value_projections():
    """Split and fused: the penalty and its gradient against a sum written out by hand."""
    for make in (make_split, make_fused):
        found = []

        def training(msg, context, make=make, found=found):
            from tepal.client_app import apply_plan

            model = make()
            plan = apply_plan(model, msg)
            model.zero_grad()
            plan.penalty().backward()
            rows = slice(None) if make is make_split else slice(128, 192)
            name = "value.weight" if make is make_split else "qkv.weight"
            weights = [model.state_dict()[f"blocks.{k}.attention.{name}"][rows] for k in range(2)]
            found.append((plan.penalty().item(), 0.5 * 0.3 * sum(w.square().sum().item() for w in weights)))
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
            assert len(grads) == 2 and all("weight" in name for name in grads)
            for name, grad in grads.items():
                torch.testing.assert_close(grad[rows], 0.3 * model.state_dict()[name][rows])
            raise ValueError("enough")

        from flwr.clientapp import ClientApp

        app = ClientApp(mods=[partial_exchange])
        app.train()(training)
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
        with pytest.raises(RoundFailed, match="enough"):
            run(FedFrozen(warmup_rounds=1, ridge=0.3, model=make()), make, grid=grid)
        for got, expected in found:
            assert got == pytest.approx(expected, rel=1e-5)


def test_the_learning_rate_follows_a_cosine_over_the_rounds():
    strategy = FedFrozen(warmup_rounds=1, model=make_split(), schedule="cosine", fraction_evaluate=0)
    _, history, _ = run(strategy, make_split, rounds=4)
    expected = [0.02 * 0.5 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert [report.learning_rate for report in history] == pytest.approx(expected)
    assert history[0].learning_rate == 0.02


def test_a_model_without_attention_is_refused_by_name():
    cnn = build("cnn", image_shape=(1, 8, 8), classes=10, seed=0)
    with pytest.raises(NoAttentionError, match="CNN"):
        FedFrozen(warmup_rounds=1, model=cnn)
    with pytest.raises(NoAttentionError, match="CNN"):
        cost_ratio(cnn, 1, 2)
    with pytest.raises(NoAttentionError, match="model=model"):
        run(FedFrozen(warmup_rounds=1), make_split)


def test_a_ridge_without_known_value_projections_is_refused_before_the_run():
    blocks = find_blocks(make_split(), query_key=["*query*", "*key*"])
    FedFrozen(warmup_rounds=1, model=blocks)
    with pytest.raises(NoAttentionError, match=r"ridge is 0\.001, .* value_projection="):
        FedFrozen(warmup_rounds=1, model=blocks, ridge=0.001)


@pytest.mark.parametrize("option", [{"warmup_rounds": -2}, {"ridge": -0.1}, {"fraction_train": 0}, {"schedule": "x"}])
def test_options_out_of_range_are_errors(option):
    with pytest.raises(ValueError, match="must be"):
        FedFrozen(model=make_split(), **{"warmup_rounds": 1, **option})


def test_cost_ratio_counts_what_a_run_moves():
    model = make_split()
    _, history, _ = run(FedFrozen(warmup_rounds=2, model=model, fraction_evaluate=0), make_split, rounds=5)
    full = 5 * 3 * find_blocks(model).layout.nbytes()
    up, down = (sum(getattr(r, way).payload for r in history) for way in ("up", "down"))
    assert up / full == pytest.approx(cost_ratio(model, 2, 5))
    assert (up + down) / (2 * full) == pytest.approx(cost_ratio(model, 2, 5, downlink=True))
    assert cost_ratio(model, 5, 5, downlink=True) == 1.0
    assert cost_ratio(model, 0, 5) < cost_ratio(model, 1, 5), "a run may be without warm-up"
    with pytest.raises(ValueError, match="warm-up"):
        cost_ratio(model, 6, 5)


@pytest.mark.parametrize(("rounds", "warmup"), [(2, 1), (5, 2)])
def test_without_a_number_the_warmup_is_three_tenths_of_the_rounds(rounds, warmup):
    strategy = FedFrozen(model=make_split())
    phases = []
    strategy.on_round = lambda report: phases.append(report.phase)
    app = quickstart_app(make_split, [partial_exchange], calls_apply_plan=True)
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
    for _ in range(2):  # a strategy may start again
        strategy.start(grid, ArrayRecord(make_split().state_dict()), num_rounds=rounds)
        assert phases == ["warm-up"] * warmup + ["frozen"] * (rounds - warmup)
        phases.clear()


def test_a_run_that_is_prolonged_keeps_its_warm_up_and_what_was_frozen(tmp_path):
    """Three tenths of ten rounds are three, and of twenty would be six."""
    app = quickstart_app(make_split, [partial_exchange], calls_apply_plan=True)
    model, states, phases = make_split(), {}, {}
    for resume, rounds in ((False, 10), (True, 20)):
        strategy = FedFrozen(
            model=model, fraction_evaluate=0, checkpoints=tmp_path / "checkpoints", resume=resume,
            on_round=lambda report: phases.update({report.round: report.phase}),
        )  # fmt: skip
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
        strategy.start(
            grid, ArrayRecord(model.state_dict()), num_rounds=rounds, train_config=CONFIG,
            evaluate_fn=lambda number, arrays: states.update({number: entries(arrays, make_split)}),
        )  # fmt: skip
        assert strategy.method.warmup_rounds == 3
    assert [phases[number] for number in range(1, 21)] == ["warm-up"] * 3 + ["frozen"] * 17
    for name in find_blocks(model).query_key:
        assert len({states[number][name].tobytes() for number in range(3, 21)}) == 1
    assert any(not np.array_equal(states[10][name], states[11][name]) for name in find_blocks(model).value)


def test_another_number_of_warm_up_rounds_is_still_another_strategy(tmp_path):
    app = quickstart_app(make_split, [partial_exchange], calls_apply_plan=True)

    def start(rounds, **options):
        strategy = FedFrozen(model=make_split(), fraction_evaluate=0, checkpoints=tmp_path / "checkpoints", **options)
        grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(2)])
        strategy.start(grid, ArrayRecord(make_split().state_dict()), num_rounds=rounds, train_config=CONFIG)

    start(2)
    with pytest.raises(CheckpointError, match="of another strategy"):
        start(3, warmup_rounds=2, resume=True)
