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

from tepal import models
from tepal.client_app.config import TrainingConfig
from tepal.client_app.training import autocast

_BATCH = 512  # examples in one forward pass, as in training.score


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
    """Mean negative logarithm of the true class's mean probability, and share of correct labels, of the ensemble."""

    loss: float
    accuracy: float
    examples: int
    diversity: Diversity


@dataclass(frozen=True)
class RegressionScore:
    """Mean squared error of the mean output, and the variance over members, both means over all numbers put out."""

    mean_squared_error: float
    variance_over_members: float
    examples: int


def predict(
    model: nn.Module,
    states: Iterable[Mapping[str, Tensor]],
    inputs: Tensor,
    config: TrainingConfig | None,
    *,
    kind: str = models.IMAGES,
) -> Predictions:
    """The mean prediction of the members.

    Args:
        model: takes each member's weights in turn, and has the last one's afterwards; in evaluation mode.
        states: the members' state_dicts; an iterator that reads them one by one keeps one in memory.
        inputs: (n, …), on the model's device.
        config: its `autocast` holds; None is none.
        kind: `models.IMAGES` (mean of the probabilities) or `models.SEQUENCES` (mean of the outputs).

    Raises:
        ValueError: there is no member.
    """
    members = (_outputs(model, state, inputs, config) for state in states)
    return _classify(members) if kind == models.IMAGES else _regress(members)


def score_ensemble(
    model: nn.Module,
    states: Iterable[Mapping[str, Tensor]],
    inputs: Tensor,
    labels: Tensor,
    config: TrainingConfig | None,
) -> EnsembleScore:
    """Score a classifying ensemble; with one member, loss and accuracy are those of `training.score`.

    Args as for `predict`; `labels` (n,) are class numbers. Raises ValueError for no member, for no example, and where
    inputs and labels are not of one number.
    """
    _require_pairs(inputs, labels)
    predictions = predict(model, states, inputs, config)
    labels = labels.cpu()
    log_probabilities = _of_classes(predictions.log_probabilities)
    return EnsembleScore(
        loss=-float(log_probabilities.gather(1, labels[:, None]).mean()),
        accuracy=_share(predictions.labels == labels),
        examples=len(labels),
        diversity=diversity(predictions, labels),
    )


def score_regression(
    model: nn.Module,
    states: Iterable[Mapping[str, Tensor]],
    inputs: Tensor,
    targets: Tensor,
    config: TrainingConfig | None,
) -> RegressionScore:
    """Score an ensemble that does a regression; `targets` are of the outputs' shape. Otherwise as `score_ensemble`."""
    _require_pairs(inputs, targets)
    predictions = predict(model, states, inputs, config, kind=models.SEQUENCES)
    if predictions.outputs.shape != targets.shape:  # or they would be broadcast
        raise ValueError(f"targets have shape {tuple(targets.shape)}, outputs {tuple(predictions.outputs.shape)}")
    assert predictions.variance is not None
    return RegressionScore(
        mean_squared_error=float((predictions.outputs - targets.cpu().double()).square().mean()),
        variance_over_members=float(predictions.variance.mean()),
        examples=len(targets),
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


@torch.no_grad()
def _outputs(model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor, config: TrainingConfig | None) -> Tensor:
    """One member's outputs (n, …).

    In double precision, where logits that differ still differ after log_softmax: a member alone has the accuracy that
    `training.score` finds. On the CPU, since not every accelerator has double precision.
    """
    model.load_state_dict(state)
    model.eval()
    parts = []
    for batch in inputs.split(_BATCH):
        with autocast(config, batch.device) if config else nullcontext():
            outputs = model(batch)
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


def _require_pairs(inputs: Tensor, labels: Tensor) -> None:
    if len(inputs) != len(labels) or not len(labels):
        raise ValueError(f"{len(inputs)} inputs and {len(labels)} labels: a score needs one label for each input")


def _share(correct: Tensor) -> float:
    return int(correct.sum()) / len(correct)
