"""TLS and node authentication on a real SuperLink: who is let in, who is not, and what can be reached from where."""

import contextlib
import datetime
import socket
import textwrap
import time
from pathlib import Path

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from tepal.host.processes import Process, free_port
from tepal.host.superlink import explain
from tests.integration.credentials import DAY, authority, node_key
from tests.integration.loopback import Loopback, loopback, partitions

pytestmark = pytest.mark.deployment

SITES = ["site-0", "site-1"]


@pytest.fixture(scope="module")
def deployment():
    # Looked at is where each process listens: none is a fork.
    with loopback(partitions(len(SITES)), secure=True, warm=False, forked=False) as running:
        yield running


def supernode(
    deployment: Loopback, name: str, key: Path | None, *, trust: Path | None = None, fleet: str = ""
) -> Process:
    """Start one more SuperNode, with a key or without."""
    trust = trust or deployment.authority.certificate
    command = ["flower-supernode", "--superlink", fleet or deployment.fleet, "--root-certificates", str(trust)]
    command += ["--auth-supernode-private-key", str(key)] if key else []
    return deployment.start(name, *command, "--host", "127.0.0.1", "--port", str(free_port()))


@pytest.fixture(scope="module")
def strangers(deployment) -> dict[str, Process]:
    """SuperNodes that are not let in, or do not trust the server. They try side by side, and while others wait."""
    keys = deployment.folder / "keys"
    other = authority(keys, "other").certificate
    return {
        "stranger": supernode(deployment, "stranger", node_key(keys, "stranger")),
        "keyless": supernode(deployment, "keyless", None),
        "distrustful": supernode(deployment, "distrustful", deployment.keys[0], trust=other),
    }


def refusal(process: Process) -> str:
    """What a SuperNode said that never came in."""
    assert process.wait(120) == 1, process.tail()
    log = process.log.read_text()
    assert "Failed to initialize the connection to the SuperLink." in log
    assert "SuperNode ID:" not in log, "it had been let in"
    return log


def wait_until(condition, what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.1)


# Who is let in --------------------------------------------------------------------------------------------------------

ROLL_CALL = {
    "pyproject.toml": """
        [project]
        name = "roll-call"
        version = "1.0.0"
        description = "Who is there?"
        license = "Apache-2.0"
        dependencies = ["flwr", "numpy"]

        [tool.flwr.app]
        publisher = "somebody"

        [tool.flwr.app.components]
        serverapp = "server_app:app"
        clientapp = "client_app:app"

        [tool.flwr.app.config]
        sites = "2 1"
        """,
    "server_app.py": """
        import time
        import numpy as np
        from flwr.app import Array, ArrayRecord, Message, RecordDict
        from flwr.serverapp import ServerApp

        app = ServerApp()


        @app.main()
        def main(grid, context):
            for sites in map(int, context.run_config["sites"].split()):
                while len(list(grid.get_node_ids())) != sites:
                    time.sleep(0.2)
                names = {node.node_id: node.name for node in grid.get_nodes()}
                print(f"{sites} sites:", *sorted(names.values()))
                content = RecordDict({"arrays": ArrayRecord({"x": Array(np.arange(3.0))})})
                messages = [Message(content, dst_node_id=node, message_type="query") for node in names]
                replies = [reply for reply in grid.send_and_receive(messages) if reply.has_content()]
                right = [r for r in replies if r.content["arrays"]["x"].numpy().tolist() == [0.0, 2.0, 4.0]]
                print(f"{sites} answers:", *sorted(names[reply.metadata.src_node_id] for reply in right), flush=True)
        """,
    "client_app.py": """
        from flwr.app import Array, ArrayRecord, Message, RecordDict
        from flwr.clientapp import ClientApp

        app = ClientApp()


        @app.query()
        def query(msg, context):
            x = msg.content["arrays"]["x"].numpy()
            return Message(RecordDict({"arrays": ArrayRecord({"x": Array(2 * x)})}), reply_to=msg)
        """,
}


def roll_call(folder: Path) -> Path:
    """Write an app that asks all sites for an answer, once while there are two of them and once while one."""
    folder.mkdir()
    for name, text in ROLL_CALL.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    return folder


def test_a_run_has_the_registered_sites_and_goes_on_without_the_one_whose_key_is_revoked(
    deployment, strangers, tmp_path
):
    """The key of the second is revoked between two exchanges of one run."""
    run = deployment.submit(roll_call(tmp_path / "roll-call"), timeout=300)
    wait_until(lambda: "2 answers:" in run.log_text() or not run.running, "the answers of two sites")
    deployment.flwr("supernode", "unregister", str(deployment.node_ids[1]))
    outcome = run.wait()
    log = run.log_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    said = dict(line.split(": ") for line in log.splitlines() if line.startswith(("2 ", "1 ")))
    for what, sites in {"2 sites": SITES, "2 answers": SITES, "1 sites": SITES[:1], "1 answers": SITES[:1]}.items():
        assert said[what].split() == sites

    # Its SuperNode ends, with a good status and no word on why; started again, it is refused like a stranger.
    assert deployment.nodes[1].wait(120) == 0
    assert "SuperNode terminated gracefully." in deployment.nodes[1].log.read_text()
    assert "[code: 2004] Failed to activate SuperNode." in refusal(supernode(deployment, "revoked", deployment.keys[1]))
    assert deployment.nodes[0].running


