"""Local training and scoring of a model on batches."""

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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, AdamW, Optimizer

from tepal.training import tasks
from tepal.training.augmentation import NONE, Augmentation
from tepal.training.checkpointing import recomputed_layers, statistics_kept
from tepal.training.config import TrainingConfig
from tepal.training.freezing import frozen_by_plan
from tepal.training.tasks import Tally, Task

_GATHERED = 1 << 24  # bytes of inputs up to which an epoch's are put in order at once


@dataclass(frozen=True)
class Batches:
    """Examples on one device, in batches whose order and augmentation depend only on (seed, epoch)."""

    inputs: Tensor
    labels: Tensor
    batch_size: int
    seed: int
    augmentation: Augmentation = NONE

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return len(cuts(len(self), self.batch_size))

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield every example once, shuffled. The last batch may be smaller, or larger by one.

        No batch has a single example, for which BatchNorm may have no variance, unless `batch_size` is 1 or there is
        only one example.
        """
        # NumPy's generator, not torch's: its permutation is the same on every device and platform.
        rng = np.random.default_rng([self.seed, number])
        order = torch.from_numpy(rng.permutation(len(self))).to(self.labels.device)
        inputs, labels = self.inputs, self.labels
        gathered = inputs.nbytes <= _GATHERED
        if gathered:
            inputs, labels = inputs[order], labels[order]
        for part in cuts(len(self), self.batch_size):
            chosen = part if gathered else order[part]
            yield self.augmentation(inputs[chosen], rng), labels[chosen]


Batch = tuple[Tensor, Tensor]
"""Inputs (n, …) and labels (n,) or, in a regression, (n, outputs)."""


def cuts(count: int, size: int) -> list[slice]:
    """Return slices of at most `size`; a last slice of a single example is merged with the one before it."""
    ends = [*range(size, count, size), count]
    if len(ends) > 1 and size > 1 and count - ends[-2] == 1:
        del ends[-2]
    return [slice(start, end) for start, end in pairwise([0, *ends])] if count else []


@dataclass(frozen=True)
class Fitted:
    """The result of local training: number of steps, mean loss over the steps (with penalties), duration in seconds."""

    steps: int
    loss: float
    seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return self.seconds / max(self.steps, 1)


@dataclass(frozen=True)
class Score:
    """Mean loss over `examples` examples, accuracy (None in a regression), and the task's other metrics by name."""

    loss: float
    accuracy: float | None
    examples: int
    figures: Mapping[str, float] = field(default_factory=dict)


def device_of(setting: str | None) -> torch.device:
    """Return the device that a node's config names (`device="cuda:1"`); by default a GPU if there is one, else the CPU.

    Raises:
        ValueError: the device is not available on this machine.
    """
    if setting is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(setting)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"this node's config has device={setting!r}, which is not available: {reason}") from error
    return device


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → parameter, for parameters that are not frozen as a whole; a shared one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_for(trained: Iterable[Tensor], config: TrainingConfig) -> Optimizer:
    """Return a new optimizer. Fused, it takes one call for all tensors, and a fifth of the time for small models."""
    trained = list(trained)
    rate, decay = config.learning_rate, config.weight_decay
    fused = all(parameter.is_floating_point() for parameter in trained)  # complex numbers cannot be
    if config.optimizer == "sgd":
        optimizer = SGD(trained, rate, momentum=config.momentum, weight_decay=decay, fused=fused)
        if fused and config.momentum and config.autocast == "fp16":
            # After a first step that a gradient scaler skips, it would go on with momentum that was never written.
            for parameter in trained:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(trained, rate, weight_decay=decay, fused=fused)


