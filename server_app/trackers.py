"""Trackers: a run's metrics in TensorBoard and MLflow, round by round, in addition to `metrics.jsonl`.

A tracker shows what `read_metrics` reads from `metrics.jsonl`. Where the two may differ (a run is resumed, a round is
repeated, a tracker was not reachable), the tracker is updated from the file. If a tracker fails, that is logged, and
the run goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tepal.records.round_record import COLUMNS, COUNTED, RoundRecord
from tepal.records.run_directory import as_json, read_metrics, scored, write_whole

if TYPE_CHECKING:
    from tepal.server_app.config import RunConfig

log = getLogger("flwr")

TENSORBOARD, MLFLOW = "tensorboard", "mlflow"
NAMES = (TENSORBOARD, MLFLOW)

EVENTS = "tensorboard"  # folder in a run directory: TensorBoard's event files
MLFLOW_RUN = "mlflow.json"  # in a run directory: names its run of MLflow
MLFLOW_DATABASE = "mlflow.db"  # in the folder of runs, if no tracking server is named

_BATCH = 900  # values in a call of MLflow, which accepts 1000


class TrackerError(ValueError):
    """A tracker cannot be used. The message has the reason and a remedy."""


class Tracker(Protocol):
    """Shows the rounds of one run."""

    def match(self, lines: Sequence[RoundRecord]) -> None:
        """Show exactly these rounds, as `read_metrics` returns them."""

    def write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Show further values, by round and name; none of them is shown yet."""

    def close(self, status: str) -> None:
        """Note the end of the run: FINISHED, FAILED, or KILLED by a person or a signal."""


