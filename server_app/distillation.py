"""Distillation of an ensemble into one model on unlabelled examples, as in FedBE (arXiv:2009.01974).

The members of the ensemble predict first, in turn in one model object. The student is then trained on the mean of their
class probabilities, at a temperature, by SGD with stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407):
the learning rate falls in cycles, and the result is the mean of the weights at the ends of the cycles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from itertools import islice
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
from tepal.training.loop import Batches, endless, pieces
from tepal.training.prediction import predict
from tepal.training.probing import CalledModel, random_numbers_apart
from tepal.training.tasks import Task

CYCLE = 25
"""Steps in a cycle of the learning rate."""
LOWEST = 0.4
"""Factor of the learning rate in the last step of a cycle; from the first step on it falls linearly."""
_MOMENTUM = 0.9


@dataclass(frozen=True, eq=False)
class Distiller:
    """Trains a student on the predictions of an ensemble: `FedBE(distil=Distiller(…))`.

    The result depends only on ensemble, student and seed: the seed determines the order of the examples and dropout.

    Args:
        model: torch module of a classifier, on the device to use; its weights are overwritten.
        layout: layout of its entries, `find_blocks(model).layout`.
        inputs: unlabelled inputs (n, …), n at least 1: images, or ids of texts.
        epochs: passes over the inputs, at least 1. Steps are rounded up to whole cycles of 25.
        learning_rate: learning rate of SGD with momentum 0.9 in the first step of a cycle; it falls to 0.4 of it.
        batch_size: examples per step.
        temperature: T above 0; the student is trained on p ∝ p̄^(1/T), where p̄ are the members' mean probabilities. 1:
            on p̄, as in the paper's text; below 1: on more certain predictions. The authors' released code has 0.5.
        seed: seed of the order of the examples, and of dropout.
        deterministic: compute with one thread.
        task: how the model is called.
        micro_batch_size: examples per pass, several of which make a step; 0: the whole batch.

    Raises:
        ValueError: there are no inputs, or the temperature is not a number above 0.
    """

    model: nn.Module
    layout: Layout
    inputs: NDArray[Any]
    _: KW_ONLY
    epochs: int = 20
    learning_rate: float = 1e-3
    batch_size: int = 128
    temperature: float = 1.0
    seed: int = 0
    deterministic: bool = False
    task: Task = tasks.IMAGES
    micro_batch_size: int = 0

    def __post_init__(self) -> None:
        if not len(self.inputs):
            raise ValueError("there are no inputs to distil on: give at least one")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature!r}; it must be a number, above 0")

    def __call__(self, models: Iterable[Arrays], student: Arrays) -> Arrays:
        """Return the entries of the trained student; integer entries do not change.

        Args:
            models: entries of the ensemble's members, read one by one.
            student: initial entries of the student.

        Raises:
            MethodError: the training diverged, or a member predicts NaN or infinite values.
        """
        if self.deterministic:
            torch.set_num_threads(1)
        device = next(self.model.parameters()).device
        inputs = torch.from_numpy(self.inputs).to(device)
        training = TrainingConfig(micro_batch_size=self.micro_batch_size)
        states = (self._state(entries) for entries in models)
        predictions = predict(self.model, states, inputs, training, self.task)
        if not predictions.outputs.isfinite().all():
            raise MethodError("FedBE cannot distil: a diverged model of its ensemble predicts NaN: lower learning-rate")
        targets = predictions.outputs if self.temperature == 1 else predictions.tempered(self.temperature)
        self.model.load_state_dict(self._state(student))
        with random_numbers_apart(self.model, self.seed):  # for dropout
            trained = self._fit(Batches(inputs, targets.float().to(device), self.batch_size, self.seed), training)
        raw = {name: tensor.detach().cpu().numpy().copy() for name, tensor in trained.state_dict().items()}
        entries = self.layout.split(raw)
        if not all(np.isfinite(array).all() for array in entries.values()):
            raise MethodError(
                f"FedBE's distillation diverged with a learning rate of {self.learning_rate:g}: lower "
                "fedbe.learning-rate"
            )
        return {name: array if array.dtype.kind == "f" else student[name] for name, array in entries.items()}

    def _fit(self, batches: Batches, training: TrainingConfig) -> nn.Module:
        """Train the model; return one with the mean of its weights at the ends of the cycles.

        Labels of the batches are probabilities (n, classes).
        """
        optimizer = SGD(self.model.parameters(), self.learning_rate, momentum=_MOMENTUM)
        rates = LambdaLR(optimizer, lambda step: 1 - (1 - LOWEST) * (step % CYCLE) / (CYCLE - 1))
        averaged = AveragedModel(self.model)
        self.model.train()
        cycles = -(-self.epochs * batches.per_epoch // CYCLE)
        for step, batch in enumerate(islice(endless(batches), cycles * CYCLE), start=1):
            optimizer.zero_grad()
            for inputs, probabilities, share in pieces(batch, training):
                # Up to a constant, the loss is the Kullback-Leibler divergence.
                (share * self.task.loss_of(self.model, inputs, probabilities)).backward()
            optimizer.step()
            rates.step()
            if step % CYCLE == 0:
                averaged.update_parameters(self.model)
        # The averaged weights were never used on examples: compute the statistics of their norms.
        update_bn((inputs for inputs, _ in batches.epoch(0)), CalledModel(averaged.module, self.task.outputs))
        return averaged.module

    def _state(self, entries: Arrays) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.array(array)) for name, array in self.layout.join(entries).items()}
