"""What real clients and machines do, on a real SuperLink and SuperNodes: each costs only its own part of a round.

Two runs of one app show it, on the same nodes; the tests look at what was left of them. In the first, no deadline
matters: replies are bad, processes die, a network is cut, disks are full. In the second, clients are slow.
"""

import importlib.util
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tepal.host.superlink import explain
from tests.integration.loopback import Loopback, Submitted, loopback
from tests.integration.relay import Relay

pytestmark = pytest.mark.deployment

APP = Path(__file__).parent / "faulty_app"
SITES = [f"site-{k}" for k in range(6)]
CUT, LONG_CUT = 5.0, 30.0  # seconds without network

FAULTS = {
    "site-1": {"1": "nan", "2": "die"},
    "site-2": {"1": "shape", "2": "sleep:20"},  # time to kill its node in
    "site-3": {"1": "foreign"},
    "site-4": {"1": "raise"},
}


def task():
    """The app's own module: what its clients do with arrays, for the test to do it again."""
    spec = importlib.util.spec_from_file_location("faulty_task", APP / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TASK = task()
PHI = sum(TASK.initial()[name].nbytes for name in TASK.QUERY_KEY)
THETA = sum(TASK.initial()[name].nbytes for name in TASK.VALUE)

# A tmpfs that only the process and its children see, and that ends with them.
SMALL_DISK = (
    "unshare", "--map-root-user", "--mount",
    "sh", "-c", 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"', "sh",
)  # fmt: skip


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL_DISK, "64k", "/mnt", "true"], capture_output=True).returncode == 0


@dataclass
class Told:
    """What is left of a run."""

    log: str
    rounds: dict[int, dict]
    model: dict[str, np.ndarray]


def wait_for(condition: Callable[[], object], what: str, submitted: Submitted, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert submitted.running, f"{what} did not happen, and the run has ended\n{submitted.log_text()[-3000:]}"
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.05)


def rounds_of(results: Path) -> dict[int, dict]:
    path = results.with_suffix(".jsonl")
    return {line["round"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def told(running, results: Path, submitted) -> Told:
    outcome = submitted.wait(600)
    log = outcome.log.read_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    with np.load(results.with_suffix(".npz")) as model:
        return Told(log, rounds_of(results), dict(model))


def predicted(rounds: dict[int, dict]) -> dict[str, np.ndarray]:
    """The model that the replies which counted make, by the rules: a mean weighted with examples, round by round."""
    model = TASK.initial()
    for number in sorted(rounds):
        trains = TASK.QUERY_KEY + TASK.VALUE if number == 1 else TASK.VALUE
        replies = [TASK.trained(client, number, model, trains) for client in rounds[number]["replied"]]
        total = sum(examples for _, examples in replies)
        for name in trains:
            mean = sum(np.asarray(arrays[name], np.float64) * examples for arrays, examples in replies) / total
            model[name] = np.rint(mean).astype(np.int64) if name == "steps" else mean.astype(np.float32)
    return model


def assert_is_predicted(run: Told) -> None:
    expected = predicted(run.rounds)
    assert run.model.keys() == expected.keys()
    for name, array in run.model.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)


def throttled(relay: Relay) -> int:
    """Slow a client's network down, so that its reply takes two seconds; return the bytes that it has sent before."""
    relay.throttle(32_000)
    return relay.up


def cut_in_mid_upload(relay: Relay, sent: int, seconds: float, submitted: Submitted) -> threading.Timer:
    """Cut a network while a reply is on its way; what is returned mends it in so many seconds."""
    wait_for(lambda: relay.up - sent > 20_000, "an upload", submitted)
    relay.cut()
    mend = threading.Timer(seconds, lambda: (relay.mend(), relay.throttle(None)))
    mend.start()
    return mend


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Loopback]:
    disk = tmp_path_factory.mktemp("disk")
    (disk / "client").mkdir()
    (disk / "server").mkdir()
    inside = {}
    if may_mount():
        inside = {
            "node-5": (*SMALL_DISK, "48k", str(disk / "client")),  # one block of the model has 64 kB
            # The first state of a run and a checkpoint of it have some 130 kB each.
            "superlink": (*SMALL_DISK, "200k", str(disk / "server")),
        }
    configs = [f'name="{name}"' for name in SITES]
    configs[5] += f' cache-path="{disk / "client"}"'
    with loopback(configs, relay=True, inside=inside, spare=True, short_heartbeat=True) as running:
        running.small_disks = disk if inside else None
        yield running


