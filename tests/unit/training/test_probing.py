"""layer_scores: the right gradient of the right examples, and a model that is as it was."""

import copy
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from tepal.client_app import apply_plan
from tepal.exchange import MODEL, Outgoing, Plan, Sender, partial_exchange
from tepal.exchange.plan import LAYER_MILLISECONDS, LAYER_SCORES, PROBE, PROBE_BATCHES, PROBE_SCORE, PROBE_TIMED
from tepal.models.blocks import canonical_state, find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.strategies.in_process import InProcessGrid
from tepal.training import probing
from tepal.training.probing import layer_scores, reply_to_probes


def seeded(build, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def vit(fused=False, depth=3):
    return seeded(lambda: TinyViT((1, 8, 8), 10, width=16, depth=depth, heads=2, fused=fused))


class NormedCNN(nn.Module):
    """Two stages with batch norm and dropout, a stem below and a head above them."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, 4, 1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
            for _ in range(2)
        )
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, images):
        images = self.patch_embed(images)
        for stage in self.stages:
            images = stage(images)
        return self.head(images.flatten(1))


def images(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def message_that_freezes(model, frozen):
    """A message as an app gets it: the values of `model`, of which `frozen` must not change."""
    InProcessGrid([])  # sets the identity that a Message needs
    layout = find_blocks(model).layout
    trains = tuple(name for name in layout.names if name not in frozen)
    plan = Plan(client="c", round=1, needs={MODEL: layout.names}, trains=trains, returns={MODEL: trains})
    sender = Sender(layout, {"all": layout.names}, experiment="e", record="arrays")
    entries = {name: tensor.numpy().copy() for name, tensor in canonical_state(model).items()}
    seen = []

    def app(msg, context):
        seen.append(msg)
        return Message(RecordDict({"arrays": msg.content["arrays"]}), reply_to=msg)

    partial_exchange(Message(sender.content(Outgoing(plan, lambda tree: entries))[0], 1, "train"),
                     Context(1, 1, {}, RecordDict(), {}), app)  # fmt: skip
    return seen[0]


def scores(model, batches, layers=None, **options):
    blocks = find_blocks(model)
    return layer_scores(model, batches, blocks.layers if layers is None else layers, blocks.layout, **options)


def gradients_by_layer(model, inputs, labels):
    """By autograd.grad on the model itself: per layer, (gradient, weights) of its parameters as NumPy arrays."""
    model = copy.deepcopy(model).train()
    found = dict(model.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(found.values()))
    of = dict(zip(found, gradients, strict=True))
    layers = sorted({name.split(".")[1] for name in of if name.startswith(("blocks.", "stages."))})
    return [
        [
            (of[name].double().numpy(), found[name].detach().double().numpy())
            for name in of
            if name.startswith((f"blocks.{layer}.", f"stages.{layer}."))
        ]
        for layer in layers
    ]


def test_the_gradient_of_a_linear_model_is_the_one_by_hand():
    """Mean cross-entropy of softmax(Wx + b): gradients mean (p − y)xᵀ and mean (p − y)."""
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    inputs, labels = images()
    x = inputs.flatten(1).double().numpy()
    weight, bias = (parameter.detach().double().numpy() for parameter in model[1].parameters())
    logits = x @ weight.T + bias
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.eye(10)[labels]
    by_weight, by_bias = (p - y).T @ x / len(x), (p - y).mean(0)
    found = scores(model, [(inputs, labels)], [("1.weight", "1.bias"), ("1.bias",)])
    assert found.scores == pytest.approx([(by_weight**2).sum() + (by_bias**2).sum(), (by_bias**2).sum()], rel=1e-5)
    assert found.loss == pytest.approx(-np.log(p[np.arange(12), labels]).mean(), rel=1e-5) and found.examples == 12


def test_every_layer_has_its_own_gradient_in_the_order_of_the_layers():
    model, batch = vit(), images()
    expected = [sum((g**2).sum() for g, _ in layer) for layer in gradients_by_layer(model, *batch)]
    assert len(set(expected)) == 3
    assert scores(model, [batch]).scores == pytest.approx(expected, rel=1e-5)
    backwards = find_blocks(model).layers[::-1]
    assert scores(model, [batch], backwards).scores == pytest.approx(expected[::-1], rel=1e-5)


@pytest.mark.parametrize("kind", ["gradient", "snr", "rgn"])
def test_several_batches_count_as_one_large_batch(kind):
    """Of unequal sizes: it is the squared norm of the mean gradient, not the mean of squared norms."""
    model, (inputs, labels) = vit(), images(13)
    # The gradient of a key's bias is 0 but for rounding, and so would its signal and noise be.
    layers = [tuple(name for name in layer if "key.bias" not in name) for layer in find_blocks(model).layers]
    whole = scores(model, [(inputs, labels)], layers, score=kind)
    parts = scores(model, zip(inputs.split(5), labels.split(5), strict=True), layers, score=kind)
    assert parts.scores == pytest.approx(whole.scores, rel=1e-4)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5) and parts.examples == 13
    mean_of_norms = sum(
        len(y) / 13 * np.array(scores(model, [(x, y)]).scores)
        for x, y in zip(inputs.split(5), labels.split(5), strict=True)
    )
    assert all(scores(model, [(inputs, labels)]).scores < 0.99 * mean_of_norms)


def test_signal_to_noise_and_relative_norm_by_numpy():
    model, batch = NormedCNN().eval(), images()
    model.stages[0][3].p = model.stages[1][3].p = 0.0
    by_hand = gradients_by_layer(model, *batch)
    rgn = [math.sqrt(sum((g**2).sum() for g, _ in layer) / sum((w**2).sum() for _, w in layer)) for layer in by_hand]
    # A bias under a batch norm has a gradient of rounding errors alone: leave it out on both sides.
    layers = [tuple(n for n in layer if not n.endswith(".0.bias")) for layer in find_blocks(model).layers]
    snr = [sum(g.mean() ** 2 / g.var() for g, _ in (layer[0], *layer[2:])) for layer in by_hand]
    assert scores(model, [batch], layers, score="snr").scores == pytest.approx(snr, rel=1e-4)
    assert scores(model, [batch], score="rgn").scores == pytest.approx(rgn, rel=1e-5)


class Scaled(nn.Module):
    """Logits x·s + c·1 + 0·u: a gradient of one element, and one whose elements are all equal."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.zeros(10))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return inputs.flatten(1)[:, :10] * self.scale + self.shift


def test_tensors_without_variance_and_layers_without_weights_have_finite_scores():
    model, (inputs, labels) = Scaled(), images()
    layers = [("scale",), ("shift",), ("unused",)]

    def mean(model, inputs, labels):
        return model(inputs).mean()

    snr = scores(model, [(inputs, labels)], layers, score="snr", loss=mean).scores
    rgn = scores(model, [(inputs, labels)], layers, score="rgn", loss=mean).scores
    assert snr == [0, 0, 0]
    assert rgn[1:] == [0, 0] and rgn[0] == pytest.approx(float(inputs.flatten(1)[:, :10].mean()) / 0.7)


@pytest.mark.parametrize("kind", ["gradient", "snr", "rgn"])
def test_a_parameter_that_the_loss_does_not_use_counts_as_zero(kind):
    model, batch = Scaled(), images()
    found = scores(model, [batch], [("shift", "unused"), ("unused",)], score=kind)
    shift = scores(model, [batch], [("shift",)], score=kind).scores[0]
    assert found.scores[1] == 0 and found.scores[0] == (pytest.approx(shift) if kind != "rgn" else found.scores[0])
    assert all(math.isfinite(ms) and ms > 0 for ms in found.milliseconds)


@pytest.mark.parametrize("kind", ["gradient", "rgn"])
def test_a_fused_and_a_split_model_have_equal_scores(kind):
    batch = images()
    fused, split = (scores(vit(fused), [batch], score=kind).scores for fused in (True, False))
    assert fused == pytest.approx(split, rel=1e-5)


def test_an_entry_of_a_fused_tensor_is_scored_alone():
    fused, split, batch = vit(fused=True), vit(), images()
    names = [(f"blocks.1.attention.qkv.weight:{role}",) for role in "qv"]
    expected = [(f"blocks.1.attention.{role}.weight",) for role in ("query", "value")]
    assert scores(fused, [batch], names).scores == pytest.approx(scores(split, [batch], expected).scores, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_numbers_are_as_they_were(training, fails):
    model, batch = NormedCNN().train(training), images()
    model.stages[0][1].eval()  # not the mode of its parent
    model.stages[1][0].weight.requires_grad_(False)
    model.head.bias.grad = torch.ones(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    numbers = torch.get_rng_state()
    if fails:
        with pytest.raises(FloatingPointError):
            scores(model, [batch, (batch[0] * math.nan, batch[1])], timed=True)
    else:
        scores(model, [batch, batch], timed=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert torch.equal(numbers, torch.get_rng_state())
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.bias"]
    assert torch.equal(model.head.bias.grad, torch.ones(10))


def test_scores_depend_on_the_model_and_the_batch_alone():
    """Not on the mode, on gradients left over, on frozen parameters, or on the random numbers drawn before."""
    model, batch = NormedCNN(), images()
    first = scores(model, [batch]).scores
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model.load_state_dict(model.state_dict())
    model.requires_grad_(False)
    assert scores(model.eval(), [batch]).scores == first
    assert first != scores(model, [images(seed=1)]).scores


def test_batch_norms_score_with_the_statistics_of_the_batch():
    model, batch = NormedCNN(), images()
    for stage in model.stages:
        stage[1].running_mean.fill_(100.0)
        stage[3].p = 0.0
    expected = [sum((g**2).sum() for g, _ in layer) for layer in gradients_by_layer(model, *batch)]
    assert scores(model.eval(), [batch]).scores == pytest.approx(expected, rel=1e-4)


def test_a_plan_of_the_round_before_does_not_change_the_scores():
    model, batch = NormedCNN(), images()
    expected = scores(model, [batch]).scores
    blocks = find_blocks(model)
    apply_plan(model, message_that_freezes(model, (*blocks.layers[0], *blocks.embedding)))
    assert scores(model, [batch]).scores == expected
    before = model.stages[0][1].running_mean.clone()
    model.train()(batch[0])
    assert torch.equal(before, model.stages[0][1].running_mean)  # the plan still holds


def test_the_backward_pass_ends_at_the_lowest_layer():
    model, batch = vit(), images()
    seen = {}

    def loss(model, inputs, labels):
        seen["flags"] = {name: p.requires_grad for name, p in model.named_parameters()}
        seen["embedded"] = []
        hook = model.blocks[0].register_forward_pre_hook(lambda _, args: seen["embedded"].append(args[0].requires_grad))
        value = F.cross_entropy(model(inputs), labels)
        hook.remove()
        return value

    blocks = find_blocks(model)
    layer_scores(model, [batch], blocks.layers, blocks.layout, head=blocks.head, loss=loss)
    assert seen["embedded"] == [False]
    for name, flag in seen["flags"].items():
        assert flag == name.startswith(("blocks.", "head.")), name


@pytest.mark.parametrize("timed", [True, False])
def test_milliseconds_are_positive_and_tell_a_slow_layer_from_a_fast_one(timed):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.1)
            return gradient

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.head = nn.Linear(64, 10)

        def forward(self, inputs):
            x = self.stages[0](inputs.flatten(1))
            x = Slow.apply(self.stages[1](x))
            return Slow.apply(self.head(self.stages[2](x)))  # the second delay is the head's

    model = seeded(Net)
    blocks = find_blocks(model)
    found = layer_scores(model, [images()], blocks.layers, blocks.layout, head=blocks.head, timed=timed)
    bottom, middle, top = found.milliseconds
    assert middle >= 100 and 0 < bottom < 90 and 0 < top < 90
    assert scores(model, [images()]).milliseconds[2] >= 100  # without a head named, what is above is the top layer's


def test_layers_that_share_their_place_in_the_backward_pass_still_cost_something():
    model = vit(depth=2)
    first, second = find_blocks(model).layers
    found = scores(model, [images()], [(first[0], second[-1]), (*first[1:], *second[:-1])])
    assert all(math.isfinite(ms) and ms > 0 for ms in found.milliseconds)


def test_a_tied_parameter_has_one_gradient_under_any_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
            self.stages[1].weight = self.stages[0].weight
            self.head = nn.Linear(64, 10)

        def forward(self, inputs):
            return self.head(self.stages[1](torch.tanh(self.stages[0](inputs.flatten(1)))))

    model, (inputs, labels) = seeded(Tied), images()
    gradient = torch.autograd.grad(F.cross_entropy(model(inputs), labels), model.stages[0].weight)[0]
    found = scores(model, [(inputs, labels)], [("stages.0.weight",)])
    assert found.scores == pytest.approx([float(gradient.square().sum())], rel=1e-5)


@pytest.mark.parametrize("kind", ["gradient", "snr", "rgn"])
def test_a_diverged_model_is_an_error_that_names_the_cure(kind):
    model = vit()
    with torch.no_grad():
        model.blocks[0].mlp[0].weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"loss of a batch of 12 is nan.*lower learning-rate"):
        scores(model, [images()], score=kind)

    def steep(model, inputs, labels):  # a finite loss, at a point where its slope is infinite
        return torch.sqrt((model.head(model.norm(model.blocks[2].mlp[2].bias)) * 0).square().sum())

    with pytest.raises(FloatingPointError, match=r"layer 3 of 3 \(blocks\.2.*NaN or infinite.*lower learning-rate"):
        scores(vit(), [images()], score=kind, loss=steep)


def test_a_last_batch_of_one_example_is_merged_with_the_one_before_it():
    """BatchNorm has no variance for it."""
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))  # noqa: E731
    model, (inputs, labels) = seeded(build), images(9)
    app = ClientApp(mods=[partial_exchange])
    reply_to_probes(app, lambda msg, context: (model, inputs, labels), batch_size=4)
    layout = find_blocks(model).layout
    entries = {name: tensor.numpy().copy() for name, tensor in canonical_state(model).items()}
    InProcessGrid([])  # sets the identity that a Message needs
    plan = Plan(
        client="c", round=1, action=PROBE, needs={MODEL: layout.names},
        groups={"layer/0": ("1.weight", "1.bias")}, options={PROBE_SCORE: "gradient", PROBE_BATCHES: 0},
    )  # fmt: skip
    sender = Sender(layout, {"all": layout.names}, experiment="e", record="arrays")
    message = Message(sender.content(Outgoing(plan, lambda tree: entries))[0], 1, f"train.{PROBE}")
    found = app(message, Context(1, 1, {}, RecordDict(), {})).content["metrics"][LAYER_SCORES]
    parts = [(inputs[:4], labels[:4]), (inputs[4:], labels[4:])]
    assert found == scores(model, parts, [("1.weight", "1.bias")]).scores


