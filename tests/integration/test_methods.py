"""Each method on the loopback from its run config: the server is killed, a node restarted, and the end is the same.

What it must be the same as is the run of the same config in this process, which nothing interrupts.
"""

import json
import random
import time
import tomllib

import numpy as np
import pytest

from tepal.host.superlink import explain
from tepal.models import build
from tepal.models.blocks import find_blocks
from tests.integration.loopback import ROOT, loopback, own_data, pairs
from tests.integration.test_resume import bits, measured, rounds_done, uninterrupted, wait_for_round  # noqa: F401
from tests.lines import read_lines

pytestmark = pytest.mark.deployment

CLIENTS, ROUNDS = 2, 3
SHORT = {
    "num-server-rounds": ROUNDS,
    "min-clients": CLIENTS,
    "optimizer": "sgd",
    "learning-rate": 0.05,
    "local-epochs": 1,
    "deterministic": True,
}
METHODS = {
    "selective": {},
    "fedensemble": {"fedensemble.modes": 2, "fedensemble.member": "fedfrozen", "fedfrozen.warmup-rounds": 1},
    "fedacs": {},
    # What a client has of the model and of the control variate, server and client know after any restart.
    "scaffold": {"wire-dtype": "auto"},
    # What int8 leaves out is kept beside the client's own model, and outlives what that outlives.
    "apfl": {"wire-dtype-down": "bfloat16", "wire-dtype-up": "int8"},
}
FIRST = ("apfl",)
"""Of it the clients have the most to keep. The others take part in `make test-all`; that each is resumed with the same
bits is shown without a deployment by tests/unit/strategies."""
PARAMS = [pytest.param(name, marks=() if name in FIRST else pytest.mark.long) for name in METHODS]


def flat(table: dict, prefix: str = "") -> dict:
    """The flat keys of a TOML table, as Flower reads them."""
    values = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def config_of(name: str) -> dict:
    """The method's run config, shortened."""
    return {**flat(tomllib.loads((ROOT / f"conf/{name}.toml").read_text())), **SHORT, **METHODS[name]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return own_data(tmp_path_factory.mktemp("data"), CLIENTS)


@pytest.fixture(scope="module")
def deployment(data):
    with loopback([f"{pairs(site)} layer-budget=1" for site in data]) as running:
        yield running


@pytest.fixture(scope="module")
def layout():
    return find_blocks(build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=42))


@pytest.fixture(scope="module", params=PARAMS)
def interrupted(request, deployment, tmp_path_factory):
    """(name, run directory) of a run whose ServerApp was killed; node 0 was restarted before it went on."""
    name = request.param
    runs = tmp_path_factory.mktemp(name)
    submitted = deployment.submit(ROOT, {**config_of(name), "runs": str(runs)})
    wait_for_round(runs, 1, lambda: submitted.running)
    time.sleep(random.Random(name).uniform(0, 0.5))
    (server_app,) = deployment.server_apps()
    server_app.kill()
    assert rounds_done(runs) < ROUNDS
    deployment.stop_node(0)
    deployment.start_node(0)
    outcome = deployment.run(ROOT, {"resume": str(runs)})
    assert outcome.status == "completed", explain(outcome.log.read_text(), outcome.details)
    return name, (runs / "latest").resolve()


def test_it_ends_as_in_one_process_without_interruption(interrupted, uninterrupted, data):  # noqa: F811
    name, run = interrupted
    whole = uninterrupted(config_of(name), data)
    assert bits(run) == bits(whole)
    assert measured(run) == measured(whole)
    for record in (whole / "rounds").glob("*.npz"):
        ours, theirs = np.load(run / "rounds" / record.name), np.load(record)
        assert ours.files == theirs.files and "travel_down" in ours.files
        for key in set(ours.files) - {"travel_down"}:  # who was asked again before the crash holds what it was sent
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=f"{record.name} {key}")


def test_what_clients_hold_is_found_again_and_not_sent_twice(interrupted, layout):
    name, run = interrupted
    rounds = {line["round"]: line for line in read_lines(run)}
    full, bytes_of = CLIENTS * layout.layout.nbytes(), layout.layout.nbytes
    # In the round in which the server was killed some parts had been sent before, and are not sent again.
    if name == "selective":
        masks = [np.load(run / "rounds" / f"{number:06d}.npz")["masks"] for number in range(1, ROUNDS + 1)]
        assert all((mask.sum(axis=1) == 1).all() for mask in masks), "the budget that the nodes declare"
        for number, mask in enumerate(masks, 1):
            trained = [sum(bytes_of(layer) for layer, on in zip(layout.layers, row, strict=True) if on) for row in mask]
            assert rounds[number]["bytes_up"] == sum(trained) + CLIENTS * bytes_of(layout.head)
        assert rounds[1]["bytes_down"] == full
        for number in (2, 3):
            changed = [layer for layer, on in zip(layout.layers, masks[number - 2].any(axis=0), strict=True) if on]
            new = CLIENTS * (sum(map(bytes_of, changed)) + bytes_of(layout.head))
            last = [layer for layer, on in zip(layout.layers, masks[2].any(axis=0), strict=True) if on]
            scored = CLIENTS * (sum(map(bytes_of, last)) + bytes_of(layout.head)) if number == ROUNDS else 0
            assert rounds[number]["bytes_down"] <= new + scored
    elif name == "fedensemble":
        state = json.loads((run / "checkpoint" / "round-000003" / "checkpoint.json").read_text())["facts"]["state"]
        assert state["type"].endswith(":EnsembleState")
        modes = [np.load(run / "rounds" / f"{number:06d}.npz")["modes"] for number in range(1, ROUNDS + 1)]
        assert all(sorted(together) == [0, 1] for together in zip(modes[0], modes[1], strict=True)), "one age"
        # In round 3 both modes are frozen, and every client has had its mode before, with Q and K of then or later.
        assert rounds[3]["bytes_up"] == CLIENTS * bytes_of(layout.value)
        assert rounds[1]["bytes_down"] == full
    elif name == "scaffold":
        assert all(rounds[number]["bytes_up"] < 0.1 * 2 * full for number in (1, 2, 3)), "a variate beside each model"
        for number, scored in ((2, 0), (3, full / 7)):  # the result is sent in int4, with scales
            assert rounds[number]["bytes_down"] < 0.1 * 2 * full + scored, "changes, and nothing twice"
        assert not any(line["notes"] for line in rounds.values()), "the variate outlived node and server"
    elif name == "apfl":
        entries = layout.layout.entries
        in_int8 = [e.size + 4 * e.shape[0] if len(e.shape) > 1 else e.nbytes for e in entries]
        assert all(rounds[number]["bytes_up"] == CLIENTS * sum(in_int8) < 0.3 * full for number in (1, 2, 3))
        assert rounds[ROUNDS]["accuracy_of"] == "personal" and not any(line["notes"] for line in rounds.values())
    else:
        # The clients score the models that they returned, which they kept: nothing goes down for it.
        assert rounds[ROUNDS]["bytes_down"] <= full and rounds[ROUNDS]["bytes_up"] == full
        assert rounds[ROUNDS]["clients_accuracy"] is not None
