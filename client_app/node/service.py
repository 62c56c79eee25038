"""The node's gRPC services: `node.proto` on its control address; the standard health service there and elsewhere.

`tepal node status` imports this module: what only the node itself needs is imported by `Services`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tepal.client_app.node import node_pb2

NAME = node_pb2.DESCRIPTOR.services_by_name["Node"].full_name
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class Services:
    """The gRPC servers of a node, which serve until `stop`.

    Args:
        control: address for status, drain and health, "host:port" or "unix:/path".
        health_address: a further address for health alone; "" for none.
        status: returns the node's status.
        drain: begins to drain the node; with True as its argument, has it connect again. Returns the status.

    Raises:
        OSError: an address is in use.
    """

    def __init__(
        self,
        control: str,
        health_address: str,
        *,
        status: Callable[[], node_pb2.NodeStatus],
        drain: Callable[[bool], node_pb2.NodeStatus],
    ) -> None:
        from grpc_health.v1 import health

        self._health = health.HealthServicer()
        self.serving(False)
        handlers = {
            "Status": grpc.unary_unary_rpc_method_handler(
                lambda request, context: status(),
                request_deserializer=node_pb2.StatusRequest.FromString,
                response_serializer=node_pb2.NodeStatus.SerializeToString,
            ),
            "Drain": grpc.unary_unary_rpc_method_handler(
                lambda request, context: drain(request.undo),
                request_deserializer=node_pb2.DrainRequest.FromString,
                response_serializer=node_pb2.NodeStatus.SerializeToString,
            ),
        }
        self._servers: list[grpc.Server] = []
        try:
            server = self._listen(control)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
            server.start()
            if health_address:
                self._listen(health_address).start()
        except OSError:
            self.stop()
            raise

    def serving(self, well: bool) -> None:
        """Set what the health service reports: whether the node can answer messages."""
        status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", NAME):
            self._health.set(name, status)

    def stop(self) -> None:
        """Close the control and health addresses."""
        for server in self._servers:
            server.stop(0.2).wait()

    def _listen(self, address: str) -> grpc.Server:
        from concurrent.futures import ThreadPoolExecutor

        from grpc_health.v1 import health_pb2_grpc

        server = grpc.server(ThreadPoolExecutor(4, "control"), options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        taken = f"the node cannot listen on {address}: is there another node on this machine?"
        if address.startswith("unix:") and _listened_on(address.removeprefix("unix:")):
            raise OSError(taken)  # gRPC would replace the other node's file
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(taken) from error
        self._servers.append(server)
        return server


class Control:
    """A client of a node's control address. Its methods raise `ConnectionError` if no node answers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])

    def status(self, timeout: float = 5.0) -> node_pb2.NodeStatus:
        """Return the node's status."""
        return self._call(f"/{NAME}/Status", node_pb2.StatusRequest(), timeout)

    def drain(self, *, undo: bool = False, wait: float = 60.0) -> node_pb2.NodeStatus:
        """Drain the node, or `undo` this; return the status when it is done, or after `wait` seconds."""
        end = time.monotonic() + wait
        status = self._call(f"/{NAME}/Drain", node_pb2.DrainRequest(undo=undo), 5.0)
        under_way = ("draining", "drained", "starting") if undo else ("draining",)
        while status.state in under_way and time.monotonic() < end:
            time.sleep(0.1)
            status = self.status()
        return status

    def healthy(self, timeout: float = 5.0) -> bool:
        """Return whether the standard health service reports that the node can answer messages."""
        answer = self._call(
            _HEALTH_CHECK, health_pb2.HealthCheckRequest(), timeout, health_pb2.HealthCheckResponse
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, timeout: float, answer: Any = node_pb2.NodeStatus) -> Any:
        call = self._channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        try:
            return call(request, timeout=timeout)
        except grpc.RpcError as error:
            raise ConnectionError(f"no node answers on {self._address} ({error.code().name.lower()})") from error


def _listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