def test_mistakes_are_named():
    model, batch = vit(), images()
    blocks = find_blocks(model)
    with pytest.raises(ValueError, match=r"score='norm': choose one of gradient, snr, rgn"):
        scores(model, [batch], score="norm")
    with pytest.raises(ValueError, match="at least one batch"):
        scores(model, [])
    with pytest.raises(ValueError, match=r"entry 'blocks\.9\.x'"):
        scores(model, [batch], [("blocks.9.x",)])
    with pytest.raises(ValueError, match="not a wrapper of it"):
        layer_scores(nn.Sequential(model), [batch], blocks.layers, blocks.layout)


def test_a_layer_that_only_an_earlier_batch_went_through_takes_no_time_from_the_last(monkeypatch):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, inputs):
            return self.above(self.below(inputs) if len(inputs) > 2 else inputs)

    def batches():
        yield torch.rand(4, 4), torch.tensor([0, 1, 0, 1])
        clock.now += 1000.0
        yield torch.rand(2, 4), torch.tensor([0, 1])

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("tepal.training.probing._now", lambda device: clock.now)
    model = Sometimes()
    layers = [("below.weight",), ("above.weight",)]
    found = layer_scores(model, batches(), layers, find_blocks(model).layout, timed=True)
    assert max(found.milliseconds) < 500


