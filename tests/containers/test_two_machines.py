"""docker/compose.server.yml and compose.client.yml: machines of their own that have nothing but the Fleet port between.

Each project is a network with addresses of its own, and the engine lets no packet pass from one to another. A client
gets to the server as from another machine: by a name and a published port of the host.
"""

import ipaddress
import re
import shutil
import threading
import time

import numpy as np
import pytest

from tests.containers.engine import (
    ROOT,
    SERVER,
    UID,
    EngineError,
    Project,
    connect,
    docker,
    free_port,
    project,
)

pytestmark = [pytest.mark.containers, pytest.mark.usefixtures("images")]

HOST = "fleet.test"
SITES = ("site-1", "site-2")
SHAPE = (3, 68, 72)
"""With it, the model "cnn" has ten million parameters."""
EDGE = 2**30
"""Bytes of memory that a client may use: an edge device's."""
DATA = f'dataset="local" image-shape="{"x".join(map(str, SHAPE))}" classes=10 min-clients=2 '


def administrator(folder, command: str) -> str:
    """What a person does with root's rights on a machine; `folder` is where that person stands."""
    return docker(
        "run",
        "--rm",
        "--user",
        "0",
        "--network",
        "none",
        "-v",
        f"{folder}:/here",
        "-w",
        "/here",
        SERVER,
        "sh",
        "-euc",
        command,
    )