def test_a_key_that_nobody_registered_is_refused(deployment, strangers):
    assert "[code: 2004] Failed to activate SuperNode." in refusal(strangers["stranger"])
    assert "exception: No SuperNode found with the given public key." in deployment.superlink.log.read_text()


def test_a_supernode_without_a_key_is_refused(strangers):
    log = refusal(strangers["keyless"])
    assert "[code: 2001] SuperNode authentication is enabled. All SuperNodes must be registered via the CLI." in log


def heartbeat(deployment: Loopback, site: int, *, key: int, monkeypatch, age: float = 0.0):
    """Send the heartbeat of a site as its SuperNode does, with the key of any site and signed `age` seconds ago."""
    from flwr.client.grpc_rere_client import node_auth_client_interceptor as signing
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.date import now
    from flwr.supercore.grpc import create_channel
    from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

    monkeypatch.setattr(signing, "now", lambda: now() - datetime.timedelta(seconds=age))
    private = load_ssh_private_key(deployment.keys[key].read_bytes(), None)
    interceptors = [
        RuntimeVersionClientInterceptor(component_name="SuperNode"),
        signing.NodeAuthClientInterceptor(private, private.public_key()),
    ]
    trust = deployment.authority.certificate.read_bytes()
    channel = create_channel(deployment.fleet, insecure=False, root_certificates=trust, interceptors=interceptors)
    try:
        request = SendNodeHeartbeatRequest(node=Node(node_id=deployment.node_ids[site]), heartbeat_interval=30)
        return FleetStub(channel).SendNodeHeartbeat(request, timeout=60, wait_for_ready=True)
    finally:
        channel.close()


@pytest.mark.parametrize("age", [3600, 330, -60], ids=["an hour ago", "past the tolerance", "a minute ahead"])
def test_a_request_signed_at_another_time_is_refused(deployment, monkeypatch, age):
    """Flower allows for 305 s of delay and 5 s of a fast clock: a recorded request is of no use afterwards."""
    with pytest.raises(grpc.RpcError) as refused:
        heartbeat(deployment, 0, key=0, monkeypatch=monkeypatch, age=age)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")
    assert heartbeat(deployment, 0, key=0, monkeypatch=monkeypatch, age=200).success, "only its age was wrong"


def test_a_site_cannot_act_for_another(deployment, monkeypatch):
    with pytest.raises(grpc.RpcError) as refused:
        heartbeat(deployment, 0, key=1, monkeypatch=monkeypatch)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "Invalid node ID")


# Whom a site trusts ---------------------------------------------------------------------------------------------------


def test_a_server_whose_certificate_is_of_another_authority_is_not_trusted(strangers):
    log = refusal(strangers["distrustful"])
    assert "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate" in log


@pytest.fixture(scope="module")
def outdated(deployment):
    """A SuperLink with an expired certificate, its Fleet API open to all: the process, its control and Fleet port."""
    fleet, control = free_port(), free_port()
    certificate, key = deployment.authority.server(deployment.folder / "keys", "outdated", validity=(-2 * DAY, -DAY))
    superlink = deployment.start(
        "outdated", "flower-superlink", "--fleet-api-address", f"0.0.0.0:{fleet}", "--port", str(control),
        "--ssl-ca-certfile", str(deployment.authority.certificate), "--ssl-certfile", str(certificate),
        "--ssl-keyfile", str(key), "--enable-supernode-auth",
    )  # fmt: skip
    wait_until(lambda: open_to("127.0.0.1", fleet) and open_to("127.0.0.1", control), "the SuperLink's ports")
    yield superlink, control, fleet
    superlink.stop(5)


def test_a_server_whose_certificate_has_expired_is_not_trusted(deployment, outdated):
    _, _, fleet = outdated
    log = refusal(supernode(deployment, "punctual", deployment.keys[0], fleet=f"127.0.0.1:{fleet}"))
    assert "CERTIFICATE_VERIFY_FAILED: certificate has expired" in log


# What can be reached --------------------------------------------------------------------------------------------------


def open_to(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def listening(process: Process) -> set[tuple[str, int]]:
    """(address, port) of all sockets on which the process and those below it listen."""
    found = set()
    for member in process.tree():
        with contextlib.suppress(psutil.AccessDenied):  # SuperExec hides itself from all but root
            for connection in member.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return found


def test_only_the_fleet_api_can_be_reached_from_another_machine(deployment, outdated):
    """Whoever reaches the Control API can run code on all sites. 127.0.0.2 is another address of this machine."""
    superlink, control, fleet = outdated
    (elsewhere,) = {address for address in listening(superlink) if address[0] != "127.0.0.1"}
    assert elsewhere in {("0.0.0.0", fleet), ("::", fleet)}
    assert listening(superlink) - {elsewhere} == {("127.0.0.1", control)}
    assert open_to("127.0.0.1", control) and not open_to("127.0.0.2", control)
    assert open_to("127.0.0.1", fleet) and open_to("127.0.0.2", fleet)
    # The nodes' own APIs, through which their apps get their data, are for their machine alone.
    for node in deployment.nodes[:1]:
        assert [address for address, _ in listening(node)] == ["127.0.0.1"]
