"""The warm node beside a real SuperLink, with TLS and registered keys: what dies, what is stopped, what is wrong.

One run, whose server asks what the tests have it ask: see node_app.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tepal.client_app.node.service import Control
from tepal.host.superlink import CONNECTION
from tests.integration.credentials import authority, node_key
from tests.integration.loopback import Loopback, loopback

pytestmark = pytest.mark.deployment

APP = Path(__file__).parent / "node_app"

# A tmpfs that only the process and its children see, and that ends with them.
SMALL_DISK = (
    "unshare", "--map-root-user", "--mount",
    "sh", "-c", 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"', "sh",
)  # fmt: skip


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL_DISK, "64k", "/mnt", "true"], capture_output=True).returncode == 0


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.05)


class Chat:
    """What the run's server asks its clients, and what they answer."""

    def __init__(self, running: Loopback, folder: Path, app: Path = APP, size: int = 100) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self.submitted = running.submit(app, {"folder": str(folder), "size": size})

    def ask(self, **todo: str) -> Callable[..., dict]:
        """Ask clients (site_0="sleep:3", …); return what waits for their answers."""
        number = next(self._numbers)
        part = self.folder / "todo"
        part.write_text(json.dumps({name.replace("_", "-"): do for name, do in todo.items()}))
        part.rename(self.folder / f"{number}.todo")

        def answers(seconds: float = 60) -> dict:
            done = self.folder / f"{number}.json"
            wait_for(lambda: done.exists() or not self.submitted.running, f"round {number} with {todo}", seconds)
            assert done.exists(), self.submitted.log_text()
            return json.loads(done.read_text())

        return answers

    def close(self) -> None:
        """Let the run end."""
        self.ask()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Loopback]:
    inside = {}
    if may_mount():
        disk = tmp_path_factory.mktemp("disk")
        inside["node-2"] = (*SMALL_DISK, "16k", str(disk), "env", f"TEPAL_NODE_STATE={disk}")
    sites = [f'name="site-{k}"' for k in range(3)]
    # Looked at are its processes, one by one: none is a fork.
    real = {"spare": True, "short_heartbeat": True, "forked": False}
    with loopback(sites, secure=True, relay=True, inside=inside, **real) as running:
        running.small_disk = bool(inside)
        # It takes some 20 s until the SuperLink takes the key of a SuperNode that was killed; a later test looks at it.
        running.killed = pids(running, 1)["supernode"]
        os.kill(running.killed, signal.SIGKILL)
        yield running


@pytest.fixture(scope="module")
def chat(deployment, tmp_path_factory) -> Chat:
    return Chat(deployment, tmp_path_factory.mktemp("chat"))


def in_hand(running: Loopback, k: int, chat: Chat, do: str) -> Callable[..., dict]:
    """Ask client k, and return what waits for its answer when its app has the message."""
    begun = chat.folder / "begun"
    begun.unlink(missing_ok=True)
    answers = chat.ask(**{f"site_{k}": do})
    wait_for(begun.exists, f"a message in hand of node {k}")
    assert running.control(k).status().message_type
    return answers


def pids(running: Loopback, k: int) -> dict[str, int]:
    return {process.role: process.pid for process in running.control(k).status().processes}


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def log_of(running: Loopback, k: int) -> str:
    return (running.folder / f"node-{k}.log").read_text()


def connected(running: Loopback, k: int) -> bool:
    with contextlib.suppress(ConnectionError):
        return running.control(k).status().state == "connected"
    return False


def test_a_node_says_who_it_is_and_that_it_is_well(deployment, chat):
    (first,) = chat.ask(site_0="")().values()
    (second,) = chat.ask(site_0="")().values()
    assert (second["pid"], second["count"], second["shape"]) == (first["pid"], first["count"] + 1, [100])
    control = deployment.control(0)
    status = control.status()
    assert (status.state, status.problem) == ("connected", "")
    assert status.superlink == deployment.relays[0].address
    assert status.node_id == deployment.node_ids[0] and status.answered >= 2
    roles = {process.role: process for process in status.processes}
    assert roles["executor"].pid == first["pid"] and roles["executor"].run_id == chat.submitted.run_id
    assert control.healthy()


