"""Trackers: TensorBoard and MLflow show what metrics.jsonl says, also of runs that go on, and none ends a run."""

import importlib.util
import json
import logging
import shutil
from collections import Counter

import numpy as np
import pytest

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tepal.server_app import trackers
from tepal.server_app.config import ConfigError, defaults, read_run_config
from tepal.server_app.config.reading import CHANGEABLE
from tepal.server_app.run import _OWN
from tepal.server_app.trackers import TensorBoard, Trackers, check_trackers, group, open_trackers
from tests.lines import read_lines
from tests.packages import ROOT

BOTH = {"trackers": "tensorboard, mlflow"}

event_file_writer = pytest.importorskip(
    "tensorboard.summary.writer.event_file_writer", reason="pip install 'tepal[tensorboard]'"
)
pytest.importorskip("mlflow", reason="pip install 'tepal[mlflow]'")


@pytest.fixture(autouse=True)
def nothing_of_the_environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(autouse=True)
def numbers_of_files(monkeypatch):
    """TensorBoard reads files of one second in the order of their names, which end with a number: of as many digits."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


def line(number, **values):
    usual = {"phase": "train", "accuracy": number / 7, "loss": 1 / (number + 1), "bytes_down": 1000 * number,
             "refused": [], "lost": [{"client": "a", "reason": "x"}] * (number % 3)}  # fmt: skip
    return RoundRecord.from_line({"round": number, **usual, **values})


def expected(run):
    """By metrics.jsonl, read as text: (round, key) → number; of the troubled clients how many."""
    values = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(text)
        number = row.pop("round")
        values = {at: value for at, value in values.items() if at[0] < number}
        for key, value in row.items():
            if type(value) is list and key in ("refused", "lost", "late", "left_out"):
                values[number, key] = len(value)
            elif type(value) in (int, float):
                values[number, key] = value
    return values


def in_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [((each.step, key), each.value) for key in events.Tags()["scalars"] for each in events.Scalars(key)]


def in_mlflow(run, uri=None, experiment="tepal"):
    from mlflow import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{run.parent / 'mlflow.db'}")
    identity = client.get_experiment_by_name(experiment).experiment_id
    found = client.search_runs([identity], filter_string=f"tags.`mlflow.runName` = '{run.name}'")
    assert len(found) == 1
    histories = (client.get_metric_history(found[0].info.run_id, key) for key in found[0].data.metrics)
    return [((each.step, each.key), each.value) for history in histories for each in history], found[0]


def check_that_they_show(run, wanted=None):
    wanted = wanted or expected(run)
    shown = in_tensorboard(run)
    assert max(Counter(at for at, _ in shown).values()) == 1, "a step is there twice"
    assert dict(shown) == {at: float(np.float32(value)) for at, value in wanted.items()}
    shown, _ = in_mlflow(run)
    assert max(Counter(at for at, _ in shown).values()) == 1, "a step is there twice"
    assert dict(shown) == wanted


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """A database of MLflow with all its tables: MLflow makes them by some fifty migrations, which take seconds."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.mktemp("mlflow")
    SqlAlchemyStore(f"sqlite:///{folder / 'mlflow.db'}", folder.as_uri())
    return folder / "mlflow.db"


@pytest.fixture
def directory(tmp_path, empty_database):
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs")
    return RunDirectory.create(tmp_path / "runs", "fedavg", {**defaults(), **BOTH})


def follow(directory, numbers, **values):
    """Rounds as a run writes them."""
    with open_trackers(read_run_config({**BOTH, "runs": str(directory.path.parent)}), directory.path) as tracked:
        for number in numbers:
            row = line(number, **values)
            directory.add(row)
            tracked.add(row)


def test_they_show_what_metrics_jsonl_says(directory):
    follow(directory, range(5), learning_rate=float("nan"), step_seconds=None, deterministic=True)
    wanted = expected(directory.path)
    assert wanted[3, "accuracy"] == 3 / 7 and wanted[2, "lost"] == 2 and (2, "learning_rate") not in wanted
    check_that_they_show(directory.path)
    _, run = in_mlflow(directory.path)
    assert run.info.status == "FINISHED"
    assert run.data.params["trackers"] == BOTH["trackers"] and set(run.data.params) == set(defaults())
    assert run.data.tags["tepal.run"] == str(directory.path)


