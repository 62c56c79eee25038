"""Pretraining's loop: learning rates, the average of the weights, and continuing what was interrupted."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from tepal.tools.pretrain.loop import Schedule, train

INPUTS = torch.arange(40.0).reshape(20, 2).sin()
TARGETS = INPUTS @ torch.tensor([[1.0], [-2.0]])


def squares(model, indices, rng):
    chosen = torch.from_numpy(indices)
    noise = torch.from_numpy(rng.normal(0, 0.01, (len(indices), 1))).float()
    return (model(INPUTS[chosen]) - TARGETS[chosen] - noise).square().mean()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))


def trained(tmp_path, log=lambda line: None, *, model=None, loss=squares, seed=1, name="state", **schedule):
    plan = Schedule(**{"epochs": 4, "batch_size": 8, **schedule})
    return train(model or network(), loss, 20, plan, seed=seed, state=tmp_path / name, log=log)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3])
def test_interrupted_training_ends_with_the_same_weights(tmp_path, after):
    def stop(line):
        if line.startswith(f"Epoch {after} "):
            raise Interrupted

    whole = trained(tmp_path)
    with pytest.raises(Interrupted):
        trained(tmp_path, stop, name="other")
    lines = []
    rest = trained(tmp_path, lines.append, name="other")
    assert lines[0] == f"Continuing after epoch {after} of 4" and len(lines) == 1 + 4 - after
    assert rest.loss == whole.loss
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, rest.model.state_dict()[name])


def test_finished_training_is_not_trained_again(tmp_path):
    first, lines = trained(tmp_path), []
    second = trained(tmp_path, lines.append)
    assert lines == ["Continuing after epoch 4 of 4"] and second.seconds == first.seconds
    assert torch.equal(first.model[0].weight, second.model[0].weight)


def test_the_loss_decreases(tmp_path):
    model = nn.Linear(2, 1)
    done = trained(tmp_path, model=model, epochs=300, learning_rate=0.05, weight_decay=0.0, average=0.5)
    assert done.loss < 0.001
    assert torch.allclose(done.model.weight, torch.tensor([[1.0, -2.0]]), atol=0.05)


def test_without_averaging_the_result_is_the_trained_model(tmp_path):
    model = network()
    done = trained(tmp_path, model=model, average=0.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), done.model.parameters(), strict=True))


def test_the_average_follows_its_formula(tmp_path):
    """One weight with the gradient 1: Adam's steps are the learning rate, so each step's weight is known."""
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.item()

    def constant(model, indices, rng):
        return model.weight.sum()

    plan = {"epochs": 5, "batch_size": 20, "learning_rate": 0.1, "weight_decay": 0.0, "warmup": 0.0, "average": 0.3}
    done = trained(tmp_path, model=model, loss=constant, **plan)
    weight = averaged = start
    for step in range(5):
        rate = 0.1 if step == 0 else 0.05 * (1 + math.cos(math.pi * (step - 1) / 4))
        weight -= rate
        decay = min(0.3, (1 + step) / (10 + step))
        averaged = decay * averaged + (1 - decay) * weight
    assert math.isclose(done.model.weight.item(), averaged, abs_tol=1e-5)


def test_the_learning_rate_warms_up_and_falls_to_nothing():
    plan = Schedule(epochs=1, learning_rate=2.0, warmup=0.1)
    rates = [plan.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert max(rates) == 2.0 and rates[55] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[10:])) and rates[-1] < 0.01


@pytest.mark.parametrize(("change", "named"), [({"seed": 2}, "seed"), ({"epochs": 5}, "schedule")])
def test_a_state_of_another_training_is_refused(tmp_path, change, named):
    trained(tmp_path)
    with pytest.raises(ValueError, match=f"another {named}: remove it"):
        trained(tmp_path, **change)


def test_a_state_of_another_model_is_refused(tmp_path):
    trained(tmp_path)
    with pytest.raises(ValueError, match="another model"):
        trained(tmp_path, model=nn.Linear(2, 1))


def test_a_loss_that_is_not_a_number_ends_training(tmp_path):
    with pytest.raises(ValueError, match="epoch 1 is nan"):
        trained(tmp_path, loss=lambda model, indices, rng: model[0].weight.sum() * math.nan)
    assert not (tmp_path / "state").exists()


def test_no_examples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no examples"):
        train(network(), squares, 0, Schedule(epochs=1), seed=0, state=tmp_path / "state", log=print)