@pytest.mark.parametrize("size", [5, 12, 0])
def test_a_probe_takes_as_much_at_once_as_training_does(monkeypatch, size):
    """The gradient is that of the whole batch. The time is that of a whole piece, for as many examples as there are."""
    model, batch, seen = vit(), images(), []
    blocks = find_blocks(model)
    groups = {f"layer/{number}": layer for number, layer in enumerate(blocks.layers)}
    options = {PROBE_SCORE: "gradient", PROBE_TIMED: True, PROBE_BATCHES: 1}
    plan = SimpleNamespace(action=PROBE, groups={**groups, "head": blocks.head}, options=options)
    monkeypatch.setattr(probing, "received", lambda msg: SimpleNamespace(plan=plan, layout=blocks.layout))
    add = probing._Probe.add
    monkeypatch.setattr(probing._Probe, "add", lambda self, x, y, share: seen.append(len(y)) or add(self, x, y, share))
    monkeypatch.setattr(probing._Probe, "_durations", lambda self, start: [2.0] * len(self.layers))
    found = probing.probe_layers(model, None, [batch, batch], micro_batch_size=size)
    pieces = {5: [2, 5, 5], 12: [12], 0: [12]}[size]
    assert seen[1:] == pieces, "the first is taken once more, to measure the time"
    assert found[LAYER_SCORES] == pytest.approx(scores(model, [batch]).scores, rel=1e-4)
    assert found[LAYER_MILLISECONDS] == [2.0 * 12 / pieces[-1]] * len(blocks.layers)


