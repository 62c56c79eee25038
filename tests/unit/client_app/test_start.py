"""The initial values that a client of this project's app makes, against those of the server."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import save_file

from client_app.app import app
from tepal.client_app import start
from tepal.models import ModelError, build
from tepal.models.blocks import find_blocks
from tepal.models.initial import seed_of_mode, sources_of
from tepal.models.pretrained import load_pretrained
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node
from tests.quiet import quiet  # noqa: F401

CLIENTS = 3
CONFIG = {
    **defaults(), "model": "tiny-vit", "local-steps": 1, "batch-size": 16, "min-clients": CLIENTS,
    "num-server-rounds": 2, "deterministic": True, "score-in-training": False, "fraction-evaluate": 0.0, "seed": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")


def rounds_of(folder, *, nodes=(), **changes):
    """Bytes that went down by round, and the model, of a run whose clients verify what they are sent."""
    config = {**CONFIG, "runs": str(folder), **changes}
    configs = [{"partition-id": k, "num-partitions": CLIENTS, **(nodes[k] if nodes else {})} for k in range(CLIENTS)]
    grid = InProcessGrid([Node(app, own) for own in configs], config, spoil=lambda node, message, reply: reply)
    directory = run(grid, config)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["bytes_down"] for line in lines if line["round"]], load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "fedavg"}, {"strategy": "fedfrozen", "fedfrozen.warmup-rounds": 1}, {"strategy": "fedprox"},
        {"strategy": "selective", "selective.budget": 1.0}, {"strategy": "fedacs"},
        {"strategy": "fedensemble", "fedensemble.modes": 2, "fedensemble.strata": 2},
    ],
    ids=lambda changes: changes["strategy"],
)  # fmt: skip
def test_a_client_makes_what_the_server_begins_with(changes, tmp_path):
    usual, as_usual = rounds_of(tmp_path / "sent", **changes)
    made, model = rounds_of(tmp_path / "made", **{"wire-start": "made"}, **changes)
    assert made[0] == 0 < usual[0]
    assert model.keys() == as_usual.keys()
    for name, value in as_usual.items():
        np.testing.assert_array_equal(model[name], value)


def test_it_loads_the_pretrained_weights_that_it_has(tmp_path, monkeypatch):
    weights = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=99).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    changes = {"strategy": "fedavg", "wire-start": "made", "pretrained": str(tmp_path / "weights.safetensors")}
    made, _ = rounds_of(tmp_path / "here", **changes)
    assert made[0] == 0

    def elsewhere(model, blocks, source, **how):
        return load_pretrained(model, blocks, str(tmp_path / "not-here.safetensors"), **how)

    monkeypatch.setattr("tepal.client_app.start.load_pretrained", elsewhere)
    sent, _ = rounds_of(tmp_path / "elsewhere", **changes)
    assert sent[0] == CLIENTS * sum(value.numel() * value.element_size() for value in weights.values())


def test_nothing_is_downloaded_for_it(monkeypatch):
    monkeypatch.setattr("tepal.models.pretrained._download", lambda name: pytest.fail("it is downloaded"))
    model = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=0)
    with pytest.raises(ModelError, match="'org/weights' is not on this machine"):
        load_pretrained(model, find_blocks(model), "org/weights", download=False)


@pytest.mark.parametrize("several", [False, True])
def test_each_mode_begins_with_its_own_weights(several, tmp_path):
    """Pretrained without a head: the modes differ in it alone, or in everything if each has its own weights."""
    for k in range(2):
        weights = build("tiny-vit", image_shape=(1, 8, 8), classes=10, seed=90 + k).state_dict()
        save_file({name: v for name, v in weights.items() if "head" not in name}, tmp_path / f"{k}.safetensors")
    names = [str(tmp_path / f"{k}.safetensors") for k in range(2 if several else 1)]
    made, _ = rounds_of(
        tmp_path / "runs",
        **{
            "strategy": "fedensemble", "fedensemble.modes": 2, "fedensemble.strata": 2, "wire-start": "made",
            "pretrained": ",".join(names),
        },
    )  # fmt: skip
    assert made[0] == 0


def test_the_clients_of_a_simulation_make_it_once_and_then_forget_it(tmp_path, monkeypatch):
    made, make = [], start._made
    monkeypatch.setattr(start, "_made", lambda *of: made.append(1) or make(*of))
    config = {**CONFIG, "runs": str(tmp_path), "strategy": "fedavg", "wire-start": "made"}
    nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
    directory = run(InProcessGrid(nodes, config, at_once=2), config)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["bytes_down"] == 0 and start._shared == {}
    assert made == [1]


def test_sources_and_seeds():
    assert sources_of("") == sources_of("  ") == ()
    assert sources_of("a, b,c") == ("a", "b", "c")
    modes = tuple(f"mode-{k:02}.safetensors" for k in range(15))  # together longer than a file's name can be
    assert sources_of(",".join(modes)) == modes
    assert seed_of_mode(7, 0) == 7
    assert len({seed_of_mode(seed, mode) for seed in (0, 1) for mode in range(5)}) == 10


def test_a_path_may_have_a_comma(tmp_path):
    path = tmp_path / "a,b.safetensors"
    path.write_bytes(b"")
    assert sources_of(str(path)) == (str(path),)
