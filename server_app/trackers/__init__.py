"""Trackers: a run's metrics in TensorBoard, MLflow and Weights & Biases, round by round, next to `metrics.jsonl`.

A tracker shows what `read_metrics` reads from `metrics.jsonl`. Where the two may differ (a run is resumed, a round is
repeated, a tracker was not reachable), the tracker is updated from the file. If a tracker fails, that is logged, and
the run goes on.
"""

from tepal.server_app.trackers.choice import NAMES, check_trackers, missing, names_of, open_trackers
from tepal.server_app.trackers.group import Trackers
from tepal.server_app.trackers.mlflow import MLflow, with_password
from tepal.server_app.trackers.tensorboard import TensorBoard
from tepal.server_app.trackers.tracker import Tracker, TrackerError, scalars
from tepal.server_app.trackers.wandb import WandB

__all__ = [
    "NAMES", "MLflow", "TensorBoard", "Tracker", "TrackerError", "Trackers", "WandB",
    "check_trackers", "missing", "names_of", "open_trackers", "scalars", "with_password",
]  # fmt: skip