@pytest.mark.parametrize(("build", "lowest"), [(vit, "blocks.0.mlp.0"), (NormedCNN, "stages.0.0")])
@pytest.mark.parametrize("kind", ["gradient", "rgn"])
def test_with_layers_that_are_recomputed_the_scores_are_the_same(build, lowest, kind):
    """Whichever parameters the app itself trains, with dropout, and with running statistics left as they are."""
    model, batches, passes = build(), [images(), images(7, seed=1)], []
    model.get_submodule(lowest).weight.requires_grad_(False)
    model.get_submodule(lowest).register_forward_pre_hook(lambda *_: passes.append(None))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = scores(model, batches, score=kind, timed=True)
    assert len(passes) == 3, "the first batch is taken once more, to measure the time"
    again = scores(model, batches, score=kind, timed=True, gradient_checkpointing=True)
    assert len(passes) == 3 + 2 * 3
    assert again.scores == pytest.approx(plain.scores, rel=1e-5) and again.loss == pytest.approx(plain.loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(math.isfinite(each) and each > 0 for each in again.milliseconds)


def test_recomputed_layers_have_the_precision_of_the_first_pass():
    def narrow(model, inputs, labels):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(inputs), labels)

    model, batches = vit(), [images()]
    plain, again = (scores(model, batches, loss=narrow, gradient_checkpointing=each) for each in (False, True))
    assert again.scores == pytest.approx(plain.scores, rel=1e-6) and again.loss == plain.loss
    assert plain.scores != scores(model, batches).scores, "it is narrower than float32"


def test_layers_are_recomputed_where_a_probe_asks_for_it(monkeypatch):
    model, batch, passes = vit(), images(), []
    blocks = find_blocks(model)
    groups = {f"layer/{number}": layer for number, layer in enumerate(blocks.layers)}
    plan = SimpleNamespace(action=PROBE, groups=groups, options={PROBE_SCORE: "gradient"})
    monkeypatch.setattr(probing, "received", lambda msg: SimpleNamespace(plan=plan, layout=blocks.layout))
    model.blocks[0].mlp[0].register_forward_pre_hook(lambda *_: passes.append(None))
    for again in (False, True):
        passes.clear()
        probing.probe_layers(model, None, [batch], gradient_checkpointing=again)
        assert len(passes) == 1 + again
