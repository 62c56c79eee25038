"""docker/compose.yml: a server and three clients by one command, what they may do, and what they survive."""

import re
import time

import pytest

from tests.containers.engine import CLIENT, SERVER, UID, connect, docker, free_port, inspect, project, wait_until

pytestmark = [pytest.mark.containers, pytest.mark.usefixtures("images")]

CLIENTS = ("client-1", "client-2", "client-3")
SERVICES = ("server", *CLIENTS)
each = pytest.mark.parametrize("service", SERVICES)

LONG = (
    'strategy="fedfrozen" dataset="local" image-shape="1x8x8" classes=10 min-clients=3 local-steps=60 '
    "fedfrozen.warmup-rounds=1 "
)
"""A run whose rounds take some seconds, so that what happens to a process happens in the midst of one."""


@pytest.fixture(scope="module")
def deployment(images):
    """The deployment as the command starts it; only the port that it publishes and its limits are chosen."""
    environment = {
        "TEPAL_FLEET_PORT": str(free_port()),
        "TEPAL_CLIENT_MEMORY": "1536m",
        "TEPAL_CLIENT_CPUS": "0.75",
        "TEPAL_CLIENT_PIDS": "300",
    }
    with project("compose.yml", environment=environment) as made:
        begun = time.monotonic()
        made.up()
        print(f"up and healthy after {time.monotonic() - begun:.1f} s")
        yield made


def test_the_run_of_the_environment_comes_to_its_end(deployment):
    """With data that the server never sees: each site's own digits, and its own tests of the model."""
    (run,) = wait_until(deployment.runs, "the run's directory")
    summary = deployment.summary(run)
    assert (summary["strategy"], summary["rounds"], summary["refused_replies"]) == ("fedfrozen", 6, 0)
    assert summary["accuracy"] > 0.5, "guessing gives 0.1"
    assert summary["bytes_vs_fedavg"] < 0.95, "the frozen half sends less"
    rounds = deployment.rounds(run)
    assert [line["clients_replied"] for line in rounds if line["round"]] == [3] * 6
    wait_until(lambda: f"{run} has ended" in deployment.logs("server"), "the server's word on it")
    assert "report.html" in deployment.exec("server", "ls", f"state/runs/{run}")


# What the containers are and may do -----------------------------------------------------------------------------------


@each
def test_it_runs_as_nobody_and_with_no_rights(deployment, service):
    host = deployment.inspect(service)["HostConfig"]
    assert host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert deployment.exec(service, "id", "-u").strip() == str(UID)
    # Of every process in it, init too.
    status = deployment.exec(service, "sh", "-c", "cat /proc/[0-9]*/status || true")
    assert set(re.findall(r"^Uid:\s+(\d+)", status, re.MULTILINE)) == {str(UID)}
    assert set(re.findall(r"^Cap(?:Eff|Prm|Bnd):\s+(\w+)", status, re.MULTILINE)) == {"0" * 16}
    assert set(re.findall(r"^NoNewPrivs:\s+(\d)", status, re.MULTILINE)) == {"1"}
    assert "init" in deployment.exec(service, "cat", "/proc/1/cmdline")


@each
def test_only_its_state_can_be_written(deployment, service):
    assert deployment.inspect(service)["HostConfig"]["ReadonlyRootfs"]
    places = "/ /app /opt/venv /opt/tepal /usr/bin /data /app/site /app/credentials /tmp /app/state /app/cache"
    script = f"for place in {places}; do touch $place/new 2>/dev/null && rm $place/new && echo $place; done; true"
    writable = {"/tmp", "/app/state"} | ({"/app/cache"} if service != "server" else set())
    assert set(deployment.exec(service, "sh", "-c", script).split()) == writable
    # Nothing has gone into the container's own layer (what is mounted on, the engine has made there).
    changed = docker("diff", deployment.container(service)).split("\n")
    assert [line for line in changed if line[:1] not in ("", "C") and not line.endswith("/docker-init")] == []


