import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tepal.client_app.config import TrainingConfig
from tepal.client_app.training import Batches, device_of, fit, optimizer_for, score


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
    held = [p for group in optimizer_for(model, settings).param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model[2].parameters()}


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
