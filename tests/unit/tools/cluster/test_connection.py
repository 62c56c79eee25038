"""Addresses of clusters, and what has room on their machines. Without Ray."""

import itertools
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tepal.host.superlink import RunError
from tepal.tools.cli.main import main
from tepal.tools.cluster import connection
from tepal.tools.cluster import inputs as inputs_module
from tepal.tools.cluster.connection import Cluster, Resources, address_of, connected
from tepal.tools.deploy import doctor_cluster
from tepal.tools.deploy.doctor import OK, PROBLEM

# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environment", "address"),
    [
        (None, None, ""),
        (None, "", ""),
        (None, "here:6379", "here:6379"),
        (None, "auto", "auto"),
        (None, "none", ""),
        (None, "local", ""),
        (None, "http://here:8265", ""),  # the dashboard, for `ray job`
        (None, "ray://here:10001", ""),
        ("far:1", "here:6379", "far:1"),
        ("auto", None, "auto"),
        ("none", "here:6379", ""),
    ],
)
def test_the_address_that_is_given_comes_before_that_of_the_environment(monkeypatch, given, environment, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert address_of(given) == address


@pytest.mark.parametrize("given", ["ray://here:10001", "http://here:8265"])
def test_an_address_that_cannot_be_joined_is_refused_with_what_to_do(monkeypatch, given):
    with pytest.raises(ValueError, match=rf"--ray {given}: expected HOST:PORT .*ray start --address"):
        address_of(given)


# --- room -----------------------------------------------------------------------------------------------------------


ONE_CORE = Resources()


def cluster(*nodes, job=ONE_CORE):
    return Cluster("here:1", job, tuple(Resources(*node) for node in nodes), None)


def room(cores, cards, gigabytes, cpus, gpus, memory):
    """Jobs of hundredths of each that fit, placed one by one as Ray does: a share is of one GPU."""
    cores, gigabytes, cpus, gpus, memory = (round(each * 100) for each in (cores, gigabytes, cpus, gpus, memory))
    free = [100] * int(cards)
    for count in itertools.count():
        cores, gigabytes = cores - cpus, gigabytes - memory
        whole = [number for number, left in enumerate(free) if left == 100][: gpus // 100]
        if gpus > 100:
            fits = len(whole) == gpus // 100
            for number in whole if fits else []:
                free[number] = 0
        else:
            chosen = next((number for number, left in enumerate(free) if left >= gpus), None)
            fits = not gpus or chosen is not None
            if gpus and fits:
                free[chosen] -= gpus
        if cores < 0 or gigabytes < 0 or not fits:
            return count


SHARES = st.one_of(st.integers(0, 100).map(lambda share: share / 100), st.integers(1, 3).map(float))


HUNDREDTHS = st.integers(10, 300).map(lambda share: share / 100)
MEMORY = st.one_of(st.just(0.0), HUNDREDTHS)


@given(st.integers(0, 9), st.integers(0, 4), st.integers(0, 20), HUNDREDTHS, SHARES, MEMORY)
def test_as_many_jobs_as_fit(cores, cards, gigabytes, cpus, gpus, memory):
    node, job = (float(cores), float(cards), float(gigabytes)), Resources(cpus, gpus, memory)
    expected = room(cores, cards, gigabytes, cpus, gpus, memory)
    assert cluster(node, job=job).at_once == expected
    assert cluster(node, (0.0, 0.0), node, job=job).at_once == 2 * expected


@pytest.mark.parametrize(
    ("nodes", "job", "line"),
    [
        (((1, 0, 9),), (1,), "1 machine with 1 core; 1 run at once, each with 1 core"),
        (((8, 0), (0, 0)), (2,), "1 machine with 8 cores; 4 runs at once, each with 2 cores"),
        (((8, 2),), (1, 0.4), "1 machine with 8 cores and 2 GPUs; 4 runs at once, each with 1 core and 0.4 GPUs"),
        (((8, 1), (2, 0)), (2, 1), "2 machines with 10 cores and 1 GPU; 1 run at once, each with 2 cores and 1 GPU"),
        (((8, 0, 30.26), (4, 0, 16), (0, 0, 64)), (1, 0, 4.5), "2 machines with 12 cores and 46.3 GB of memory; "
         "9 runs at once, each with 1 core and 4.5 GB of memory"),
        (((8, 2, 64),), (1, 1, 8), "1 machine with 8 cores, 2 GPUs and 64 GB of memory; 2 runs at once, each with "
         "1 core, 1 GPU and 8 GB of memory"),
    ],
)  # fmt: skip
def test_a_cluster_is_described_in_a_line(nodes, job, line):
    found = cluster(*nodes, job=Resources(*job))
    assert found.description == f"Engine: Ray cluster here:1: {line}"
    assert found.description.startswith(f"Engine: Ray cluster {found.contents};")


# --- connecting -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ray(monkeypatch):
    """A module in the place of `ray`, with a cluster of two machines, one of which has died."""
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0, "memory": 8e9}}, {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {}},
    ]  # fmt: skip
    calls = []
    made = SimpleNamespace(
        calls=calls, nodes=lambda: nodes, shutdown=lambda: calls.append("shutdown"),
        init=lambda **options: calls.append(options["address"]),
        cloudpickle=SimpleNamespace(register_pickle_by_value=lambda module: calls.append(module.__name__)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(connection, "find_spec", lambda name: made)
    monkeypatch.setattr(inputs_module, "_code", lambda _copy: {})
    return made


def test_the_connection_ends_with_its_block(ray):
    with connected("auto") as found:
        assert found.nodes == (Resources(4.0, 0.0, 8.0), Resources(0.0, 0.0, 0.0))
        assert found.job == Resources(1.0, 0.0, 0.0) and found.at_once == 4
        assert ray.calls == ["tepal.tools.cluster.machine", "auto"]
    with pytest.raises(KeyError), connected("auto"):
        raise KeyError
    assert ray.calls.count("shutdown") == 2


def test_a_cluster_without_room_for_a_run_is_refused(ray):
    with pytest.raises(RunError, match=r"no machine .* --cpus 5 --gpus 0. The largest have 4 cores"):
        connected("auto", 5).__enter__()
    with pytest.raises(RunError, match=r"--cpus 1 --gpus 0.5"):
        connected("auto", 1, 0.5).__enter__()
    with pytest.raises(RunError, match=r"--cpus 1 --gpus 0 --memory 9. The largest have 4 cores and 8 GB of memory"):
        connected("auto", 1, memory=9).__enter__()
    assert ray.calls.count("shutdown") == 3
    with pytest.raises(RunError, match=r"--gpus 1.5: .* whole number"):
        connected("auto", 1, 1.5).__enter__()
    assert ray.calls.count("shutdown") == 3


@pytest.mark.parametrize(("cpus", "gpus", "option"), [(1.5, 0, "--cpus 1.5"), (1, 2.5, "--gpus 2.5")])
def test_shares_of_several_are_refused(ray, cpus, gpus, option):
    with pytest.raises(RunError, match=f"{option}: .* must be a whole number"):
        connected("auto", cpus, gpus).__enter__()


def test_no_cluster_is_said_in_words(ray, monkeypatch):
    def init(**_options):
        raise ConnectionError("Could not find any running Ray instance.\nMore.")

    ray.init = init
    with pytest.raises(RunError, match=r"no cluster answers there.*\(Could not find any running Ray instance.\)"):
        connected("auto").__enter__()
    with socket.socket() as bound:  # nothing listens
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"--ray {address}: no cluster answers there"):
            connected(address).__enter__()
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'tepal\[ray\]'"):
        connected("auto").__enter__()
    assert "shutdown" not in ray.calls


def test_another_version_than_the_clusters_is_said_with_both(ray):
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.55.1\n    Python: 3.11.8\nThis process was"

    def init(**_options):
        raise RuntimeError(text)

    ray.init = init
    with pytest.raises(RunError, match=r"^--ray auto: Version mismatch: .* Python: 3\.11\.8 This process"):
        connected("auto").__enter__()


class RayError(Exception):
    pass


class AuthenticationError(RayError):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AuthenticationError("no authentication token was found. Ensure this.\nMore."),
         r"--ray auto: .*same token \(no authentication token was found\). .*RAY_AUTH_MODE.*ray get-auth-token"),
        (RayError("The system died.\nMore."), r"--ray auto: no cluster answers there.*\(The system died.\)"),
    ],
)  # fmt: skip
def test_rays_own_errors_are_said_in_words(ray, error, words):
    """They are no RuntimeError."""
    ray.exceptions = SimpleNamespace(RayError=RayError, AuthenticationError=AuthenticationError)

    def init(**_options):
        raise error

    ray.init = init
    with pytest.raises(RunError, match=words):
        connected("auto").__enter__()