@each
def test_its_limits_are_set(deployment, service):
    container = deployment.inspect(service)
    host = container["HostConfig"]
    memory, cpus, pids = (4 * 2**30, 2.0, 1024) if service == "server" else (1536 * 2**20, 0.75, 300)
    assert (host["Memory"], host["NanoCpus"] / 1e9, host["PidsLimit"]) == (memory, cpus, pids)
    assert host["Init"] and host["RestartPolicy"]["Name"] == "unless-stopped"
    assert container["Config"]["StopTimeout"] == 60
    assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "3"}
    assert deployment.healthy(service)


@each
def test_it_uses_no_more_threads_than_it_has_cores(deployment, service):
    """torch would take all cores of the machine, and a container with a part of them would crawl."""
    if service == "server":
        pytest.skip("merges with numpy")
    environments = deployment.exec(service, "sh", "-c", "cat /proc/[0-9]*/environ | tr '\\0' '\\n' || true")
    assert set(re.findall(r"^OMP_NUM_THREADS=(\d+)$", environments, re.MULTILINE)) == {"1"}


def test_only_the_fleet_port_is_published(deployment):
    for service in SERVICES:
        published = {
            port for port, at in deployment.inspect(service)["NetworkSettings"]["Ports"].items() if at is not None
        }
        assert published == ({"9092/tcp"} if service == "server" else set())


def test_a_client_reaches_the_fleet_port_and_nothing_else(deployment):
    """Whoever reaches the control port can run code at every site."""
    assert connect(deployment, "server", "127.0.0.1", 8000) == "open"
    assert connect(deployment, "client-1", "server", 9092) == "open"
    assert connect(deployment, "client-1", "server", 8000) == "refused"
    networks = deployment.inspect("server")["NetworkSettings"]["Networks"]
    (outside,) = (network["IPAddress"] for name, network in networks.items() if name.endswith("outside"))
    gateway = networks[f"{deployment.name}_outside"]["Gateway"]
    for host, port in ((outside, 9092), (outside, 8000), (gateway, 9092), ("192.0.2.1", 443)):
        assert connect(deployment, "client-1", host, port) in ("no route", "silence")


def test_everybody_has_its_own_credentials_and_no_others(deployment):
    keys = "find / -name '*.key' -not -path '/proc/*' 2>/dev/null"
    assert set(deployment.exec("server", "sh", "-c", keys, check=False).split()) == {"/app/credentials/server.key"}
    seen = set()
    for client in CLIENTS:
        assert set(deployment.exec(client, "sh", "-c", keys, check=False).split()) == {"/app/site/node.key"}
        seen.add(deployment.exec(client, "cat", "/app/site/node.key"))
        assert deployment.exec(client, "stat", "-c", "%a %u", "/app/site/node.key").split() == ["600", str(UID)]
    assert len(seen) == len(CLIENTS)


def test_a_second_up_changes_nothing(deployment):
    before = [deployment.container(service) for service in SERVICES]
    key = deployment.exec("client-1", "cat", "/app/site/node.key")
    runs = deployment.runs()
    deployment.up()
    assert [deployment.container(service) for service in SERVICES] == before
    assert deployment.exec("client-1", "cat", "/app/site/node.key") == key
    assert deployment.runs() == runs


def test_a_key_that_nobody_registered_is_refused_and_the_client_says_so(deployment):
    """A stranger with the right authority's certificate, and a key of its own."""
    code = """
import shutil
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
site = Path("/tmp/stranger")
site.mkdir(0o700)
for name in ("ca.crt", "site.toml"):
    shutil.copy(f"/app/site/{name}", site)
key = ec.generate_private_key(ec.SECP384R1())
(site / "node.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
(site / "node.key").chmod(0o600)
"""
    # A folder of its own for its state: the site's is in use.
    script = f"python -c '{code}' && TEPAL_SITE=/tmp/stranger TEPAL_NODE_STATE=/tmp/state exec tepal node"
    name = f"{deployment.name}-stranger"
    arguments = ("--no-deps", "--detach", "--name", name, "client-1", "sh", "-c", script)
    deployment.compose("run", *arguments)

    def status() -> str:
        return docker("exec", name, "tepal", "node", "status", check=False)

    try:
        wait_until(lambda: re.search(r"^state\s+refused", status(), re.MULTILINE), "the refusal")
        assert "this node's key: it was never registered" in docker("logs", name)
        assert inspect(name)["State"]["Health"]["Status"] != "healthy"
        print(docker("logs", name)[-600:])
    finally:
        docker("rm", "--force", "--volumes", name)
    assert "3 registered: site-1, site-2, site-3" in deployment.exec("server", "tepal", "server", "status")


