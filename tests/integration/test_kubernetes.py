"""The pods of `tepal provision kubernetes` as processes: volumes and rights as kubelet gives them, probes, a run."""

import contextlib
import json
import os
import signal
import stat
import time

import grpc
import numpy as np
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from tepal.host.processes import free_port
from tepal.tools.cli.provision import app as provision
from tests.integration.pods import Cluster, Pod, image_command, why_no_pods

pytestmark = [pytest.mark.deployment, pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())]

RUN = (
    'strategy="fedacs" dataset="local" image-shape="1x8x8" classes=10 min-clients=2 num-server-rounds=2 local-steps=1 '
    "fraction-evaluate=0.0"
)
SITES = ("north", "South_1.")


def tepal(*arguments):
    result = CliRunner().invoke(provision, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def wait_for(condition, what, processes, seconds=150):
    end = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.running, f"waited for {what}\n{process.tail(40)}"
        tails = "\n".join(process.tail(15) for process in processes)
        assert time.monotonic() < end, f"waited {seconds} s for {what}\n{tails}"
        time.sleep(0.3)


def ready(pod: Pod, address: str) -> bool:
    """As kubelet's gRPC probe, which has no TLS."""
    assert "grpc" in pod.container["readinessProbe"]
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return answer.status == health_pb2.HealthCheckResponse.SERVING
    return False


def test_pods_run_a_round_survive_and_a_revoked_site_is_refused(tmp_path):
    fleet, control = free_port(), free_port()
    folder, output = tmp_path / "fl", tmp_path / "k8s"
    digits = load_digits()
    data = {}
    for k, site in enumerate(SITES):
        data[site] = tmp_path / f"data-{k}"
        data[site].mkdir()
        images, labels = (digits.images[k::20] / 16).astype(np.float32), digits.target[k::20]
        np.savez(data[site] / "site.npz", images=images, labels=labels)
    tepal("make", folder, "--host", "localhost", "--port", fleet, *(w for site in SITES for w in ("--site", site)))

    def objects(*arguments):
        tepal("kubernetes", folder, "--output", output, "--data-claim", "examples", *arguments)
        return {path.name: list(yaml.safe_load_all(path.read_text())) for path in output.rglob("*.yaml")}

    files = objects("-c", RUN)
    clusters = {"server": Cluster(tmp_path / "server", {})}
    for k, site in enumerate(SITES):
        clusters[site] = Cluster(tmp_path / f"site-{k}", {"examples": data[site]})
        clusters[site].apply(files[f"{site}.yaml"])
    clusters["server"].apply(files["server.yaml"])

    server = clusters["server"].pod("tepal-server")
    names = {site: next(name for kind, name in clusters[site].objects if kind == "Deployment") for site in SITES}
    nodes = {site: clusters[site].pod(names[site]) for site in SITES}
    health = {site: f"127.0.0.1:{free_port()}" for site in SITES}
    moved = {"TEPAL_PORT": str(control), "TEPAL_FLEET_API_ADDRESS": f"127.0.0.1:{fleet}", "OMP_NUM_THREADS": "1"}
    state = clusters["server"].folder / "Claim-tepal-server-state"

    def answers(pod, process, probe):
        return pod.exec(process, pod.container[probe]["exec"]["command"])

    with contextlib.ExitStack() as stack:

        def start_server():
            stopping = contextlib.ExitStack()
            stack.enter_context(stopping)
            return stopping, stopping.enter_context(server.running("server", image_command("server"), **moved))

        stopping, running = start_server()
        processes = {}
        for site in SITES:
            own = {"TEPAL_NODE_HEALTH": health[site], "TEPAL_NODE_CONTROL": f"127.0.0.1:{free_port()}"}
            own |= {"OMP_NUM_THREADS": "1", "TEPAL_NODE_SPARE": "false"}
            processes[site] = stack.enter_context(nodes[site].running("client", image_command("client"), **own))
        everyone = [running, *processes.values()]
        wait_for(lambda: answers(server, running, "readinessProbe")[0] == 0, "the server to be ready", everyone)
        assert answers(server, running, "livenessProbe")[1].startswith("alive\n")
        for site in SITES:
            wait_for(lambda site=site: ready(nodes[site], health[site]), f"{site} to be ready", everyone)
            assert answers(nodes[site], processes[site], "livenessProbe")[0] == 0

        # A key for the node alone, though its Secret can be read by the group.
        copied = clusters["north"].folder / f"emptyDir-{names['north']}-site" / "node.key"
        assert (stat.S_IMODE(copied.stat().st_mode), copied.stat().st_uid) == (0o600, 49999)
        for pod, process in ((server, running), (nodes["north"], processes["north"])):
            status, said = pod.exec(process, ["sh", "-c", "id -u; echo x > /app/x; echo x > /app/credentials/nodes/x"])
            assert (
                status != 0
                and said.splitlines()[0] == "49999"
                and said.count("Read-only") + said.count("nonexist") == 2
            )

        summary = state / "runs" / "latest" / "summary.json"
        wait_for(summary.exists, "the run's end", everyone, 300)
        assert json.loads(summary.read_text())["rounds"] == 2
        kept = list((clusters["north"].folder / f"Claim-{names['north']}-cache").rglob("*.safetensors"))
        assert kept, "what the client keeps is on the claim"

        # A server that is down must not restart the nodes.
        begun = time.monotonic()
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait(60) == 0, running.tail()
        took = time.monotonic() - begun
        assert took < server.spec["terminationGracePeriodSeconds"]
        wait_for(lambda: not ready(nodes["north"], health["north"]), "north to be unreachable", processes.values())
        assert answers(nodes["north"], processes["north"], "livenessProbe")[0] == 0
        stopping.close()
        stopping, running = start_server()
        everyone = [running, *processes.values()]
        for site in SITES:
            wait_for(lambda site=site: ready(nodes[site], health[site]), f"{site} to come back", everyone)

        # Revoked in the folder, rendered again, applied: the ConfigMaps of the running pod change.
        assert "NOT UNREGISTERED" in tepal("revoke", folder, "north")
        clusters["server"].apply(objects("-c", RUN)["server.yaml"])
        wait_for(lambda: not ready(nodes["north"], health["north"]), "north to be refused", everyone)
        wait_for(
            lambda: "does not know" in nodes["north"].exec(processes["north"], ["tepal", "node", "status"])[1],
            "north to say so", everyone,
        )  # fmt: skip
        assert ready(nodes["South_1."], health["South_1."])
        assert answers(server, running, "readinessProbe")[0] == 0

        for site in SITES:
            begun = time.monotonic()
            os.kill(processes[site].pid, signal.SIGTERM)
            assert processes[site].wait(60) == 0, processes[site].tail()
            assert time.monotonic() - begun < nodes[site].spec["terminationGracePeriodSeconds"]
