"""The input and output of an objective, and the objectives' base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tepal.client_app.state import set_values
from tepal.exchange.layout import Arrays, Layout
from tepal.exchange.plan import Scalar, Tree
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batch, Batches, Fitted, autocast, fit, pieces
from tepal.training.tasks import Call, Task


@dataclass
class Work:
    """One client's local training: a model with the received values, and its data and settings."""

    model: nn.Module
    batches: Batches
    config: TrainingConfig
    task: Task = tasks.IMAGES
    layout: Layout = field(default_factory=lambda: Layout((), ()))
    received: Arrays = field(default_factory=dict)
    """Entries of the model as received."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Options of the plan."""
    trees: Mapping[Tree, Arrays] = field(default_factory=dict)
    """Received trees other than the model."""
    load_personal: Callable[[], Arrays] = dict
    penalty: Callable[[], Tensor | float] = lambda: 0.0
    """Term that the plan adds to the loss of the returned model."""

    @cached_property
    def personal(self) -> Arrays:
        """The client's personal state; {} if it has none yet."""
        return self.load_personal()

    def number(self, name: str) -> float:
        """An option of the plan."""
        return float(self.options[name])

    def gradient(
        self, parameters: Iterable[Tensor], batch: Batch, model: Call | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss on a batch, detached, and its gradient with respect to some parameters.

        The plan's penalty is added to the loss of the work's own model, and not to that of another `model`. Raises
        ValueError with autocast in float16.
        """
        if self.config.autocast == "fp16":
            raise ValueError("this client has autocast='fp16', whose gradients are not scaled here: use 'bf16' or 'no'")
        wanted = list(parameters)
        total, gathered = torch.zeros((), device=batch[1].device), [torch.zeros_like(each) for each in wanted]
        for inputs, labels, share in pieces(batch, self.config):
            with autocast(self.config, inputs.device):
                loss = self.task.loss_of(model or self.model, inputs, labels)
                loss = share * (loss if model else loss + self.penalty())
            found = torch.autograd.grad(loss, wanted, materialize_grads=True)
            torch._foreach_add_(gathered, found)
            total += loss.detach()
        return total, gathered

    def fit(self, penalty: Callable[[], Tensor | float] | None = None, **how: Callable[[], None]) -> Fitted:
        """Train the model; see `tepal.training.loop.fit`."""
        penalty = self.penalty if penalty is None else penalty
        return fit(self.model, self.batches, self.config, penalty, task=self.task, **how)

    def read(self) -> dict[str, np.ndarray]:
        """A copy of the model's entries."""
        return {name: tensor.cpu().numpy().copy() for name, tensor in self._views().items()}

    def load(self, values: Arrays) -> None:
        """Set entries of the model."""
        views = self._views()
        for name, value in values.items():
            set_values(views[name], value)

    def of_parameters(self, values: Arrays) -> dict[str, Tensor]:
        """Trained parameter → tensor of its entries' values, on the model's device."""
        tensors: dict[str, Tensor] = {}
        trained = {name: p for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        for raw, entries in self.layout.entries_of.items():
            if raw in trained and all(entry.name in values for entry in entries):
                tensors[raw] = torch.empty_like(trained[raw], requires_grad=False)
                for entry in entries:
                    set_values(tensors[raw][entry.index], values[entry.name])
        return tensors

    def _views(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {entry.name: state[entry.raw][entry.index] for entry in self.layout.entries}


@dataclass(frozen=True)
class Outcome:
    """The result of local training, in addition to the work's model."""

    fitted: Fitted
    trees: Mapping[Tree, Arrays] = field(default_factory=dict)
    """Returned trees other than the model."""
    personal: Arrays | None = None
    """The client's new personal state; None if it does not change."""


class Objective(Protocol):
    """What local training minimises, and how."""

    name: str = ""
    """Name in plans."""
    personal: bool = False
    """Whether each client has a personal model, which is scored."""

    def fit(self, work: Work) -> Outcome:
        """Train the work's model."""

    def personalise(self, work: Work) -> None:
        """Turn the model with the received values into the client's personal model: by default, load its state."""
        work.load(work.personal)


class EmpiricalLoss(Objective):
    """The mean loss over the client's examples, with the plan's penalty."""

    def fit(self, work: Work) -> Outcome:
        return Outcome(work.fit())
