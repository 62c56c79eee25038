"""Local training by a user's function: `tepal.simulate(train=…)`."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from logging import getLogger
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from tepal.client_app import app as own
from tepal.client_app.local_client import LocalClient
from tepal.client_app.objectives import Work
from tepal.server_app.config import ConfigError
from tepal.strategies.rounds.strategy import MethodStrategy
from tepal.training.loop import Batch, Batches, Fitted

log = getLogger("flwr")

Penalty = Callable[[], Tensor | float]
"""A term of the loss that the strategy adds, such as FedProx's; 0.0 for most strategies."""

Train = Callable[[nn.Module, "Epochs", Penalty], Any]
"""Trains a model in place on a client's batches, and returns the mean loss."""


class Epochs:
    """A client's batches: each iteration is one epoch, in another order that depends on the run's seed alone."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._epoch = 0
        self.steps = 0
        """Number of batches so far."""

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self._batches.per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield (inputs, labels)."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        for batch in self._batches.epoch(epoch):
            self.steps += 1
            yield batch


def client_app(train: Train, errors: list[Exception]) -> ClientApp:
    """Return a ClientApp that does what Tepal's own does, and trains with this function.

    What the function raises is added to `errors`.
    """
    app = ClientApp(mods=own.MODS)

    @app.train()
    def train_it(msg: Message, context: Context) -> Message:
        return own.train_client(LocalClient.of(msg, context), msg, fit)

    def fit(work: Work) -> Fitted:
        try:
            return _fitted(train, work)
        except Exception as error:
            log.info("train raised an exception:\n%s", traceback.format_exc())  # into the run's log
            errors.append(error)
            raise

    app.train("probe")(own.probe)
    app.evaluate()(own.evaluate)
    return app


def _fitted(train: Train, work: Work) -> Fitted:
    epochs, begun = Epochs(work.batches), time.perf_counter()
    work.model.train()
    loss = train(work.model, epochs, work.penalty)
    try:
        loss = float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"train returned {type(loss).__name__}, expected the mean loss, a number") from error
    if not math.isfinite(loss):
        raise ValueError(f"train returned a loss of {loss}: lower the learning rate")
    return Fitted(epochs.steps, loss, time.perf_counter() - begun)


def check_own_training(name: str, strategy: MethodStrategy) -> None:
    """Raise ConfigError for a strategy that prescribes how clients train."""
    if getattr(strategy.method, "objective", "") or name == "fednova":
        raise ConfigError(
            f"strategy={name!r} prescribes how clients train: leave out train, or choose a strategy such as fedavg, "
            "fedfrozen, selective, fedensemble, fedacs or fedprox"
        )