def fit(
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
    *,
    task: Task = tasks.IMAGES,
    correct: Callable[[], None] = lambda: None,
) -> Fitted:
    """Train a model in place for `local_steps` steps, or `local_epochs` epochs; if a plan freezes all, only score it.

    In float16 a step whose scaled gradient overflows is repeated with half the scale, down to a scale of 1. If it still
    overflows then, it is skipped.

    Args:
        model: on the batches' device; entries with `requires_grad` False are not trained.
        batches: inputs and labels of this client.
        config: see TrainingConfig.
        penalty: returns a scalar that is added to every batch's loss, such as a ridge or proximal term.
        task: how the model is called, and its loss.
        correct: called before every optimizer step; may change the gradients in the parameters' `grad`. It is called
            again for a step that is repeated.

    Returns:
        Steps, mean loss and duration.

    Raises:
        FloatingPointError: the loss is NaN or infinite.
        ValueError: the model has nothing to train, and not because of a plan.
    """
    trained = list(trained_parameters(model).values())
    if not trained:
        if not any(map(frozen_by_plan, model.parameters())):
            raise ValueError("the model has no parameter that can be trained: requires_grad is False for all of them")
        return Fitted(0, score(model, batches.inputs, batches.labels, config, task).loss)
    optimizer = optimizer_for(trained, config)
    # Only float16 gradients need one, and its calls take a tenth of a small model's step.
    scaler = torch.amp.GradScaler(batches.labels.device.type) if config.autocast == "fp16" else None
    scale = scaler.get_scale() if scaler else 1.0

    def loss_of(inputs: Tensor, labels: Tensor, share: float) -> Tensor:
        with autocast(config, inputs.device):
            loss, added = task.loss_of(model, inputs, labels), penalty()
            loss = loss + added if isinstance(added, Tensor) or added else loss
            return loss if share == 1 else share * loss

    def attempt(batch: Batch) -> Tensor:
        for parameter in trained:
            parameter.grad = None
        losses = []
        for piece in pieces(batch, config):
            loss = loss_of(*piece)
            (scaler.scale(loss) if scaler else loss).backward()
            losses.append(loss.detach())
        if scaler:
            scaler.unscale_(optimizer)
        correct()
        clip(trained, config)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        return sum(losses[1:], start=losses[0])

    def step(stream: Iterator[Batch]) -> Tensor:
        nonlocal scale
        batch = next(stream)
        loss = attempt(batch)
        if scaler is None:
            return loss
        begun = before = scale
        scale = scaler.get_scale()
        # The scale falls if a gradient is infinite or NaN. That attempt changed no parameter, and is no step.
        while 1 <= scale < before and math.isfinite(float(loss)):
            before = scale
            with statistics_kept(model):
                loss = attempt(batch)
            scale = scaler.get_scale()
        if scale < before:  # none helps this batch: the next ones are trained with what they need
            scale = max(begun / 2, 1.0)
            scaler.update(scale)
        return loss

    return descend(model, batches, config, step)


def descend(
    model: nn.Module, batches: Batches, config: TrainingConfig, step: Callable[[Iterator[Batch]], Tensor]
) -> Fitted:
    """Call `step` for every local step: it takes its batches, updates the model, and returns its detached loss.

    Raises FloatingPointError as `fit` does.
    """
    model.train()
    steps = steps_of(batches, config)
    stream = endless(batches)
    total = torch.zeros((), device=batches.labels.device)
    start = time.perf_counter()
    with recomputed_layers(model) if config.gradient_checkpointing else nullcontext():
        for number in range(steps):
            total += step(stream)
            if number % 100 == 0:  # rarely: on a GPU the check waits for all queued work
                _require_finite(total, config)
    return fitted(steps, total, time.perf_counter() - start, config)


