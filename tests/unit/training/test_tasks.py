"""What each kind of model is asked for, against loops over the examples one by one, and scikit-learn's figures."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from tepal import models
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.data.tokens import CHOICE, CONTEXT, PADDING
from tepal.training.loop import Batches, fit, score
from tepal.training.prediction import score_ensemble
from tepal.training.tasks import Tally

WORDS = 11


class LanguageModel(nn.Module):
    """A causal language model: a recurrent one sees what came before each place, and nothing else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 6)
        self.recurrent = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)
        self.asked = []

    def forward(self, ids, attention_mask=None):
        self.asked.append((ids, attention_mask))
        return self.head(self.recurrent(self.embedding(ids))[0])


def question(context, *choices, length=9, places=3):
    """One example of multiple choice, with padding."""
    encoded = torch.zeros(places, 2, length, dtype=torch.int64)
    for place, choice in enumerate(choices):
        sequence = [*context, *choice]
        encoded[place, 0, : len(sequence)] = torch.tensor(sequence)
        encoded[place, 1, : len(sequence)] = torch.tensor([CONTEXT] * len(context) + [CHOICE] * len(choice))
    return encoded


QUESTIONS = torch.stack(
    [question([1, 2, 3], [4], [5, 6, 7], [8, 9]), question([2], [3, 4, 5, 6], [7]), question([9, 9], [1, 1], [1, 2])]
)


def by_hand(model, inputs):
    """Mean log probability of the choice's tokens, token by token, each sequence alone and without padding."""
    scores = np.full(inputs.shape[:2], -np.inf)
    for n, example in enumerate(inputs):
        for place, (ids, parts) in enumerate(example):
            ids = ids[parts != PADDING]
            told = [
                model(ids[None, :end])[0, -1].log_softmax(-1)[ids[end]].item()
                for end in range(1, len(ids))
                if parts[end] == CHOICE
            ]
            if told:
                scores[n, place] = np.mean(told)
    return scores


def test_a_choice_is_scored_by_the_mean_log_probability_of_its_tokens():
    model = LanguageModel()
    with torch.no_grad():
        scores = tasks.CHOICES.outputs(model, QUESTIONS)
        np.testing.assert_allclose(scores, by_hand(LanguageModel(), QUESTIONS), rtol=1e-5)
    assert scores[1, 2] == -np.inf, "there is no third choice"
    (ids, mask), *_ = model.asked
    assert torch.equal(mask, (QUESTIONS[:, :, 1].flatten(0, 1) != PADDING).long()) and len(ids) == 9


def test_multiple_choice_is_trained_by_its_scores():
    model, labels = LanguageModel(), torch.tensor([1, 0, 1])
    config = TrainingConfig.of({"local-steps": 30, "learning-rate": 0.02, "batch-size": 3})
    before = score(model, QUESTIONS, labels, config, tasks.CHOICES)
    fit(model, Batches(QUESTIONS, labels, 3, 0), config, task=tasks.CHOICES)
    after = score(model, QUESTIONS, labels, config, tasks.CHOICES)
    assert after.loss < 0.3 < before.loss and after.accuracy == 1
    members = [model.state_dict(), LanguageModel().state_dict()]
    both = score_ensemble(LanguageModel(), members, QUESTIONS, labels, None, tasks.CHOICES)
    said = []
    for state in members:
        model.load_state_dict(state)
        said.append(tasks.CHOICES.outputs(model, QUESTIONS).softmax(1).detach().double())
    expected = torch.stack(said).mean(0)
    assert both.loss == pytest.approx(-expected[range(3), labels].log().mean().item(), rel=1e-5)
    assert both.figures == {}


@pytest.mark.parametrize("missing", [(), (2,), (0, 3)])
def test_macro_f1_is_scikit_learns(missing):
    rng = np.random.default_rng(1)
    labels, predicted = (rng.choice([c for c in range(5) if c not in missing], 60) for _ in range(2))
    tally = Tally(tasks.IMAGES)
    outputs = nn.functional.one_hot(torch.from_numpy(predicted), 5).float()
    for part in (slice(0, 7), slice(7, 60)):
        tally.add(outputs[part], torch.from_numpy(labels[part]))
    assert tally.figures["macro-f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert tally.accuracy == pytest.approx((labels == predicted).mean()) and tally.examples == 60


def test_macro_f1_of_an_ensemble_of_one_is_the_models():
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(4, 3), torch.randn(50, 4), torch.randint(0, 3, (50,))
    alone = score(model, inputs, labels, TrainingConfig.of({}))
    ensemble = score_ensemble(model, [model.state_dict()], inputs, labels, None)
    assert alone.figures == ensemble.figures and set(alone.figures) == {"macro-f1"}


def test_a_regression_has_a_squared_error_and_no_accuracy():
    model = models.build("linear-attention", features=64, outputs=32, seed=0)
    inputs, targets = torch.randn(6, 3, 64), torch.randn(6, 32)
    config = TrainingConfig.of({"local-steps": 40, "batch-size": 6, "learning-rate": 0.05})
    scored = score(model, inputs, targets, config, tasks.REGRESSION)
    expected = ((model(inputs).detach().numpy() - targets.numpy()) ** 2).mean()
    assert scored.loss == pytest.approx(expected, rel=1e-5)
    assert (scored.accuracy, scored.examples) == (None, 6)
    assert scored.figures == {"rmse": pytest.approx(np.sqrt(expected), rel=1e-5)}
    fitted = fit(model, Batches(inputs, targets, 6, 0), config, task=tasks.REGRESSION)
    assert score(model, inputs, targets, config, tasks.REGRESSION).loss < 0.8 * scored.loss and fitted.steps == 40


def test_outputs_of_another_shape_than_the_targets_are_not_broadcast():
    with pytest.raises(ValueError, match=r"labels have shape \(6, 1\), outputs \(6,\): the model of a regress"):
        tasks.REGRESSION.loss(torch.zeros(6), torch.zeros(6, 1))


def test_every_model_that_can_be_named_has_a_task():
    assert {models.find(name).kind for name in models.names()} == set(tasks.TASKS)
