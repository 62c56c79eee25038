"""The node's own folder."""

import fcntl
import tempfile
from pathlib import Path

import pytest

from tepal.client_app.node import node as module
from tepal.client_app.node.node import _folder, run_node
from tepal.client_app.node.settings import NodeSettings
from tepal.host.flower.patches import UnsupportedFlowerVersion


def test_a_node_has_a_folder_of_its_own_that_goes_with_it(tmp_path):
    with _folder(tmp_path / "state") as first, _folder(tmp_path / "state") as second:
        assert first != second and first.parent == second.parent == tmp_path / "state"
        (first / "app").mkdir()
        with _folder(tmp_path / "state"):
            assert (first / "app").is_dir() and second.is_dir(), "of nodes that live"
    assert list((tmp_path / "state").iterdir()) == []


def test_what_a_killed_node_left_goes_with_the_next_start_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, living, other = (tmp_path / f"tepal-node-{name}" for name in ("killed", "living", "starting"))
    for folder in (killed, living, other):
        (folder / "worker-1").mkdir(parents=True)
    (killed / "lock").touch()
    with (living / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _folder(None) as own:
            assert sorted(tmp_path.iterdir()) == sorted([living, other, own])
    assert Path(own).exists() is False


def test_a_node_begins_nothing_with_another_version_of_flower(monkeypatch):
    def other():
        raise UnsupportedFlowerVersion("it has other names")

    monkeypatch.setattr(module, "require_flower", other)
    monkeypatch.setattr(module, "_folder", None)  # is not reached
    with pytest.raises(UnsupportedFlowerVersion):
        run_node(NodeSettings(superlink="127.0.0.1:1", insecure=True))
