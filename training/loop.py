"""Local training and scoring on one client. It knows batches and a model, and nothing of federated learning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tepal.training import tasks
from tepal.training.checkpointing import recomputed_layers
from tepal.training.config import TrainingConfig
from tepal.training.tasks import Tally, Task


@dataclass(frozen=True)
class Batches:
    """Examples on one device, handed out in batches whose order depends on (seed, epoch) alone."""

    inputs: Tensor
    labels: Tensor
    batch_size: int
    seed: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def per_epoch(self) -> int:
        return len(_cuts(len(self), self.batch_size))

    def epoch(self, number: int) -> Iterator[Batch]:
        """Every example once, shuffled. The last batch may be smaller, or larger by one: none is of one example alone,
        which has no variance for a BatchNorm."""
        # NumPy's generator, not torch's: its permutation is the same on every device and platform.
        order = np.random.default_rng([self.seed, number]).permutation(len(self))
        for part in _cuts(len(self), self.batch_size):
            chosen = torch.from_numpy(order[part]).to(self.labels.device)
            yield self.inputs[chosen], self.labels[chosen]


Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""


def _cuts(count: int, size: int) -> list[slice]:
    """Parts of at most `size`; a last one of a single example is joined to the one before it."""
    ends = [*range(size, count, size), count]
    if len(ends) > 1 and size > 1 and count - ends[-2] == 1:
        del ends[-2]
    return [slice(start, end) for start, end in pairwise([0, *ends])] if count else []


@dataclass(frozen=True)
class Fitted:
    """What local training did: number of steps, the mean loss over them (ridge and the like included), and its time."""

    steps: int
    loss: float
    seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        return self.seconds / max(self.steps, 1)


@dataclass(frozen=True)
class Score:
    """Mean loss over `examples` examples, share of correct labels (None in a regression), and the task's figures."""

    loss: float
    accuracy: float | None
    examples: int
    figures: Mapping[str, float] = field(default_factory=dict)


def device_of(setting: str | None) -> torch.device:
    """The device that a node's config names (`device="cuda:1"`), else a GPU when there is one, else the CPU.

    Raises ValueError for a device that this machine does not have.
    """
    if setting is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(setting)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"this node's config says device={setting!r}, which cannot be used here: {reason}") from error
    return device


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of what is not frozen as a whole; a shared one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_for(trained: Iterable[Tensor], config: TrainingConfig) -> Optimizer:
    """A fresh optimizer over what trains. Fused: one call for all tensors, a fifth of the time for small models."""
    trained = list(trained)
    if config.optimizer == "sgd":
        return SGD(
            trained, config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
        )
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(trained, config.learning_rate, weight_decay=config.weight_decay, fused=True)


def fit(
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
    *,
    task: Task = tasks.IMAGES,
    correct: Callable[[], None] = lambda: None,
) -> Fitted:
    """Train in place: `local_steps` steps, or `local_epochs` epochs.

    Args:
        model: on the batches' device; entries with `requires_grad` False do not train.
        batches: inputs and labels of this client.
        config: see TrainingConfig.
        penalty: a scalar that is added to every batch's loss, such as a ridge or a proximal term.
        task: says how the model is called, and its loss.
        correct: is called before every step, and may change the gradients, which are in the parameters' `grad`.

    Raises:
        FloatingPointError: the loss is NaN or infinite; nothing sensible could be returned to the server.
    """
    trained = list(trained_parameters(model).values())
    optimizer = optimizer_for(trained, config)
    scaler = torch.amp.GradScaler(batches.labels.device.type, enabled=config.autocast == "fp16")

    def step(stream: Iterator[Batch]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=batches.labels.device)
        for inputs, labels, share in pieces(next(stream), config):
            with autocast(config, inputs.device):
                loss = share * (task.loss_of(model, inputs, labels) + penalty())
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        correct()
        clip(trained, config)
        scaler.step(optimizer)
        scaler.update()
        return total

    return descend(model, batches, config, step)


def descend(
    model: nn.Module, batches: Batches, config: TrainingConfig, step: Callable[[Iterator[Batch]], Tensor]
) -> Fitted:
    """Call `step` as often as the config says: it takes its batches, changes the model, and returns its loss, detached.

    Raises FloatingPointError as `fit` does.
    """
    model.train()
    steps = steps_of(batches, config)
    stream = endless(batches)
    total = torch.zeros((), device=batches.labels.device)
    begun = time.perf_counter()
    with recomputed_layers(model) if config.gradient_checkpointing else nullcontext():
        for number in range(steps):
            total += step(stream)
            if number % 100 == 0:  # not every time: on a GPU the look waits for all work queued
                _require_finite(total, config)
    return fitted(steps, total, time.perf_counter() - begun, config)


