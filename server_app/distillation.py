"""Distillation of an ensemble into one model, on examples without labels, as FedBE does it (arXiv:2009.01974).

The ensemble's members predict first, one after the other in one model object: the mean of their class probabilities is
what the student is then trained on, by SGD with stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407):
the learning rate falls in cycles, and the result is the mean of the weights at the end of the cycles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, update_bn

from tepal.exchange.layout import Arrays, Layout
from tepal.strategies.method import MethodError
from tepal.training import tasks
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches, pieces
from tepal.training.prediction import predict
from tepal.training.probing import random_numbers_apart
from tepal.training.tasks import Task

CYCLE = 25
"""Steps of one cycle of the learning rate."""
LOWEST = 0.4
"""Factor of the learning rate in the last step of a cycle; in between it falls in equal steps."""
_MOMENTUM = 0.9


class Distiller:
    """Trains a student on what an ensemble predicts: `FedBE(distil=Distiller(…))`.

    The same ensemble and student give the same result: examples come in an order that depends on the seed alone,
    and so does what the model drops.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        inputs: NDArray[Any],
        *,
        epochs: int = 20,
        learning_rate: float = 1e-3,
        batch_size: int = 128,
        seed: int = 0,
        deterministic: bool = False,
        task: Task = tasks.IMAGES,
        micro_batch_size: int = 0,
    ) -> None:
        """
        Args:
            model: torch module for classification, whose weights are lost; it computes where it is.
            layout: of its entries, `find_blocks(model).layout`.
            inputs: (n, …) without labels, n at least 1: images, or texts as numbers.
            epochs: passes over them, at least 1. Steps are rounded up to whole cycles of 25.
            learning_rate: of SGD with momentum 0.9 in the first step of a cycle; it falls to 0.4 of it.
            batch_size: examples in a step.
            seed: of the order of the examples, and of dropout.
            deterministic: compute with one thread.
            task: says how the model is called.
            micro_batch_size: examples in one pass, of which several make a step; 0: all of a step at once.

        Raises:
            ValueError: there are no inputs.
        """
        if not len(inputs):
            raise ValueError("there are 0 inputs to distil on; there must be at least 1")
        self.model = model
        self.layout = layout
        self.inputs = torch.from_numpy(inputs)
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.seed = seed
        self.deterministic = deterministic
        self.task = task
        self.training = TrainingConfig(micro_batch_size=micro_batch_size)

    def __call__(self, models: Iterable[Arrays], student: Arrays) -> Arrays:
        """Entries of the trained student; integer ones are as they were.

        Args:
            models: entries of the ensemble's members, taken one by one.
            student: entries that the training starts from.

        Raises:
            MethodError: the training diverged, or a member predicts what is no number.
        """
        if self.deterministic:
            torch.set_num_threads(1)
        device = next(self.model.parameters()).device
        inputs = self.inputs.to(device)
        states = (self._state(entries) for entries in models)
        taught = predict(self.model, states, inputs, self.training, self.task).outputs
        if not taught.isfinite().all():
            raise MethodError("FedBE has nothing to distil: a model of its ensemble predicts NaN, as it diverged")
        self.model.load_state_dict(self._state(student))
        with random_numbers_apart(self.model, self.seed):  # those of dropout
            trained = self._fit(Batches(inputs, taught.float().to(device), self.batch_size, self.seed))
        raw = {name: tensor.detach().cpu().numpy().copy() for name, tensor in trained.state_dict().items()}
        entries = self.layout.split(raw)
        if not all(np.isfinite(array).all() for array in entries.values()):
            raise MethodError(
                f"the distillation of FedBE diverged with a learning rate of {self.learning_rate:g}: lower "
                "fedbe.learning-rate"
            )
        return {name: array if array.dtype.kind == "f" else student[name] for name, array in entries.items()}

    def _fit(self, batches: Batches) -> nn.Module:
        """The mean of the model's weights over the ends of the cycles. Labels are probabilities (n, classes)."""
        optimizer = SGD(self.model.parameters(), self.learning_rate, momentum=_MOMENTUM)
        rates = LambdaLR(optimizer, lambda step: 1 - (1 - LOWEST) * (step % CYCLE) / (CYCLE - 1))
        averaged = AveragedModel(self.model)
        self.model.train()
        cycles = -(-self.epochs * batches.per_epoch // CYCLE)
        epoch, step = 0, 0
        while step < cycles * CYCLE:
            for batch in batches.epoch(epoch):
                optimizer.zero_grad()
                for inputs, probabilities, share in pieces(batch, self.training):
                    # The loss is the divergence, but for a constant.
                    (share * self.task.loss_of(self.model, inputs, probabilities)).backward()
                optimizer.step()
                rates.step()
                step += 1
                if step % CYCLE == 0:
                    averaged.update_parameters(self.model)
                if step == cycles * CYCLE:
                    break
            epoch += 1
        # Averaged weights have never seen an example: the statistics of their norms are taken anew.
        update_bn((inputs for inputs, _ in batches.epoch(0)), _Called(averaged.module, self.task))
        return averaged.module

    def _state(self, entries: Arrays) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.array(array)) for name, array in self.layout.join(entries).items()}


class _Called(nn.Module):
    """A model that is called as a task calls it."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, inputs: Tensor) -> Tensor:
        return self.task.outputs(self.model, inputs)
