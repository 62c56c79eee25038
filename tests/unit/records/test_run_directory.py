"""The run directory: what is written is complete, readable by others, and survives a crash in the middle."""

import errno
import json
import math
import os
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import (
    RunDirectory,
    RunInUse,
    as_json,
    directory,
    find_run,
    read_metrics,
    read_records,
    read_summary,
    savings,
    summarise,
    write_whole,
)
from tests.lines import read_lines

START = datetime(2026, 11, 20, 10, 15, tzinfo=UTC)
CONFIG = {
    "strategy": "fedfrozen",
    "model": "vit_b_32",
    "num-server-rounds": 20,
    "learning-rate": 1e-4,
    "deterministic": True,
    "fedfrozen.warmup-rounds": 6,
}


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "fedfrozen", CONFIG, started=START)


def test_the_name_is_the_start_in_utc_and_the_strategy(tmp_path):
    in_tokyo = START.astimezone(timezone(timedelta(hours=9)))
    run = RunDirectory.create(tmp_path, "FedFrozen", CONFIG, started=in_tokyo)
    assert run.path == tmp_path / "20261120-101500-FedFrozen"


def test_a_strategy_name_cannot_lead_out_of_the_folder(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "../../x y", CONFIG, started=START)
    assert run.path == tmp_path / "runs" / "20261120-101500-x-y"


def test_servers_that_start_in_the_same_second_do_not_share_a_directory(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(tmp_path, "a", CONFIG, started=START), range(8)))
    expected = {"20261120-101500-a", *(f"20261120-101500-a-{n}" for n in range(2, 9))}
    assert {run.path.name for run in runs} == expected


def test_config_toml_holds_the_flat_config(run):
    text = (run.path / "config.toml").read_text()
    assert tomllib.loads(text) == CONFIG
    assert list(tomllib.loads(text)) == list(CONFIG)


def test_config_values_that_toml_cannot_say_do_not_stop_a_run(tmp_path):
    config = {"path": Path("/data"), "unset": None, "number": np.float32(0.5), "limit": math.inf}
    run = RunDirectory.create(tmp_path, "a", config)
    written = tomllib.loads((run.path / "config.toml").read_text())
    assert written == {"path": "/data", "number": 0.5, "limit": math.inf}


def test_latest_is_a_relative_link_to_the_newest_run(tmp_path, run):
    newer = RunDirectory.create(run.path.parent, "fedavg", CONFIG, started=START)
    latest = run.path.parent / "latest"
    assert os.readlink(latest) == newer.path.name
    assert find_run(latest) == newer.path.resolve()
    moved = run.path.parent.rename(tmp_path / "elsewhere")
    assert find_run(moved / "latest") == moved / newer.path.name


def test_latest_is_a_text_file_where_links_cannot_be_made(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no right to make links")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    RunDirectory.create(tmp_path, "first", CONFIG)
    run = RunDirectory.create(tmp_path, "second", CONFIG)
    assert not (tmp_path / "latest").is_symlink()
    assert find_run(tmp_path / "latest") == run.path.resolve()


def test_a_folder_named_latest_stays_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    run = RunDirectory.create(tmp_path, "a", CONFIG)
    assert (tmp_path / "latest").is_dir()
    assert run.path.name in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([run.path.name, "latest"])


@pytest.mark.parametrize("content", [None, {"notes.txt": "x"}])
def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path, content):
    folder = tmp_path / "folder"
    if content:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(FileNotFoundError, match="folder"):
        find_run(folder)


def test_a_round_is_on_disk_as_one_line_once_append_returns(run):
    run.append(RoundRecord(round=1, accuracy=0.5, entropy=0.25))
    run.append(RoundRecord(round=2, lost=[{"client": "client-4", "reason": "no answer"}]))
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert list(json.loads(lines[0])) == [*RoundRecord(round=1).to_line(), "entropy"]
    assert json.loads(lines[1])["accuracy"] is None
    assert [line["round"] for line in read_lines(run.path)] == [1, 2]


