"""What a finished run scored, client by client and example by example, so that any test can be made of it later."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from numpy.typing import NDArray

from tepal.tools.predict.predict import load_predictor
from tepal.training.data.inputs import held_out_inputs
from tepal.training.loop import device_of
from tepal.training.prediction import predict
from tepal.training.tasks import TASKS

_ACCURACY = re.compile("(received|personal|ensemble)-accuracy")


class ClientScores:
    """An app that notes the accuracy that each client reports in an evaluation; a later one replaces it."""

    def __init__(self, app: Callable[[Message, Context], Message]) -> None:
        self._app = app
        self._scores: dict[int, tuple[float, int]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self._app(message, context)
        if message.metadata.message_type == "evaluate" and reply.has_content():
            metrics: dict[str, Any] = dict(next(iter(reply.content.metric_records.values()), {}))
            for accuracy in (value for name, value in metrics.items() if _ACCURACY.fullmatch(name)):
                scored = float(accuracy), int(metrics["num-examples"])
                self._scores[int(context.node_config["partition-id"])] = scored
        return reply

    def last(self) -> dict[str, tuple[float, int]]:
        """Client (its number, as text) → accuracy and number of test examples, of the last round that scored it.

        A client without a score in the last round, for instance because its training diverged, keeps its earlier one:
        without it, what is compared on the clients that all runs scored would favour the run that failed on it.
        """
        return {str(client): score for client, score in sorted(self._scores.items())}


def correct_examples(run: Path, device: str = "") -> str:
    """Which of the server's held-out examples a run's final model or ensemble classifies correctly; see `unpacked`.

    Args:
        run: its directory.
        device: on which to predict, such as "cuda:1"; "": a GPU if there is one, else the CPU.
    """
    predictor, where = load_predictor(run), device_of(device or None)
    predictor.model.to(where)
    examples = held_out_inputs(predictor.config)
    assert examples is not None
    task = TASKS[predictor.config.kind]
    inputs = torch.from_numpy(examples.values).to(where)
    found = predict(predictor.model, predictor.states(), inputs, predictor.training, task)
    return packed(found.labels.cpu().numpy() == examples.labels)


def packed(correct: NDArray[np.bool_]) -> str:
    """Flags (n,) as compressed text, with their number: "1500:eNpj…"."""
    flat = correct.ravel()
    return f"{len(flat)}:{base64.b64encode(zlib.compress(np.packbits(flat).tobytes(), 9)).decode()}"


def unpacked(text: str) -> NDArray[np.bool_]:
    """The flags (n,) of `packed`."""
    count, _, content = text.partition(":")
    bits = np.frombuffer(zlib.decompress(base64.b64decode(content)), np.uint8)
    return np.unpackbits(bits, count=int(count)).astype(bool)
