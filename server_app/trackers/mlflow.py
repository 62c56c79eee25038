"""MLflow: a run on a tracking server or in a database."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import write_whole
from tepal.server_app.trackers.tracker import TrackerError, scalars

if TYPE_CHECKING:
    from tepal.server_app.config import RunConfig

MLFLOW_RUN = "mlflow.json"  # in a run directory: names its run of MLflow
MLFLOW_DATABASE = "mlflow.db"  # in the folder of runs, if no tracking server is named

_BATCH = 900  # values in a call of MLflow, which accepts 1000


class MLflow:
    """A run of MLflow, with the name of the run directory, the run config as its parameters and the round as step."""

    def __init__(self, run: Path, config: Mapping[str, Any], uri: str, experiment: str) -> None:
        self._path, self._config = run, config
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._run = ""

    def match(self, lines: Sequence[RoundRecord]) -> None:
        if self._client is None:
            self._client = _client(self._uri)
        wanted = {(line.round, key): value for line in lines for key, value in scalars(line).items()}
        known = self._run or self._kept()
        shown = self._shown(known) if known else {}
        if known and all(wanted.get(at) == value for at, value in shown.items()):
            self._run = known
            if self._client.get_run(known).info.status != "RUNNING":
                self._client.update_run(known, status="RUNNING")
        else:
            # MLflow cannot remove a value, so a run with other values is replaced.
            self._run, shown = self._new(), {}
            if known:
                self._client.set_tag(known, "tepal.replaced_by", self._run)
                self._client.delete_run(known)
        self._log({at: value for at, value in wanted.items() if at not in shown})

    def write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        self._log({(number, key): value for number, named in values.items() for key, value in named.items()})

    def _log(self, values: Mapping[tuple[int, str], float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, number) for (number, key), value in values.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + _BATCH])

    def close(self, status: str) -> None:
        if self._run:
            self._client.set_terminated(self._run, status)

    def _kept(self) -> str:
        """The run of MLflow that this run directory names; "" if it names none, or that was deleted."""
        try:
            kept = json.loads((self._path / MLFLOW_RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        if (kept.get("uri"), kept.get("experiment")) != (self._uri, self._experiment):
            return ""
        from mlflow.exceptions import MlflowException

        try:
            active = self._client.get_run(kept["run"]).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""
        return str(kept["run"]) if active else ""

    def _shown(self, run: str) -> dict[tuple[int, str], float]:
        return {
            (metric.step, key): metric.value
            for key in self._client.get_run(run).data.metrics
            for metric in self._client.get_metric_history(run, key)
        }

    def _new(self) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            # For a local database, MLflow would otherwise make a folder for artifacts in the working directory.
            local = self._uri.startswith("sqlite:")
            place = (self._path.parent / "mlflow-artifacts").absolute().as_uri() if local else None
            identity = self._client.create_experiment(self._experiment, artifact_location=place)
        else:
            identity = experiment.experiment_id
        tags = {"tepal.run": str(self._path.absolute())}
        run = str(self._client.create_run(identity, run_name=self._path.name, tags=tags).info.run_id)
        params = [Param(key, str(value)) for key, value in self._config.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(run, params=params[start : start + 100])
        kept = {"uri": self._uri, "experiment": self._experiment, "run": run}
        write_whole(self._path / MLFLOW_RUN, (json.dumps(kept) + "\n").encode())
        return run


def check_mlflow(config: RunConfig) -> None:
    """Raise TrackerError if the run config names a tracking server that does not answer."""
    uri = tracking_uri(config, Path(config.rounds.runs).expanduser())
    if uri.startswith(("http:", "https:")):
        try:
            _client(uri).get_experiment_by_name(config.mlflow.experiment)
        except Exception as error:
            raise TrackerError(
                f"mlflow.tracking-uri={uri!r} is not reachable as a tracking server of MLflow: {error}. Start it, "
                "name another one, or leave mlflow out of trackers"
            ) from error


def with_password(uri: str) -> bool:
    """Whether a tracking URI contains a user's password."""
    try:
        return bool(urlsplit(uri).password)
    except ValueError:
        return False


def tracking_uri(config: RunConfig, runs: Path) -> str:
    """The URI that the run config or the environment names; otherwise that of a database in the folder of runs."""
    named = config.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    return named or f"sqlite:///{(runs / MLFLOW_DATABASE).absolute()}"


def _client(uri: str) -> Any:
    # By default MLflow would retry for minutes, in which the clients wait, and would send usage data.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient(uri)
