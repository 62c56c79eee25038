"""Prediction by the mean over an ensemble's members, and figures that tell how far the members differ.

Fed-ensemble (Shi et al., arXiv 2107.10663) predicts with the mean over its K models: of their class probabilities, or
in a regression of their outputs. One model object takes the members' weights in turn, so that memory holds one model
whatever K is. A single model is an ensemble of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.loop import at_once, autocast
from tepal.training.tasks import Task, check_shapes, counts_by_class, macro_f1


@dataclass(frozen=True, eq=False)
class Predictions:
    """What an ensemble of K members says of n examples. All tensors are on the CPU, numbers are float64.

    outputs: the members' mean probabilities (n, classes), or in a regression the mean of their outputs (n, …).
    log_probabilities: logarithms of the mean probabilities, finite also where these are too small for a number;
        None in a regression.
    member_labels: the label that each member gives on its own (K, n); None in a regression.
    variance: of the K outputs around their mean, divided by K, in the shape of `outputs`; None in a classification.
    """

    outputs: Tensor
    log_probabilities: Tensor | None = None
    member_labels: Tensor | None = None
    variance: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """The ensemble's own labels (n,): the classes with the highest mean probability."""
        return _of_classes(self.log_probabilities).argmax(dim=1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of each example's mean probabilities (n,), in nats: 0 is certain, log(classes) is a mere guess."""
        _of_classes(self.log_probabilities)
        return torch.special.entr(self.outputs).sum(dim=1)

    @property
    def dissent(self) -> Tensor:
        """Share of the members whose label is not the ensemble's (n,)."""
        return (_of_classes(self.member_labels) != self.labels).double().mean(dim=0)


@dataclass(frozen=True)
class Diversity:
    """How far the members of a classifying ensemble differ.

    lowest_accuracy, highest_accuracy: of a member on its own.
    entropy: of the mean probabilities, in nats, mean over the examples.
    disagreement: share of examples on which two members give different labels, mean over all pairs; 0 for one member.
    """

    lowest_accuracy: float
    highest_accuracy: float
    entropy: float
    disagreement: float


@dataclass(frozen=True)
class EnsembleScore:
    """How well an ensemble predicts `examples` examples, and how far its members differ.

    loss: mean negative logarithm of the true class's mean probability; in a regression the mean squared error of the
        mean output.
    accuracy: share of correct labels; None in a regression.
    figures: those of the task, by name.
    diversity: of a classification, else None.
    variance: over the members, of a regression, mean over all numbers put out; else None.
    """

    loss: float
    accuracy: float | None
    examples: int
    figures: Mapping[str, float]
    diversity: Diversity | None = None
    variance: float | None = None

    @property
    def apart(self) -> dict[str, float]:
        """How far the members differ, by the names of metrics."""
        if self.diversity is None:
            return {} if self.variance is None else {"variance-over-members": self.variance}
        return {name.replace("_", "-"): value for name, value in vars(self.diversity).items()}


def predict(
    model: nn.Module,
    states: Iterable[Mapping[str, Tensor]],
    inputs: Tensor,
    config: TrainingConfig | None,
    task: Task = tasks.IMAGES,
) -> Predictions:
    """The mean prediction of the members.

    Args:
        model: takes each member's weights in turn, and has the last one's afterwards; in evaluation mode.
        states: the members' state_dicts; an iterator that reads them one by one keeps one in memory.
        inputs: (n, …), on the model's device.
        config: its `autocast` holds, and what fits in a pass (see `training.at_once`); None: the usual.
        task: says how the model is called, and whether probabilities or outputs are averaged.

    Raises:
        ValueError: there is no member.
    """
    members = (_outputs(model, state, inputs, config, task) for state in states)
    return _regress(members) if task.regression else _classify(members)


def score_ensemble(
    model: nn.Module,
    states: Iterable[Mapping[str, Tensor]],
    inputs: Tensor,
    labels: Tensor,
    config: TrainingConfig | None,
    task: Task = tasks.IMAGES,
) -> EnsembleScore:
    """Score an ensemble; with one member, loss, accuracy and figures are those of `training.score`.

    Args as for `predict`; `labels` (n,) are class numbers, in a regression numbers of the outputs' shape. Raises
    ValueError for no member, for no example, and where labels do not fit inputs or outputs.
    """
    if len(inputs) != len(labels) or not len(labels):
        raise ValueError(f"{len(inputs)} inputs and {len(labels)} labels: a score needs one label for each input")
    predictions = predict(model, states, inputs, config, task)
    labels = labels.cpu()
    if task.regression:
        return _score_regression(predictions, labels)
    log_probabilities, predicted = _of_classes(predictions.log_probabilities), predictions.labels
    loss = -float(log_probabilities.gather(1, labels[:, None]).mean())
    figures = {}
    if task.macro_f1:
        figures["macro-f1"] = macro_f1(*counts_by_class(predicted, labels, log_probabilities.shape[1]))
    return EnsembleScore(
        loss, _share(predicted == labels), len(labels), figures, diversity=diversity(predictions, labels)
    )


def diversity(predictions: Predictions, labels: Tensor) -> Diversity:
    """How far the members differ on examples with these labels (n,)."""
    member_labels = _of_classes(predictions.member_labels)
    accuracies = [_share(member == labels) for member in member_labels]
    return Diversity(
        lowest_accuracy=min(accuracies),
        highest_accuracy=max(accuracies),
        entropy=float(predictions.entropy.mean()),
        disagreement=_disagreement(member_labels, classes=predictions.outputs.shape[1]),
    )


def _score_regression(predictions: Predictions, targets: Tensor) -> EnsembleScore:
    check_shapes(predictions.outputs, targets)
    assert predictions.variance is not None
    loss = float((predictions.outputs - targets.double()).square().mean())
    figures = {"rmse": math.sqrt(loss)}
    return EnsembleScore(loss, None, len(targets), figures, variance=float(predictions.variance.mean()))


@torch.no_grad()
def _outputs(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor, config: TrainingConfig | None, task: Task
) -> Tensor:
    """One member's outputs (n, …).

    In double precision, where logits that differ still differ after log_softmax: a member alone has the accuracy that
    `training.score` finds. On the CPU, since not every accelerator has double precision.
    """
    model.load_state_dict(state)
    model.eval()
    parts = []
    for batch in inputs.split(at_once(inputs, config or TrainingConfig(), task)):
        with autocast(config, batch.device) if config else nullcontext():
            outputs = task.outputs(model, batch)
        parts.append(outputs.cpu().double())
    return torch.cat(parts)


def _classify(members: Iterator[Tensor]) -> Predictions:
    logits = _first(members)
    total = logits.log_softmax(dim=1)  # the logarithm of the sum of probabilities: no probability is lost to underflow
    member_labels = [logits.argmax(dim=1)]
    for logits in members:
        total = torch.logaddexp(total, logits.log_softmax(dim=1))
        member_labels.append(logits.argmax(dim=1))
    log_probabilities = total - math.log(len(member_labels))
    return Predictions(log_probabilities.exp(), log_probabilities, torch.stack(member_labels))


def _regress(members: Iterator[Tensor]) -> Predictions:
    mean = _first(members)
    squares = torch.zeros_like(mean)
    count = 1
    # Welford's update: the difference of two large sums of squares would lose the small variance between them.
    for count, outputs in enumerate(members, start=2):
        apart = outputs - mean
        mean = mean + apart / count
        squares += apart * (outputs - mean)
    return Predictions(mean, variance=squares / count)


def _first(members: Iterator[Tensor]) -> Tensor:
    first = next(members, None)
    if first is None:
        raise ValueError("an ensemble without a member cannot predict: give at least one state_dict")
    return first


def _of_classes(of_classification: Tensor | None) -> Tensor:
    if of_classification is None:
        raise ValueError("predictions of a regression have no labels, no entropy and no disagreement")
    return of_classification


def _disagreement(member_labels: Tensor, classes: int) -> float:
    members, examples = member_labels.shape
    if members == 1:
        return 0.0
    # Counted by class, K·n steps instead of K²·n: c members with one label are c(c−1) ordered pairs that agree.
    votes = torch.zeros(examples, classes, dtype=torch.float64)
    votes.scatter_add_(1, member_labels.T, torch.ones(examples, members, dtype=torch.float64))
    agreeing = (votes * (votes - 1)).sum(dim=1) / (members * (members - 1))
    return 1 - float(agreeing.mean())


def _share(correct: Tensor) -> float:
    return int(correct.sum()) / len(correct)
