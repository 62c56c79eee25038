"""Connections to the SuperLink: lost ones are noticed, and errors that pass end neither heartbeats nor an upload."""

import contextlib
import inspect
import socket
import sys
import threading
from functools import partial

import grpc
import psutil
import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.grpc import create_channel
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from tepal.host.flower.link import Link
from tepal.host.flower.refusals import channel, push_once, reconnecting, steady

TCP_USER_TIMEOUT = 18

# The channel ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch):
    """The channels that gRPC is asked for: (kind, address, options)."""
    channels = []

    def insecure(address, options):
        channels.append(("insecure", address, dict(options)))

    def secure(address, credentials, options):
        channels.append(("secure", address, dict(options)))

    monkeypatch.setattr(grpc, "insecure_channel", insecure)
    monkeypatch.setattr(grpc, "secure_channel", secure)
    return channels


@pytest.mark.parametrize("kind", ["insecure", "secure"])
def test_a_channel_has_flowers_options_and_pings_as_often_as_the_superlink_allows(opened, kind):
    for make in (create_channel, channel):
        make("here:1", kind == "insecure", max_message_length=5)
    (_, _, flowers), (found, address, ours) = opened
    assert (found, address) == (kind, "here:1")
    assert flowers == {"grpc.max_send_message_length": 5, "grpc.max_receive_message_length": 5}
    assert ours == flowers | {"grpc.keepalive_time_ms": 310_000, "grpc.keepalive_timeout_ms": 60_000}


def test_a_channel_is_made_with_what_flower_gives():
    def given(make):
        return [(each.name, each.default) for each in inspect.signature(make).parameters.values()]

    assert given(channel) == given(create_channel)


def test_a_channel_has_its_interceptors(opened, monkeypatch):
    monkeypatch.setattr(grpc, "intercept_channel", lambda found, *interceptors: interceptors)
    assert channel("here:1", True, interceptors=["one", "two"]) == ("one", "two")


def test_an_insecure_channel_with_root_certificates_is_refused_as_flower_does(opened):
    for make in (create_channel, channel):
        with pytest.raises(ValueError, match="insecure"):
            make("here:1", True, b"certificates")
    assert opened == []


def test_root_certificates_that_grpc_does_not_take_are_refused_as_flower_does(opened, monkeypatch):
    def refuses(certificates):
        raise RuntimeError("no PEM")

    monkeypatch.setattr(grpc, "ssl_channel_credentials", refuses)
    for make in (create_channel, channel):
        with pytest.raises(ValueError, match="Failed to create SSL channel credentials: no PEM"):
            make("here:1", False, b"certificates")
    assert opened == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_USER_TIMEOUT is of Linux")
def test_the_system_gives_a_connection_up_whose_data_is_not_acknowledged_for_a_minute():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        made = channel(f"127.0.0.1:{server.getsockname()[1]}", True)
        made.subscribe(lambda state: None, try_to_connect=True)
        accepted, address = server.accept()
        with accepted, contextlib.closing(made):
            (end,) = (each for each in psutil.Process().net_connections("tcp") if each.laddr.port == address[1])
            with socket.fromfd(end.fd, end.family, end.type) as client:
                assert client.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT) == 60_000


# Errors that pass -----------------------------------------------------------------------------------------------------


class Status(grpc.RpcError):
    """An error of a call."""

    def __init__(self, code, details):
        self._code, self._details = code, details

    def code(self):
        return self._code

    def details(self):
        return self._details


@pytest.fixture
def invoker():
    """Flower's own, as it is changed, without its pauses."""
    link, end = Link.pair()
    changed = reconnecting(make_simple_grpc_retry_invoker, link)
    changed.wait_function = lambda seconds: None
    yield changed
    link.close()
    end.close()


def test_a_superlink_that_has_too_many_calls_is_asked_again(invoker):
    tries = []

    def call():
        tries.append(1)
        if len(tries) < 4:
            raise Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        return "answer"

    assert invoker.invoke(call) == "answer" and len(tries) == 4