def test_a_line_of_another_version_is_read_as_far_as_its_columns_are_known(run):
    line = {"round": 1, "loss": 0.5, "accuracy": None, "a column of a later version": 1}
    (run.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_metrics(run.path)
    assert record == RoundRecord(round=1, loss=0.5)
    assert (record.accuracy, record.lost, record.value("loss")) == (None, [], 0.5)
    with pytest.raises(KeyError):
        record.value("to_line")


def test_numbers_that_json_cannot_say_become_null(run):
    numbers = {"accuracy": np.float32(0.5), "loss": math.nan, "train_loss": np.float32("inf"), "seconds": -math.inf}
    run.append(RoundRecord(round=np.int64(1), **numbers))
    other = {"names": {"b", "a"}, "norms": np.array([1.0, math.nan]), "where": Path("/data")}
    assert as_json(other) == {"names": ["a", "b"], "norms": [1.0, None], "where": "/data"}
    text = (run.path / "metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(text, parse_constant=refuse)
    assert (line["round"], line["accuracy"], line["loss"], line["train_loss"], line["seconds"]) == (1, 0.5, *[None] * 3)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_torn_anywhere_costs_only_that_round(run, cut):
    run.append(RoundRecord(round=1, accuracy=0.1))
    run.append(RoundRecord(round=2, accuracy=0.2))
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    # Without its newline only, the line is still whole.
    rounds = [1, 2] if cut == 1 else [1]
    assert [line["round"] for line in read_lines(path)] == rounds

    resumed = RunDirectory.resume(run.path)
    with resumed.in_use():
        resumed.append(RoundRecord(round=2, accuracy=0.3))
    assert [(line["round"], line["accuracy"]) for line in read_lines(path)] == [(1, 0.1), (2, 0.3)]
    assert path.read_bytes().startswith(whole[: whole.index(b"\n") + 1])


def test_a_run_that_goes_on_cannot_be_resumed_beside_itself(run):
    with run.in_use(), pytest.raises(RunInUse, match="has not ended"), RunDirectory.resume(run.path).in_use():
        pass
    with RunDirectory.resume(run.path).in_use():
        pass


def test_rounds_that_cannot_be_written_are_kept_back_and_written_later(run, monkeypatch, caplog):
    append = RunDirectory.append
    full = OSError(errno.ENOSPC, "no space left")

    def refuse(self, line):
        raise full

    run.add(RoundRecord(round=1))
    monkeypatch.setattr(RunDirectory, "append", refuse)
    run.add(RoundRecord(round=2))
    run.add(RoundRecord(round=3))
    assert "no space left" in caplog.text and "round 2 is written later" in caplog.text
    with pytest.raises(OSError, match="no space"):
        run.write_summary()
    monkeypatch.setattr(RunDirectory, "append", append)
    run.write_summary()
    assert [line["round"] for line in read_lines(run.path)] == [1, 2, 3]


def test_a_directory_that_is_opened_to_resume_its_run_has_its_config_and_is_not_yet_the_latest(run):
    other = RunDirectory.create(run.path.parent, "other", CONFIG)
    resumed = RunDirectory.resume(run.path)
    assert resumed.config == CONFIG
    assert find_run(run.path.parent / "latest") == other.path.resolve()


def test_a_run_that_is_resumed_from_an_older_checkpoint_drops_the_rounds_after_it(run):
    for number in range(6):
        run.append(RoundRecord(round=number, accuracy=number / 10))
        run.write_record(number, {"a": np.ones(1)})
    resumed = RunDirectory.resume(run.path)
    resumed.write_record(3, {"a": np.zeros(1)})
    with resumed.in_use():
        assert len(read_lines(run.path)) == 6, "nothing is lost before there is a new round"
        resumed.append(RoundRecord(round=3, accuracy=0.9))
        resumed.append(RoundRecord(round=4, accuracy=0.95))
    text = (run.path / "metrics.jsonl").read_text()
    assert [json.loads(line)["accuracy"] for line in text.splitlines()] == [0, 0.1, 0.2, 0.9, 0.95]
    assert [(number, arrays["a"][0]) for number, arrays in read_records(run.path)] == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert resumed.write_summary()["rounds"] == 4


def test_a_broken_line_in_the_middle_is_an_error_with_file_and_line(run):
    path = run.path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_lines(path)
    path.write_text('{"round": 1}\n[2]\n{"round": 3}\n')
    with pytest.raises(ValueError, match="line 2: not a round"):
        read_lines(path)


def test_a_run_without_metrics_has_no_rounds(run):
    assert read_lines(run.path) == []
    assert read_summary(run.path) is None


def test_the_model_keeps_names_values_shapes_and_dtypes(run):
    arrays = {
        "encoder.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        # As a view on a fused projection, or a transposed one, arrives: not contiguous.
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "strided": np.arange(12, dtype=np.float16).reshape(3, 4)[:, ::2],
        "bn.num_batches_tracked": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }
    path = run.write_model(arrays)
    stored = load_file(path)
    assert set(stored) == set(arrays)
    for name, array in arrays.items():
        assert stored[name].dtype == array.dtype
        assert stored[name].shape == array.shape
        np.testing.assert_array_equal(stored[name], array)


def test_the_model_file_says_which_experiment_it_is_of(run):
    run.write_model({"w": np.zeros(2)}, metadata={"experiment": "42"})
    with safe_open(run.path / "model.safetensors", framework="np") as file:
        header = file.metadata()
    assert header["run"] == "20261120-101500-fedfrozen"
    assert (header["strategy"], header["model"], header["experiment"]) == ("fedfrozen", "vit_b_32", "42")
    assert json.loads(header["config"]) == CONFIG


def test_the_model_file_can_be_read_by_whom_the_config_can(run):
    path = run.write_model({"w": np.zeros(2)})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((run.path / "config.toml").stat().st_mode)


def test_a_model_that_cannot_be_written_leaves_the_old_one(run, monkeypatch):
    path = run.write_model({"w": np.zeros(2)})
    before = path.read_bytes()

    def disk_full(arrays, part, metadata):
        Path(part).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(directory, "save_file", disk_full)
    with pytest.raises(OSError, match=r"cannot write .*model\.safetensors: .*No space left.*MB free"):
        run.write_model({"w": np.ones(2)})
    assert path.read_bytes() == before
    assert {p.name for p in run.path.iterdir()} == {"config.toml", "model.safetensors"}


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_disk_is_said_with_the_file_and_what_helps(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: No space left on device; .*MB free") as caught:
        run.append(RoundRecord(round=1))
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_fills_up_within_a_line_leaves_no_half_line(run, monkeypatch):
    run.append(RoundRecord(round=1))

    def disk_full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="No space left"):
            run.append(RoundRecord(round=2))
    run.append(RoundRecord(round=3))
    assert [line["round"] for line in read_lines(run.path)] == [1, 3]


def test_a_folder_that_cannot_be_made_is_said_by_name(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(OSError, match=r"cannot create a run directory in .*runs.*choose a folder"):
        RunDirectory.create(tmp_path / "runs", "a", CONFIG)


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_whole(path, b"old")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"summary\.json: Input/output error"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_summary_adds_up_the_rounds(run):
    run.append(RoundRecord(round=0, accuracy=0.1, accuracy_of="server"))
    first = {"bytes_down": 60, "bytes_up": 40, "bytes_fedavg": 100, "bytes_plain": 90, "seconds": 1.5}
    run.append(RoundRecord(round=1, accuracy=0.6, **first))
    refused = [{"client": "a", "reason": "NaN"}, {"client": "b", "reason": "shape"}]
    second = {"bytes_down": 30, "bytes_up": 20, "bytes_fedavg": 100, "bytes_plain": 70, "seconds": 0.5}
    run.append(RoundRecord(round=2, refused=refused, **second))
    summary = run.write_summary(parameters=1234, frozen_after=1)
    assert summary == json.loads((run.path / "summary.json").read_text())
    assert list(summary) == [*summarise([], {}), "frozen_after"]
    assert summary == {
        "strategy": "fedfrozen",
        "model": "vit_b_32",
        "parameters": 1234,
        "rounds": 2,
        "accuracy": 0.6,
        "loss": None,
        "rmse": None,
        "bytes_up": 60,
        "bytes_down": 90,
        "bytes_vs_fedavg": 0.75,
        "bytes_plain": 160,
        "seconds": 2.0,
        "step_seconds": None,
        "refused_replies": 2,
        "stopped_by": None,
        "frozen_after": 1,
    }


def test_savings_are_of_the_strategy_times_of_the_encoding():
    strategy, encoding = savings(150, 160, 200)
    assert strategy * encoding == pytest.approx(150 / 200) and (strategy, encoding) == (0.8, 0.9375)
    assert savings(160, 160, 200) is None, "nothing was encoded"
    for unknown in ((None, 1, 1), (1, None, 1), (1, 2, None), (1, 2, 0), (1, 0, 2)):
        assert savings(*unknown) is None


def test_the_summarys_step_is_the_median_of_the_rounds_that_tell_one(run):
    for number, seconds in enumerate((None, 0.02, 0.9, None, 0.05)):
        run.append(RoundRecord(round=number, step_seconds=seconds))
    assert run.write_summary()["step_seconds"] == 0.05


def test_what_the_caller_knows_wins_in_the_summary(run):
    run.append(RoundRecord(round=1, accuracy=0.6, seconds=1.0))
    summary = run.write_summary(accuracy=0.7, loss=math.nan, seconds=9.0)
    assert (summary["accuracy"], summary["loss"], summary["seconds"]) == (0.7, None, 9.0)


def test_one_round_of_unknown_bytes_makes_the_total_unknown(run):
    run.append(RoundRecord(round=1, bytes_down=60, bytes_up=40, bytes_fedavg=100))
    run.append(RoundRecord(round=2, bytes_down=60, bytes_up=None, bytes_fedavg=100))
    summary = run.write_summary()
    assert (summary["bytes_down"], summary["bytes_up"], summary["bytes_vs_fedavg"]) == (120, None, None)


def test_a_score_that_the_clients_gave_a_round_later_belongs_to_the_round_before(tmp_path):
    run = RunDirectory.create(tmp_path, "fedavg", {})
    run.append(RoundRecord(round=1, received_accuracy=0.1, received_loss=2.0))
    run.append(RoundRecord(round=2, received_accuracy=0.5, received_loss=1.0))
    run.append(RoundRecord(round=4, received_accuracy=0.7, accuracy=0.8, accuracy_of="server"))
    lines = read_lines(run.path)
    assert [(m["accuracy"], m["loss"], m["accuracy_of"]) for m in lines] == [
        (0.5, 1.0, "clients"), (None, None, None), (0.8, None, "server")
    ]  # fmt: skip
