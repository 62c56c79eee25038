"""Prediction with the mean of an ensemble's members, and measures of how much the members differ.

Fed-ensemble (Shi et al., arXiv 2107.10663) predicts with the mean over its K models of their class probabilities or, in
a regression, of their outputs. The members' weights are loaded into one model object in turn, so that one model is in
memory for any K. A single model is an ensemble of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.loop import Score, at_once, autocast
from tepal.training.tasks import Task, check_shapes, counts_by_class, macro_f1
from tepal.training.uncertainty import Calibration


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of an ensemble of K members for n examples. Tensors are on the CPU, floating-point ones are float64.

    outputs: the members' mean probabilities (n, classes); in a regression the mean of their outputs (n, …).
    log_probabilities: logarithms of the mean probabilities, finite also if these underflow; None in a regression.
    member_labels: the label that each member alone predicts (K, n); None in a regression.
    member_entropy: entropy of a member's own probabilities in nats, mean over the members (n,); None in a regression.
    variance: population variance of the K outputs, in the shape of `outputs`; None in a classification.
    """

    outputs: Tensor
    log_probabilities: Tensor | None = None
    member_labels: Tensor | None = None
    member_entropy: Tensor | None = None
    variance: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """The ensemble's labels (n,): the classes with the highest mean probability."""
        return _classification_only(self.log_probabilities).argmax(dim=1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of each example's mean probabilities (n,), in nats, from 0 (certain) to log(classes) (uniform)."""
        _classification_only(self.log_probabilities)
        return torch.special.entr(self.outputs).sum(dim=1)

    @property
    def dissent(self) -> Tensor:
        """Share of the members whose label differs from the ensemble's (n,)."""
        return (_classification_only(self.member_labels) != self.labels).double().mean(dim=0)

    def tempered(self, temperature: float) -> Tensor:
        """Return the mean probabilities p̄ at a temperature T above 0, p ∝ p̄^(1/T) (n, classes).

        Below 1 it is more certain than p̄, above 1 less. Raises ValueError in a regression.
        """
        logs = _classification_only(self.log_probabilities)
        # Relative to the highest, so that no temperature makes all of them underflow.
        return ((logs - logs.amax(dim=1, keepdim=True)) / temperature).softmax(dim=1)


@dataclass(frozen=True)
class Diversity:
    """Measures of how much the members of a classifying ensemble differ.

    lowest_accuracy, highest_accuracy: accuracies of the worst and the best single member.
    entropy: entropy of the mean probabilities in nats, mean over the examples.
    mode_entropy: entropy of a member's own probabilities in nats, mean over members and examples; at most `entropy`.
        Fed-ensemble's Table 4 has it.
    disagreement: share of examples for which two members predict different labels, mean over all pairs; 0 for one
        member.
    """

    lowest_accuracy: float
    highest_accuracy: float
    entropy: float
    mode_entropy: float
    disagreement: float


@dataclass(frozen=True)
class EnsembleScore(Score):
    """Score of an ensemble on `examples` examples.

    loss: mean negative log of the true class's mean probability; in a regression the mean squared error of the mean
        output.
    accuracy: share of correct labels; None in a regression.
    figures: the task's other metrics, by name.
    diversity: how much the members differ; None in a regression.
    calibration: whether the mean probabilities are as high as the accuracy; None in a regression.
    variance: variance over the members, mean over all output elements; None in a classification.
    """

    diversity: Diversity | None = None
    calibration: Calibration | None = None
    variance: float | None = None

    @property
    def apart(self) -> dict[str, float]:
        """Measures of how much the members differ, by the names of metrics."""
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
    """Predict with the mean of the members.

    Args:
        model: loads each member's weights in turn; afterwards it has the last member's, in evaluation mode.
        states: the members' state_dicts; an iterator that reads them one by one keeps one in memory.
        inputs: (n, …), on the model's device.
        config: gives `autocast` and the size of a pass (see `loop.at_once`); None: no autocast and default settings.
        task: how the model is called, and whether probabilities or outputs are averaged.

    Returns:
        Predictions for the n inputs, on the CPU.

    Raises:
        ValueError: there is no member.
    """
    members = (_outputs(model, state, inputs, config or TrainingConfig(), task) for state in states)
    return _regress(members) if task.regression else _classify(members)


def score_ensemble(
    model: nn.Module,
    states: Iterable[Mapping[str, Tensor]],
    inputs: Tensor,
    labels: Tensor,
    config: TrainingConfig | None,
    task: Task = tasks.IMAGES,
) -> EnsembleScore:
    """Score an ensemble; with one member, loss, accuracy and figures are those of `loop.score`.

    Args:
        model: see `predict`, as for `states`, `inputs`, `config` and `task`.
        labels: class numbers (n,); in a regression targets in the outputs' shape.

    Raises:
        ValueError: there is no member or no example, or the labels do not fit the inputs or outputs.
    """
    if len(inputs) != len(labels) or not len(labels):
        raise ValueError(
            f"{len(inputs)} inputs and {len(labels)} labels: give one label for each input, and at least one"
        )
    return score_predictions(predict(model, states, inputs, config, task), labels, task)


def score_predictions(predictions: Predictions, labels: Tensor, task: Task = tasks.IMAGES) -> EnsembleScore:
    """Score predictions for at least one example with these labels, as `score_ensemble` does.

    Raises ValueError if the labels do not fit the outputs.
    """
    labels = labels.cpu()
    if task.regression:
        check_shapes(predictions.outputs, labels)
        assert predictions.variance is not None
        loss = float((predictions.outputs - labels.double()).square().mean())
        figures = {"rmse": math.sqrt(loss)}
        return EnsembleScore(loss, None, len(labels), figures, variance=float(predictions.variance.mean()))
    log_probabilities, predicted = _classification_only(predictions.log_probabilities), predictions.labels
    loss = -float(log_probabilities.gather(1, labels[:, None]).mean())
    figures = {}
    if task.macro_f1:
        figures["macro-f1"] = macro_f1(*counts_by_class(predicted, labels, log_probabilities.shape[1]))
    return EnsembleScore(
        loss,
        _share(predicted == labels),
        len(labels),
        figures,
        diversity=diversity(predictions, labels),
        calibration=Calibration.of(log_probabilities.amax(dim=1).exp(), predicted == labels),
    )


def diversity(predictions: Predictions, labels: Tensor) -> Diversity:
    """Measure how much the members differ on examples with these labels (n,)."""
    member_labels = _classification_only(predictions.member_labels)
    accuracies = [_share(member == labels) for member in member_labels]
    return Diversity(
        lowest_accuracy=min(accuracies),
        highest_accuracy=max(accuracies),
        entropy=float(predictions.entropy.mean()),
        mode_entropy=float(_classification_only(predictions.member_entropy).mean()),
        disagreement=_disagreement(member_labels, classes=predictions.outputs.shape[1]),
    )


@torch.no_grad()
def _outputs(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor, config: TrainingConfig, task: Task
) -> Tensor:
    """Return one member's outputs (n, …).

    In double precision, so that different logits remain different after log_softmax, and a single member has the
    accuracy of `loop.score`. On the CPU, because not every accelerator has double precision.
    """
    model.load_state_dict(state)
    model.eval()
    parts = []
    for batch in inputs.split(at_once(inputs, config, task)):
        with autocast(config, batch.device):
            outputs = task.outputs(model, batch)
        parts.append(outputs.cpu().double())
    return torch.cat(parts)


def _classify(members: Iterator[Tensor]) -> Predictions:
    logits = _first(members)
    total = logits.log_softmax(dim=1)  # log of the sum of probabilities: none underflows
    member_labels, entropies = [logits.argmax(dim=1)], _entropy(total)
    for logits in members:
        logs = logits.log_softmax(dim=1)
        total = torch.logaddexp(total, logs)
        member_labels.append(logits.argmax(dim=1))
        entropies += _entropy(logs)
    count = len(member_labels)
    log_probabilities = total - math.log(count)
    return Predictions(log_probabilities.exp(), log_probabilities, torch.stack(member_labels), entropies / count)


def _entropy(log_probabilities: Tensor) -> Tensor:
    return torch.special.entr(log_probabilities.exp()).sum(dim=1)


def _regress(members: Iterator[Tensor]) -> Predictions:
    mean = _first(members)
    squares = torch.zeros_like(mean)
    count = 1
    # Welford's update: the difference of two large sums of squares would lose the small variance between them.
    for count, outputs in enumerate(members, start=2):
        difference = outputs - mean
        mean = mean + difference / count
        squares += difference * (outputs - mean)
    return Predictions(mean, variance=squares / count)


def _first(members: Iterator[Tensor]) -> Tensor:
    first = next(members, None)
    if first is None:
        raise ValueError("an ensemble without members cannot predict: give at least one state_dict")
    return first


def _classification_only(found: Tensor | None) -> Tensor:
    if found is None:
        raise ValueError(
            "predictions of a regression have no labels, entropy or disagreement: use outputs and variance"
        )
    return found


def _disagreement(member_labels: Tensor, classes: int) -> float:
    members, examples = member_labels.shape
    if members == 1:
        return 0.0
    # By counts per class, in K·n steps instead of K²·n: c members with one label are c(c−1) ordered agreeing pairs.
    votes = torch.zeros(examples, classes, dtype=torch.float64)
    votes.scatter_add_(1, member_labels.T, torch.ones(examples, members, dtype=torch.float64))
    agreeing = (votes * (votes - 1)).sum(dim=1) / (members * (members - 1))
    return 1 - float(agreeing.mean())


def _share(correct: Tensor) -> float:
    return int(correct.sum()) / len(correct)
