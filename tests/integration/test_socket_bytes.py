"""What passes through the socket between SuperNode and SuperLink, beside what the run says it moved."""

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tepal.host.superlink import explain
from tests.integration.loopback import loopback

pytestmark = pytest.mark.deployment

APP = Path(__file__).parent / "large_app"
ENTRIES = 100
SIZES = {"10 MB": 25_000, "a thirtieth": 833}
"""Float32 numbers of an entry."""
LARGE = 100_000  # bytes of a burst that carries part of a model, and not polls alone


@pytest.fixture(scope="module", params=["warm", pytest.param("stock", marks=pytest.mark.long)])
def exchanges(request, tmp_path_factory):
    """Size → the rounds' figures: bytes up and down, and the seconds they took to pass; and idle bytes a second.

    With TLS and a registered key. A round is what passes from the end of the one before to its own end; in the first
    one the app's bundle passes as well, so it is left out.
    """
    with loopback(["name=0"], secure=True, relay=True, warm=request.param == "warm") as running:
        (relay,) = running.relays
        begun = time.monotonic()
        time.sleep(10 if request.param == "stock" else 3)  # several polls
        seconds = time.monotonic() - begun
        idle = dict(zip(("up", "down"), [moved / seconds for moved in relay.moved(begun)], strict=True))
        return {
            label: _rounds_of(running, relay, size, idle, tmp_path_factory.mktemp("large") / "rounds.jsonl")
            for label, size in SIZES.items()
        }


def _rounds_of(running, relay, size, idle, results):
    outcome = running.run(APP, {"results": str(results), "rounds": 4, "size": size})
    assert outcome.status == "completed", explain(outcome.log.read_text(), outcome.details)
    rounds = [json.loads(line) for line in results.read_text().splitlines()]
    bursts = {way: [b for b in relay.bursts(way) if b[2] > LARGE] for way in ("up", "down")}
    return [
        {
            **this,
            "since": before["ended"],
            "moved": dict(zip(("up", "down"), relay.moved(before["ended"], this["ended"]), strict=True)),
            "passing": {
                # By its beginning: the polls that follow at once may make it last beyond the round.
                way: sum(end - start for start, end, _ in bursts[way] if before["ended"] < start <= this["ended"])
                for way in bursts
            },
            "idle": idle,
        }
        for before, this in pairwise(rounds)
    ]


@pytest.mark.parametrize(
    ("size", "way", "most"),
    [("10 MB", "down", 1.01), ("10 MB", "up", 1.01), ("a thirtieth", "down", 1.02), ("a thirtieth", "up", 1.06)],
)
def test_the_socket_carries_hardly_more_than_the_payload(exchanges, size, way, most):
    """A model in 100 entries; the node's idle polls, which pass whether there is a model or not, counted apart.

    Of a node's answer each of Flower's requests has a key and a signature, some 700 bytes: of a thirtieth of the model
    that is more than everything else. There the round counts in which it polled least while it waited for the server.
    """
    ratios = []
    for this in exchanges[size]:
        polls = this["idle"][way] * (this["ended"] - this["since"])
        ratios.append((this["moved"][way] - polls) / this[way])
        print(f"round {this['round']} {way}: {this['moved'][way]} bytes, {polls:.0f} of polls, ratio {ratios[-1]:.5f}")
        assert this[way] == ENTRIES * SIZES[size] * 4
    counted = [min(ratios)] if size == "a thirtieth" else ratios
    assert min(ratios) >= 1 and max(counted) <= most


@pytest.mark.long
@pytest.mark.parametrize("exchanges", ["stock"], indirect=True)
def test_an_exchange_takes_less_than_a_second_without_flowers_waits(exchanges):
    """Both transfers, and what both sides of the exchange do before and after them. Not in it: starting a process for
    every message, polls, and what passes between processes of one machine."""
    seconds = []
    for this in exchanges["10 MB"]:
        parts = {**this["passing"], "client": this["client_seconds"], "server": this["server_seconds"]}
        seconds.append(sum(parts.values()))
        print(f"round {this['round']}: " + ", ".join(f"{name} {value:.3f} s" for name, value in parts.items()))
        assert parts["up"] > 0 and parts["down"] > 0
    assert median(seconds) <= 1.0