@pytest.fixture(scope="module")
def faulty(deployment, tmp_path_factory) -> Told:
    """Three rounds. In the second one a ClientApp dies, a node is killed and restarted, and a network is cut."""
    results = tmp_path_factory.mktemp("faulty") / "run"
    checkpoints = str(deployment.small_disks / "server" / "checkpoint") if deployment.small_disks else ""
    config = {
        "results": str(results), "clients": len(SITES), "rounds": 3, "faults": json.dumps(FAULTS),
        "checkpoints": checkpoints,
    }  # fmt: skip
    submitted = deployment.submit(APP, config)
    try:
        wait_for(lambda: 1 in rounds_of(results), "round 1", submitted)
        sent = throttled(deployment.relays[3])

        def kept(k: int) -> list[Path]:
            return list(deployment.cache(k).glob("*/content/*.safetensors"))

        # A node goes down while its client trains; what it has received for good lies in its cache by then.
        wait_for(lambda: kept(2) and deployment.client_apps(2), "training on node 2", submitted)
        deployment.kill_node(2)
        mend = cut_in_mid_upload(deployment.relays[3], sent, CUT, submitted)
        # A file goes bad on the disk of a client that has answered.
        wait_for(lambda: kept(4), "what node 4 keeps", submitted)
        (file,) = kept(4)
        content = bytearray(file.read_bytes())
        content[-1000] ^= 1
        file.write_bytes(bytes(content))
        deployment.start_node(2)
        mend.join()
    finally:
        deployment.relays[3].mend()
        deployment.relays[3].throttle(None)
    run = told(deployment, results, submitted)
    print(f"with faults: seconds of each round {[round(line['seconds'], 1) for line in run.rounds.values()]}")
    return run


def test_the_model_is_the_one_of_the_replies_that_counted(faulty):
    assert [sorted(faulty.rounds[number]["replied"]) for number in (1, 2, 3)] == [
        ["site-0", "site-5"], ["site-0", "site-3", "site-4", "site-5"], SITES,
    ]  # fmt: skip
    assert_is_predicted(faulty)


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        ("site-1", "entry 'head' has values that are NaN or infinite"),
        ("site-2", "its arrays are not the requested entries, with their shapes and dtypes, in their order"),
        ("site-3", "its arrays are not the requested entries, with their shapes and dtypes, in their order"),
    ],
)
def test_a_bad_reply_is_refused_alone_with_its_reason(faulty, client, reason):
    assert [client, reason] in faulty.rounds[1]["refused"]
    assert f"{client} is refused in round 1: {reason}" in faulty.log


def test_an_app_that_raises_costs_its_client_the_round(faulty):
    ((client, reason),) = faulty.rounds[1]["lost"]
    assert client == "site-4" and "no memory left on this device" in reason
    assert "site-4 is lost in round 1: error 2: " in faulty.log


def test_a_client_app_that_is_killed_costs_its_client_the_round(faulty):
    assert "site-1" in dict(faulty.rounds[2]["lost"])
    assert "site-1 is lost in round 2: error 8: " in faulty.log


def test_a_node_that_is_killed_finds_what_it_held_when_it_is_started_again(faulty):
    assert "site-2" in dict(faulty.rounds[2]["lost"])
    assert "site-2 is lost in round 2: error 5: " in faulty.log
    assert "site-2 is back, as node " in faulty.log
    assert "site-2" in faulty.rounds[3]["replied"]


def test_a_network_cut_in_mid_upload_costs_nothing_but_time(faulty):
    assert "site-3" in faulty.rounds[2]["replied"]
    assert faulty.rounds[2]["seconds"] > CUT


