"""What an objective works on, what it gives back, and how a model's entries are read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tepal.exchange.layout import Arrays, Layout
from tepal.exchange.plan import Scalar, Tree
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batch, Batches, Fitted, autocast, fit, pieces
from tepal.training.tasks import Call, Task


@dataclass
class Work:
    """One client's local training: a model that holds what was received, and all that there is beside it."""

    model: nn.Module
    batches: Batches
    config: TrainingConfig
    task: Task = tasks.IMAGES
    layout: Layout = field(default_factory=lambda: Layout((), ()))
    received: Arrays = field(default_factory=dict)
    """Entries of the model as they came."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Of the plan."""
    trees: Mapping[Tree, Arrays] = field(default_factory=dict)
    """What came beside the model."""
    load_personal: Callable[[], Arrays] = dict
    penalty: Callable[[], Tensor | float] = lambda: 0.0
    """Of the plan, for the model that is returned."""

    @cached_property
    def personal(self) -> Arrays:
        """What this client keeps for itself; {} when it has nothing yet."""
        return self.load_personal()

    def number(self, name: str) -> float:
        """An option of the plan."""
        return float(self.options[name])

    def gradient(
        self, parameters: Iterable[Tensor], batch: Batch, model: Call | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss on a batch, detached, and its gradient by some parameters.

        Of the model, with what the plan adds to its loss; or of a `model` that stands for it, without.
        """
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
        """Train the model as the config says; see `training.fit`."""
        penalty = self.penalty if penalty is None else penalty
        return fit(self.model, self.batches, self.config, penalty, task=self.task, **how)

    def read(self) -> dict[str, np.ndarray]:
        """A copy of the model's entries."""
        return {name: tensor.cpu().numpy().copy() for name, tensor in self._views().items()}

    def load(self, values: Arrays) -> None:
        """Set entries of the model."""
        views = self._views()
        for name, value in values.items():
            views[name].copy_(torch.from_numpy(np.array(value)))

    def of_parameters(self, values: Arrays) -> dict[str, Tensor]:
        """Parameter → tensor of its entries' values, on the model's device, for parameters that train."""
        tensors: dict[str, Tensor] = {}
        trained = {name: p for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        for raw, entries in self.layout.entries_of.items():
            if raw in trained and all(entry.name in values for entry in entries):
                tensors[raw] = torch.empty_like(trained[raw], requires_grad=False)
                for entry in entries:
                    tensors[raw][entry.index].copy_(torch.from_numpy(np.array(values[entry.name])))
        return tensors

    def _views(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {entry.name: state[entry.raw][entry.index] for entry in self.layout.entries}


@dataclass(frozen=True)
class Outcome:
    """What local training came to; the model that is returned is in its model."""

    fitted: Fitted
    trees: Mapping[Tree, Arrays] = field(default_factory=dict)
    """What is returned beside the model."""
    personal: Arrays | None = None
    """What the client keeps for itself from now on; None when it stays as it is."""


class Objective(Protocol):
    """See the package."""

    name: str = ""
    """By which plans ask for it."""

    personal: bool = False
    """Whether each client has a model of its own, which is what is scored."""

    def fit(self, work: Work) -> Outcome:
        """Train."""

    def personalise(self, work: Work) -> None:
        """Make the model, which holds what was received, the client's own."""
        return None


class Empirical(Objective):
    """The mean loss over the client's examples, and what the plan adds to it."""

    def fit(self, work: Work) -> Outcome:
        return Outcome(work.fit())


def proximal(parameters: Iterable[nn.Parameter], anchors: Iterable[Tensor], strength: float) -> Tensor:
    """(strength/2)·‖w − anchor‖² over pairs of parameters and anchors of one shape."""
    squares = [(w - anchor).square().sum() for w, anchor in zip(parameters, anchors, strict=True)]
    return 0.5 * strength * torch.stack(squares).sum()