def test_the_doctor_finds_no_problem_in_a_server_that_is_well(deployment):
    deployment.exec(
        "server", "tepal", "doctor", "--credentials", "/app/credentials", "--superlink", "127.0.0.1:8000"
    )  # it ends with status 1 where there is a problem


# What they survive ----------------------------------------------------------------------------------------------------


def at_work(deployment, client: str) -> bool:
    """Whether a client is in the midst of a message."""
    return bool(re.search(r"^message\s+train", deployment.exec(client, "tepal", "node", "status"), re.MULTILINE))


def test_a_client_that_is_stopped_and_started_has_kept_what_it_held(deployment):
    """Nothing is sent to it again: not the frozen part, which was sent once and then only named."""
    run = deployment.submit(LONG + "num-server-rounds=6")
    deployment.wait_for_round(run, 2)
    deployment.compose("stop", "client-3")
    assert deployment.inspect("client-3")["State"]["ExitCode"] == 0, deployment.logs("client-3")[-3000:]
    time.sleep(1)
    deployment.compose("start", "client-3")
    began = time.monotonic()
    wait_until(lambda: deployment.healthy("client-3"), "the client")
    print(f"healthy {time.monotonic() - began:.1f} s after its start")
    summary = deployment.summary(run)
    assert summary["rounds"] == 6
    # Round 2 brings the frozen part as it was left by round 1; round 6 has the evaluation's bytes in it, too.
    rounds = {line["round"]: line for line in deployment.rounds(run)}
    sent = {rounds[number]["bytes_down"] for number in (3, 4, 5) if rounds[number]["clients_replied"] == 3}
    assert len(sent) == 1 and sent.pop() < rounds[2]["bytes_down"]
    assert sum(line["resent"] for line in rounds.values()) == 0
    assert rounds[6]["clients_replied"] == 3, "it has come back"


def test_a_client_that_is_killed_in_a_round_comes_back_and_the_run_ends(deployment):
    run = deployment.submit(LONG + "num-server-rounds=4")
    deployment.wait_for_round(run, 1)
    wait_until(lambda: at_work(deployment, "client-2"), "a message", pause=0.1)
    before = deployment.inspect("client-2")["RestartCount"]
    deployment.kill_inside("client-2")
    began = time.monotonic()
    wait_until(lambda: deployment.inspect("client-2")["RestartCount"] > before, "its restart")
    wait_until(lambda: deployment.healthy("client-2"), "the client")
    print(f"healthy {time.monotonic() - began:.1f} s after it was killed")
    summary = deployment.summary(run)
    assert summary["rounds"] == 4
    rounds = {line["round"]: line for line in deployment.rounds(run)}
    assert rounds[4]["clients_replied"] == 3, "it has come back"
    print([(line["round"], line["clients_replied"], line["lost"], line["seconds"]) for line in rounds.values()])