def test_a_run_that_goes_on_has_no_step_twice_and_stays_the_same_run_of_mlflow(directory):
    follow(directory, range(3))
    _, before = in_mlflow(directory.path)
    follow(directory, range(3, 6))
    check_that_they_show(directory.path)
    _, after = in_mlflow(directory.path)
    assert after.info.run_id == before.info.run_id


def test_a_round_that_is_repeated_is_shown_as_it_went_the_last_time(directory):
    follow(directory, range(5))
    follow(directory, range(3, 5), loss=9.0)
    assert expected(directory.path)[4, "loss"] == 9
    check_that_they_show(directory.path)


def test_a_server_that_was_killed_before_it_told_a_round_tells_it_later(directory):
    follow(directory, range(3))
    directory.add(line(3))
    follow(directory, [4])
    check_that_they_show(directory.path)


def test_a_tracker_that_a_run_begins_with_later_shows_it_from_its_start(directory):
    for number in range(4):
        directory.add(line(number))
    follow(directory, [4])
    check_that_they_show(directory.path)


def test_scores_that_clients_give_a_round_later_are_shown_at_the_round_that_they_are_of(directory):
    none = {"accuracy": None, "loss": None}
    with open_trackers(read_run_config({**BOTH, "runs": str(directory.path.parent)}), directory.path) as tracked:
        for row in (line(1, **none), line(2, **none, received_accuracy=0.25), line(3, received_accuracy=0.5)):
            directory.add(row)
            tracked.add(row)
    wanted = {**expected(directory.path), (1, "accuracy"): 0.25, (2, "accuracy"): 0.5}
    assert read_lines(directory.path)[1]["accuracy"] == 0.5
    check_that_they_show(directory.path, wanted)


def test_a_run_that_failed_is_marked_so(directory):
    with pytest.raises(RuntimeError), open_trackers(read_run_config(BOTH), directory.path) as tracked:
        directory.add(line(1))
        tracked.add(line(1))
        raise RuntimeError("too few replies")
    assert in_mlflow(directory.path)[1].info.status == "FAILED"


def test_a_tracker_that_fails_is_said_once_and_caught_up_with(directory, caplog):
    class Away:
        fails, shown = True, None

        def match(self, lines):
            if self.fails:
                raise ConnectionError("no route")
            self.shown = [each.round for each in lines]

        def write(self, values):
            self.shown += list(values)

        def close(self, status):
            self.status = status

    away, board = Away(), TensorBoard(directory.path, {})
    with Trackers(directory.path, {"mlflow": away, "tensorboard": board}) as tracked:
        for number in range(6):
            away.fails = number < 3
            directory.add(line(number))
            tracked.add(line(number))
    assert away.shown == [0, 1, 2, 3, 4, 5] and away.status == "FINISHED"
    assert caplog.text.count("no route") == 1 and "The run continues" in caplog.text
    assert dict(in_tensorboard(directory.path)).keys() == expected(directory.path).keys()


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), ValueError("line 3: not a round")])
def test_a_file_that_cannot_be_read_while_a_tracker_is_away_does_not_end_the_run(directory, caplog, monkeypatch, error):
    class Away:
        fails, shown = True, None

        def match(self, lines):
            if self.fails:
                raise ConnectionError("no route")
            self.shown = [each.round for each in lines]

        write = match

        def close(self, status):
            self.status = status

    away = Away()
    broken = {2, 5}  # of the readings: one of a round, and the first at the end
    readings = []
    read = group.read_metrics

    def flaky(*arguments, **options):
        readings.append(arguments)
        if len(readings) - 1 in broken:
            raise error
        return read(*arguments, **options)

    monkeypatch.setattr(group, "read_metrics", flaky)
    with Trackers(directory.path, {"mlflow": away}) as tracked:
        for number in range(4):
            directory.add(line(number))
            tracked.add(line(number))
        away.fails = False
    assert away.status == "FINISHED" and away.shown is None
    assert caplog.text.count(str(error)) == 2
    with Trackers(directory.path, {"mlflow": away}):
        assert away.shown == [0, 1, 2, 3]