@pytest.mark.parametrize("details", ["Received message larger than max (5 vs. 4)", "", None])
def test_a_message_that_is_too_large_is_not_sent_again(invoker, details):
    tries = []

    def call():
        tries.append(1)
        raise Status(grpc.StatusCode.RESOURCE_EXHAUSTED, details)

    with pytest.raises(Status):
        invoker.invoke(call)
    assert len(tries) == 1


@pytest.mark.parametrize("answer", [True, False])
def test_a_heartbeat_has_its_answer(answer, caplog):
    assert steady(lambda: answer) is answer and not caplog.records


@pytest.mark.parametrize(
    "error", [Status(grpc.StatusCode.INTERNAL, "odd"), RuntimeError("not known"), RunNotRunningException()]
)
def test_a_heartbeat_that_fails_in_an_unexpected_way_does_not_end_the_heartbeats(error, caplog):
    tries, well = [], threading.Event()

    def beat():
        tries.append(1)
        if len(tries) < 3:
            raise error
        well.set()
        return True

    sender = HeartbeatSender(partial(steady, beat))
    sender._retry_invoker.wait_function = lambda seconds: None
    sender.start()
    assert well.wait(10) and sender.is_running
    sender.stop()
    assert len(tries) == 3
    told = [record.levelname for record in caplog.records if "heartbeat has failed" in record.message]
    assert told == ["WARNING"] * 2


# Objects that were sent twice -----------------------------------------------------------------------------------------


class SuperLink:
    """What stands for the connection's `push_object` and `pull_object`. `has`: content, or what `pull` raises."""

    def __init__(self, has, *, stores):
        self.has, self.stores, self.calls = has, stores, []

    def push(self, run_id, session_id, object_id, content):
        self.calls.append(("push", run_id, session_id, object_id, content))
        if not self.stores:
            raise ObjectPushError(object_id, run_id, session_id)

    def pull(self, run_id, object_id):
        self.calls.append(("pull", run_id, object_id))
        if isinstance(self.has, BaseException):
            raise self.has
        return self.has


def test_an_object_that_is_stored_is_not_asked_for():
    link = SuperLink(None, stores=True)
    push_once(link.push, link.pull, 1, "session", "id", b"content")
    assert link.calls == [("push", 1, "session", "id", b"content")]


def test_an_object_that_is_refused_because_it_is_there_does_not_end_the_upload():
    link = SuperLink(b"content", stores=False)
    push_once(link.push, link.pull, 1, "session", "id", b"content")
    assert link.calls == [("push", 1, "session", "id", b"content"), ("pull", 1, "id")]


@pytest.mark.parametrize("has", [b"other", ObjectPullError("id", "not found"), ObjectUnavailableError("id")])
def test_an_object_that_is_refused_and_not_there_ends_the_upload_as_before(has):
    link = SuperLink(has, stores=False)
    with pytest.raises(ObjectPushError):
        push_once(link.push, link.pull, 1, "session", "id", b"content")


def test_a_run_that_has_ended_meanwhile_is_told_as_that():
    link = SuperLink(RunNotRunningException(), stores=False)
    with pytest.raises(RunNotRunningException):
        push_once(link.push, link.pull, 1, "session", "id", b"content")


def test_flowers_state_refuses_an_object_that_it_has_and_gives_it_back():
    """Both sides share this state's methods; the SuperLink's handlers check no more than the run's status."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    state = InMemoryNodeState(ObjectStoreFactory().store())
    session, tree, content = state.start_session(1), get_object_tree(message), message.deflate()
    assert tree.object_id in state.preregister_object_tree(tree, session)

    def push(run_id, session_id, object_id, content):
        if not state.store_object(run_id, session_id, object_id, content):
            raise ObjectPushError(object_id, run_id, session_id)

    push(1, session, tree.object_id, content)
    with pytest.raises(ObjectPushError):
        push(1, session, tree.object_id, content)
    push_once(push, state.get_object, 1, session, tree.object_id, content)
