"""Every strategy that a run config can name, two rounds on the digits with the project's own app, in this process."""

import json

import numpy as np
import pytest

from tepal.client_app.app import app
from tepal.host.toml import parse_run_config
from tepal.records.run_directory import read_records
from tepal.server_app.config import defaults, read_run_config
from tepal.server_app.run import build_model, build_strategy, run
from tepal.strategies import STRATEGIES
from tepal.strategies.in_process import InProcessGrid, Node
from tests.lines import read_lines
from tests.packages import ROOT
from tests.quiet import quiet  # noqa: F401

CLIENTS, ROUNDS = 3, 2
CONFIG = {
    "dataset": "digits", "model": "tiny-vit", "num-server-rounds": ROUNDS, "min-clients": CLIENTS, "local-steps": 2,
    "optimizer": "sgd", "learning-rate": 0.05, "weight-decay": 0.0, "schedule": "constant", "deterministic": True,
    "fedfrozen.warmup-rounds": 1, "fedensemble.modes": 2, "pfedme.lambda": 1.0, "server-share": 0.05,
    "fedacs.quantile": 0.1, "fedadagrad.learning-rate": 0.01,
}  # fmt: skip


ENCODED = {"wire-dtype-down": "bfloat16", "wire-dtype-up": "int8", "wire-top-k": 0.5}
DIFFERENCES = {"wire-dtype-down": "int4", "wire-dtype-up": "ternary"}
AUTO = {"wire-dtype": "auto"}
WIRES = [
    pytest.param(ENCODED, id="values down"),
    pytest.param(AUTO, id="auto"),
    pytest.param(DIFFERENCES, id="differences down", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Strategy and changes to the config → its run directory; each runs once."""
    done = {}

    def make(name, **changes):
        key = name, *changes.items()
        if key not in done:
            folder = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TEPAL_CACHE", str(folder / "cache"))
                if changes:  # the report of the run as it is says enough; to draw one takes longer than the run
                    patch.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
                config = {**defaults(), **CONFIG, "strategy": name, "runs": str(folder / "runs"), **changes}
                nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
                done[key] = run(InProcessGrid(nodes, config), config)
        return done[key]

    return make


@pytest.fixture(scope="module")
def sizes():
    """Bytes of the model, of its parameters, of its query and key projections, of its head, of each layer."""
    model, blocks = build_model(read_run_config(CONFIG))
    of = blocks.layout.nbytes
    return {
        "P": of(),
        "C": sum(p.numel() * p.element_size() for p in model.parameters()),
        "Φ": of(blocks.query_key),
        "head": of(blocks.head),
        "layers": [of(layer) for layer in blocks.layers],
    }


def expected(name, number, size):
    """(down, up) payload of one client in a round, the scoring after the last included."""
    whole, last = size["P"], number == ROUNDS
    scoring = whole if last else 0
    if name == "fedfrozen":
        frozen = number > 1
        travels = whole - size["Φ"] if frozen else whole
        # Φ̄ goes down once more than the others: with the first frozen round, which keeps it.
        return whole + (whole - size["Φ"] if last else 0), travels
    if name == "fedensemble":
        return whole + (2 * whole if last else 0), whole
    if name == "scaffold":
        return whole + size["C"] + scoring, whole + size["C"]
    if name == "local":
        return (whole if number == 1 else 0), 0
    if name in ("fedacs", "fedamp"):
        return whole, whole  # each client has kept what it is to score (and a mixture that is its own model, too)
    return whole + scoring, whole


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "selective"])
def test_it_moves_what_its_formula_says(ran, sizes, name):
    lines = {line["round"]: line for line in read_lines(ran(name))}
    for number in (1, ROUNDS):
        down, up = expected(name, number, sizes)
        assert (lines[number]["bytes_down"], lines[number]["bytes_up"]) == (CLIENTS * down, CLIENTS * up), number


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_it_says_of_blocks_and_of_clients_adds_up_to_what_it_moved(ran, name):
    run = ran(name)
    lines = {line["round"]: line for line in read_lines(run)}
    cells, now, clients = (json.loads((run / f"{name}.json").read_text()) for name in ("blocks", "now", "clients"))
    of_cells = np.array([cell["bytes"] for cell in cells])
    records = dict(read_records(run))
    for number in (1, ROUNDS):
        for way in ("down", "up"):
            shares = records[number][f"travel_{way}"]
            assert shares @ of_cells * CLIENTS == pytest.approx(lines[number][f"bytes_{way}"], rel=1e-6), (number, way)
    for way in ("down", "up"):
        key, last = f"bytes_{way}", lines[ROUNDS][f"bytes_{way}"]
        assert sum(client[key] for client in now["clients"].values()) == last
        assert sum(client[key] for client in clients.values()) == lines[1][key] + last
    assert now["round"] == now["rounds"] == ROUNDS and now["ended"] and len(clients) == CLIENTS
    for client, told in now["clients"].items():
        assert told["state"] == "replied" and told["examples"] > 0 and told["seconds"] > 0
        total = clients[client]
        assert (total["rounds"], total["replied"], total["refused"], total["lost"]) == (ROUNDS, ROUNDS, 0, 0)


def test_query_and_key_neither_train_nor_travel_when_they_are_frozen(ran):
    run = ran("fedfrozen")
    kinds = [cell["kind"] for cell in json.loads((run / "blocks.json").read_text())]
    of = dict(read_records(run))
    for way in ("trains", "up"):
        assert of[1][f"travel_{way}"].tolist() == [1] * len(kinds)
        assert of[2][f"travel_{way}"].tolist() == [int(kind == "other") for kind in kinds]


def test_selective_sends_up_the_chosen_layers_and_the_head(ran, sizes):
    lines = {line["round"]: line for line in read_lines(ran("selective"))}
    ways = {layer + sizes["head"] for layer in sizes["layers"]}
    for number in (1, ROUNDS):
        up = lines[number]["bytes_up"]
        assert CLIENTS * min(ways) <= up <= CLIENTS * max(ways) < CLIENTS * sizes["P"]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_takes_any_encoding(ran, name, wire):
    """In fewer bits, and of each matrix the larger half of the changes: clients answer, with fewer bytes."""
    as_it_is, encoded = read_lines(ran(name)), read_lines(ran(name, **wire))
    for before, line in zip(as_it_is, encoded, strict=True):
        assert not line["refused"] and not line["lost"] and not line["notes"]
        if line["round"]:
            assert line["clients_replied"] == CLIENTS
            assert line["bytes_down"] <= 0.66 * before["bytes_down"]
            assert line["bytes_up"] <= 0.5 * before["bytes_up"]
    own = name in ("fedacs", "fedamp", "local", "ditto", "perfedavg", "pfedme", "apfl")
    key = "clients_accuracy" if own else "loss"
    assert encoded[-1][key] == pytest.approx(as_it_is[-1][key], rel=0.2, abs=0.1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_settings_for_a_comparison_of_all_suit_it(name):
    settings = parse_run_config([str(ROOT / "conf/all.toml")])
    config = read_run_config({**settings, "strategy": name})
    build_strategy(config, build_model(config)[1])


@pytest.mark.parametrize("name", STRATEGIES)
def test_its_result_is_scored_and_named_after_the_model_it_is_of(ran, name):
    last = read_lines(ran(name))[-1]
    own = name in ("fedacs", "fedamp", "local", "ditto", "perfedavg", "pfedme", "apfl")
    assert last["accuracy_of"] == ("personal" if own else "server")
    assert 0 <= last["accuracy"] <= 1 and 0 <= last["clients_accuracy"] <= 1 and last["clients_spread"] >= 0
    assert last["clients_replied"] == CLIENTS and not last["refused"] and not last["lost"] and not last["notes"]
    assert last["step_seconds"] > 0
