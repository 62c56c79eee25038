"""The mean prediction of an ensemble and its diversity, against NumPy loops over the members one by one."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from tepal import models
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.loop import score
from tepal.training.prediction import predict, score_ensemble

CLASSES = 4


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def states(count):
    """Members that differ, with logits of some size."""
    return [{name: 3 * tensor for name, tensor in network(seed).state_dict().items()} for seed in range(count)]


def examples(count=37, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def probabilities(state, inputs):
    """The network's softmax, written out."""
    w, b, v, c = (state[name].double().numpy() for name in ("0.weight", "0.bias", "3.weight", "3.bias"))
    logits = np.tanh(inputs.double().numpy() @ w.T + b) @ v.T + c
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


class Spoken(nn.Module):
    """Its weights are its logits, whatever it is shown."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))

    def forward(self, inputs):
        return self.logits[: len(inputs)]


def spoken(*members):
    """A model and the states of members with these logits, each (examples, classes)."""
    return Spoken(members[0]), [Spoken(logits).state_dict() for logits in members]


def no_autocast():
    return TrainingConfig.of({})


@pytest.mark.parametrize("members", [1, 2, 5])
def test_probabilities_are_averaged_not_logits(members):
    inputs, _ = examples()
    predictions = predict(network(), states(members), inputs, no_autocast())
    each = [probabilities(state, inputs) for state in states(members)]
    np.testing.assert_allclose(predictions.outputs, np.mean(each, axis=0), rtol=1e-5)
    np.testing.assert_array_equal(predictions.member_labels, [p.argmax(axis=1) for p in each])
    np.testing.assert_array_equal(predictions.labels, np.mean(each, axis=0).argmax(axis=1))


def test_the_score_is_that_of_the_mean_probability():
    inputs, labels = examples()
    scored = score_ensemble(network(), states(3), inputs, labels, no_autocast())
    mean = np.mean([probabilities(state, inputs) for state in states(3)], axis=0)
    assert scored.loss == pytest.approx(-np.mean([math.log(p[y]) for p, y in zip(mean, labels, strict=True)]), rel=1e-5)
    assert scored.accuracy == np.mean(mean.argmax(axis=1) == labels.numpy())
    assert scored.examples == len(labels)


def test_diversity_is_what_loops_over_members_and_pairs_count():
    inputs, labels = examples()
    diversity = score_ensemble(network(), states(4), inputs, labels, no_autocast()).diversity
    each = [probabilities(state, inputs) for state in states(4)]
    accuracies = [np.mean(p.argmax(axis=1) == labels.numpy()) for p in each]
    pairs = [np.mean(a.argmax(axis=1) != b.argmax(axis=1)) for a, b in combinations(each, 2)]
    entropies = [-sum(q * math.log(q) for q in p) for p in np.mean(each, axis=0)]
    assert (diversity.lowest_accuracy, diversity.highest_accuracy) == (min(accuracies), max(accuracies))
    assert min(accuracies) < max(accuracies) and 0 < np.mean(pairs) < 1, "these members show nothing"
    assert diversity.disagreement == pytest.approx(np.mean(pairs), abs=1e-12)
    assert diversity.entropy == pytest.approx(np.mean(entropies), rel=1e-5)
    own = [np.mean([-sum(q * math.log(q) for q in row) for row in p]) for p in each]
    assert diversity.mode_entropy == pytest.approx(sum(own) / 4, rel=1e-5)
    assert diversity.mode_entropy < 0.95 * diversity.entropy, "these members show nothing"


@pytest.mark.parametrize("autocast", ["no", "bf16"])
def test_one_member_scores_as_a_single_model(autocast):
    inputs, labels = examples(700)
    config = TrainingConfig.of({"autocast": autocast})
    (state,) = states(1)
    scored = score_ensemble(network(), [state], inputs, labels, config)
    single = network()
    single.load_state_dict(state)
    expected = score(single, inputs, labels, config)
    assert scored.loss == pytest.approx(expected.loss, rel=1e-6)
    assert (scored.accuracy, scored.examples) == (expected.accuracy, expected.examples)
    assert scored.diversity.lowest_accuracy == scored.diversity.highest_accuracy == expected.accuracy
    assert scored.diversity.disagreement == 0
    assert scored.diversity.mode_entropy == pytest.approx(scored.diversity.entropy, rel=1e-12)


def test_autocast_is_that_of_the_config():
    inputs, _ = examples()
    halved = predict(network(), states(2), inputs, TrainingConfig.of({"autocast": "bf16"})).outputs
    full = predict(network(), states(2), inputs, None).outputs
    assert not torch.equal(halved, full)
    torch.testing.assert_close(halved, full, atol=0.05, rtol=0)
    assert torch.equal(full, predict(network(), states(2), inputs, no_autocast()).outputs)


def test_the_order_of_the_members_does_not_matter():
    inputs, labels = examples()
    members = states(5)
    scores = [
        score_ensemble(network(), [members[k] for k in order], inputs, labels, no_autocast())
        for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1])
    ]
    assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-12)
    assert scores[0].accuracy == scores[1].accuracy
    assert scores[0].diversity.disagreement == scores[1].diversity.disagreement


def test_a_member_that_is_there_three_times_counts_as_once():
    inputs, labels = examples()
    once, thrice = (score_ensemble(network(), states(1) * times, inputs, labels, None) for times in (1, 3))
    assert thrice.loss == pytest.approx(once.loss, rel=1e-12)
    assert thrice.accuracy == once.accuracy
    assert thrice.diversity.entropy == pytest.approx(once.diversity.entropy, rel=1e-12)
    assert thrice.diversity.disagreement == 0


def test_batches_do_not_matter():
    """1,100 examples are three batches; those beside the cuts are predicted alone too."""
    inputs, _ = examples(1100)
    together = predict(network(), states(2), inputs, None)
    rows = [0, 511, 512, 1023, 1024, 1099]
    alone = [predict(network(), states(2), inputs[row : row + 1], None) for row in rows]
    torch.testing.assert_close(together.outputs[rows], torch.cat([one.outputs for one in alone]), rtol=1e-5, atol=1e-7)
    assert torch.equal(together.member_labels[:, rows], torch.cat([one.member_labels for one in alone], dim=1))


def test_members_that_are_sure_and_wrong_cost_much_and_stay_finite():
    """e^-10000 is no number of a computer; its logarithm is."""
    sure, opposite = [[10_000.0, 0.0]], [[0.0, 10_000.0]]
    labels = torch.tensor([1])
    for members, loss in (
        ([sure], 10_000),
        ([sure, sure], 10_000),
        ([sure, opposite], math.log(2)),
        ([opposite], 0),
        ([sure] * 3 + [opposite], math.log(4)),
    ):
        model, weights = spoken(*members)
        scored = score_ensemble(model, weights, torch.zeros(1, 3), labels, None)
        assert scored.loss == pytest.approx(loss, abs=1e-9)
        assert math.isfinite(scored.diversity.entropy)


LOGITS = st.floats(-50, 50, width=32) | st.just(-math.inf)


@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)), elements=LOGITS))
def test_the_mean_of_the_members_entropies_is_at_most_that_of_their_mean(logits):
    """Entropy is concave (Jensen); and no entropy is above that of equal probabilities, or below 0."""
    logits[:, :, 0] = np.maximum(logits[:, :, 0], -50)  # not all classes of an example are impossible
    model, weights = spoken(*logits)
    predictions = predict(model, weights, torch.zeros(logits.shape[1], 1), None)
    of_members, of_mean = predictions.member_entropy, predictions.entropy
    assert of_members.shape == of_mean.shape == logits.shape[1:2]
    assert (of_members >= 0).all() and (of_members <= of_mean + 1e-9).all()
    assert (of_mean <= math.log(logits.shape[2]) + 1e-9).all()


def test_a_known_vote():
    """Three members on four examples: all agree, two against one twice, all differ. Pairs differ: 0, 2/3, 2/3, 1."""
    votes = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 2]])
    model, weights = spoken(*(5 * np.eye(3)[member] for member in votes))
    predictions = predict(model, weights, torch.zeros(4, 1), None)
    assert predictions.labels[:3].tolist() == [0, 0, 1]
    np.testing.assert_allclose(predictions.dissent, [0, 1 / 3, 1 / 3, 2 / 3])
    np.testing.assert_allclose(predictions.entropy[3], math.log(3), rtol=1e-6)
    scored = score_ensemble(model, weights, torch.zeros(4, 1), torch.tensor([0, 0, 0, 0]), None)
    assert scored.diversity.disagreement == pytest.approx((0 + 2 / 3 + 2 / 3 + 1) / 4)
    assert (scored.diversity.lowest_accuracy, scored.diversity.highest_accuracy) == (0.25, 1.0)


def test_members_that_are_certain_of_different_classes_have_an_entropy_together_only():
    model, weights = spoken([[200.0, 0.0]], [[0.0, 200.0]])
    diversity = score_ensemble(model, weights, torch.zeros(1, 1), torch.tensor([0]), None).diversity
    assert diversity.entropy == pytest.approx(math.log(2))
    assert diversity.mode_entropy == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 4.0])
def test_tempered_probabilities_are_powers_of_the_mean_ones(temperature):
    inputs, _ = examples()
    predictions = predict(network(), states(3), inputs, None)
    powers = predictions.outputs.numpy() ** (1 / temperature)
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(predictions.tempered(temperature), expected, rtol=1e-9)


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1e300])
def test_no_temperature_makes_probabilities_that_are_none(temperature):
    """Of a class that is impossible the probability is 0; at the lowest temperature the most probable one has all."""
    model, weights = spoken([[3.0, 1.0, -math.inf]])
    tempered = predict(model, weights, torch.zeros(1, 1), None).tempered(temperature)
    expected = [[0.5, 0.5, 0]] if temperature > 1 else [[1, 0, 0]]
    np.testing.assert_allclose(tempered, expected, atol=1e-12)


def test_members_are_taken_one_by_one():
    """An iterator is asked for the next member after the one before was used, and its weights are what is loaded."""
    model, used = network(), []

    def one_by_one():
        for state in states(3):
            yield state
            used.append(torch.equal(model[0].weight, state["0.weight"]))

    predict(model, one_by_one(), examples()[0], None)
    assert used == [True, True, True]


def test_prediction_is_in_evaluation_mode_and_without_gradients():
    model = network().train()
    inputs, _ = examples()
    first, second = (predict(model, states(2), inputs, None).outputs for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad


def test_a_regression_averages_outputs():
    inputs = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1))
    targets = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    sizes = {"features": 64, "outputs": 32}
    members = [models.build("linear-attention", **sizes, seed=seed) for seed in range(4)]
    outputs = np.stack([member(inputs).detach().double().numpy() for member in members])
    given = [member.state_dict() for member in members]
    model = models.build("linear-attention", **sizes, seed=9)
    predictions = predict(model, given, inputs, None, tasks.REGRESSION)
    np.testing.assert_allclose(predictions.outputs, outputs.mean(axis=0), atol=1e-6)
    scored = score_ensemble(model, given, inputs, targets, None, tasks.REGRESSION)
    squared = (outputs.mean(axis=0) - targets.numpy()) ** 2
    assert scored.loss == pytest.approx(squared.mean(), rel=1e-5)
    assert scored.figures == {"rmse": pytest.approx(np.sqrt(squared.mean()), rel=1e-5)}
    assert scored.variance == pytest.approx(np.var(outputs, axis=0).mean(), rel=1e-5)
    assert (scored.examples, scored.accuracy, scored.apart) == (5, None, {"variance-over-members": scored.variance})
    assert score_ensemble(model, given[:1], inputs, targets, None, tasks.REGRESSION).variance == 0


def test_what_has_no_answer_is_refused():
    inputs, labels = examples()
    with pytest.raises(ValueError, match="without members"):
        predict(network(), [], inputs, None)
    with pytest.raises(ValueError, match="37 inputs and 36 labels"):
        score_ensemble(network(), states(1), inputs, labels[:-1], None)
    with pytest.raises(ValueError, match="0 inputs and 0 labels"):
        score_ensemble(network(), states(1), inputs[:0], labels[:0], None)
    with pytest.raises(ValueError, match="regression"):
        _ = predict(network(), states(1), inputs, None, tasks.REGRESSION).entropy
    with pytest.raises(ValueError, match="regression"):
        predict(network(), states(1), inputs, None, tasks.REGRESSION).tempered(0.5)
    with pytest.raises(ValueError, match=r"labels have shape \(37, 1\), outputs \(37, 4\)"):
        score_ensemble(network(), states(1), inputs, torch.zeros(37, 1), None, tasks.REGRESSION)