def names_of(text: str) -> list[str]:
    """Parse the run config's `trackers`. Raises TrackerError for an unknown one."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in NAMES:
            raise TrackerError(f"{name!r} is not a tracker: allowed are {', '.join(NAMES)}, with commas between")
    return list(dict.fromkeys(names))


def missing(names: Iterable[str]) -> list[str]:
    """A message for each tracker whose packages are not installed."""
    needed = {TENSORBOARD: ("tensorboard",), MLFLOW: ("mlflow", "sqlalchemy", "alembic")}
    found = []
    for name in names:
        if lacking := [package for package in needed[name] if importlib.util.find_spec(package) is None]:
            found.append(
                f"{name} needs {', '.join(lacking)}, which this Python does not have: "
                f"pip install 'tepal[{name}]', or leave {name} out"
            )
    return found


def scalars(line: RoundRecord) -> dict[str, float]:
    """The numbers of a round by their columns in `metrics.jsonl`; of columns that list clients, how many they list."""
    values = {name: line.value(name) for name in COLUMNS if name != "round"}
    values |= {name: len(values[name]) for name in COUNTED}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


class Trackers:
    """The trackers of a run, which are given its rounds. Made by `open_trackers`; a context manager."""

    def __init__(self, run: Path, trackers: Mapping[str, Tracker]) -> None:
        self._run = run
        self._trackers = dict(trackers)
        self._last: RoundRecord | None = None
        self._behind: set[str] = set()  # trackers that do not show what the file contains
        self._away: set[str] = set()  # those of them whose failure was logged

    def __enter__(self) -> Trackers:
        if self._trackers:
            lines = read_metrics(self._run, most=None)
            self._last = lines[-1] if lines else None
            self._each(lambda tracker: tracker.match(lines), self._trackers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED"
        if self._behind:
            lines = read_metrics(self._run, most=None)
            self._each(lambda tracker: tracker.match(lines), self._behind)
        self._each(lambda tracker: tracker.close(status), self._trackers)

    def add(self, record: RoundRecord) -> None:
        """Show a round that was written to `metrics.jsonl`."""
        if not self._trackers:
            return
        line = RoundRecord.from_line(as_json(record.to_line()))  # without NaN and infinity, as the file has it
        before, self._last = self._last, line
        if before is not None and before.round >= line.round:
            self._behind = set(self._trackers)  # a repeated round may have other values
        news = _news(before, line)
        self._each(lambda tracker: tracker.write(news), self._trackers.keys() - self._behind)
        if self._behind:
            lines = [each for each in read_metrics(self._run, most=None) if each.round <= line.round]
            self._each(lambda tracker: tracker.match(lines), self._behind)
            if not lines or lines[-1].round < line.round:
                self._behind = set(self._trackers)  # the disk is full; the line is written later

    def _each(self, do: Callable[[Tracker], None], names: Iterable[str]) -> None:
        for name in sorted(names):
            try:
                do(self._trackers[name])
                self._behind.discard(name)
                self._away.discard(name)
            except Exception as error:  # no error of a tracker's package may end the run
                if name not in self._away:
                    log.error("%s could not be updated: %s. The run continues, and it is updated later.", name, error)
                self._behind.add(name)
                self._away.add(name)


def _news(before: RoundRecord | None, line: RoundRecord) -> dict[int, dict[str, float]]:
    """The values of a new line, and scores of the round before that the clients reported in this one."""
    news: dict[int, dict[str, float]] = {}
    if before is not None:
        known = scalars(before)
        filled, _ = scored([before, line])
        if later := {key: value for key, value in scalars(filled).items() if key not in known}:
            news[before.round] = later
    news[line.round] = scalars(line)
    return news


def check_trackers(config: RunConfig) -> None:
    """Check the trackers before a run starts. Raises TrackerError if MLflow cannot be reached."""
    if MLFLOW in names_of(config.rounds.trackers):
        uri = _tracking_uri(config, Path(config.rounds.runs).expanduser())
        if uri.startswith(("http:", "https:")):
            try:
                _mlflow_client(uri).get_experiment_by_name(config.mlflow.experiment)
            except Exception as error:
                raise TrackerError(
                    f"mlflow.tracking-uri={uri!r} is not reachable as a tracking server of MLflow: {error}. Start it, "
                    f"name another one, or leave {MLFLOW} out of trackers"
                ) from error


def open_trackers(config: RunConfig, run: Path) -> Trackers:
    """The trackers that the run config names, for the run in this directory."""
    made: dict[str, Tracker] = {}
    for name in names_of(config.rounds.trackers):
        made[name] = TensorBoard(run, config.flat) if name == TENSORBOARD else MLflow(
            run, config.flat, _tracking_uri(config, run.parent), config.mlflow.experiment
        )  # fmt: skip
    return Trackers(run, made)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class TensorBoard:
    """Event files in the run directory: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._folder = run / EVENTS
        self._config = config
        self._writer: Any = None

    def match(self, lines: Sequence[RoundRecord]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            with suppress(Exception):  # it may have failed before
                self._writer.close()
        # An event file with a purge step of 0: readers then ignore all earlier values.
        again = self._folder.is_dir() and any(self._folder.iterdir())
        self._writer = SummaryWriter(str(self._folder), purge_step=0 if again else None)
        rows = "\n".join(f"| {key} | {json.dumps(as_json(value))} |" for key, value in self._config.items())
        self._writer.add_text("run config", f"| key | value |\n|---|---|\n{rows}", 0)
        self.write({line.round: scalars(line) for line in lines})

    def write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        for number, named in values.items():
            for key, value in named.items():
                self._writer.add_scalar(key, value, number)
        self._writer.flush()

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


# --- MLflow -----------------------------------------------------------------------------------------------------------


class MLflow:
    """A run of MLflow, with the name of the run directory, the run config as its parameters and the round as step."""

    def __init__(self, run: Path, config: Mapping[str, Any], uri: str, experiment: str) -> None:
        self._path, self._config = run, config
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._run = ""

    def match(self, lines: Sequence[RoundRecord]) -> None:
        if self._client is None:
            self._client = _mlflow_client(self._uri)
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


def with_password(uri: str) -> bool:
    """Whether a tracking URI contains a user's password."""
    try:
        return bool(urlsplit(uri).password)
    except ValueError:
        return False


def _tracking_uri(config: RunConfig, runs: Path) -> str:
    """The URI that the run config or the environment names; otherwise that of a database in the folder of runs."""
    named = config.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    return named or f"sqlite:///{(runs / MLFLOW_DATABASE).absolute()}"


def _mlflow_client(uri: str) -> Any:
    # By default MLflow would retry for minutes, in which the clients wait, and would send usage data.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient(uri)
