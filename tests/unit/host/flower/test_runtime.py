"""The Runtime API over a Unix socket; that it carries whole exchanges is in test_executor.py."""

import socket
import stat
import struct
import threading
import time

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError

from tepal.host.flower import runtime
from tepal.host.flower.runtime import RuntimeClient, RuntimeFailed, RuntimeRefused, RuntimeServer
from tests.unit.host.flower.test_supernode import FlowerLoop, bundle, wait_until

SECRET = b"a secret of thirty-two bytes ...."
ANY = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])


@pytest.fixture
def loop():
    running = FlowerLoop({1: bundle(client_app="app = None\n")})
    yield running
    running.stop()


@pytest.fixture
def path(tmp_path, loop):
    server = RuntimeServer(tmp_path / "runtime", loop.state, SECRET)
    yield tmp_path / "runtime"
    server.stop()
    assert not (tmp_path / "runtime").exists()


def worker(loop, path):
    """(client with a task's token, id of its message)"""
    sent = loop.send()
    wait_until(lambda: sent in loop.fetched)
    token = RuntimeClient(path, SECRET.hex()).AcquireTask(ANY).token
    return RuntimeClient(path, token), sent


def test_only_its_user_can_open_the_socket(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_connection_that_cannot_be_served_now_is_the_only_one(loop, path, monkeypatch, caplog):
    """Descriptors and threads run out when an app has too many, and come back."""
    begin, failing = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start(thread):
        if thread.name == "runtime" and failing:
            raise failing.pop()
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError):
        RuntimeClient(path, SECRET.hex()).AcquireTask(ANY)
    assert not RuntimeClient(path, SECRET.hex()).AcquireTask(ANY).HasField("task")
    assert "can't start new thread" in caplog.text


def test_connections_are_accepted_again_after_descriptors_had_run_out(loop, tmp_path, caplog):
    server = RuntimeServer(tmp_path / "r", loop.state, SECRET)
    whole, failing = server._socket, [OSError(24, "Too many open files")]

    class Listening:
        def accept(self):
            if failing:
                raise failing.pop()
            return whole.accept()

        def __getattr__(self, name):
            return getattr(whole, name)

    RuntimeClient(tmp_path / "r", SECRET.hex()).AcquireTask(ANY)
    server._socket = Listening()
    RuntimeClient(tmp_path / "r", SECRET.hex()).AcquireTask(ANY)  # the accept that waited since before
    assert not RuntimeClient(tmp_path / "r", SECRET.hex()).AcquireTask(ANY).HasField("task")
    assert "Too many open files" in caplog.text
    server.stop()


@pytest.mark.parametrize("secret", ["", b"another".hex(), SECRET.hex().upper(), SECRET.decode()])
def test_who_does_not_know_the_secret_gets_no_task(loop, path, secret):
    sent = loop.send()
    wait_until(lambda: sent in loop.fetched)
    with pytest.raises(RuntimeRefused, match="secret"):
        RuntimeClient(path, secret).AcquireTask(ANY)


@pytest.mark.parametrize("token", ["", "0" * 128, SECRET.hex()])
def test_who_has_no_valid_token_may_do_nothing(loop, path, token):
    client, sent = RuntimeClient(path, token), loop.send()
    for call in (
        lambda: client.PullObject(sent),
        lambda: client.PushObject("session", sent, b"x"),
        lambda: client.SendTaskHeartbeat(SendTaskHeartbeatRequest()),
        lambda: client.PushTaskOutput(PushTaskOutputRequest(sub_status="failed")),
    ):
        with pytest.raises(RuntimeRefused, match="token"):
            call()


def test_a_token_ends_with_its_task(loop, path):
    client, _ = worker(loop, path)
    assert client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    client.PushTaskOutput(PushTaskOutputRequest(sub_status="failed", details="why"))
    with pytest.raises(RuntimeRefused):
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def test_objects_are_there_late_or_unknown(loop, path, monkeypatch):
    client, sent = worker(loop, path)
    assert client.PullObject(sent) == loop.state.object_store.get(sent)
    with pytest.raises(ObjectPullError):
        client.PullObject("0" * 64)
    with pytest.raises(ObjectPushError):
        client.PushObject("no session", "0" * 64, b"x")
    loop.state.object_store.store[sent].content = b""
    monkeypatch.setattr(runtime, "_WAIT", 0.05)
    with pytest.raises(ObjectUnavailableError):
        client.PullObject(sent)


def test_an_object_that_comes_later_is_waited_for(loop, path):
    client, sent = worker(loop, path)
    entry = loop.state.object_store.store[sent]
    content, entry.content, entry.is_available = entry.content, b"", False
    got = []
    thread = threading.Thread(target=lambda: got.append(client.PullObject(sent)))
    thread.start()
    time.sleep(0.1)
    assert not got
    loop.state.object_store.put(sent, content)
    thread.join(2)
    assert got == [content]


def test_an_error_of_a_handler_is_one_of_that_request(loop, path):
    client, _ = worker(loop, path)
    client.PullTaskInput(runtime.PullTaskInputRequest())
    with pytest.raises(RuntimeFailed, match="FlowerError"):
        client.PullTaskInput(runtime.PullTaskInputRequest())  # it was started already
    assert client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success


def test_connections_stay_open_and_threads_do_not_mix_their_answers(loop, path):
    client, sent = worker(loop, path)
    content = client.PullObject(sent)
    first = client._free[0]
    client.PullObject(sent)
    assert client._free == [first]
    got = []
    threads = [threading.Thread(target=lambda: got.append(client.PullObject(sent))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [content] * 8
    client.close()
    assert not client._free


def test_a_frame_that_is_cut_or_too_large_ends_its_connection_alone(loop, path):
    for data in (b"\0", struct.pack("!HHIQ", 1, 0, 0, 1 << 40), struct.pack("!HHIQ", 9, 9, 9, 9) + b"x"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            assert connection.recv(1) == b""
    worker(loop, path)


def test_no_server_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError):
        RuntimeClient(tmp_path / "none").PullObject("x")


def test_a_path_that_is_too_long_for_a_socket_works_all_the_same(tmp_path, loop):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    server = RuntimeServer(folder / "runtime", loop.state, SECRET)
    worker(loop, folder / "runtime")
    server.stop()
