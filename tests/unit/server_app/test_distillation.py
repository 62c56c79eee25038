"""Distillation of an ensemble, against softmax regression written down in NumPy, and on models of all kinds."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tepal.models.blocks import canonical_state, find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.server_app.distillation import CYCLE, LOWEST, Distiller
from tepal.strategies.method import MethodError
from tepal.training import tasks
from tepal.training.data.tokens import CHOICE, CONTEXT

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(60, 5)).astype(np.float32)


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def entries_of(model):
    return {name: tensor.detach().numpy().copy() for name, tensor in canonical_state(model).items()}


def distiller(model, images=IMAGES, **options):
    return Distiller(model, find_blocks(model).layout, images, **options)


def softmax(logits):
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def regression(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {"weight": scale * rng.normal(size=(3, 5)).astype(np.float32), "bias": rng.normal(size=3).astype(np.float32)}


@pytest.mark.parametrize(("cycles", "temperature"), [(1, 1), (3, 1), (1, 0.5), (1, 3.0)])
def test_the_result_is_the_mean_of_the_weights_at_the_end_of_each_cycle(cycles, temperature):
    """All examples are in every step: gradient descent with momentum on a power of the members' mean probabilities."""
    members, student, rate = [regression(1), regression(2)], regression(3), 0.2
    options = {"epochs": cycles * CYCLE - 1, "learning_rate": rate, "batch_size": 60, "temperature": temperature}
    found = distiller(linear(), **options)(iter(members), student)
    x = IMAGES.astype(np.float64)
    taught = sum(softmax(x @ m["weight"].T + m["bias"]) for m in members) / 2
    taught = taught ** (1 / temperature)
    taught = taught / taught.sum(1, keepdims=True)
    w, b = student["weight"].astype(np.float64), student["bias"].astype(np.float64)
    speed_w, speed_b, ends = 0.0, 0.0, []
    for step in range(cycles * CYCLE):  # rounded up from one step less
        error = (softmax(x @ w.T + b) - taught) / len(x)
        speed_w, speed_b = 0.9 * speed_w + error.T @ x, 0.9 * speed_b + error.sum(0)
        lr = rate + (LOWEST * rate - rate) * (step % CYCLE) / (CYCLE - 1)
        w, b = w - lr * speed_w, b - lr * speed_b
        if (step + 1) % CYCLE == 0:
            ends.append((w, b))
    np.testing.assert_allclose(found["weight"], np.mean([w for w, _ in ends], 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["bias"], np.mean([b for _, b in ends], 0), rtol=1e-4, atol=1e-5)


def test_the_student_comes_to_predict_what_the_ensemble_does():
    members, student = [regression(1), regression(2)], regression(3)
    found = distiller(linear(), epochs=200, learning_rate=0.05, batch_size=16)(members, student)

    def off(model):
        taught = sum(softmax(IMAGES @ m["weight"].T + m["bias"]) for m in members) / 2
        return np.abs(softmax(IMAGES @ model["weight"].T + model["bias"]) - taught).mean()

    assert off(found) < 0.3 * off(student)


def test_the_same_ensemble_gives_the_same_student_whatever_the_model_was_before():
    make, model = (lambda: (iter([regression(1), regression(2)]), regression(3))), linear()
    distil = distiller(model, epochs=5, batch_size=16, learning_rate=0.1, seed=3)
    first, second = distil(*make()), distil(*make())
    other = distiller(linear(), epochs=5, batch_size=16, learning_rate=0.1, seed=4)(*make())
    assert first["weight"].tobytes() == second["weight"].tobytes() != other["weight"].tobytes()


def test_members_are_taken_one_by_one(quick_gc):
    seen, left = [], []

    def members():
        for seed in range(4):
            gc.collect()
            left.append(sum(array() is not None for array in seen))
            model = regression(seed)
            seen.append(weakref.ref(model["weight"]))
            yield model

    distiller(linear(), epochs=1)(members(), regression(9))
    assert len(left) == 4 and max(left) <= 1


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.first(x))))


