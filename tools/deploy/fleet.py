"""The node keys and the runs of a running SuperLink, through its Control API.

The Control API has no authentication. It listens on 127.0.0.1 only, so this runs on the SuperLink's machine. The
SuperLink's certificate is verified with the authority of `tepal provision`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from tepal.host.addresses import unused_proxy
from tepal.host.superlink import control_client
from tepal.tools.deploy.provision import ProvisionError, ServerFolder, load_public_key

CONTROL = "127.0.0.1:8000"
"""The default address of the Control API of Flower's SuperLink."""


class FleetError(RuntimeError):
    """The SuperLink refused a request. The message has the reason and what to do."""


class Unreachable(FleetError):
    """No SuperLink answers at the address, or one of another authority."""


@dataclass(frozen=True)
class NodeKey:
    """A key that a SuperLink knows. `status` is Flower's: registered, online, offline or unregistered."""

    node_id: int
    name: str
    status: str
    public_key: bytes
    """In PEM."""


@dataclass(frozen=True)
class RunStatus:
    """Flower's status of a run: pending, starting, running, finished; then completed, failed or stopped; the reason."""

    status: str = ""
    ended: str = ""
    details: str = ""


@dataclass(frozen=True)
class KeyResult:
    """The result for one key: what was done, or the problem, "" without one."""

    site: str
    done: str
    problem: str = ""


class Fleet:
    """The node keys and runs of a running SuperLink. Made by `open_fleet`; its methods raise `FleetError`."""

    def __init__(self, address: str, client: Any) -> None:
        self.address = address
        self._client = client

    def node_keys(self) -> list[NodeKey]:
        """Return all keys that were registered since the SuperLink's start; revoked ones are "unregistered"."""
        with _explained(self.address):
            answer = self._client.ListNodes(ListNodesRequest())
        return [NodeKey(node.node_id, node.name, node.status, node.public_key) for node in answer.nodes_info]

    def register(self, public_key: bytes, name: str) -> int:
        """Register a key under a name; return the node's id. An unregistered key can never be registered again."""
        with _explained(self.address):
            node_id = self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name)).node_id
        if not node_id:
            raise FleetError(f"the SuperLink at {self.address} did not register {name} and gave no reason: see its log")
        return int(node_id)

    def unregister(self, node_id: int) -> None:
        """Unregister a key permanently. A connected SuperNode with this key ends within seconds."""
        try:
            with _explained(self.address):
                self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        except FleetError:
            # A server that reads the same folder may have done it since the keys were listed.
            if not any(node.node_id == node_id and node.status == "unregistered" for node in self.node_keys()):
                raise

    def runs(self) -> dict[int, RunStatus]:
        """Return the status of each run, by its id. Raises `Unreachable` for any problem."""
        with _explained(self.address, refused=Unreachable):
            runs = self._client.ListRuns(ListRunsRequest()).run_dict
        statuses = {run_id: run.status for run_id, run in runs.items()}
        return {run_id: RunStatus(each.status, each.sub_status, each.details) for run_id, each in statuses.items()}

    def stop_run(self, run_id: int) -> None:
        """Stop a run whose process is dead, and with it the messages to its nodes; no error if it has ended."""
        with contextlib.suppress(FleetError), _explained(self.address):
            self._client.StopRun(StopRunRequest(run_id=run_id))


@contextlib.contextmanager
def open_fleet(address: str, root_certificates: Path | None) -> Iterator[Fleet]:
    """Make a client of the Control API at `address`, HOST:PORT, by TLS; without certificates, by plain HTTP.

    It connects at the first request. Raises ProvisionError if the certificates cannot be read.
    """
    try:
        client = control_client(address, root_certificates)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ProvisionError(f"{root_certificates} is not a certificate in PEM format: {error}") from error
    try:
        yield Fleet(address, client)
    finally:
        client.close()