def test_a_server_that_is_killed_in_a_round_goes_on_and_the_run_ends(deployment):
    """The container with all in it. `docker kill` counts as a person's wish, so a person starts it again."""
    run = deployment.submit(LONG + "num-server-rounds=5")
    deployment.wait_for_round(run, 2)
    wait_until(lambda: at_work(deployment, "client-1"), "a message", pause=0.1)
    deployment.compose("kill", "--signal", "KILL", "server")
    began = time.monotonic()
    deployment.compose("start", "server")
    wait_until(lambda: deployment.healthy("server"), "the server")
    print(f"healthy {time.monotonic() - began:.1f} s after it was killed")
    summary = deployment.summary(run, 240)
    assert summary["rounds"] == 5
    assert deployment.runs()[-1] == run, "it is one run"
    numbers = [line["round"] for line in deployment.rounds(run)]
    # A round that was recorded and not saved is repeated; of its lines the last counts.
    assert sorted(numbers) == numbers and set(numbers) == {1, 2, 3, 4, 5} and len(numbers) <= 6
    assert all(deployment.healthy(client) for client in CLIENTS)
    assert all(deployment.inspect(client)["RestartCount"] <= 1 for client in CLIENTS), "they stay and connect again"


def test_a_server_whose_processes_are_killed_is_started_again_by_itself(deployment):
    before = deployment.inspect("server")["RestartCount"]
    deployment.kill_inside("server")
    wait_until(lambda: deployment.inspect("server")["RestartCount"] > before, "its restart")
    wait_until(lambda: deployment.healthy("server"), "the server")
    wait_until(lambda: all(deployment.healthy(client) for client in CLIENTS), "the clients")


def test_rounds_leave_no_processes_and_no_open_files_behind(deployment):
    """Two runs one after the other; the second must end with what the first ended with."""
    script = "ls -d /proc/[0-9]* | wc -l; ls /proc/[0-9]*/fd 2>/dev/null | wc -l"

    def counted() -> dict[str, list[int]]:
        """The least of several looks: now and then a health check is at work."""
        looks = []
        for _ in range(5):
            time.sleep(1)
            counts = {service: deployment.exec(service, "sh", "-c", script).split() for service in SERVICES}
            looks.append({service: [int(n) for n in numbers] for service, numbers in counts.items()})
        return {service: [*map(min, *(look[service] for look in looks))] for service in SERVICES}

    def after_a_run() -> dict[str, list[int]]:
        short = 'strategy="fedavg" dataset="local" image-shape="1x8x8" classes=10 min-clients=3 local-steps=1 '
        deployment.summary(deployment.submit(short + "num-server-rounds=4"))
        time.sleep(3)
        return counted()

    first, second = after_a_run(), after_a_run()
    print(first, second)
    for service in SERVICES:
        (processes, files), (processes_later, files_later) = first[service], second[service]
        assert processes_later <= processes + 1 and files_later <= files + 20


def test_a_site_is_revoked_and_all_credentials_are_made_anew(deployment):
    """As docs/operations.md says: the volumes keep what was computed, and everybody has a new key."""

    def provision(*command: str) -> str:
        return deployment.compose("run", "--rm", "provision", *command)

    def registered(names: str) -> bool:
        return f"registered: {names}" in deployment.exec("server", "tepal", "server", "status", check=False)

    key, runs = deployment.exec("client-1", "cat", "/app/site/node.key"), deployment.runs()
    assert "more days" in provision("tepal", "provision", "list", "/app/provision")
    provision("tepal", "provision", "revoke", "/app/provision", "site-3")
    wait_until(lambda: registered("site-1, site-2\n"), "the revocation")
    provision("rm", "/app/provision/ca/complete")
    deployment.compose("down")
    deployment.up()
    assert registered("site-1, site-2, site-3") and deployment.runs() == runs
    assert deployment.exec("client-1", "cat", "/app/site/node.key") != key


def test_everything_goes_when_it_is_taken_down(images):
    """Containers that run once, networks and volumes too."""
    with project("compose.yml", environment={"TEPAL_FLEET_PORT": str(free_port())}) as made:
        made.compose("up", "provision", "data", "--no-build")
    label = f"label=com.docker.compose.project={made.name}"
    for what in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
        assert docker(*what, "--quiet", "--filter", label) == ""
    assert docker("image", "ls", "--quiet", SERVER) and docker("image", "ls", "--quiet", CLIENT)
