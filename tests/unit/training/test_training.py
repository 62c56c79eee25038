import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from tepal import models
from tepal.models.blocks import find_blocks
from tepal.training import freezing, tasks
from tepal.training.checkpointing import layer_modules, recomputed_layers
from tepal.training.config import TrainingConfig
from tepal.training.loop import (
    Batches,
    Fitted,
    at_once,
    device_of,
    fit,
    optimizer_for,
    score,
    trained_parameters,
)
from tepal.training.prediction import score_ensemble


def examples(count=23, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def linear(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def config(**values):
    return TrainingConfig.of({"optimizer": "sgd", "learning-rate": 0.1, "weight-decay": 0.0, "batch-size": 5, **values})


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    inputs, labels = torch.arange(23.0), torch.arange(23)
    batches = Batches(inputs, labels, 5, seed=1)
    epochs = [[y for _, y in batches.epoch(number)] for number in (0, 1, 0)]
    orders = [torch.cat(epoch).tolist() for epoch in epochs]
    assert [len(y) for y in epochs[0]] == [5, 5, 5, 5, 3] and batches.per_epoch == 5
    assert sorted(orders[0]) == list(range(23))
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] != torch.cat([y for _, y in Batches(inputs, labels, 5, seed=2).epoch(0)]).tolist()
    for x, y in batches.epoch(0):
        torch.testing.assert_close(x.long(), y)


@pytest.mark.parametrize(("settings", "steps"), [({"local-epochs": 2}, 10), ({"local-steps": 3}, 3),
                                                 ({"local-steps": 12, "local-epochs": 1}, 12)])  # fmt: skip
def test_epochs_or_steps_say_how_long_training_lasts(settings, steps):
    assert fit(linear(), Batches(*examples(), 5, 0), config(**settings)).steps == steps


def test_plain_sgd_takes_the_steps_of_gradient_descent():
    """Against w ← w − η(∇F + wd·w) by autograd, full batch."""
    model, (inputs, labels) = linear(), examples()
    reference = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    for _ in range(4):
        hidden = torch.tanh(inputs @ reference[0].T + reference[1])
        loss = nn.functional.cross_entropy(hidden @ reference[2].T + reference[3], labels)
        gradients = torch.autograd.grad(loss, reference)
        reference = [
            (w - 0.1 * (g + 0.01 * w)).detach().requires_grad_() for w, g in zip(reference, gradients, strict=True)
        ]
    fit(model, Batches(inputs, labels, 100, 0), config(**{"local-steps": 4, "weight-decay": 0.01}))
    for parameter, expected in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_frozen_as_a_whole_is_scored_and_does_not_change():
    """As for a client whose budget no layer fits, of a model without a head."""
    model, data = linear(), Batches(*examples(), 5, 0)
    with pytest.raises(ValueError, match="requires_grad is False for all"):
        fit(linear().requires_grad_(False), data, config(**{"local-epochs": 2}))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        setattr(parameter, freezing._FROZEN, True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted = fit(model, data, config(**{"local-epochs": 2, "optimizer": "adamw"}))
    loss = nn.functional.cross_entropy(model(data.inputs), data.labels)
    assert fitted.steps == 0 and fitted.step_seconds == 0 and fitted.loss == pytest.approx(float(loss), rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_penalty_adds_its_gradient():
    """One step with (λ/2)‖w‖² is one step without it, minus ηλw."""
    plain, ridged, data = linear(), linear(), Batches(*examples(), 100, 0)
    start = linear()[0].weight.detach()
    fit(plain, data, config(**{"local-steps": 1}))
    fit(ridged, data, config(**{"local-steps": 1}), lambda: 0.5 * 0.7 * ridged[0].weight.square().sum())
    torch.testing.assert_close(ridged[0].weight, plain[0].weight - 0.1 * 0.7 * start)


def test_clipping_bounds_the_step():
    model, start = linear(), [parameter.detach().clone() for parameter in linear().parameters()]
    fit(model, Batches(*examples(), 100, 0), config(**{"local-steps": 1, "clip-norm": 0.01}))
    moved = math.sqrt(sum((p - s).square().sum().item() for p, s in zip(model.parameters(), start, strict=True)))
    assert moved == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_frozen_entries_have_no_gradient_and_no_optimizer_state(optimizer):
    model = linear()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    settings = config(optimizer=optimizer, **{"weight-decay": 0.5, "momentum": 0.9})
    fit(model, Batches(*examples(), 5, 0), settings)
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None
    optimizer = optimizer_for(trained_parameters(model).values(), settings)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model[2].parameters()}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_parameters_may_be_complex(optimizer):
    class Phases(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, inputs):
            return super().forward(inputs) * (self.phase * self.phase).real

    model = Phases()
    fit(model, Batches(*examples(), 5, 0), config(optimizer=optimizer, **{"local-epochs": 1}))
    assert not torch.equal(model.phase, torch.ones_like(model.phase))
    assert optimizer_for(linear().parameters(), config(optimizer=optimizer)).defaults["fused"]


@pytest.fixture
def memory_without_values_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_momentum_begins_with_the_first_step_that_a_gradient_scaler_does_not_skip(memory_without_values_is_nan):
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    settings = config(autocast="fp16", momentum=0.9)
    parameter, expected = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, scaler = optimizer_for([parameter], settings), torch.amp.GradScaler("cpu")
    for gradient in (torch.full((3,), torch.inf), torch.arange(3.0), torch.ones(3)):
        parameter.grad = scaler.scale(gradient)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    reference = torch.optim.SGD([expected], 0.1, momentum=0.9, fused=False)
    for gradient in (torch.arange(3.0), torch.ones(3)):
        expected.grad = gradient
        reference.step()
    torch.testing.assert_close(parameter, expected)
    assert optimizer_for([parameter], config(momentum=0.9)).defaults["fused"], "no step is skipped"


class Steep(nn.Module):
    """A batch norm, beside a parameter whose gradient is always 2**115: float32 has it scaled by up to 2**12."""

    def __init__(self, slope=2.0**115):
        super().__init__()
        self.norm, self.place, self.slope, self.calls = nn.BatchNorm1d(6), nn.Parameter(torch.zeros(2)), slope, 0

    def loss(self, model, inputs, labels):
        self.calls += 1
        return (self.place * self.slope).sum() + 0.0 * self.norm(inputs).sum()


@pytest.mark.parametrize(("momentum", "moved"), [(0.0, 3.0), (0.5, 1 + 1.5 + 1.75)])
def test_a_step_in_float16_that_overflows_is_repeated_with_half_the_scale(momentum, moved):
    """As many steps are taken as are counted, and a repeated pass changes no running statistics."""
    model, data, corrected = Steep(), Batches(*examples(), 100, 0), []
    settings = config(autocast="fp16", momentum=momentum, **{"local-steps": 3, "learning-rate": 2.0**-115})
    task = SimpleNamespace(loss_of=model.loss)
    fitted = fit(model, data, settings, task=task, correct=lambda: corrected.append(model.place.grad is not None))
    assert fitted.steps == 3 and math.isfinite(fitted.loss)
    torch.testing.assert_close(model.place.detach(), torch.full((2,), -moved))
    assert model.calls == 3 + 4 and corrected == [True] * 7, "at 2**16, 2**15, 2**14 and 2**13 it is infinite"
    assert model.norm.num_batches_tracked == 3 and model.norm.momentum == 0.1
    expected = nn.BatchNorm1d(6)
    for _ in range(3):
        expected(data.inputs)
    torch.testing.assert_close(model.norm.running_mean, expected.running_mean)
    torch.testing.assert_close(model.norm.running_var, expected.running_var)


def test_a_batch_that_no_scale_helps_is_skipped_and_costs_half_the_scale():
    """Its loss is finite, but its gradient never. Small gradients of the next batches are not lost."""
    model, scales = Steep(slope=1.0), []
    model.place.register_hook(lambda gradient: scales.append(float(gradient.abs().max())))

    def loss_of(*batch):
        bad = (0 * model.place).sum().sqrt() if len(scales) < 17 else 0.0
        return model.loss(*batch) + bad

    settings = config(autocast="fp16", **{"local-steps": 3, "learning-rate": 1.0})
    fitted = fit(model, Batches(*examples(), 100, 0), settings, task=SimpleNamespace(loss_of=loss_of))
    assert fitted.steps == 3 and model.place.tolist() == [-2.0, -2.0]
    assert len(scales) == 17 + 2 and scales[17:] == [2.0**15] * 2, "the bad one is taken at 2**16 to 2**0"


def test_a_batch_whose_loss_is_not_finite_is_taken_once():
    model, settings = Steep(slope=math.inf), config(autocast="fp16", **{"local-steps": 1})
    with torch.no_grad():
        model.place.fill_(1)
    with pytest.raises(FloatingPointError):
        fit(model, Batches(*examples(), 100, 0), settings, task=SimpleNamespace(loss_of=model.loss))
    assert model.calls == 1


@pytest.mark.parametrize("settings", [{"optimizer": "adamw"}, {"optimizer": "adam"}, {"momentum": 0.9},
                                      {"micro-batch-size": 2}, {"gradient-checkpointing": True}])  # fmt: skip
def test_repeated_steps_are_those_that_need_no_repetition(settings):
    """Gradients that are infinite while the scale is above 2**13, and those of float32, which has no scale."""
    calls, trained = [], {}

    def loss_of(model, inputs, labels):
        calls.append(len(inputs))
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.register_hook(lambda gradient: torch.where(gradient > 2.0**13, torch.inf, gradient))
        return loss

    for autocast in ("fp16", "no"):
        model, batches = linear(), Batches(*examples(20), 5, 0)
        values = config(autocast=autocast, **{"local-steps": 6, **settings})
        fit(model, batches, values, task=SimpleNamespace(loss_of=loss_of))
        trained[autocast] = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    pieces = len(calls) // (6 + 6 + 3)
    assert pieces >= 1 and len(calls) == 15 * pieces
    torch.testing.assert_close(trained["fp16"], trained["no"], rtol=0, atol=2e-3)


def test_the_same_seed_trains_the_same_bits():
    def trained(seed):
        model = linear()
        fit(model, Batches(*examples(), 5, seed), config(**{"local-epochs": 2}))
        return model[0].weight

    assert torch.equal(trained(1), trained(1)) and not torch.equal(trained(1), trained(2))


@pytest.mark.parametrize("dtype", ["no", "bf16"])
def test_a_model_learns(dtype):
    inputs, _ = examples(200)
    labels = (inputs[:, 0] > 0.5).long()
    model, settings = linear(), config(**{"local-epochs": 60, "autocast": dtype, "optimizer": "adamw"})
    before = score(model, inputs, labels, settings)
    fitted = fit(model, Batches(inputs, labels, 20, 0), settings)
    after = score(model, inputs, labels, settings)
    assert after.accuracy > 0.95 > before.accuracy and 0 < fitted.loss < before.loss


def test_score_is_the_mean_over_all_examples_whatever_the_batches():
    model, (inputs, labels) = linear(), examples(1200)
    scored = score(model, inputs, labels, config())
    with torch.no_grad():
        logits = model(inputs).numpy().astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert scored.loss == pytest.approx(-logs[np.arange(1200), labels].mean(), rel=1e-5)
    assert scored.accuracy == (logits.argmax(1) == labels.numpy()).mean() and scored.examples == 1200


def test_a_diverged_loss_is_an_error_that_names_the_cure():
    with pytest.raises(FloatingPointError, match=r"learning-rate 100.*lower the learning rate"):
        model = linear()
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
        fit(model, Batches(*examples(), 5, 0), config(**{"learning-rate": 100}))


def test_a_device_that_is_not_there_is_named():
    assert device_of("cpu") == torch.device("cpu")
    for setting in ("cuda:97", "gpu"):
        with pytest.raises(ValueError, match=f"device='{setting}'"):
            device_of(setting)


@pytest.mark.parametrize("bad", [{"batch-size": 0}, {"learning-rate": 0}, {"optimizer": "lion"}, {"momentum": 1.0},
                                 {"autocast": "fp8"}, {"clip-norm": -1}])  # fmt: skip
def test_settings_out_of_range_are_errors(bad):
    with pytest.raises(ValidationError):
        TrainingConfig.of(bad)


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_a_step_in_pieces_is_the_step_at_once(size):
    """Also with a penalty, clipping and a last batch that is smaller."""
    def trained(**settings):
        model = linear().double()
        inputs, labels = examples()
        fitted = fit(
            model,
            Batches(inputs.double(), labels, 5, 0),
            config(**{"local-epochs": 2, "clip-norm": 0.5, **settings}),
            lambda: 0.3 * model[0].weight.square().sum(),
        )
        return [fitted.loss, *(parameter.detach() for parameter in model.parameters())]

    for together, in_pieces in zip(trained(), trained(**{"micro-batch-size": size}), strict=True):
        torch.testing.assert_close(in_pieces, together, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("settings", "seconds", "steps"), [({}, 2.5, 10), ({"micro-batch-size": 2}, 4.5, 10)])
def test_the_time_of_training_is_that_of_its_steps(monkeypatch, settings, seconds, steps):
    """A pass takes 0.25 s. Two epochs of batches of 5, 5, 5, 5 and 3; in pieces of 2, a 5 takes two passes."""
    clock, model = SimpleNamespace(now=1000.0), linear()

    def pass_time(*_):
        clock.now += 0.25

    model.register_forward_pre_hook(pass_time)
    monkeypatch.setattr("tepal.training.loop.time", SimpleNamespace(perf_counter=lambda: clock.now))
    fitted = fit(model, Batches(*examples(), 5, 0), config(**{"local-epochs": 2, **settings}))
    assert fitted.seconds == pytest.approx(seconds)
    assert fitted.step_seconds == pytest.approx(seconds / steps)


@pytest.mark.parametrize(("steps", "seconds"), [(0, 0.0), (1, 3.0), (2, 1.5)])
def test_the_time_of_a_step_is_told_for_a_single_one_and_for_none(steps, seconds):
    assert Fitted(steps, loss=0.0, seconds=3.0 if steps else 0.0).step_seconds == seconds


@given(st.integers(0, 60), st.integers(1, 12))
def test_no_batch_is_of_one_example_alone(count, size):
    """Unless there is no other; all examples are there, and no batch is more than one too large."""
    batches = Batches(torch.arange(float(count)), torch.arange(count), size, seed=3)
    sizes = [len(labels) for _, labels in batches.epoch(0)]
    assert sum(sizes) == count and len(sizes) == batches.per_epoch and all(each <= size + 1 for each in sizes)
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert 1 not in sizes or size == 1 or count == 1
    assert sorted(int(n) for _, labels in batches.epoch(1) for n in labels) == list(range(count))


def test_a_batch_norm_never_sees_one_example():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for settings in ({"batch-size": 4}, {"batch-size": 9, "micro-batch-size": 4}):
        batches = Batches(*examples(9), settings["batch-size"], 0)
        assert fit(model, batches, config(**{"local-epochs": 1, **settings})).steps == batches.per_epoch


def test_no_pass_is_larger_than_a_piece():
    model, passes = linear(), []
    model.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    fit(model, Batches(*examples(), 10, 0), config(**{"local-epochs": 1, "micro-batch-size": 4}))
    assert passes == [4, 4, 2, 4, 4, 2, 3]


@pytest.mark.parametrize("name", ["tiny-vit", "cnn", "resnet-20", "resnet-20 with cumulative averages"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_checkpointing_trains_the_same(name, frozen):
    def trained(**settings):
        model = models.build(name.split()[0], image_shape=(1, 8, 8), classes=3, seed=0)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = None if "cumulative" in name else 0.1
        layers = find_blocks(model).layers
        for name_of, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name_of.startswith(layers[0][0].split(".")[0])))
        inputs = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        fit(model, Batches(inputs, torch.arange(12) % 3, 12, 0), config(**{"local-steps": 2, **settings}))
        assert not any("forward" in vars(module) for module in model.modules()), "as it was before"
        assert {norm.momentum for norm in norms} <= {None if "cumulative" in name else 0.1}
        return model.state_dict()

    plain, again = trained(), trained(**{"gradient-checkpointing": True})
    for name_of, expected in plain.items():
        torch.testing.assert_close(again[name_of], expected, rtol=1e-5, atol=1e-7)


def test_gradient_checkpointing_keeps_the_inputs_of_layers_alone():
    model = models.build("tiny-vit", image_shape=(1, 8, 8), classes=3, seed=0)
    inputs, widths = torch.rand(2, 1, 8, 8), [64, 256]

    def wide():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape[-1]) or t, lambda t: t):
            loss = model(inputs).sum()
        loss.backward()
        return {width: kept.count(width) for width in widths}

    plain = wide()
    with recomputed_layers(model):
        again = wide()
    assert [path.split(".")[0] for path in map(str, layer_paths(model))] == ["blocks", "blocks"]
    assert plain[256] > 0 == again[256], "nothing of the wide inner layer is kept"
    with pytest.raises(ValueError, match="needs a model with layers, and Linear has none"), recomputed_layers(
        nn.Linear(2, 2)
    ):
        pass