def test_a_command_that_its_cluster_takes_for_dead_ends_with_what_to_do(ray):
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "ours")
    ray.nodes = lambda: [
        {"NodeID": "ours", "Alive": alive, "Resources": {}},
        {"NodeID": "other", "Alive": True, "Resources": {"CPU": 1.0}},
    ]  # fmt: skip
    alive = True
    said = r"--ray auto: this machine is no longer a part .* --resume"
    with pytest.raises(RunError, match=said), connected("auto") as found:
        assert found.has_room()
        alive = False
        found.has_room()
    assert found.stopped.is_set() and ray.calls[-1] == "shutdown"


# --- `tepal doctor` -------------------------------------------------------------------------------------------------


def test_the_doctor_names_machines_with_other_versions(ray, monkeypatch):
    ours = {"python": "3.11.7", "torch": "2.9"}
    found = {"a": dict(ours), "b": {"python": "3.11.7", "torch": "missing"}, "c": "it does not answer"}
    monkeypatch.setattr(doctor_cluster.machine, "versions", lambda: ours)
    monkeypatch.setattr(doctor_cluster, "versions_by_machine", lambda: found)
    first, *others = doctor_cluster.check_cluster("auto")
    assert first.state == OK and "1 machine with 4 cores" in first.found
    assert [(each.check, each.state) for each in others] == [("a", OK), ("b", PROBLEM), ("c", PROBLEM)]
    assert "torch missing" in others[1].found and "torch 2.9" in others[1].remedy
    assert "python" not in others[1].remedy and others[2].found == "it does not answer"