def align(fleet: Fleet, server: ServerFolder, name: str | None = None) -> list[KeyResult]:
    """Make a SuperLink's keys agree with a folder: unregister the revoked keys, register the authorised ones.

    May be called any number of times. `name` limits it to one site. A problem with one key does not affect the others.
    Keys that are not in the folder stay as they are. Raises `Unreachable` when the SuperLink does not answer.
    """
    known = {node.public_key: node for node in fleet.node_keys()}
    results, revoked, doubtful = [], set(), set()
    # Revoked keys first: a site with a new key must not be registered twice.
    for site, path in server.revoked_keys():
        if name not in (None, site):
            continue
        try:
            key = read_key(path)
            revoked.add(key)
            node = known.get(key)
            if node is not None and node.status != "unregistered":
                fleet.unregister(node.node_id)
                results.append(KeyResult(site, "its revoked key is unregistered"))
        except Unreachable:
            raise
        except FleetError as error:
            results.append(KeyResult(site, "", f"its revoked key could not be unregistered: {error}"))
        except (ProvisionError, OSError) as error:
            doubtful.add(site)
            results.append(KeyResult(site, "", f"its revoked key cannot be read, and is not unregistered: {error}"))
    for site, path in server.node_keys().items():
        if name in (None, site):
            try:
                key = read_key(path)
                if site in doubtful and key not in known:
                    problem = f"its key is not registered while a key of it in {server.revoked} cannot be read"
                    results.append(KeyResult(site, "", problem))
                    continue
                results.append(_register(fleet, site, key, known, revoked))
            except Unreachable:
                raise
            except (ProvisionError, FleetError, OSError) as error:
                results.append(KeyResult(site, "", str(error)))
    return results


def _register(fleet: Fleet, site: str, key: bytes, known: dict[bytes, NodeKey], revoked: set[bytes]) -> KeyResult:
    node, new_key = known.get(key), f"For a new key: tepal provision renew FOLDER --site {site}"
    if key in revoked:
        return KeyResult(site, "", f"its key is among the revoked ones, and is not registered. {new_key}")
    if node is None:
        fleet.register(key, site)
        return KeyResult(site, "registered")
    if node.status == "unregistered":
        problem = (
            "its key was unregistered while this SuperLink ran, for example because it was missing from nodes/ for a "
            f"minute. It is accepted again only after the SuperLink (`tepal server`) is restarted. {new_key}"
        )
        return KeyResult(site, "", problem)
    if node.name != site:
        return KeyResult(site, "", f"its key is registered there under another name, {node.name!r}. {new_key}")
    return KeyResult(site, "was registered before" + (f", is {node.status}" if node.status != "registered" else ""))


def read_key(path: Path) -> bytes:
    """Read a public key, and return it in the form that the SuperLink keeps and compares. Raises ProvisionError."""
    return public_key_to_bytes(load_public_key(path))


@contextlib.contextmanager
def _explained(address: str, refused: type[FleetError] = FleetError) -> Iterator[None]:
    """Turn the client's exceptions into `refused`, for an HTTP error status, or `Unreachable`, with the cause."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        try:
            reason = str(error.response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            reason = f"HTTP status {error.response.status_code}"
        raise refused(f"the SuperLink at {address} refuses: {reason}") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        said = str(error) or type(error).__name__
        if "certificate has expired" in said or "not yet valid" in said:
            what = (
                f"the certificate of the server at {address} is not valid at this machine's time: check its clock, "
                "then `tepal provision renew FOLDER --server`, and restart the server"
            )
        elif "ostname mismatch" in said or "IP address mismatch" in said:
            what = (
                f"the certificate of the server at {address} is not for that name: `tepal provision list FOLDER` shows "
                "its names"
            )
        elif "CERTIFICATE_VERIFY_FAILED" in said:
            what = f"the certificate of the server at {address} was not issued by this folder's ca.crt"
        elif "WRONG_VERSION_NUMBER" in said or isinstance(error, httpx.RemoteProtocolError):
            what = f"the server at {address} is not a SuperLink with TLS"
        else:
            what = f"no SuperLink answers at {address}"
            said += unused_proxy(address.rpartition(":")[0])
        raise Unreachable(f"{what} ({said})") from error
    except ValueError as error:  # the client's, for an invalid response
        raise Unreachable(f"the server at {address} is not a SuperLink ({error})") from error