@pytest.fixture(scope="module")
def handed_out(images, tmp_path_factory):
    """Port of the server, and the folders that each machine has got: credentials, unpacked as root, and data."""
    folder = tmp_path_factory.mktemp("machines")
    port = free_port()
    sites = " ".join(f"--site {name}" for name in SITES)
    administrator(
        folder, f"tepal provision make fleet --host {HOST} --port {port} {sites}; chown -R {UID}:{UID} fleet/server"
    )
    for name in SITES:
        administrator(folder, f"mkdir {name}-machine; tar -C {name}-machine -xpzf fleet/sites/{name}.tar.gz")
        rng = np.random.default_rng(int(name[-1]))
        (folder / f"{name}-data").mkdir()
        images = rng.integers(0, 256, (40, *SHAPE), dtype=np.uint8)
        np.savez(folder / f"{name}-data" / "site.npz", images=images, labels=rng.integers(0, 10, 40))
    yield port, folder
    administrator(folder, "rm -rf fleet *-machine")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def machines(handed_out, tmp_path_factory):
    """The project of the server, those of the clients, and in words what these took to come up and use when idle."""
    port, folder = handed_out
    # The name leads to the host that publishes the port, as it would in the sites' DNS.
    name_service = tmp_path_factory.mktemp("names") / "names.yml"
    name_service.write_text(f'services: {{client: {{extra_hosts: ["{HOST}:host-gateway"]}}}}\n')
    environment = {
        "TEPAL_CREDENTIALS": str(folder / "fleet" / "server"),
        "TEPAL_FLEET_PORT": str(port),
    }
    with project("compose.server.yml", environment=environment) as server:
        server.up()
        of_sites = [
            {
                "TEPAL_SITE": str(folder / f"{name}-machine" / name),
                "TEPAL_DATA": str(folder / f"{name}-data"),
                "TEPAL_CLIENT_MEMORY": str(EDGE),
                "TEPAL_CLIENT_CPUS": "1.0",
                "TEPAL_NODE_SPARE": "false",
            }
            for name in SITES
        ]
        with (
            project("compose.client.yml", name_service, environment=of_sites[0]) as first,
            project("compose.client.yml", name_service, environment=of_sites[1]) as second,
        ):
            seconds: dict[str, float] = {}

            def start(client):
                begun = time.monotonic()
                client.up()
                seconds[client.name] = time.monotonic() - begun

            threads = [threading.Thread(target=start, args=(client,)) for client in (first, second)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(seconds) == 2, "a client did not come up"
            time.sleep(3)
            idle = ", ".join(memory(client)[0] for client in (first, second))
            measured = f"healthy after {', '.join(f'{one:.1f}' for one in seconds.values())} s; idle {idle}"
            yield server, [first, second], measured


def address(project, service: str) -> ipaddress.IPv4Interface:
    (network,) = project.inspect(service)["NetworkSettings"]["Networks"].values()
    return ipaddress.IPv4Interface(f"{network['IPAddress']}/{network['IPPrefixLen']}")


def test_a_run_of_machines_with_only_the_fleet_port_between_comes_to_its_end(machines):
    server, clients, _ = machines
    networks = {address(server, "server").network, *(address(client, "client").network for client in clients)}
    assert len(networks) == 3, "each machine has a network of its own"
    short = "num-server-rounds=3 fedfrozen.warmup-rounds=1 local-steps=1"
    run = server.submit(f'{DATA} strategy="fedfrozen" {short}')
    summary = server.summary(run)
    assert (summary["strategy"], summary["rounds"], summary["refused_replies"]) == ("fedfrozen", 3, 0)
    assert [line["clients_replied"] for line in server.rounds(run) if line["round"]] == [2, 2, 2]


def test_the_control_port_cannot_be_reached_from_another_machine(machines, handed_out):
    server, clients, _ = machines
    port, _ = handed_out
    assert connect(server, "server", "127.0.0.1", 8000) == "open"
    for client in clients:
        assert connect(client, "client", HOST, port) == "open"
        assert connect(client, "client", HOST, 8000) != "open"
        for inside in (8000, 9092):
            assert connect(client, "client", str(address(server, "server").ip), inside) in ("silence", "no route")
        # Nor do clients see each other.
        (other,) = (address(one, "client").ip for one in clients if one is not client)
        assert connect(client, "client", str(other), 9095) in ("silence", "no route")
    published = server.inspect("server")["NetworkSettings"]["Ports"]
    assert set(published) == {"9092/tcp"} and {at["HostPort"] for at in published["9092/tcp"]} == {str(port)}


def test_an_edge_device_of_one_gigabyte_trains_ten_million_parameters(machines):
    server, clients, measured = machines
    run = server.submit(DATA + 'strategy="fedavg" model="cnn" num-server-rounds=2 local-epochs=1 batch-size=8')
    summary = server.summary(run, 300)
    assert 9.5e6 < summary["parameters"] < 10.5e6 and summary["rounds"] == 2
    assert [line["clients_replied"] for line in server.rounds(run) if line["round"]] == [2, 2]
    print(f"{measured}; after the rounds, and the most with pages of files: {[memory(one) for one in clients]}")
    for client in clients:
        container = client.inspect("client")
        assert container["HostConfig"]["Memory"] == EDGE == container["HostConfig"]["MemorySwap"] // 2
        assert not container["State"]["OOMKilled"] and container["RestartCount"] == 0
        status = client.exec("client", "tepal", "node", "status")
        assert re.search(r"answered\s+\d+, and 0 with an error", status), status


def memory(client) -> tuple[str, float]:
    """What a client's container uses, as `docker stats` says it, and the most that it ever used, in bytes.

    The latter has pages of files in it, which the kernel takes back when it wants to: it may be all that is allowed.
    """
    now = docker("stats", "--no-stream", "--format", "{{.MemUsage}}", client.container("client")).split("/")[0]
    peak = "cat /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory/memory.max_usage_in_bytes 2>/dev/null || true"
    return now.strip(), float(client.exec("client", "sh", "-c", peak) or "nan")


def test_a_folder_that_is_not_there_is_an_error_and_not_a_new_folder(handed_out, tmp_path):
    environment = {"TEPAL_SITE": str(tmp_path / "nowhere"), "TEPAL_DATA": str(tmp_path)}
    with project("compose.client.yml", environment=environment) as client, pytest.raises(EngineError, match="nowhere"):
        client.up()
    assert not (tmp_path / "nowhere").exists()


def test_what_must_be_given_is_asked_for():
    for file, name in (("compose.server.yml", "TEPAL_CREDENTIALS"), ("compose.client.yml", "TEPAL_SITE")):
        with pytest.raises(EngineError, match=f"{name}.*the folder"):
            Project(ROOT / "docker" / file, environment={name: ""}).compose("config")