def test_an_executor_that_is_killed_in_mid_message_costs_its_client_the_round_at_once(deployment, chat):
    answers = in_hand(deployment, 0, chat, "sleep:30")
    killed = time.time()
    os.kill(pids(deployment, 0)["executor"], signal.SIGKILL)
    answer = answers()["site-0"]
    assert answer["code"] == 8 and "process was killed (SIGKILL)" in answer["reason"]
    assert answer["at"] - killed < 20  # not the thirty that the app would have slept
    assert chat.ask(site_0="")()["site-0"]["count"] == 1


def test_a_message_in_hand_is_answered_when_its_node_is_stopped(deployment, chat):
    answers = in_hand(deployment, 0, chat, "sleep:3")
    node, started = deployment.nodes[0], pids(deployment, 0)
    os.kill(node.pid, signal.SIGTERM)
    assert node.wait(60) == 0
    assert answers()["site-0"]["who"] == "first"
    assert not any(alive(pid) for pid in started.values())
    deployment.start_node(0)
    assert "after its current message" in log_of(deployment, 0)


def test_who_stops_a_node_twice_does_not_wait(deployment, chat):
    """But for the word that says so, which takes two seconds on a slow line."""
    answers = in_hand(deployment, 0, chat, "sleep:60")
    node, relay = deployment.nodes[0], deployment.relays[0]
    said = lambda: log_of(deployment, 0).count("after its current message")  # noqa: E731
    before = said()
    try:
        relay.throttle(8_000)
        os.kill(node.pid, signal.SIGTERM)
        wait_for(lambda: said() > before, "its word that it is stopping")
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(40) == 0  # not the sixty that the app would have slept
        answer = answers(30)["site-0"]
        assert answer["code"] == 8 and "this node is being stopped" in answer["reason"]
    finally:
        relay.throttle(None)
        deployment.start_node(0)


def test_a_message_beyond_the_grace_is_handed_back_with_words(deployment, chat):
    node = deployment.nodes[0]
    os.kill(node.pid, signal.SIGTERM)
    assert node.wait(45) == 0
    node = deployment.start("node-0", *deployment._nodes[0].command, "--grace", "1")
    try:
        wait_for(lambda: connected(deployment, 0), "node 0")
        answers = in_hand(deployment, 0, chat, "sleep:60")
        asked = time.time()
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(45) == 0
        answer = answers()["site-0"]
        assert answer["code"] == 8 and "is being stopped, and the app has not answered within 1 s" in answer["reason"]
        assert answer["at"] - asked < 45
    finally:
        deployment.start_node(0)


def test_a_node_that_is_drained_finishes_its_message_and_comes_back_when_asked(deployment, chat):
    control = deployment.control(0)
    answers = in_hand(deployment, 0, chat, "sleep:2")
    try:
        assert control.drain(wait=0.1).state == "draining"
        wait_for(lambda: not control.healthy(), "bad health", 30)
        answer = answers()["site-0"]
        assert answer.get("who") == "first", answer
        wait_for(lambda: control.status().state == "drained", "the end of draining", 45)
        assert not control.healthy()
        assert "supernode" not in pids(deployment, 0)
        waiting = chat.ask(site_0="")
    finally:
        assert control.drain(undo=True, wait=30).state == "connected"
    wait_for(control.healthy, "health", 30)
    assert waiting()["site-0"]["who"] == "first"


def test_what_an_app_raises_is_reported_as_flower_does(deployment, chat):
    answer = chat.ask(site_0="raise")()["site-0"]
    assert (answer["code"], answer["reason"]) == (2, "<class 'ZeroDivisionError'>:<'division by zero'>")


