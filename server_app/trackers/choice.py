"""Which trackers a run has: the run config's `trackers`, parsed, checked and opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tepal.host.toml import parts_of
from tepal.server_app.trackers.group import Trackers
from tepal.server_app.trackers.mlflow import MLflow, check_mlflow, tracking_uri
from tepal.server_app.trackers.tensorboard import TensorBoard
from tepal.server_app.trackers.tracker import Tracker, TrackerError
from tepal.server_app.trackers.wandb import WandB, check_wandb

if TYPE_CHECKING:
    from tepal.server_app.config import RunConfig

TENSORBOARD, MLFLOW, WANDB = "tensorboard", "mlflow", "wandb"

_NEEDED = {
    TENSORBOARD: ("tensorboard",),
    MLFLOW: ("mlflow", "sqlalchemy", "alembic"),
    WANDB: ("wandb",),
}
NAMES = tuple(_NEEDED)
"""The trackers that the run config may name."""


def names_of(text: str) -> list[str]:
    """Parse the run config's `trackers`. Raises TrackerError for an unknown one."""
    names = parts_of(text)
    for name in names:
        if name not in NAMES:
            raise TrackerError(f"{name!r} is not a tracker: allowed are {', '.join(NAMES)}, with commas between")
    return list(dict.fromkeys(names))


def missing(names: Iterable[str]) -> list[str]:
    """A message for each tracker whose packages are not installed."""
    found = []
    for name in names:
        if lacking := [package for package in _NEEDED[name] if not _installed(package)]:
            found.append(
                f"{name} needs {', '.join(lacking)}, which this Python does not have: "
                f"pip install 'tepal[{name}]', or leave {name} out"
            )
    return found


def _installed(package: str) -> bool:
    # Trackers write folders with their own names, and a folder in the current one can be imported, but has no origin.
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def check_trackers(config: RunConfig) -> None:
    """Check the trackers before a run starts.

    Raises TrackerError if a server cannot be reached, or Weights & Biases has no API key.
    """
    names = names_of(config.rounds.trackers)
    if MLFLOW in names:
        check_mlflow(config)
    if WANDB in names:
        check_wandb(config)


def open_trackers(config: RunConfig, run: Path) -> Trackers:
    """The trackers that the run config names, for the run in this directory."""
    return Trackers(run, {name: _made(name, config, run) for name in names_of(config.rounds.trackers)})


def _made(name: str, config: RunConfig, run: Path) -> Tracker:
    if name == TENSORBOARD:
        return TensorBoard(run, config.flat)
    if name == MLFLOW:
        return MLflow(run, config.flat, tracking_uri(config, run.parent), config.mlflow.experiment)
    return WandB(run, config.flat, config.wandb, group=config.rounds.strategy)