@pytest.mark.long
def test_nor_does_one_that_is_gone_for_half_a_minute(tmp_path):
    results = tmp_path / "run"
    with loopback([f'name="{name}"' for name in SITES[:2]], relay=True) as running:
        submitted = running.submit(APP, {"results": str(results), "clients": 2, "rounds": 2, "faults": "{}"})
        wait_for(lambda: 1 in rounds_of(results), "round 1", submitted)
        sent = throttled(running.relays[1])
        cut_in_mid_upload(running.relays[1], sent, LONG_CUT, submitted).join()
        run = told(running, results, submitted)
    assert [sorted(run.rounds[number]["replied"]) for number in (1, 2)] == [SITES[:2], SITES[:2]]
    assert run.rounds[2]["seconds"] > LONG_CUT
    assert_is_predicted(run)


def test_a_damaged_cache_is_healed_by_a_resend_in_the_same_round(faulty):
    note = "block 'query_key' is removed from the cache"
    assert any(who == "site-4" and note in text for who, text in faulty.rounds[3]["notes"])
    assert faulty.rounds[3]["resent"] == 1 and "site-4 lacks entries in round 3; they are sent again." in faulty.log


def test_what_clients_hold_is_not_sent_again(faulty, deployment):
    """In round 3 the frozen block goes to site-4, whose file is damaged; to site-5, whose disk is full; and to site-1,
    which could not say in round 2 what it keeps. Not to site-2, which said so when it was back."""
    full_disk = 1 if deployment.small_disks else 0
    assert faulty.rounds[3]["down"]["payload"] == len(SITES) * THETA + (2 + full_disk) * PHI


def test_a_full_disk_at_a_client_is_said_and_costs_only_bytes(faulty, deployment):
    if not deployment.small_disks:
        pytest.skip("no right to mount a small disk")
    for number in (2, 3):
        notes = [note for who, note in faulty.rounds[number]["notes"] if who == "site-5"]
        assert len(notes) == 1 and "block 'query_key' cannot be cached" in notes[0] and "No space left" in notes[0]
        assert f"site-5 reports in round {number}: {notes[0]}" in faulty.log


def test_a_full_disk_at_checkpoint_time_is_said_and_the_run_goes_on(faulty, deployment):
    if not deployment.small_disks:
        pytest.skip("no right to mount a small disk")
    assert "no checkpoint of round 1 could be written: " in faulty.log
    assert "The run continues; if it is killed now" in faulty.log
    assert ["server", "No space left" in faulty.rounds[2]["notes"][0][1]] == [faulty.rounds[2]["notes"][0][0], True]


# Slow clients ---------------------------------------------------------------------------------------------------------

DEADLINE = 10.0  # the nodes have a process ready for the run


@pytest.fixture(scope="module")
def slow(deployment, faulty, tmp_path_factory) -> Told:
    """Two rounds with a deadline. One client needs ten times as long, and one is late by a few seconds."""
    results = tmp_path_factory.mktemp("slow") / "run"
    faults = {"site-1": {"1": f"sleep:{10 * DEADLINE}"}, "site-2": {"1": f"sleep:{DEADLINE + 2}"}}
    config = {"results": str(results), "clients": 4, "rounds": 2, "timeout": DEADLINE, "faults": json.dumps(faults)}
    return told(deployment, results, deployment.submit(APP, config))


def test_a_round_ends_at_its_deadline(slow):
    first = slow.rounds[1]
    assert {client for client, _ in first["lost"]} == {"site-1", "site-2"}
    assert f"site-1 is lost in round 1: it did not answer within {DEADLINE:g} s" in slow.log
    assert first["seconds_train"] >= DEADLINE
    assert "site-1" in dict(slow.rounds[2]["lost"]), "it is busy with round 1"


def test_a_late_reply_is_recognised_and_dropped(slow):
    assert ["site-2", 1] in slow.rounds[2]["late"]
    assert "site-2 answered round 1 too late; its reply is dropped." in slow.log


def test_the_model_has_nothing_of_who_was_late(slow):
    assert_is_predicted(slow)
    assert "site-2" not in slow.rounds[1]["replied"] and "site-0" in slow.rounds[1]["replied"]
