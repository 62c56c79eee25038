"""`labels.json`: counts that cannot be true never reach it, so that it can be read again."""

import json

import pytest

from tepal.records.run_directory import RunDirectory, directory, read_label_counts
from tepal.records.run_directory.names import LABELS


@pytest.mark.parametrize("count", [1e60, 2.0**60, -1.0, 0.5, float("nan"), float("inf")])
def test_counts_that_cannot_be_true_are_left_out_and_others_are_added_later(tmp_path, count):
    run = RunDirectory(tmp_path, {})
    run.add_label_counts({"liar": [count, 1.0], "site-1": [3.0, 4.0]})
    run.add_label_counts({"site-2": [0.0, 10.0**15]})
    assert read_label_counts(tmp_path) == {"site-1": [3, 4], "site-2": [0, 10**15]}


def test_without_true_counts_there_is_no_file(tmp_path):
    RunDirectory(tmp_path, {}).add_label_counts({"liar": [1e60]})
    assert not (tmp_path / LABELS).exists()


@pytest.mark.parametrize("damaged", ["{", "[]", json.dumps({"site-1": [10**60]})])
def test_a_damaged_file_is_named_and_not_overwritten(tmp_path, damaged):
    (tmp_path / LABELS).write_text(damaged)
    with pytest.raises(ValueError, match=r"labels\.json is damaged"):
        RunDirectory(tmp_path, {}).add_label_counts({"site-2": [1.0]})
    assert (tmp_path / LABELS).read_text() == damaged


def test_the_file_is_read_once_however_often_counts_are_added(tmp_path, monkeypatch):
    RunDirectory(tmp_path, {}).add_label_counts({"site-1": [1.0, 2.0]})
    read = []
    monkeypatch.setattr(directory, "read_label_counts", lambda *a, **k: read.append(a) or read_label_counts(*a, **k))
    run = RunDirectory(tmp_path, {})
    for number in range(2, 5):
        run.add_label_counts({f"site-{number}": [3.0, 4.0]})
    assert len(read) == 1
    assert read_label_counts(tmp_path) == {"site-1": [1, 2], **{f"site-{number}": [3, 4] for number in range(2, 5)}}