def layer_paths(model):
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(module)] for module in layer_modules(model)]


class Counting(nn.Module):
    """Logits of tokens that depend on each alone; it notes how many examples come at once."""

    def __init__(self, words=7):
        super().__init__()
        self.next = nn.Embedding(words, words)
        self.passes = []

    def forward(self, ids, attention_mask=None):
        self.passes.append(len(ids))
        logits = self.next(ids)
        return logits if attention_mask is not None else logits.mean(1)


def numbers_of(shape, most=7):
    return torch.from_numpy(np.random.default_rng(0).integers(0, most, shape).astype(np.uint8))


@pytest.mark.parametrize(
    ("settings", "length", "expected"),
    [
        ({}, 8, [512, 188]),
        ({}, 128, [256, 256, 188]),
        ({"batch-size": 32}, 2**13, [32] * 21 + [28]),  # a training pass has as many
        ({"batch-size": 600}, 128, [512, 188]),
        ({"micro-batch-size": 300, "batch-size": 600}, 8, [300, 300, 100]),
    ],
)
def test_texts_are_scored_in_passes_that_memory_is_there_for(settings, length, expected):
    model, inputs, labels = Counting(), numbers_of((700, length)), numbers_of((700,)).long()
    scored = score(model, inputs, labels, config(**settings), tasks.TEXTS)
    assert model.passes == expected
    with torch.no_grad():
        outputs = model.next.weight[inputs[:50].long()].mean(1)
        whole = score(model, inputs[:50], labels[:50], config(**settings), tasks.TEXTS)
    assert scored.examples == 700
    assert whole.loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, labels[:50])), rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "settings", "expected"),
    [
        ((3, 224, 224), {"batch-size": 8}, 27),
        ((3, 224, 224), {"batch-size": 64}, 64),  # a training pass has as many
        ((3, 224, 224), {"batch-size": 64, "micro-batch-size": 4}, 4),
        ((3, 4096, 4096), {"batch-size": 2}, 2),
        ((1, 28, 28), {"batch-size": 8}, 512),
        ((0,), {"batch-size": 8}, 512),
    ],
)
def test_images_are_scored_in_passes_that_memory_is_there_for(shape, settings, expected):
    inputs = torch.empty(600, *shape, device="meta")
    assert at_once(inputs, config(**settings), tasks.IMAGES) == expected
    assert at_once(inputs[:0], config(**{"batch-size": 8}), tasks.IMAGES) == 512


