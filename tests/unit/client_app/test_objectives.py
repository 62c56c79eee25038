"""The objectives of local training that a plan can name."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tepal.client_app.objectives import OBJECTIVES, Work, find
from tepal.exchange import plan
from tepal.models.blocks import layout_of
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches
from tests.packages import ROOT


def test_each_file_is_an_objective_by_its_name():
    files = {path.stem for path in (ROOT / "client_app/objectives").glob("[!_]*.py")} - {"work"}
    assert files == OBJECTIVES.keys() - {""}
    for name in files:
        assert type(OBJECTIVES[name]).__module__ == f"tepal.client_app.objectives.{name}"
    assert {plan.SCAFFOLD, plan.LOCAL, plan.DITTO, plan.PERFEDAVG, plan.PFEDME, plan.APFL} <= files


def test_one_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"the objective 'ditot'; this client's app has apfl, ditto, .*scaffold"):
        find("ditot")


@pytest.mark.parametrize("name", [plan.APFL, plan.PERFEDAVG, plan.PFEDME])
def test_settings_of_a_client_with_which_a_method_is_wrong_are_refused(name):
    """A client's own settings may differ from the run's, which the server has checked."""
    model = nn.Linear(4, 3)
    inputs, labels = torch.randn(20, 4), torch.randint(0, 3, (20,))
    options = {plan.ALPHA: 0.25, plan.ADAPTIVE: False, plan.DELTA: 0.01, plan.HESSIAN_FREE: False}
    options |= {plan.LAMBDA: 1.0, plan.INNER_RATE: 0.1, plan.INNER_STEPS: 1, plan.OUTER_STEP: 0.1}

    def fit(**settings):
        config = TrainingConfig(optimizer="sgd", learning_rate=0.1, local_steps=2, **settings)
        made = Work(model, Batches(inputs, labels, 10, 0), config, layout=layout_of(model), options=options)
        made.received = {name: np.array(values) for name, values in made.read().items()}
        find(name).fit(made)

    with pytest.raises(ValueError, match=r"this client has autocast='fp16'.*use 'bf16' or 'no'"):
        fit(autocast="fp16")
    if name == plan.APFL:
        with pytest.raises(ValueError, match="APFL needs gradient-checkpointing=false, and this client has true"):
            fit(gradient_checkpointing=True)


def pfedme(model, inputs, labels, rate, outer=0.25, **settings):
    options = {plan.LAMBDA: 1.5, plan.INNER_RATE: rate, plan.INNER_STEPS: 1, plan.OUTER_STEP: outer}
    config = TrainingConfig(optimizer="sgd", learning_rate=0.1, **settings)
    return find(plan.PFEDME).fit(
        Work(model, Batches(inputs, labels, len(inputs), 0), config, layout=layout_of(model), options=options)
    )


def test_pfedme_clips_the_gradients_of_its_inner_steps():
    """One inner step from w has no proximal term: θ = w − rate·g·min(1, c/‖g‖), and then w ← w − s(w − θ)."""
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(4, 3), torch.randn(20, 4) * 5, torch.randint(0, 3, (20,))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    assert norm > 0.3
    outcome = pfedme(model, inputs, labels, 0.2, local_steps=1, clip_norm=0.3)
    for (name, theta), w, g, after in zip(
        outcome.personal.items(), before, gradients, model.parameters(), strict=True
    ):
        expected = w - 0.2 * 0.3 / norm * g
        np.testing.assert_allclose(theta, expected, rtol=1e-4, atol=1e-6, err_msg=name)
        torch.testing.assert_close(after.detach(), w - 0.25 * (w - expected))


def test_pfedme_that_diverges_names_its_own_rate():
    model, inputs, labels = nn.Linear(4, 3), torch.randn(20, 4), torch.randint(0, 3, (20,))
    with pytest.raises(FloatingPointError, match=r"pfedme\.inner-learning-rate=1e\+06 and pfedme\.lambda=1\.5: lower"):
        pfedme(model, inputs, labels, 1e6, local_steps=30)
    with pytest.raises(FloatingPointError, match=r"from w towards θ is 4\.5 and must be below 2: lower learning-rate"):
        pfedme(model, inputs, labels, 0.01, outer=4.5, local_steps=300)


def test_apfls_personal_model_has_the_statistics_with_which_it_was_trained():
    """Parameters are mixed; running statistics are those of the mixture already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    inputs, labels = torch.randn(20, 4) * 3 + 5, torch.randint(0, 3, (20,))
    options = {plan.ALPHA: 0.25, plan.ADAPTIVE: False}

    def work(**others):
        config = TrainingConfig(optimizer="sgd", learning_rate=0.1, local_steps=5, weight_decay=0.0)
        made = Work(model, Batches(inputs, labels, 10, 0), config, layout=layout_of(model), options=options, **others)
        made.received = {name: np.array(values) for name, values in made.read().items()}
        return made

    apfl, first = find(plan.APFL), work()
    kept = apfl.fit(first).personal
    with torch.no_grad():  # another model comes in the next round
        for tensor in model.state_dict().values():
            tensor.add_(1)
    second = work(load_personal=lambda: kept)
    apfl.personalise(second)
    for name, values in second.read().items():
        share = 0.25 if name in ("0.weight", "0.bias", "1.weight", "1.bias") else 1.0
        expected = share * kept[name] + (1 - share) * second.received[name]
        np.testing.assert_allclose(values, expected, rtol=1e-6, err_msg=name)


