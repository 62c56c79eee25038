"""Local training and scoring on one client. It knows batches and a model, and nothing of federated learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tepal.client_app.config import TrainingConfig


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
        return math.ceil(len(self) / self.batch_size)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every example once, shuffled; the last batch may be smaller."""
        # NumPy's generator, not torch's: its permutation is the same on every device and platform.
        order = np.random.default_rng([self.seed, number]).permutation(len(self))
        for start in range(0, len(self), self.batch_size):
            chosen = torch.from_numpy(order[start : start + self.batch_size]).to(self.labels.device)
            yield self.inputs[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Fitted:
    """What local training did: number of steps, and the mean loss over its batches (ridge and the like included)."""

    steps: int
    loss: float


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and share of correct labels over `examples` examples."""

    loss: float
    accuracy: float
    examples: int


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


def optimizer_for(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """A fresh optimizer over the entries that train; frozen ones have no state in it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimizer == "sgd":
        return SGD(trained, config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(trained, config.learning_rate, weight_decay=config.weight_decay)


def fit(
    model: nn.Module, batches: Batches, config: TrainingConfig, penalty: Callable[[], Tensor | float] = lambda: 0.0
) -> Fitted:
    """Train in place: `local_steps` steps, or `local_epochs` epochs.

    Args:
        model: on the batches' device; entries with `requires_grad` False do not train.
        batches: inputs and labels (class numbers) of this client.
        config: see TrainingConfig.
        penalty: a scalar that is added to every batch's loss, such as a ridge or a proximal term.

    Raises:
        FloatingPointError: the loss is NaN or infinite; nothing sensible could be returned to the server.
    """
    optimizer = optimizer_for(model, config)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scaler = torch.amp.GradScaler(batches.labels.device.type, enabled=config.autocast == "fp16")
    steps = config.local_steps or config.local_epochs * batches.per_epoch
    total = torch.zeros((), device=batches.labels.device)
    model.train()
    for step, (inputs, labels) in zip(range(steps), _endless(batches), strict=False):
        with autocast(config, inputs.device):
            loss = F.cross_entropy(model(inputs), labels) + penalty()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        if config.clip_norm:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        total += loss.detach()
        if step % 100 == 0 or step == steps - 1:  # not at every step: on a GPU the look waits for all work queued
            _require_finite(total, config)
    return Fitted(steps, float(total) / max(steps, 1))


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor, labels: Tensor, config: TrainingConfig) -> Score:
    """Mean loss and accuracy over all examples, in batches of 512."""
    model.eval()
    loss, correct = 0.0, 0
    for x, y in zip(inputs.split(512), labels.split(512), strict=True):
        with autocast(config, x.device):
            logits = model(x)
        loss += float(F.cross_entropy(logits.float(), y, reduction="sum"))
        correct += int((logits.argmax(dim=1) == y).sum())
    return Score(loss / len(labels), correct / len(labels), len(labels))


def _endless(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
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
