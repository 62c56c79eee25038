"""The objectives of local training that a plan can name."""

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