def test_a_full_disk_costs_its_client_the_round_and_is_said(deployment, chat):
    if not deployment.small_disk:
        pytest.skip("no right to mount a small disk")
    answers = chat.ask(site_2="", site_0="")()
    assert answers["site-2"]["code"] in (1, 8) and answers["site-0"]["who"] == "first"
    assert "No space left on device" in log_of(deployment, 2)
    status = deployment.control(2).status()
    assert status.state == "connected" and status.failed == 1


def test_the_server_is_told_of_a_clients_full_disk(deployment, chat):
    if not deployment.small_disk:
        pytest.fail("no right to mount a small disk")
    assert "No space left on device" in chat.ask(site_2="")()["site-2"]["reason"]


def resources(running: Loopback, k: int) -> dict[str, tuple[int, int]]:
    """Role → (open files, bytes of memory) of each process of node k."""
    found = {}
    for role, pid in pids(running, k).items():
        process = psutil.Process(pid)
        found[role] = (process.num_fds(), process.memory_info().rss)
    return found


@pytest.mark.long
def test_a_hundred_exchanges_leave_nothing_behind(deployment, chat):
    def temporary() -> int:
        return sum(1 for _ in (deployment.folder / "node-0" / "state").glob("tepal-node-*/**/*"))

    for _ in range(15):
        chat.ask(site_0="")()
    before, files = resources(deployment, 0), temporary()
    began = time.monotonic()
    for _ in range(100):
        chat.ask(site_0="")()
    print(f"100 exchanges: {time.monotonic() - began:.1f} s")
    after = resources(deployment, 0)
    print({role: (before[role], after[role]) for role in before})
    assert after.keys() == before.keys()
    assert 0 < temporary() <= files + 2
    for role in before:
        assert after[role][0] <= before[role][0] + 3, f"open files of the {role}"
        assert after[role][1] <= before[role][1] + 12 * 2**20, f"memory of the {role}"


def test_the_next_run_has_its_own_code_and_model_under_the_same_names(deployment, chat, tmp_path, tmp_path_factory):
    """While the first one goes on."""
    app = tmp_path / "node-app"
    shutil.copytree(APP, app)
    (app / "helper.py").write_text('WHO = "second"\n')
    (tmp_path / "chat").mkdir()
    second = Chat(deployment, tmp_path / "chat", app, size=7)
    (theirs,) = second.ask(site_0="")().values()
    (ours,) = chat.ask(site_0="")().values()
    assert (theirs["who"], theirs["shape"]) == ("second", [7])
    assert (ours["who"], ours["shape"]) == ("first", [100])
    assert theirs["pid"] != ours["pid"] and theirs["count"] == ours["count"] == 1
    second.close()


def test_a_supernode_that_is_killed_is_started_again_and_takes_part(deployment, chat):
    status = deployment.control(1).status()
    assert status.supernodes_died >= 1 and deployment.killed not in pids(deployment, 1).values()
    wait_for(lambda: connected(deployment, 1), "the new SuperNode's connection", 120)
    assert chat.ask(site_1="")(60)["site-1"]["who"] == "first"


def test_what_a_node_started_dies_with_it_and_its_key_is_taken_again(deployment, chat):
    chat.ask(site_1="")()
    started = pids(deployment, 1)
    os.kill(deployment.nodes[1].pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in started.values()), "the end of its processes", 45)
    # At once when its SuperNode has said goodbye in time; a SuperLink that heard nothing waits for a minute.
    deployment.start_node(1, timeout=120)
    assert chat.ask(site_1="")()["site-1"]["count"] == 1


# What keeps a node out ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def other_node(running: Loopback, name: str, *options: str, **environment: str) -> Iterator[Control]:
    """A node of its own beside the deployment's; its log is `name`.log."""
    address = f"unix:{running.folder}/{name}.sock"
    command = [sys.executable, "-m", "tepal.tools.cli.main", "node", "--superlink", running.fleet, *options]
    settings = [f"{key}={value}" for key, value in environment.items()]
    process = running.start(name, "env", *settings, *command, "--control", address, "--no-spare")
    yield Control(address)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0


