"""The model that a run delivered, and what its files say about it: strategy, round, data, score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tepal.records.run_directory import CONFIG, LARGEST_ROUND, measured_by, read_metrics, scored
from tepal.strategies import STRATEGIES
from tepal.tools.predict.model_file import described
from tepal.tools.predict.predict import Predictor, load_predictor
from tepal.training.data.config import LOCAL
from tepal.training.tasks import TASKS, Task

TOLERANCE = 1e-5
"""Largest allowed difference of an exported model's outputs, times the largest output if that is above 1."""

_MEASURED_ON = {
    "server": "the server's held-out examples",
    "clients": "the clients' own test examples",
    "personal": "the clients' own test examples, with each client's personal model, not with this model",
}


class ExportError(ValueError):
    """Raised for a model that cannot be exported in this form, or whose exported form computes something else."""


@dataclass(frozen=True, eq=False)
class Delivered:
    """A saved model, and the facts about it.

    predictor: the model file, checked.
    facts: name → text; names are `run`, `strategy`, `round`, `model`, `data`, the measure (`accuracy` or `rmse`),
        `measured-on`, `measured-after-round` and `note`. A fact that is not known is left out.
    """

    predictor: Predictor
    facts: Mapping[str, str]

    @property
    def task(self) -> Task:
        """How the model is called."""
        return TASKS[self.predictor.config.kind]

    def model(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Load the weights of a member into the one model object, on the CPU, and return it in evaluation mode."""
        model = self.predictor.model.cpu()
        model.load_state_dict(state)
        return model.eval()


def load_delivered(path: Path) -> Delivered:
    """Read a saved model and the scores of its run.

    Args:
        path: a run directory, a folder of runs (of which the latest is used), or a safetensors file.

    Raises:
        OSError: `path` has no model.
        ValueError: the file is not a model, or the run's metrics are damaged.
    """
    predictor = load_predictor(path)
    name, config = described(predictor.metadata)
    run = predictor.file.parent
    scores = {}
    if "run" in predictor.metadata and (run / CONFIG).exists():
        scores = _scores(run, int(predictor.metadata.get("round", LARGEST_ROUND)))
    strategy = str(config.get("strategy", ""))
    known = {
        "run": predictor.metadata.get("run", ""),
        "strategy": STRATEGIES[strategy].strategy.__name__ if strategy in STRATEGIES else strategy,
        "model": _last_part(name),
        "data": _data(config),
        **scores,
        "note": predictor.caution,
    }
    return Delivered(predictor, {key: value for key, value in known.items() if value})


def largest_difference(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the largest difference of two outputs, and the largest that is allowed (`TOLERANCE`).

    Equal infinities, the scores of choices that do not exist, do not differ.
    """
    expected, found = expected.double(), found.double()
    if expected.shape != found.shape:
        return float("inf"), TOLERANCE
    difference = torch.where(expected == found, 0.0, (expected - found).abs()).nan_to_num(nan=torch.inf)
    size = torch.where(expected.isfinite(), expected.abs(), 0.0).max()
    return float(difference.max()), TOLERANCE * max(1.0, float(size))


def _scores(run: Path, delivered: int) -> dict[str, str]:
    """Return the delivered round, and the last score up to it."""
    metrics = [line for line in scored(read_metrics(run)) if line.round <= delivered]
    if not metrics:
        return {}
    facts, measure = {"round": str(metrics[-1].round)}, measured_by(metrics)
    for line in reversed(metrics):
        if (score := line.value(measure.key)) is not None:
            facts |= {measure.key: f"{score:.4f}", "measured-after-round": str(line.round)}
            if line.accuracy_of in _MEASURED_ON:
                facts["measured-on"] = _MEASURED_ON[line.accuracy_of]
            break
    return facts


def _data(config: Mapping[str, Any]) -> str:
    dataset = str(config.get("dataset", ""))
    return "each client's own data" if dataset == LOCAL else _last_part(dataset)


def _last_part(name: str) -> str:
    """Return a name as it is, of an existing or absolute path its last part: a file for others names no folders."""
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or path.exists() else name