def steps_of(batches: Batches, config: TrainingConfig) -> int:
    """How many steps a client takes in a round."""
    return config.local_steps or config.local_epochs * batches.per_epoch


def fitted(steps: int, total: Tensor, seconds: float, config: TrainingConfig) -> Fitted:
    """What steps with this sum of losses came to. Raises FloatingPointError where the sum is NaN or infinite."""
    _require_finite(total, config)
    return Fitted(steps, float(total) / max(steps, 1), seconds)


def accumulation(config: TrainingConfig, steps: int, proximal: float = 0.0) -> float:
    """‖a‖₁ of FedNova (Wang et al. 2020, arXiv:2007.07481, section 4): a way of `steps` local steps is −η·Σ_k a_k·g_k.

    SGD: the number of steps. With momentum ρ: a_k = (1 − ρ^(τ−k))/(1 − ρ). With a proximal term μ (and no momentum):
    a_k = (1 − ημ)^(τ−1−k). It is found by taking the steps with g = 1, so that both together count right, too. An
    optimizer that is no SGD has no such vector: its steps are counted.
    """
    if config.optimizer != "sgd":
        return float(steps)
    way = velocity = 0.0
    for _ in range(steps):
        velocity = config.momentum * velocity + 1.0 - config.learning_rate * proximal * way
        way += velocity
    return way


def pieces(batch: Batch, config: TrainingConfig) -> Iterator[tuple[Tensor, Tensor, float]]:
    """A batch in parts that fit into memory, and each one's share of the examples.

    The gradient of the mean loss is the sum of the parts', by their shares. What a layer takes from all examples of a
    pass together, as BatchNorm's statistics, it takes from a part.
    """
    inputs, labels = batch
    size = config.micro_batch_size or len(labels)
    for part in _cuts(len(labels), size):
        yield inputs[part], labels[part], (part.stop - part.start) / len(labels)


def clip(trained: Iterable[Tensor], config: TrainingConfig) -> None:
    """Bring the gradients of all trained entries together to the norm that the config allows."""
    if config.clip_norm:
        nn.utils.clip_grad_norm_(trained, config.clip_norm)


MOST_AT_ONCE = 512
MOST_TOKENS = 2**15


def at_once(inputs: Tensor, config: TrainingConfig, task: Task) -> int:
    """How many examples go through the model in one pass without gradients: what memory is there for in training.

    At most 512; where the run says what fits in one pass, `micro-batch-size`; of a vast task as many as in a training
    pass; of texts so many that there are not more than 2¹⁵ tokens, or as many as in a training pass.
    """
    if config.micro_batch_size or task.vast:
        return min(config.micro_batch_size or config.batch_size, MOST_AT_ONCE)
    if inputs.is_floating_point() or not len(inputs):
        return MOST_AT_ONCE
    return min(max(MOST_TOKENS // inputs[0].numel(), config.batch_size), MOST_AT_ONCE)


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor, labels: Tensor, config: TrainingConfig, task: Task = tasks.IMAGES) -> Score:
    """Loss and figures over all examples, in passes of `at_once`."""
    model.eval()
    tally = Tally(task)
    size = at_once(inputs, config, task)
    for x, y in zip(inputs.split(size), labels.split(size), strict=True):
        with autocast(config, x.device):
            outputs = task.outputs(model, x)
        tally.add(outputs, y)
    return Score(tally.loss, tally.accuracy, tally.examples, tally.figures)


def endless(batches: Batches) -> Iterator[Batch]:
    """Batches of one epoch after the other."""
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def autocast(config: TrainingConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Within it, the forward pass computes in the dtype that the config says."""
    if config.autocast == "no":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.autocast == "bf16" else torch.float16)


def _require_finite(total: Tensor, config: TrainingConfig) -> None:
    if not math.isfinite(float(total)):
        raise FloatingPointError(
            f"local training diverged: the loss is {float(total)} with {config.optimizer} and learning-rate "
            f"{config.learning_rate:g}; lower the learning rate or set clip-norm"
        )