def problem(control: Control) -> str:
    with contextlib.suppress(ConnectionError):
        return control.status().problem
    return ""


def test_who_is_not_let_in_is_told_why(deployment, tmp_path):
    """A key that nobody knows, an authority that is another, and a clock that is wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import datetime\n"
        "try:\n"
        "    import flwr.client.grpc_rere_client.node_auth_client_interceptor as interceptor\n"
        "    right = interceptor.now\n"
        "    interceptor.now = lambda: right() - datetime.timedelta(seconds=400)\n"
        "except ImportError:\n"
        "    pass\n"
    )
    known = node_key(tmp_path, "late")
    deployment.flwr("supernode", "register", f"{known}.pub", CONNECTION, "--name", "late")
    trusted = ("--root-certificates", str(deployment.root_certificates))
    other = ("--root-certificates", str(authority(tmp_path, "other").certificate))
    path = os.pathsep.join([str(tmp_path), str(APP.parents[2])])
    with (
        other_node(deployment, "late", *trusted, "--key", str(known), PYTHONPATH=path) as late,
        other_node(deployment, "unknown", *trusted, "--key", str(node_key(tmp_path, "unknown"))) as unknown,
        other_node(deployment, "astray", *other, "--key", str(known)) as astray,
    ):
        words = {
            "late": (late, "does not accept the time of this machine"),
            "unknown": (unknown, "does not know this node's key"),
            "astray": (astray, "TLS"),
        }
        missing = []
        for name, (control, word) in words.items():
            try:
                wait_for(lambda control=control, word=word: word in problem(control), name, 90)
                assert not control.healthy()
                if name != "astray":
                    assert control.status().state == "refused"
                    assert word in (deployment.folder / f"{name}.log").read_text()
            except AssertionError as error:
                missing.append((name, str(error), problem(control), control.status().state))
        assert not missing


# The SuperLink goes ---------------------------------------------------------------------------------------------------


def test_a_node_is_not_healthy_without_its_superlink_and_is_when_it_is_back(deployment, tmp_path):
    control = deployment.control(0)
    assert control.healthy()
    deployment.kill_superlink()
    wait_for(lambda: not control.healthy(), "bad health", 30)
    assert f"the SuperLink at {deployment.relays[0].address} does not answer" in control.status().problem
    deployment.start_superlink()
    wait_for(control.healthy, "good health", 90)
    (tmp_path / "chat").mkdir()
    after = Chat(deployment, tmp_path / "chat")
    assert after.ask(site_0="")()["site-0"]["who"] == "first"
    after.close()


def test_a_node_without_superlink_can_be_drained(deployment):
    """There is no message in hand, so there is nothing to wait for."""
    wait_for(lambda: connected(deployment, 2), "node 2", 90)
    deployment.kill_superlink()
    wait_for(lambda: not connected(deployment, 2), "notice", 30)
    assert deployment.control(2).drain(wait=8).state == "drained"


def test_a_node_without_superlink_leaves_nothing_when_it_is_stopped(deployment):
    """The SuperNode would like to say goodbye, and there is nobody."""
    ends(deployment, 2, signal.SIGTERM)


def test_a_node_without_superlink_leaves_nothing_when_it_is_killed(deployment):
    ends(deployment, 0, signal.SIGKILL)


def ends(running: Loopback, k: int, number: signal.Signals) -> None:
    """Send a signal to node k; all its processes must be gone soon after it."""
    started = pids(running, k)
    left = lambda: {role: pid for role, pid in started.items() if alive(pid)}  # noqa: E731
    os.kill(started["node"], number)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left(), "the end of all")
    assert left() == {}