def test_a_line_that_a_full_disk_keeps_back_is_shown_when_it_is_written(directory, monkeypatch):
    with open_trackers(read_run_config(BOTH), directory.path) as tracked:
        for number in range(4):
            with monkeypatch.context() as patched:
                if number == 1:
                    patched.setattr(RunDirectory, "append", lambda *_: (_ for _ in ()).throw(OSError("full")))
                directory.add(line(number))
            tracked.add(line(number))
    assert {at[0] for at in expected(directory.path)} == {0, 1, 2, 3}
    check_that_they_show(directory.path)


def test_mlflow_does_not_silence_the_runs_own_log(directory):
    follow(directory, [1])
    assert not logging.getLogger("flwr").disabled and logging.getLogger("flwr").level < logging.CRITICAL


def test_a_database_and_an_experiment_of_ones_own_are_used(directory, tmp_path):
    own = {"trackers": "mlflow", "mlflow.tracking-uri": f"sqlite:///{tmp_path / 'own.db'}", "mlflow.experiment": "e"}
    with open_trackers(read_run_config(own), directory.path) as tracked:
        directory.add(line(1))
        tracked.add(line(1))
    shown, _ = in_mlflow(directory.path, own["mlflow.tracking-uri"], "e")
    assert dict(shown) == expected(directory.path)


def test_without_trackers_nothing_is_written_and_nothing_imported(tmp_path):
    directory = RunDirectory.create(tmp_path, "fedavg", {})
    with open_trackers(read_run_config({}), directory.path) as tracked:
        tracked.add(line(1))
    assert {path.name for path in directory.path.iterdir()} == {"config.toml"}


def test_the_keys_of_trackers_may_change_in_a_resumed_run_and_are_not_sent_to_clients():
    keys = {key for key in defaults() if key == "trackers" or key.startswith(("mlflow.", "wandb."))}
    assert len(keys) == 6 and keys <= set(CHANGEABLE) and keys <= set(_OWN)


# --- before a run starts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, package", [("tensorboard", "tensorboard"), ("mlflow", "sqlalchemy"), ("wandb", "wandb")]
)
def test_a_missing_package_stops_the_run_with_the_command_that_installs_it(monkeypatch, name, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: None if each == package else find(each))
    with pytest.raises(ConfigError, match=rf"needs {package}, .*pip install 'tepal\[{name}\]'"):
        read_run_config({"trackers": name})


def test_an_unknown_tracker_and_a_password_are_refused():
    with pytest.raises(ConfigError, match=r"'comet' is not a tracker: allowed are tensorboard, mlflow, wandb"):
        read_run_config({"trackers": "tensorboard,comet"})
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as error:
        read_run_config({"trackers": "mlflow", "mlflow.tracking-uri": "https://me:secret@host"})
    assert "secret" not in str(error.value)


def test_a_tracking_server_that_does_not_answer_stops_the_run_before_it_starts():
    config = read_run_config({"trackers": "mlflow", "mlflow.tracking-uri": "http://127.0.0.1:9"})
    with pytest.raises(trackers.TrackerError, match=r"http://127\.0\.0\.1:9.*is not reachable"):
        check_trackers(config)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_whole_run_and_its_prolongation_are_in_both(tmp_path, monkeypatch, no_report):
    monkeypatch.syspath_prepend(str(ROOT))
    from client_app.app import app
    from tepal.server_app.run import run
    from tepal.strategies.in_process import InProcessGrid, Node

    def start(**values):
        config = {**defaults(), "local-epochs": 1, "strategy": "fedavg", "runs": str(tmp_path), **BOTH, **values}
        nodes = [Node(app, {"partition-id": k, "num-partitions": 2}) for k in range(2)]
        return run(InProcessGrid(nodes, config), config)

    first = start(**{"num-server-rounds": 1})
    check_that_they_show(first)
    assert start(**{"num-server-rounds": 2, "resume": str(first)}) == first
    assert {at[0] for at in expected(first)} == {0, 1, 2}
    check_that_they_show(first)