@torch.no_grad()
def norm_without_variance(model: nn.Module, batches: Batches, config: TrainingConfig, task: Task = tasks.IMAGES) -> str:
    """Return the path of a BatchNorm that gets one value per channel in training, which has no variance; "" if none.

    Only a batch or micro-batch of a single example can have that. The model is called in evaluation mode.
    """
    norms: dict[nn.Module, str] = {m: path for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    if not norms or min(len(batches), batches.batch_size, config.micro_batch_size or batches.batch_size) != 1:
        return ""
    found: list[str] = []

    def look(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].numel() == inputs[0].shape[1]:  # (1, channels, …)
            found.append(norms[norm])

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        model.eval()
        task.outputs(model, batches.inputs[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""


def steps_of(batches: Batches, config: TrainingConfig) -> int:
    """Return the number of local steps in a round."""
    return config.local_steps or config.local_epochs * batches.per_epoch


def fitted(steps: int, total: Tensor, seconds: float, config: TrainingConfig) -> Fitted:
    """Return the result of steps whose losses sum to `total`. Raises FloatingPointError if that is NaN or infinite."""
    _require_finite(total, config)
    return Fitted(steps, float(total) / max(steps, 1), seconds)


def accumulation(config: TrainingConfig, steps: int, proximal: float = 0.0) -> float:
    """Return ‖a‖₁ of FedNova, where τ local steps change the model by −η·Σ_k a_k·g_k.

    For plain SGD it is the number of steps. With momentum ρ: a_k = (1 − ρ^(τ−k))/(1 − ρ). With a proximal term μ and no
    momentum: a_k = (1 − ημ)^(τ−1−k). It is computed by taking the steps with g = 1, which covers both together. Other
    optimizers have no such vector, and the number of steps is returned.

    Args:
        config: optimizer, learning rate η and momentum ρ.
        steps: τ, the number of local steps.
        proximal: μ of the proximal term.

    Source: Wang et al. 2020, arXiv:2007.07481, section 4.
    """
    if config.optimizer != "sgd":
        return float(steps)
    change = velocity = 0.0
    for _ in range(steps):
        velocity = config.momentum * velocity + 1.0 - config.learning_rate * proximal * change
        change += velocity
    return change


def pieces(batch: Batch, config: TrainingConfig) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield a batch in micro-batches: inputs, labels, and the share of the batch's examples.

    The gradient of the batch's mean loss is the sum of the micro-batches' gradients, weighted by their shares.
    BatchNorm's statistics are those of a micro-batch.
    """
    inputs, labels = batch
    size = config.micro_batch_size or len(labels)
    for part in cuts(len(labels), size):
        yield inputs[part], labels[part], (part.stop - part.start) / len(labels)


def clip(trained: Iterable[Tensor], config: TrainingConfig) -> None:
    """Clip the norm of the gradient over all trained entries to `clip_norm`."""
    if config.clip_norm:
        nn.utils.clip_grad_norm_(trained, config.clip_norm)


MOST_AT_ONCE = 512
"""Most examples in a pass without gradients."""
MOST_TOKENS = 2**15
"""Most tokens in a pass without gradients, if a training batch has fewer."""
MOST_NUMBERS = 2**22
"""Most numbers of inputs in a pass without gradients, if a training batch has fewer: 27 images of 3×224×224."""


def at_once(inputs: Tensor, config: TrainingConfig, task: Task) -> int:
    """Return the number of examples in a pass without gradients, which must fit into the memory of a training pass.

    At most `MOST_AT_ONCE`; `micro-batch-size` if it is set; a training batch for a task with outputs for every token;
    for texts at most `MOST_TOKENS` tokens, for images and numbers `MOST_NUMBERS`, or a training batch.
    """
    if config.micro_batch_size or task.outputs_per_token:
        return min(config.micro_batch_size or config.batch_size, MOST_AT_ONCE)
    if not len(inputs):
        return MOST_AT_ONCE
    most = MOST_NUMBERS if inputs.is_floating_point() else MOST_TOKENS
    return min(max(most // max(inputs[0].numel(), 1), config.batch_size), MOST_AT_ONCE)


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor, labels: Tensor, config: TrainingConfig, task: Task = tasks.IMAGES) -> Score:
    """Score a model on all examples, in evaluation mode and in passes of `at_once`."""
    model.eval()
    tally = Tally(task)
    size = at_once(inputs, config, task)
    for x, y in zip(inputs.split(size), labels.split(size), strict=True):
        with autocast(config, x.device):
            outputs = task.outputs(model, x)
        tally.add(outputs, y)
    return Score(tally.loss, tally.accuracy, tally.examples, tally.figures)


def endless(batches: Batches) -> Iterator[Batch]:
    """Yield the batches of epoch after epoch, without end."""
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def autocast(config: TrainingConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the forward pass uses the config's dtype."""
    if config.autocast == "no":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.autocast == "bf16" else torch.float16)


def _require_finite(total: Tensor, config: TrainingConfig) -> None:
    if not math.isfinite(float(total)):
        raise FloatingPointError(
            f"local training diverged: the loss is {float(total)} with {config.optimizer} and learning-rate "
            f"{config.learning_rate:g}; lower the learning rate or set clip-norm"
        )
