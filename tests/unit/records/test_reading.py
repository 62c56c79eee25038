"""Reading a run directory that someone else made: whatever is in it, an error that names the file, in bounded time."""

import io
import json
import os
import zipfile

import numpy as np
import pytest

from tepal.records.live import Live, read_clients, read_now, read_segments
from tepal.records.run_directory import (
    find_run,
    limits,
    read_config,
    read_json,
    read_label_counts,
    read_metrics,
    read_records,
    read_summary,
    reading,
)

DEEP = "[" * 100_000 + "]" * 100_000
READERS = {"config.toml": read_config, "metrics.jsonl": read_metrics, "summary.json": read_summary,
           "labels.json": read_label_counts}  # fmt: skip
DAMAGED = {
    "config.toml": [b"a = [", b"\xff", b"a = " + DEEP.encode(), b"num-server-rounds = 'many'",
                    b"num-server-rounds = -1", b"num-server-rounds = 99999999999999999999",
                    b"a = " + b"[" * 60 + b"]" * 60],
    "metrics.jsonl": [b"{\n{}", b"[1]\n\n", b'{"round": "1"}\n', b'{"round": -1}\n', b'{"round": 1e400}\n',
                      b'{"round": 99999999999}\n', b'{"round": 1, "x": ' + DEEP.encode() + b"}\n", b"\xff\xfe\n",
                      b'{"round": 1, "refused": 5}\n', b'{"round": ' + b"9" * 5000 + b"}\n"],
    "summary.json": [b"{", b"[]", b'"text"', b"\xff", DEEP.encode(), b'{"accuracy": "x"}', b'{"rounds": []}',
                     b'{"stopped_by": {}}', b'{"bytes_up": true}', b'{"rounds": 1e300}',
                     b'{"x": ' + DEEP.encode() + b"}"],
    "labels.json": [b"{", b"[1]", b'{"a": 1}', b'{"a": [1.5]}', b'{"a": [-1]}', b'{"a": [true]}', DEEP.encode(),
                    b'{"a": [' + b"9" * 30 + b"]}", b'{"a": ["x"]}'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, each) for name, all in DAMAGED.items() for each in all])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as raised:
        READERS[name](tmp_path)
    assert len(str(raised.value)) < 2500 and str(raised.value).isprintable()


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_a_folder_a_device_and_a_link_out_of_the_run_are_not_read(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("secret = 1")
    os.mkfifo(tmp_path / "pipe")
    for make in (
        lambda path: path.symlink_to(outside), lambda path: path.symlink_to("/dev/zero"), os.mkfifo, os.mkdir,
        lambda path: path.symlink_to(path),
    ):  # fmt: skip
        make(run / name)
        with pytest.raises((OSError, ValueError)) as raised:
            READERS[name](run)
        assert "secret" not in str(raised.value)
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()
    (run / "kept").write_bytes(b"")
    (run / name).symlink_to("kept")
    if name in ("config.toml", "metrics.jsonl"):
        assert READERS[name](run) in ({}, []), "a link within the run is followed"


@pytest.mark.parametrize("name", READERS)
def test_a_file_over_its_limit_is_an_error_and_is_not_read_whole(tmp_path, name, monkeypatch):
    for limit in ("MOST_CONFIG", "MOST_METRICS_FILE", "MOST_STATE", "MOST_SUMMARY"):
        monkeypatch.setattr(reading, limit, 1000)
    monkeypatch.setattr(read_metrics, "__defaults__", (1000,))
    monkeypatch.setattr(read_label_counts, "__defaults__", (1000,))
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)  # without blocks on the disk
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes, and 1,000 are allowed"):
        READERS[name](tmp_path)
    assert read_json(tmp_path / name) is None


def test_a_run_reads_its_own_figures_however_many_there_are(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n' * 100)
    assert len(read_metrics(tmp_path, most=None)) == 1
    with pytest.raises(ValueError, match="10 are allowed"):
        read_metrics(tmp_path, most=10)


@pytest.mark.parametrize("reader", [read_now, read_clients, read_segments])
@pytest.mark.parametrize(
    "content",
    ["[1]", "5", '"x"', DEEP, '{"clients": [1]}', '{"clients": {"a": 1}}', '{"a": {"rounds": "x"}}',
     '{"clients": {"a": {"state": 5}}}', '[{"stage": 1}]', '{"travel_up": ["x"]}', '{"a": 1}', "[[1]]",
     '[{"stage": "a", "kind": "b", "bytes": "c"}]', "{", "\x00"],
)  # fmt: skip
def test_the_state_of_a_run_is_read_or_refused(tmp_path, reader, content):
    for name in ("now.json", "clients.json", "blocks.json"):
        (tmp_path / name).write_text(content)
    try:
        found = reader(tmp_path)
    except ValueError as error:
        assert len(str(error)) < 1000
    else:
        repr(found)


def test_damaged_totals_of_a_resumed_run_do_not_end_it(tmp_path, caplog):
    (tmp_path / "clients.json").write_text('{"a": {"rounds": "x"}}')
    Live(tmp_path, 3)
    assert "The run continues" in caplog.text


def record(path, **arrays):
    path.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path / "000001.npz", **arrays)
    return path / "000001.npz"


def test_arrays_over_the_limit_are_not_unpacked(tmp_path, monkeypatch):
    file = record(tmp_path / "rounds", zeros=np.zeros(2_000_000))
    assert file.stat().st_size < 20_000 and len(read_records(tmp_path)) == 1
    monkeypatch.setattr(reading, "MOST_RECORD", 1_000_000)
    assert read_records(tmp_path) == []


def test_of_more_arrays_than_are_read_the_last_rounds_are(tmp_path, monkeypatch):
    for number in range(5):
        record(tmp_path / "rounds", a=np.full(100, number)).rename(tmp_path / "rounds" / f"{number:06d}.npz")
    monkeypatch.setattr(reading, "MOST_RECORDS", 2 * 800)
    known = {}
    assert [number for number, _ in read_records(tmp_path, known=known)] == [3, 4]
    assert [number for number, _ in read_records(tmp_path, known=known)] == [3, 4]


@pytest.mark.parametrize("shape", [(10**12,), (10**6, 10**6)])
def test_an_array_that_claims_to_be_larger_than_its_file_is_ignored(tmp_path, shape):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f8", "fortran_order": False, "shape": shape})
    (tmp_path / "rounds").mkdir()
    with zipfile.ZipFile(tmp_path / "rounds" / "000001.npz", "w") as archive:
        archive.writestr("a.npy", content.getvalue() + b"\0" * 80)
    assert read_records(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive", json.dumps([1]).encode()])
def test_a_record_that_is_no_archive_is_ignored(tmp_path, content):
    (tmp_path / "rounds").mkdir()
    for name in ("000001.npz", "1x.npz", "1\u00b2.npz", f"{'9' * 200}.npz"):
        (tmp_path / "rounds" / name).write_bytes(content)
    assert read_records(tmp_path) == []


def test_a_loop_of_links_is_no_run(tmp_path):
    (tmp_path / "latest").symlink_to("latest")
    with pytest.raises(FileNotFoundError):
        find_run(tmp_path)
    with pytest.raises(FileNotFoundError):
        find_run(tmp_path / "latest")


def test_the_limits_leave_room_for_large_runs():
    assert limits.MOST_METRICS_FILE >= 100_000 * 1000 and limits.MOST_STATE >= 100_000 * 250