def test_statistics_are_those_of_the_new_weights_and_counters_stay():
    torch.manual_seed(0)
    student = {**entries_of(Normed()), "norm.num_batches_tracked": np.array(17)}
    found = distiller(Normed(), epochs=2, batch_size=60)([entries_of(Normed()), entries_of(Normed())], student)
    assert list(found) == list(student)
    assert {name: array.dtype for name, array in found.items()} == {n: a.dtype for n, a in student.items()}
    assert found["norm.num_batches_tracked"] == 17
    hidden = IMAGES @ found["first.weight"].T + found["first.bias"]
    np.testing.assert_allclose(found["norm.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["norm.running_var"], hidden.var(0, ddof=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_models_with_fused_projections_are_taken_apart_and_put_together(fused):
    torch.manual_seed(0)
    model = TinyViT((1, 8, 8), 3, width=8, depth=1, heads=2, fused=fused)
    start = entries_of(model)
    images = RNG.random((30, 1, 8, 8)).astype(np.float32)
    found = distiller(model, images, epochs=2, batch_size=16, learning_rate=0.05)([start], start)
    assert {name: a.shape for name, a in found.items()} == {name: a.shape for name, a in start.items()}
    # The student is its own teacher: it has nothing to learn.
    for name, array in start.items():
        np.testing.assert_allclose(found[name], array, atol=1e-4, err_msg=name)


def test_a_distillation_that_diverges_says_what_to_do():
    with pytest.raises(MethodError, match=r"diverged with a learning rate of 1e\+38: lower fedbe\.learning-rate"):
        distiller(linear(), learning_rate=1e38)([regression(1)], regression(3))
    broken = {**regression(1), "bias": np.array([np.nan, 0, 0], np.float32)}
    with pytest.raises(MethodError, match="predicts NaN"):
        distiller(linear())([regression(1), broken], regression(3))


@pytest.mark.parametrize("temperature", [0, -0.5, float("nan"), float("inf")])
def test_a_temperature_that_is_no_number_above_0_is_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature is .*; it must be a number, above 0"):
        distiller(linear(), temperature=temperature)


def test_without_examples_there_is_no_distillation():
    with pytest.raises(ValueError, match="no inputs to distil on"):
        distiller(linear(), IMAGES[:0])


# Texts

TOKENS = RNG.integers(0, 7, (60, 5)).astype(np.uint8)


class Words(nn.Module):
    """The mean of the words' logits: softmax regression on the share of each word."""

    def __init__(self, classes=3):
        super().__init__()
        self.words = nn.Embedding(7, classes)

    def forward(self, ids):
        return self.words(ids).mean(1)


def words(seed):
    return {"words.weight": 3 * np.random.default_rng(seed).normal(size=(7, 3)).astype(np.float32)}


@pytest.mark.parametrize("task", [tasks.TEXTS, tasks.NEXT_CHARACTER])
@pytest.mark.parametrize("micro_batch_size", [0, 16])
def test_on_texts_it_is_descent_on_the_mean_probabilities_of_the_members_too(task, micro_batch_size):
    members, student, rate = [words(1), words(2)], words(3), 0.5
    options = {"epochs": CYCLE, "learning_rate": rate, "batch_size": 60, "micro_batch_size": micro_batch_size}
    found = distiller(Words(), TOKENS, task=task, **options)(iter(members), student)
    x = np.stack([np.bincount(row, minlength=7) / 5 for row in TOKENS])
    taught = sum(softmax(x @ m["words.weight"]) for m in members) / 2
    w, speed = student["words.weight"].astype(np.float64), 0.0
    for step in range(CYCLE):
        speed = 0.9 * speed + x.T @ (softmax(x @ w) - taught) / len(x)
        w = w - (rate + (LOWEST * rate - rate) * step / (CYCLE - 1)) * speed
    np.testing.assert_allclose(found["words.weight"], w, rtol=1e-3, atol=1e-4)


class Speaker(nn.Module):
    """A causal model in which the next token depends on the last one alone."""

    def __init__(self):
        super().__init__()
        self.next = nn.Embedding(7, 7)

    def forward(self, ids, attention_mask=None):
        return self.next(ids)


def test_questions_may_have_fewer_choices_than_others():
    """What is not there has the probability 0, and takes nothing from the others."""
    rng = np.random.default_rng(4)
    questions = np.zeros((20, 3, 2, 4), np.uint8)
    for number, question in enumerate(questions):
        for choice in question[: 2 + number % 2]:
            choice[0], choice[1] = [*rng.integers(1, 7, 3), 0], [CONTEXT, CONTEXT, CHOICE, 0]
    members = [{"next.weight": 2 * rng.normal(size=(7, 7)).astype(np.float32)} for _ in range(2)]
    student = {"next.weight": np.zeros((7, 7), np.float32)}
    found = distiller(Speaker(), questions, task=tasks.CHOICES, epochs=200, learning_rate=0.5, batch_size=8)(
        members, student
    )

    def chosen(entries):
        table = entries["next.weight"].astype(np.float64)
        logs = table - np.log(np.exp(table).sum(1, keepdims=True))
        scores = logs[questions[:, :, 0, 1], questions[:, :, 0, 2]]
        return softmax(np.where(questions[:, :, 1, 2] == CHOICE, scores, -1e9))

    taught = sum(map(chosen, members)) / 2
    assert np.abs(chosen(found) - taught).mean() < 0.3 * np.abs(chosen(student) - taught).mean()


class Dropping(Words):
    def forward(self, ids):
        return super().forward(ids) + nn.functional.dropout(self.words(ids), 0.5, self.training).mean(1)


def test_what_a_model_drops_depends_on_the_seed_alone():
    first, second = (distiller(Dropping(), TOKENS, task=tasks.TEXTS, epochs=2) for _ in range(2))
    one = first([words(1)], words(3))
    before = torch.random.get_rng_state()
    other = second([words(1)], words(3))
    assert one["words.weight"].tobytes() == other["words.weight"].tobytes()
    assert torch.equal(torch.random.get_rng_state(), before), "and the server's own draws go on as if nothing was drawn"
