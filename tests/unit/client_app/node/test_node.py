"""The node's own folder, and the signals that stop it."""

import contextlib
import errno
import fcntl
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tepal.client_app.node import node as module
from tepal.client_app.node.child import Child
from tepal.client_app.node.node import WarmNode, _folder, run_node
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


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def _signals_as_before():
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node without processes."""

    class Executor:
        task = None

        def __init__(self, *_):
            self.end = threading.Event()

        def run(self):
            self.end.wait(60)

        def stop(self, now=False):
            self.end.set()

    services = SimpleNamespace(serving=lambda healthy: None, stop=lambda: None)
    monkeypatch.setattr(module, "Executor", Executor)
    monkeypatch.setattr(module, "Services", lambda *_, **__: services)
    return WarmNode(NodeSettings(superlink="127.0.0.1:1", insecure=True), tmp_path)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("hang_up", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_node_stops_on_signals_but_under_nohup_not_at_the_end_of_the_terminal(node, monkeypatch, hang_up):
    signal.signal(signal.SIGHUP, hang_up)
    found = []

    def running():
        found.append({number: signal.getsignal(number) for number in STOPPING})
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(node, "_keep_supernode", running)
    node.run()
    stop = node._on_signal
    of_hang_up = hang_up if hang_up is signal.SIG_IGN else stop
    assert found == [{signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: of_hang_up}]
    assert signal.getsignal(signal.SIGHUP) is hang_up, "afterwards as before"


def test_a_second_signal_ends_the_waiting_for_the_message_unless_it_is_of_the_same_terminal(node):
    hang_up, end = signal.SIGHUP, signal.SIGTERM
    for number, hurry in ((hang_up, False), (hang_up, False), (end, True), (hang_up, True)):
        node._on_signal(number, None)
        assert node._stop.is_set() and node._hurry == hurry


class SuperNode:
    """A SuperNode without a process: it has answered, and signs off when it is told to."""

    alive, reached, status, node_id = True, False, None, None

    def __init__(self, sent):
        self.held, self._sent, self.signed_off = True, sent, None

    collected = module._SuperNode.collected

    def hold(self, held):
        pass

    def stop(self):
        self.signed_off = time.monotonic()


def test_a_node_that_stops_leaves_when_the_server_has_had_time_to_read_its_answer(node, monkeypatch):
    monkeypatch.setattr(module, "_COLLECTING", 0.3)
    for ago in (0.1, 0.3, 40.0):
        began = time.monotonic()
        supernode = node._supernode = SuperNode(began - ago)
        executor = threading.Thread(target=node._executor.run)
        executor.start()
        node._finish(executor)
        took = time.monotonic() - began
        assert time.monotonic() - supernode._sent >= 0.3
        assert took >= 0.2 - 1e-3 if ago == 0.1 else took < 0.19


def test_a_drained_node_leaves_when_the_server_has_had_time_to_read_its_answer(node, monkeypatch):
    monkeypatch.setattr(module, "_COLLECTING", 0.3)
    supernode = node._supernode = SuperNode(sent := time.monotonic())
    node._draining = True
    while node._supernode is not None:
        node._keep_supernode()
        assert time.monotonic() < sent + 30
    assert supernode.signed_off - sent >= 0.3


def test_a_secret_that_a_cleaner_has_removed_is_there_again_for_the_next_supernode(node, tmp_path):
    """Of a node without --state, whose folder is in the temporary folder."""
    def secret():
        options = node._options()
        file = Path(options[options.index("--superexec-auth-secret-file") + 1])
        assert file == tmp_path / "secret"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        return file.read_bytes()

    first = secret()
    assert len(first) == 32
    (tmp_path / "secret").unlink()
    assert secret() == first
    shutil.rmtree(tmp_path)
    assert secret() == first
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_secret_is_written_anew_over_what_others_could_read(node, tmp_path):
    (tmp_path / "secret").write_bytes(b"")
    (tmp_path / "secret").chmod(0o644)
    node._options()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert (tmp_path / "secret").read_bytes() == node._secret


@contextlib.contextmanager
def _no_byte_can_be_written():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_after_the_first_start_does_not_keep_the_next_supernode(tmp_path, monkeypatch):
    settings = NodeSettings(superlink="127.0.0.1:1", insecure=True, node_config={"data-path": "/data/ä.npz"})
    node = WarmNode(settings, tmp_path)
    options = node._options()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    config = tmp_path / "node-config.toml"
    assert tomllib.loads(before[config].decode()) == {"data-path": "/data/ä.npz"}

    with _no_byte_can_be_written():
        assert node._options() == options
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    config.unlink()
    with _no_byte_can_be_written(), pytest.raises(OSError):
        node._options()


def test_a_supernode_that_cannot_be_started_is_started_later_and_the_status_says_why(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    node = WarmNode(NodeSettings(superlink="127.0.0.1:1", insecure=True), tmp_path)
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    pauses = []
    for _ in range(7):
        node._keep_supernode()
        pauses.append(node._next_start - now)
        now = node._next_start - 0.1
        node._keep_supernode()
        assert node._next_start == pytest.approx(now + 0.1), "nothing before its time"
        now = node._next_start
        status = node.status()
        assert status.problem == f"the SuperNode cannot be started: [Errno {errno.EAGAIN}] no more processes"
        assert not node.healthy and status.state == "refused"
    assert pauses == [2, 4, 8, 15, 30, 30, 30]
    monkeypatch.setattr(module, "_SuperNode", lambda *_: SuperNode(0.0))
    node._keep_supernode()
    assert node._supernode is not None


def test_a_process_whose_link_nobody_can_read_is_ended(monkeypatch):
    ended = []

    class Popen:
        pid = 17

        def __init__(self, *_, **__):
            pass

        def wait(self):
            ended.append("reaped")

    class Unread(Child):
        def _listen(self):
            pass

    def no_more(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr("os.killpg", lambda pid, number: ended.append((pid, number)))
    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(OSError, match="can't start new thread for the process supernode"):
        Unread("supernode", environment={})
    assert ended == [(17, signal.SIGKILL), "reaped"]


def test_the_executor_has_the_secret_that_the_supernode_reads(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(module, "Executor", lambda address, secret, *_: given.append(secret))
    node = WarmNode(NodeSettings(superlink="127.0.0.1:1", insecure=True), tmp_path)
    node._options()
    assert given == [(tmp_path / "secret").read_bytes()]
