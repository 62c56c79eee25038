"""Training of one model on one machine, with an average of its weights; interrupted, it goes on where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW

from tepal.host.files import replacing

Loss = Callable[[nn.Module, NDArray[np.int64], np.random.Generator], Tensor]
"""Loss of a model on the examples with these indices; the generator is for augmentation and masks."""

_PLAIN = ("bias", "norm", "embedding")
"""Parts of the names of parameters without weight decay."""


@dataclass(frozen=True)
class Schedule:
    """How long and how a model is trained: AdamW with a warm-up, then a cosine to 0.

    Args:
        epochs: Passes over all examples.
        batch_size: Examples of a step.
        learning_rate: The largest learning rate.
        weight_decay: Of AdamW, for weight matrices.
        warmup: Share of all steps in which the learning rate increases.
        average: Decay of the moving average of the weights, which is the result; at step t at most (1 + t) / (10 + t).
        clip: The largest norm of the gradient.
    """

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.05
    average: float = 0.999
    clip: float = 1.0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at a step of 0 … steps − 1."""
        warm = max(1, round(self.warmup * steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@dataclass(frozen=True)
class Trained:
    """The averaged model, the mean loss of the last epoch, and the seconds of training in all sittings."""

    model: nn.Module
    loss: float
    seconds: float


def train(
    model: nn.Module,
    loss_of: Loss,
    examples: int,
    schedule: Schedule,
    *,
    seed: int,
    state: Path,
    log: Callable[[str], None],
) -> Trained:
    """Train a model, and return the average of its weights.

    After every epoch all that is needed to continue is written to `state`. What an epoch draws depends on the seed and
    its number alone, so that interrupted training ends with the weights of uninterrupted training.

    Args:
        model: The model with its initial weights, on its device.
        loss_of: The loss of a batch.
        examples: The number of examples.
        schedule: Epochs, batch size and learning rates.
        seed: Seed of the order of the examples, of augmentation and of dropout.
        state: The file of an interrupted training, if it exists; it is kept at the end.
        log: Receives a line when training continues, and after every epoch.

    Raises:
        ValueError: There are no examples; the loss is NaN or infinite; or `state` is of another schedule, seed or
            model.
    """
    if examples < 1:
        raise ValueError("there are no examples to train on")
    averaged = deepcopy(model).requires_grad_(False)
    optimizer = AdamW(_groups(model, schedule.weight_decay), schedule.learning_rate, fused=True)
    of = {"schedule": vars(schedule), "seed": seed, "examples": examples}
    done, seconds, mean = 0, 0.0, math.nan
    if state.is_file():
        done, seconds, mean = _continue(state, of, model, averaged, optimizer)
        log(f"Continuing after epoch {done} of {schedule.epochs}")
    a_pass = math.ceil(examples / schedule.batch_size)
    steps = schedule.epochs * a_pass
    for epoch in range(done, schedule.epochs):
        begun = time.monotonic()
        rng = np.random.default_rng([seed, epoch])
        order, total = rng.permutation(examples), 0.0
        model.train()
        with torch.random.fork_rng():
            torch.manual_seed(int(rng.integers(2**63)))  # dropout
            for k in range(a_pass):
                step = epoch * a_pass + k
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(step, steps)
                loss = loss_of(model, order[k * schedule.batch_size : (k + 1) * schedule.batch_size], rng)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
                optimizer.step()
                _average(averaged, model, min(schedule.average, (1 + step) / (10 + step)))
                total += float(loss.detach())
        mean, seconds = total / a_pass, seconds + time.monotonic() - begun
        if not math.isfinite(mean):
            raise ValueError(f"the loss of epoch {epoch + 1} is {mean}: choose a lower learning rate")
        _write(state, of, epoch + 1, seconds, mean, model, averaged, optimizer)
        log(f"Epoch {epoch + 1} of {schedule.epochs}: loss {mean:.4f}, {seconds:,.0f} s")
    return Trained(averaged.eval(), mean, seconds)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters with weight decay, and those without: vectors, norms and embeddings."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    plain = [each for name, each in named if each.ndim < 2 or any(part in name.lower() for part in _PLAIN)]
    chosen = {id(each) for each in plain}
    decayed = [each for _, each in named if id(each) not in chosen]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)
    for own, other in zip(averaged.buffers(), model.buffers(), strict=True):
        own.copy_(other)


def _write(
    file: Path, of: dict[str, Any], epoch: int, seconds: float, loss: float,
    model: nn.Module, averaged: nn.Module, optimizer: AdamW,
) -> None:  # fmt: skip
    kept = {"model": model.state_dict(), "averaged": averaged.state_dict(), "optimizer": optimizer.state_dict()}
    with replacing(file, durable=True) as partial, partial.open("wb") as opened:
        torch.save({"of": of, "epoch": epoch, "seconds": seconds, "loss": loss, **kept}, opened)


def _continue(
    file: Path, of: dict[str, Any], model: nn.Module, averaged: nn.Module, optimizer: AdamW
) -> tuple[int, float, float]:
    """Load what `_write` wrote; return the epochs that are done, their seconds, and the loss of the last one."""
    found = torch.load(file, map_location=next(model.parameters()).device, weights_only=True)
    different = [key for key, value in of.items() if found["of"].get(key) != value]
    if different:
        raise ValueError(
            f"{file}: is of a training with another {' and '.join(different)}: remove it to begin anew, or give "
            "another folder"
        )
    try:
        model.load_state_dict(found["model"])
        averaged.load_state_dict(found["averaged"])
    except RuntimeError as error:
        raise ValueError(f"{file}: is of another model: remove it to begin anew, or give another folder") from error
    optimizer.load_state_dict(found["optimizer"])
    return int(found["epoch"]), float(found["seconds"]), float(found["loss"])