def test_machines_need_no_library_that_is_missing_here(ray, monkeypatch):
    ours = {"torch": "2.9", "transformers": "missing"}
    found = {"a": {"torch": "2.9", "transformers": "5.1"}, "b": {"torch": "2.9"}, "c": {"transformers": "5.1"}}
    monkeypatch.setattr(doctor_cluster.machine, "versions", lambda: ours)
    monkeypatch.setattr(doctor_cluster, "versions_by_machine", lambda: found)
    _, *others = doctor_cluster.check_cluster("auto")
    assert [(each.state, each.found) for each in others] == [
        (OK, "torch 2.9"), (OK, "torch 2.9"), (PROBLEM, "torch missing"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "environment", "address"),
    [
        ((), None, None), ((), "far:1", "far:1"), ((), "http://far:8265", None), (("--ray", "none"), "far:1", None),
        (("--ray", "near:2"), "far:1", "near:2"),
    ],
)  # fmt: skip
def test_the_doctor_examines_the_cluster_that_other_commands_use(monkeypatch, options, environment, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    examined = []
    monkeypatch.setattr("tepal.tools.deploy.doctor.examine", lambda **_: [])
    monkeypatch.setattr(doctor_cluster, "check_cluster", lambda of: examined.append(of) or [])
    done = CliRunner().invoke(main, ["doctor", "--json", *options])
    assert done.exit_code == 0 and examined == [address] * (address is not None)


def test_the_doctor_says_that_there_is_no_cluster(ray):
    ray.nodes = lambda: [{"Alive": True, "Resources": {}}]
    (only,) = doctor_cluster.check_cluster("auto")
    assert only.state == PROBLEM and "no machine of this cluster has room" in only.found


def test_jobs_that_wait_at_the_same_time_all_learn_whether_there_is_room(ray, monkeypatch):
    """A look of another thread is waited for, and is not taken for a cluster that does not answer."""
    nodes = ray.nodes

    def slow():
        time.sleep(0.05)
        return nodes()

    monkeypatch.setattr(ray, "nodes", slow)
    with connected("auto", None, None) as found, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: found.has_room(), range(6))) == [True] * 6
