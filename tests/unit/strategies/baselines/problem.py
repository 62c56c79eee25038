"""A softmax regression of a few numbers on two or more clients, through the project's own ClientApp.

What a method should come to is computed beside it with NumPy: `gradient` and `batches` are all that a test needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from torch import nn

import tepal.client_app.app as app_module
from tepal.client_app.local_client import LocalClient
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches
from tepal.training.tasks import IMAGES

FEATURES, CLASSES = 3, 2
START = np.array([[0.3, -0.2, 0.1], [0.05, 0.4, -0.3]])
SETTINGS = {"optimizer": "sgd", "learning-rate": 0.5, "weight-decay": 0.0, "local-epochs": 2, "batch-size": 2}


@dataclass
class Problem:
    """Clients c0, c1, … with `sizes` examples each, and what happened at them."""

    sizes: tuple[int, ...] = (4, 6)
    works: dict[tuple[str, int], object] = field(default_factory=dict)
    """(client, round) → its Work, whose `personal` is what the client kept for itself after the round."""

    def data(self, k):
        rng = np.random.default_rng([7, k])
        inputs = rng.normal(size=(self.sizes[k], FEATURES)) + k
        return inputs, rng.integers(0, CLASSES, self.sizes[k])

    def batches(self, k, number, size=2):
        """The client's batches in a round, epoch after epoch without end."""
        inputs, labels = map(torch.from_numpy, self.data(k))
        batches, epoch = Batches(inputs, labels, size, 100 * number + k), 0
        while True:
            yield from ((x.numpy(), y.numpy()) for x, y in batches.epoch(epoch))
            epoch += 1

    def steps(self, k, *, epochs=2, size=2):
        # A single example that would be left over is in the batch before it.
        return epochs * max((self.sizes[k] + size - 2) // size, 1)

    def model(self):
        return nn.Linear(FEATURES, CLASSES, bias=False, dtype=torch.float64)

    def site(self, msg, context):
        k = int(context.node_config["partition-id"])
        settings = {**SETTINGS, **msg.content.config_records.get("config", {})}
        training = TrainingConfig.of(settings)
        inputs, labels = map(torch.from_numpy, self.data(k))
        model = self.model()
        seed = 100 * int(settings.get("server-round", 0)) + k
        batches = Batches(inputs, labels, training.batch_size, seed)
        data = {"batches": batches, "test": (inputs, labels), "sizes": {"classes": CLASSES}}
        return LocalClient(f"c{k}", model, task=IMAGES, training=training, node_config=context.node_config, **data)

    def grid(self, monkeypatch, tmp_path, **options):
        monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(LocalClient, "of", staticmethod(self.site))
        make = app_module._work

        def work(site, came, *penalty):
            made = make(site, came, *penalty)
            if came is not None:
                self.works[site.name, came.plan.round] = made
            return made

        monkeypatch.setattr(app_module, "_work", work)
        nodes = [
            Node(app_module.app, {"partition-id": k, "name": f"c{k}", "cache-path": str(tmp_path / "cache")})
            for k in range(len(self.sizes))
        ]
        return InProcessGrid(nodes, **options)

    def personal(self, k, number):
        return self.works[f"c{k}", number].personal


def start(strategy, grid, rounds, *, first=START, **settings):
    """(reports by round, the global weight after each round)."""
    reports, models = {}, {}
    strategy.on_round = lambda report: reports.update({report.round: report})
    told = ConfigRecord({**SETTINGS, **settings})
    strategy.start(
        grid,
        ArrayRecord({"weight": Array(first)}),
        num_rounds=rounds,
        timeout=120,
        train_config=told,
        evaluate_config=told,
        evaluate_fn=lambda number, arrays: models.update({number: arrays["weight"].numpy()}),
    )
    return reports, models


def gradient(w, batch):
    """Of the mean cross-entropy of softmax(x·wᵀ)."""
    inputs, labels = batch
    scores = inputs @ w.T
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return (p - np.eye(CLASSES)[labels]).T @ inputs / len(labels)


def descend(w, batches, steps, rate=0.5, extra=lambda w: 0.0):
    """Plain SGD."""
    for _ in range(steps):
        w = w - rate * (gradient(w, next(batches)) + extra(w))
    return w
