"""Scoring on the server: the global model or ensemble, on the held-out examples and on images of no class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from tepal.exchange.modes import modes_of
from tepal.server_app.config import RunConfig
from tepal.training.data.inputs import held_out_inputs
from tepal.training.foreign_images import foreign_images
from tepal.training.prediction import predict, score_predictions
from tepal.training.tasks import TASKS
from tepal.training.uncertainty import flagged


def server_evaluation(config: RunConfig, model: nn.Module) -> Callable[[int, ArrayRecord], MetricRecord | None] | None:
    """Return a function that scores the global model, or an ensemble, on the held-out examples.

    It takes the round and the arrays, and returns None in rounds without a score (`evaluate-every`). If the server has
    no held-out examples, there is no function: None.

    With `foreign-images` every score includes how many images of no class are flagged as uncertain: in every scored
    round and not only in the last one, because a run may be stopped early, or resumed with more rounds.
    """
    examples = held_out_inputs(config.data)
    if examples is None:
        return None
    images, labels = torch.from_numpy(examples.values), torch.from_numpy(examples.labels)
    foreign = foreign_images(examples.values, config.rounds.seed) if config.rounds.foreign_images else {}
    task = TASKS[config.data.kind]
    every, last = config.rounds.evaluate_every, config.rounds.num_server_rounds

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and server_round != last:
            return None
        modes = modes_of(arrays)

        def states() -> Iterator[Mapping[str, Tensor]]:
            return (ArrayRecord(mode).to_torch_state_dict() for mode in modes)

        predictions = predict(model, states(), images, config.training, task)
        scored = score_predictions(predictions, labels, task)
        figures: dict[str, Any] = {"loss": scored.loss, "examples": scored.examples, **scored.figures}
        if scored.accuracy is not None:
            figures["accuracy"] = scored.accuracy
        if task.macro_f1:
            counts = torch.bincount(labels)
            figures["predicted-classes"] = len(predictions.labels.unique())
            figures["largest-class"] = int(counts.max()) / len(labels)
        if scored.calibration is not None:
            figures |= scored.calibration.metrics
        if foreign:
            together = torch.from_numpy(np.concatenate([*foreign.values()]))
            entropies = predict(model, states(), together, config.training, task).entropy
            parts = entropies.split([len(each) for each in foreign.values()])
            figures |= flagged(predictions.entropy, dict(zip(foreign, parts, strict=True)))
        return MetricRecord(figures | (scored.apart if len(modes) > 1 else {}))

    return evaluate
