"""Who may come in at a running SuperLink: its node keys, listed, registered and revoked through its Control API.

The API asks nobody who he is: the SuperLink's machine keeps it on 127.0.0.1, so this runs there. The SuperLink is known
by the certificate authority of `tepal provision`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepal.tools.deploy.provision import ProvisionError, ServerFolder, load_public_key

CONTROL = "127.0.0.1:8000"
"""Where Flower's SuperLink has its Control API unless told otherwise."""


class FleetError(RuntimeError):
    """The SuperLink did not do what it was asked. The message says why, and what to do."""


class Unreachable(FleetError):
    """No SuperLink answers there, or not the one that is meant."""


@dataclass(frozen=True)
class Node:
    """A key that a SuperLink knows. `status` is Flower's word: registered, online, offline or unregistered."""

    node_id: int
    name: str
    status: str
    public_key: bytes
    """In PEM."""


@dataclass(frozen=True)
class Told:
    """What came of one key: `done` in words for people, or the `problem`, which is "" if there is none."""

    site: str
    done: str
    problem: str = ""


class Fleet:
    """The node keys of a running SuperLink. Made by `open_fleet`; its methods raise `FleetError`."""

    def __init__(self, address: str, client: Any) -> None:
        self.address = address
        self._client = client

    def nodes(self) -> list[Node]:
        """Return all keys that were ever registered there since its start; a revoked one is "unregistered"."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with _explained(self.address):
            answer = self._client.ListNodes(ListNodesRequest())
        return [Node(node.node_id, node.name, node.status, node.public_key) for node in answer.nodes_info]

    def register(self, public_key: bytes, name: str) -> int:
        """Let a key in under a name; return the node's id. One that was unregistered can never be registered again."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with _explained(self.address):
            node_id = self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name)).node_id
        if not node_id:
            raise FleetError(f"the SuperLink at {self.address} did not register {name} without a reason: see its log")
        return int(node_id)

    def unregister(self, node_id: int) -> None:
        """Let a key in no more, for ever; one that was unregistered before stays so.

        A SuperNode with it that is connected ends within seconds.
        """
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        try:
            with _explained(self.address):
                self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        except FleetError:
            # Another may have done it since it was listed: a server that reads the same folder.
            if not any(node.node_id == node_id and node.status == "unregistered" for node in self.nodes()):
                raise


@contextlib.contextmanager
def open_fleet(address: str, root_certificates: Path | None) -> Iterator[Fleet]:
    """Speak to the Control API of the SuperLink at `address`, HOST:PORT, by TLS; without certificates by plain HTTP.

    Nothing is sent before it is asked something. Raises ProvisionError if the certificates cannot be read.
    """
    from flwr.supercore.control import ControlHttpClient

    try:
        client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=root_certificates.read_bytes() if root_certificates else None,
            interceptors=(),
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ProvisionError(f"{root_certificates} holds no certificate to trust: {error}") from error
    try:
        yield Fleet(address, client)
    finally:
        client.close()


def align(fleet: Fleet, server: ServerFolder, name: str | None = None) -> list[Told]:
    """Bring a SuperLink's keys into line with a folder: unregister the revoked ones, register those that may come in.

    May be called at any time and any number of times. `name` limits it to one site. What is wrong with one key does
    not keep the others from being done. Keys that the folder does not know stay as they are. Raises `FleetError` when
    the SuperLink cannot be asked at all.
    """
    known = {node.public_key: node for node in fleet.nodes()}
    told, revoked = [], set()
    # First the revoked: a site with a new key must not be there twice.
    for site, path in server.revoked_keys():
        if name not in (None, site):
            continue
        try:
            key = _pem(path)
            revoked.add(key)
            node = known.get(key)
            if node is not None and node.status != "unregistered":
                fleet.unregister(node.node_id)
                told.append(Told(site, "its revoked key is unregistered"))
        except Unreachable:
            raise
        except (ProvisionError, FleetError, OSError) as error:
            told.append(Told(site, "", f"its revoked key could not be unregistered: {error}"))
    for site, path in server.node_keys().items():
        if name in (None, site):
            try:
                told.append(_register(fleet, site, _pem(path), known, revoked))
            except Unreachable:
                raise
            except (ProvisionError, FleetError, OSError) as error:
                told.append(Told(site, "", str(error)))
    return told


def _register(fleet: Fleet, site: str, key: bytes, known: dict[bytes, Node], revoked: set[bytes]) -> Told:
    node, new_key = known.get(key), f"For a new key: tepal provision renew FOLDER --site {site}"
    if key in revoked:
        return Told(site, "", f"its key is among the revoked ones, and is not registered. {new_key}")
    if node is None:
        fleet.register(key, site)
        return Told(site, "registered")
    if node.status == "unregistered":
        return Told(site, "", f"its key was revoked at this SuperLink, which never takes it again. {new_key}")
    if node.name != site:
        return Told(site, "", f"its key is registered there under another name, {node.name!r}. {new_key}")
    return Told(site, "was registered before" + (f", is {node.status}" if node.status != "registered" else ""))


def _pem(path: Path) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(load_public_key(path))  # as the SuperLink keeps and compares it


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turn what the client raises into words for people."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        try:
            reason = str(error.response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            reason = f"HTTP status {error.response.status_code}"
        raise FleetError(f"the SuperLink at {address} refuses: {reason}") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        said = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in said:
            what = f"what answers at {address} has a certificate that this folder's ca.crt does not vouch for"
        elif "WRONG_VERSION_NUMBER" in said or isinstance(error, httpx.RemoteProtocolError):
            what = f"what answers at {address} is no SuperLink with TLS"
        else:
            what = f"no SuperLink answers at {address}"
        raise Unreachable(f"{what} ({said})") from error
    except ValueError as error:  # the client's, for an answer that is none
        raise Unreachable(f"what answers at {address} is no SuperLink ({error})") from error