@pytest.mark.parametrize(("settings", "questions"), [({"batch-size": 32}, 32), ({}, 5), ({"micro-batch-size": 3}, 3)])
def test_questions_are_scored_as_many_at_once_as_are_trained_on_and_the_score_is_the_same(settings, questions):
    model, labels = Counting(), numbers_of((40,), 3).long()
    inputs = torch.stack([numbers_of((40, 3, 6)), torch.tensor([1, 1, 1, 2, 2, 0]).expand(40, 3, 6)], 2)
    scored = score(model, inputs, labels, config(**settings), tasks.CHOICES)
    ensemble = score_ensemble(model, [model.state_dict()], inputs, labels, config(**settings), tasks.CHOICES)
    assert max(model.passes) == 3 * questions and sum(model.passes) == 2 * 3 * 40
    logs = model.next.weight.detach().double().log_softmax(-1).numpy()
    ids = inputs[:, :, 0].numpy()
    scores = (logs[ids[..., 2], ids[..., 3]] + logs[ids[..., 3], ids[..., 4]]) / 2
    right = scores[np.arange(40), labels] - np.log(np.exp(scores).sum(1))
    assert scored.loss == pytest.approx(-right.mean(), rel=1e-5) and ensemble.loss == pytest.approx(scored.loss)
    assert scored.accuracy == ensemble.accuracy == (scores.argmax(1) == labels.numpy()).mean()
