"""Settings of a warm node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tepal.host.metrics import Endpoint
from tepal.host.toml import Value


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a node. Times are in seconds, sizes in bytes.

    Args:
        superlink: address of the SuperLink's Fleet API, "host:port".
        root_certificates: PEM file of the authority that signed the SuperLink's certificate; None: the system's.
        insecure: connect without TLS, for trials on one machine.
        key: this node's private key, whose public key is registered at the SuperLink; None for none.
        name: of the node, in logs and status.
        node_config: of the ClientApp's context.
        folder: for the node's files while it runs; None for a temporary one.
        control: address for `tepal node status` and `drain`: on the loopback interface, or "unix:/path".
        health: further address of the standard health service; "" for none.
        poll: the longest pause between two requests for a message.
        idle: time without a message after which the process of the last run is ended.
        grace: time in which a message may be finished when the node is stopped.
        spare: keep a process with torch loaded for the next run.
        memory_limit: private memory of a process that runs a ClientApp; 0 for no limit other than the machine's.
        metrics: the node's metrics for Prometheus; by default none.
        preload: modules that the spare process imports, if they are installed.
    """

    superlink: str
    root_certificates: Path | None = None
    insecure: bool = False
    key: Path | None = None
    name: str = ""
    node_config: Mapping[str, Value] = field(default_factory=dict)
    folder: Path | None = None
    control: str = "127.0.0.1:9095"
    health: str = ""
    poll: float = 1.0
    idle: float = 900.0
    grace: float = 30.0
    spare: bool = True
    memory_limit: int = 0
    metrics: Endpoint = field(default_factory=Endpoint)
    preload: tuple[str, ...] = ("torch",)