class PartlyUsed(nn.Module):
    """A model whose loss does not depend on one of its layers."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.used(inputs)


def test_scaffold_trains_a_model_with_a_layer_that_has_no_gradient():
    """Option II: y ← y − η(g(y) − c_i + c), then c_i⁺ = c_i − c + (x − y)/(K·η). Without a gradient g is 0."""
    torch.manual_seed(0)
    model, rate = PartlyUsed(), 0.05
    batches = Batches(torch.randn(12, 4), torch.arange(12) % 3, 4, 0)
    draw = np.random.default_rng(0).normal
    c, own = ({n: draw(size=p.shape).astype(np.float32) for n, p in model.named_parameters()} for _ in range(2))
    expected = copy.deepcopy(model)
    for inputs, labels in batches.epoch(0):
        expected.zero_grad()
        nn.functional.cross_entropy(expected(inputs), labels).backward()
        with torch.no_grad():
            for name, y in expected.named_parameters():
                y -= rate * ((0 if y.grad is None else y.grad) + torch.from_numpy(c[name] - own[name]))
    config = TrainingConfig(optimizer="sgd", learning_rate=rate, local_epochs=1, batch_size=4, weight_decay=0.0)
    work = Work(model, batches, config, layout=layout_of(model), trees={plan.CONTROL: c}, load_personal=lambda: own)
    work.received = x = work.read()
    outcome = find(plan.SCAFFOLD).fit(work)
    assert outcome.fitted.steps == 3
    for name, y in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), y)
        after = own[name] - c[name] + (x[name] - y.detach().numpy()) / (3 * rate)
        np.testing.assert_allclose(outcome.personal[name], after, atol=1e-5)
        np.testing.assert_allclose(outcome.trees[plan.CONTROL][name], after - own[name], atol=1e-5)
        if name.startswith("unused"):
            np.testing.assert_allclose(outcome.personal[name], 0, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 20])
def test_scaffolds_variate_of_a_constant_gradient_is_that_gradient(momentum, steps):
    """Whatever c and c_i are: with momentum, too, so that variates do not grow from round to round."""
    torch.manual_seed(0)
    model, draw = nn.Linear(4, 3), np.random.default_rng(0).normal
    g, c, own = ({n: draw(size=p.shape).astype(np.float32) for n, p in model.named_parameters()} for _ in range(3))

    def loss_of(model, inputs, labels):
        return sum((p * torch.from_numpy(g[name])).sum() for name, p in model.named_parameters())

    config = TrainingConfig(
        optimizer="sgd", learning_rate=0.05, momentum=momentum, local_steps=steps, batch_size=4, weight_decay=0.0
    )
    batches, task = Batches(torch.zeros(4, 4), torch.arange(4) % 3, 4, 0), SimpleNamespace(loss_of=loss_of)
    trees = {plan.CONTROL: c}
    work = Work(model, batches, config, task, layout=layout_of(model), trees=trees, load_personal=lambda: own)
    work.received = work.read()
    outcome = find(plan.SCAFFOLD).fit(work)
    assert outcome.fitted.steps == steps
    for name in g:
        np.testing.assert_allclose(outcome.personal[name], g[name], atol=1e-3)
        np.testing.assert_allclose(outcome.trees[plan.CONTROL][name], g[name] - own[name], atol=1e-3)
