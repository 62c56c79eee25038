"""The node's control address: status, drain and health, over a socket file and over TCP."""

import os

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tepal.client_app.node import node_pb2
from tepal.client_app.node.service import NAME, Control, Services
from tepal.host.processes import free_port


def drained(undo):
    return node_pb2.NodeStatus(state="connected" if undo else "drained")


def started(control, health="", drain=drained):
    return Services(control, health, status=lambda: node_pb2.NodeStatus(state="connected", name="here"), drain=drain)


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path):
    return f"unix:{tmp_path}/control.sock" if request.param == "unix" else f"127.0.0.1:{free_port()}"


@pytest.fixture
def services(address):
    here = started(address)
    yield here
    here.stop()


def test_a_node_can_be_asked_drained_and_brought_back(services, address):
    control = Control(address)
    assert (control.status().state, control.status().name) == ("connected", "here")
    assert control.drain(wait=3) == node_pb2.NodeStatus(state="drained")
    assert control.drain(undo=True, wait=4) == node_pb2.NodeStatus(state="connected")
    control.close()


def test_health_is_bad_until_it_is_said_to_be_good(services, address):
    control = Control(address)
    assert not control.healthy()
    services.serving(True)
    assert control.healthy()
    services.serving(False)
    assert not control.healthy()
    control.close()


def asked(address, service=""):
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


def test_the_health_address_tells_health_and_nothing_else(tmp_path):
    health = f"127.0.0.1:{free_port()}"
    services = started(f"unix:{tmp_path}/control.sock", health)
    services.serving(True)
    assert asked(health) == asked(health, NAME) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(ConnectionError, match="unimplemented"):
        Control(health).drain(wait=1)
    services.stop()


def test_after_its_end_nobody_answers_which_is_said(address):
    services = started(address)
    services.stop()
    with pytest.raises(ConnectionError, match="no node answers on "):
        Control(address).status(timeout=2)


def test_a_taken_address_is_refused_with_words():
    address = f"127.0.0.1:{free_port()}"
    services = started(address)
    with pytest.raises(OSError, match=f"cannot listen on {address}: is there another node on this machine"):
        started(address)
    assert Control(address).status().name == "here"
    services.stop()


def test_a_taken_health_address_leaves_nothing_listening(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    services = started(f"unix:{tmp_path}/one.sock", address)
    with pytest.raises(OSError, match="cannot listen on"):
        started(f"unix:{tmp_path}/two.sock", address)
    with pytest.raises(ConnectionError):
        Control(f"unix:{tmp_path}/two.sock").status(timeout=1)
    services.stop()


def test_a_folder_that_does_not_exist_is_refused_with_words(tmp_path):
    with pytest.raises(OSError, match="cannot listen on"):
        started(f"unix:{tmp_path}/no/such/folder/control.sock")


def test_a_socket_file_that_a_killed_node_left_is_taken_over(tmp_path):
    address = f"unix:{tmp_path}/control.sock"
    pid = os.fork()
    if pid == 0:
        import socket

        left = socket.socket(socket.AF_UNIX)
        left.bind(f"{tmp_path}/control.sock")
        os._exit(0)
    os.waitpid(pid, 0)
    services = started(address)
    assert Control(address).status().name == "here"
    services.stop()


def test_a_socket_file_that_another_node_listens_on_is_not_taken_from_it(tmp_path):
    address = f"unix:{tmp_path}/control.sock"
    services = started(address)
    try:
        with pytest.raises(OSError, match="is there another node on this machine"):
            started(address).stop()
    finally:
        services.stop()


def test_who_drains_asks_until_it_is_done_and_no_longer_than_it_wants_to(tmp_path):
    address = f"unix:{tmp_path}/control.sock"
    states = iter(["draining", "draining", "drained"])
    services = Services(
        address, "", status=lambda: node_pb2.NodeStatus(state=next(states)),
        drain=lambda undo: node_pb2.NodeStatus(state="draining"),
    )  # fmt: skip
    try:
        assert Control(address).drain(wait=0).state == "draining"
        assert Control(address).drain(wait=10).state == "drained" and next(states, None) is None
    finally:
        services.stop()
