"""What a model is asked for: how it is called, what its loss is, and what its predictions are measured by.

    image classification       (n, channels, height, width) floats → (n, classes) logits
    sequence classification    (n, length) token ids → (n, classes) logits
    next character             (n, length) character ids → (n, characters) logits of the one that follows
    multiple choice            (n, choices, 2, length) token ids and their parts → (n, choices) scores
    regression                 (n, features) or (n, length, features) floats → (n, outputs) numbers

All but regression are classifications: labels (n,) int64, mean cross-entropy, accuracy; an ensemble predicts by the
mean of its members' probabilities. A regression has labels (n, outputs), the mean squared error over all of
them and its root, and an ensemble's mean output.
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
"""A model, or what stands for one."""


@dataclass(frozen=True)
class Task:
    """How a model is called, and what its outputs are measured by.

    name: as the registry of models has it.
    outputs: (model, inputs) → outputs.
    regression: whether labels are numbers and not classes.
    macro_f1: whether the classes' F1 is measured.
    perplexity: whether e^loss, of a cross-entropy in nats, is told.
    vast: whether outputs for every token are made on the way, which take more memory than all else.
    """

    name: str
    outputs: Callable[[Call, Tensor], Tensor]
    regression: bool = False
    macro_f1: bool = False
    perplexity: bool = False
    vast: bool = False

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Mean over the examples, a scalar. `labels` may be probabilities (n, classes), as of an ensemble.

        Raises ValueError for outputs of a regression that have another shape than the labels.
        """
        if self.regression:
            check_shapes(outputs, labels)
            return F.mse_loss(outputs, labels)
        if labels.is_floating_point():  # the probability 0 of a choice that is not there, times its score −∞, is 0
            outputs = outputs.clamp(min=torch.finfo(outputs.dtype).min)
        return F.cross_entropy(outputs, labels)

    def loss_of(self, model: Call, inputs: Tensor, labels: Tensor) -> Tensor:
        """Call the model, and take the loss."""
        return self.loss(self.outputs(model, inputs), labels)


def check_shapes(outputs: Tensor, labels: Tensor) -> None:
    """Raise ValueError for those of a regression where they differ: they would be broadcast, and mean nothing."""
    if outputs.shape != labels.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, outputs {tuple(outputs.shape)}: the model of a regression "
            "returns (n, outputs)"
        )


def plain(model: Call, inputs: Tensor) -> Tensor:
    """Outputs of a model that takes its inputs as they are."""
    outputs: Tensor = model(inputs)
    return outputs


def numbers(model: Call, inputs: Tensor) -> Tensor:
    """Outputs of a model that takes numbers of tokens or characters, which are kept in small types."""
    return plain(model, inputs.long())


def of_choices(model: Call, inputs: Tensor) -> Tensor:
    """Scores (n, choices) of a causal language model: the mean log probability of a choice's tokens after the context.

    By the mean, not the sum, a long choice is not less likely for its length. A choice without tokens, as where
    questions have fewer than others, scores −∞.

    Args:
        inputs: (n, choices, 2, length) whole numbers: token ids, and of each whether it is `PADDING`, `CONTEXT` or
            `CHOICE`. Padding comes last, a choice has something before it.
    """
    examples, choices, _, length = inputs.shape
    ids, parts = inputs.long().reshape(-1, 2, length).unbind(1)
    logits = model(ids, attention_mask=(parts != PADDING).long())
    chosen = parts[:, 1:] == CHOICE  # a token is foretold at the place before it
    # Only where a choice's tokens are foretold: the logits of all places are large.
    found = F.log_softmax(logits[:, :-1][chosen].float(), dim=-1).gather(1, ids[:, 1:][chosen][:, None])[:, 0]
    sequence = chosen.nonzero()[:, 0]
    sums = torch.zeros(len(ids), dtype=found.dtype, device=found.device).index_add(0, sequence, found)
    counts = chosen.sum(dim=1)
    scores = (sums / counts.clamp(min=1)).masked_fill(counts == 0, -torch.inf)
    return scores.view(examples, choices)


IMAGES = Task("image-classification", plain, macro_f1=True)
REGRESSION = Task("sequence-regression", plain, regression=True)
NEXT_CHARACTER = Task("next-character", numbers, perplexity=True)
TEXTS = Task("sequence-classification", numbers, macro_f1=True)
CHOICES = Task("multiple-choice", of_choices, vast=True)

TASKS = {task.name: task for task in (IMAGES, REGRESSION, NEXT_CHARACTER, TEXTS, CHOICES)}
"""By what the registry of models says that a model is for."""


class Tally:
    """Sums over examples that come in batches: loss, correct labels, and what macro-F1 needs of each class."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.examples = 0
        self._loss = 0.0
        self._correct = 0
        self._counts: Tensor | None = None  # (3, classes): correct, predicted, labelled

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch."""
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
        return self._loss / self.examples

    @property
    def accuracy(self) -> float | None:
        return None if self._task.regression else self._correct / self.examples

    @property
    def figures(self) -> dict[str, float]:
        """What the task is measured by beside loss and accuracy, by name."""
        if self._task.regression:
            return {"rmse": math.sqrt(self.loss)}
        return {} if self._counts is None else {"macro-f1": macro_f1(*self._counts)}


def counts_by_class(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often each class is predicted rightly, predicted, and labelled: (3, classes)."""
    return torch.stack(
        [torch.bincount(of, minlength=classes) for of in (labels[predicted == labels], predicted, labels)]
    )


def macro_f1(correct: Tensor, predicted: Tensor, labelled: Tensor) -> float:
    """Mean of the classes' F1 = 2·correct / (predicted + labelled), over the classes that are labelled or predicted.

    Args:
        correct, predicted, labelled: counts by class (classes,).
    """
    both = predicted + labelled
    there = both > 0
    return float((2 * correct[there].double() / both[there].double()).mean())
