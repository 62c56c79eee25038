"""Files that appear whole, and locks between processes."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from tepal.host.files import is_locked, locked, new_log, remove_abandoned, replacing
from tests.packages import ROOT

HOLD = """
import sys, time
from pathlib import Path
from tepal.host.files import locked
with locked(Path(sys.argv[1]), RuntimeError("taken")):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("durable", [True, False])
def test_a_reader_sees_the_old_file_until_the_block_has_ended(tmp_path, durable):
    path = tmp_path / "a"
    path.write_text("old")
    with replacing(path, durable=durable) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == tmp_path
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_mode_that_the_umask_and_its_writer_give_it(tmp_path):
    before = os.umask(0o027)
    try:
        for name, mode in (("usual", None), ("private", 0o600)):
            with replacing(tmp_path / name) as partial:
                partial.touch(0o666 if mode is None else mode)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"usual": 0o640, "private": 0o600}


@pytest.mark.parametrize("broken", ["block", "fsync", "replace"])
def test_after_an_error_the_old_file_stays_and_nothing_is_left(tmp_path, monkeypatch, broken):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "a"
    path.write_text("old")
    if broken != "block":
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="Input/output error"), replacing(path, durable=True) as partial:
        partial.write_text("new")
        if broken == "block":
            fail()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_writers_at_the_same_time_do_not_mix_their_content(tmp_path):
    path, size = tmp_path / "a", 100_000

    def write(letter):
        for _ in range(20):
            with replacing(path) as partial, partial.open("w") as file:
                for _ in range(10):
                    file.write(letter * (size // 10))

    writers = [threading.Thread(target=write, args=letter) for letter in "abc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            text = path.read_text()
            assert len(text) == size and len(set(text)) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_is_replaced_as_a_link(tmp_path):
    for target in ("one", "two"):
        with replacing(tmp_path / "latest") as partial:
            partial.symlink_to(target)
    assert os.readlink(tmp_path / "latest") == "two" and os.listdir(tmp_path) == ["latest"]


def test_what_a_killed_process_had_begun_to_write_is_removed_after_an_hour(tmp_path):
    with pytest.raises(OSError), replacing(tmp_path / "a") as partial:
        prefix = partial.name[:9]
        raise OSError
    old, fresh, link, whole = (tmp_path / name for name in (f"{prefix}1", f"{prefix}2", f"{prefix}3", "whole"))
    for path in (old, fresh, whole):
        path.write_bytes(b"x")
    link.symlink_to("nowhere")
    for path in (old, link, whole):
        os.utime(path, (0, 0), follow_symlinks=False)
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {fresh, whole}


def test_a_folder_that_is_removed_meanwhile_is_no_error(tmp_path, monkeypatch):
    def gone(path="."):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(os, "scandir", gone)
    remove_abandoned(tmp_path)


def test_logs_have_files_of_their_own():
    paths = [new_log("test") for _ in range(2)]
    assert paths[0] != paths[1] and all(path.read_bytes() == b"" and path.suffix == ".log" for path in paths)
    for path in paths:
        path.unlink()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_excludes_other_processes_and_ends_with_its_own(tmp_path, kind):
    path = tmp_path / "a"
    path.mkdir() if kind == "folder" else path.touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], env=environment, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        assert is_locked(path)
        with pytest.raises(LookupError, match="ours"), locked(path, LookupError("ours")):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert not is_locked(path)
    with locked(path, LookupError("ours")):
        assert is_locked(path)
    assert not is_locked(path) and os.listdir(tmp_path) == ["a"]


def test_a_lock_that_is_given_up_in_time_is_waited_for(tmp_path):
    def hold():
        with locked(tmp_path, LookupError()):
            ready.set()
            time.sleep(0.2)

    ready = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    ready.wait()
    with locked(tmp_path, LookupError("taken"), patience=20):
        holder.join()
    assert not is_locked(tmp_path)


def test_an_error_in_the_block_is_not_taken_for_a_refusal(tmp_path):
    with pytest.raises(BlockingIOError, match="of the block"), locked(tmp_path, LookupError("taken")):
        raise BlockingIOError("of the block")
    assert not is_locked(tmp_path)
