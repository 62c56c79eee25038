"""Tasks: how a model is called, its loss, and the metrics of its predictions.

    image classification       (n, channels, height, width) floats → (n, classes) logits
    table classification       (n, features) floats → (n, classes) logits
    sequence classification    (n, length) token ids → (n, classes) logits
    next character             (n, length) character ids → (n, characters) logits of the next character
    multiple choice            (n, choices, 2, length) token ids and their roles → (n, choices) scores
    regression                 (n, features) or (n, length, features) floats → (n, outputs) floats

All except regression are classifications: labels (n,) int64, mean cross-entropy, accuracy; an ensemble predicts with
the mean of its members' probabilities. A regression has labels (n, outputs), the mean squared error over all output
elements and its root; an ensemble predicts with the mean output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tepal.training.data.tokens import CHOICE, PADDING

Call = Callable[..., Any]
"""A model, or a function that is called like one."""


@dataclass(frozen=True)
class Task:
    """How a model is called, and the metrics of its outputs.

    name: kind of model in `models.registry`.
    outputs: (model, inputs) → outputs.
    regression: whether labels are numbers instead of classes.
    macro_f1: whether macro-F1 is measured.
    perplexity: whether e^loss, of a cross-entropy in nats, is reported.
    outputs_per_token: whether the model computes outputs for every token, which dominate the memory.
    """

    name: str
    outputs: Callable[[Call, Tensor], Tensor]
    regression: bool = False
    macro_f1: bool = False
    perplexity: bool = False
    outputs_per_token: bool = False

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over the examples, a scalar. `labels` may also be probabilities (n, classes).

        Raises ValueError if outputs and labels of a regression have different shapes.
        """
        if self.regression:
            check_shapes(outputs, labels)
            return F.mse_loss(outputs, labels)
        if labels.is_floating_point():  # a padded choice has probability 0 and score −∞: their product must be 0
            outputs = outputs.clamp(min=torch.finfo(outputs.dtype).min)
        return F.cross_entropy(outputs, labels)

    def loss_of(self, model: Call, inputs: Tensor, labels: Tensor) -> Tensor:
        """Call the model and return the mean loss."""
        return self.loss(self.outputs(model, inputs), labels)


def check_shapes(outputs: Tensor, labels: Tensor) -> None:
    """Raise ValueError if outputs and labels of a regression differ in shape, and would be broadcast."""
    if outputs.shape != labels.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, outputs {tuple(outputs.shape)}: the model of a regression "
            "must return (n, outputs)"
        )


def plain(model: Call, inputs: Tensor) -> Tensor:
    """Return the outputs of a model that takes its inputs unchanged."""
    outputs: Tensor = model(inputs)
    return outputs


def from_ids(model: Call, inputs: Tensor) -> Tensor:
    """Return the outputs of a model that takes ids of tokens or characters, which are stored in small dtypes."""
    return plain(model, inputs.long())


def choice_scores(model: Call, inputs: Tensor) -> Tensor:
    """Score choices with a causal language model: the mean log probability of a choice's tokens given the context.

    The mean, unlike the sum, does not penalise long choices.

    Args:
        model: (token ids, attention_mask=) → logits for every token.
        inputs: (n, choices, 2, length) integers: token ids and their roles, `PADDING`, `CONTEXT` or `CHOICE`. Padding
            comes last, and every choice follows at least one token.

    Returns:
        Scores (n, choices); −∞ for a choice without tokens, which pads questions with fewer choices.
    """
    examples, choices, _, length = inputs.shape
    ids, roles = inputs.long().reshape(-1, 2, length).unbind(1)
    logits = model(ids, attention_mask=(roles != PADDING).long())
    chosen = roles[:, 1:] == CHOICE  # a token is predicted at the position before it
    # Only at positions that predict a choice's tokens, because the logits of all positions are large.
    found = F.log_softmax(logits[:, :-1][chosen].float(), dim=-1).gather(1, ids[:, 1:][chosen][:, None])[:, 0]
    sequence = chosen.nonzero()[:, 0]
    sums = torch.zeros(len(ids), dtype=found.dtype, device=found.device).index_add(0, sequence, found)
    counts = chosen.sum(dim=1)
    scores = (sums / counts.clamp(min=1)).masked_fill(counts == 0, -torch.inf)
    return scores.view(examples, choices)


IMAGES = Task("image-classification", plain, macro_f1=True)
REGRESSION = Task("sequence-regression", plain, regression=True)
TABLES = Task("table-classification", plain, macro_f1=True)
NEXT_CHARACTER = Task("next-character", from_ids, perplexity=True)
TEXTS = Task("sequence-classification", from_ids, macro_f1=True)
CHOICES = Task("multiple-choice", choice_scores, outputs_per_token=True)

TASKS = {task.name: task for task in (IMAGES, REGRESSION, TABLES, NEXT_CHARACTER, TEXTS, CHOICES)}
"""Kind of model → its task."""


class Tally:
    """Accumulates metrics over batches: loss, accuracy, and counts per class for macro-F1."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.examples = 0
        self._loss = 0.0
        self._correct = 0
        self._counts: Tensor | None = None  # (3, classes): correct, predicted, labelled

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self._loss += float(self._task.loss(outputs.float(), labels)) * len(labels)
        self.examples += len(labels)
        if self._task.regression:
            return
        predicted = outputs.argmax(dim=1)
        self._correct += int((predicted == labels).sum())
        if self._task.macro_f1:
            counts = counts_by_class(predicted, labels, outputs.shape[1])
            self._counts = counts if self._counts is None else self._counts + counts

    @property
    def loss(self) -> float:
        """Mean loss over the examples."""
        return self._loss / self.examples

    @property
    def accuracy(self) -> float | None:
        """Share of correct labels; None in a regression."""
        return None if self._task.regression else self._correct / self.examples

    @property
    def figures(self) -> dict[str, float]:
        """The task's metrics other than loss and accuracy, by name."""
        if self._task.regression:
            return {"rmse": math.sqrt(self.loss)}
        return {} if self._counts is None else {"macro-f1": macro_f1(*self._counts)}


def counts_by_class(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return counts per class (3, classes): correctly predicted, predicted, labelled."""
    return torch.stack(
        [torch.bincount(of, minlength=classes) for of in (labels[predicted == labels], predicted, labels)]
    )


def macro_f1(correct: Tensor, predicted: Tensor, labelled: Tensor) -> float:
    """Return the mean of the classes' F1 = 2·correct / (predicted + labelled), over classes labelled or predicted.

    Args:
        correct, predicted, labelled: counts by class (classes,).
    """
    both = predicted + labelled
    present = both > 0
    return float((2 * correct[present].double() / both[present].double()).mean())
