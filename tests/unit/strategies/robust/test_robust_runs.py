"""Every strategy trains a round with every robust mean, through the project's own app, in this process."""

import pytest

from tepal.client_app.app import app
from tepal.server_app.config import defaults, read_run_config
from tepal.server_app.run import build_model, build_strategy, run
from tepal.strategies import STRATEGIES
from tepal.strategies.in_process import InProcessGrid, Node
from tests.lines import read_lines
from tests.quiet import quiet  # noqa: F401

CLIENTS = 4
CONFIG = {
    "dataset": "digits", "model": "tiny-vit", "num-server-rounds": 1, "min-clients": CLIENTS, "local-steps": 2,
    "optimizer": "sgd", "learning-rate": 0.05, "weight-decay": 0.0, "schedule": "constant", "deterministic": True,
    "fedensemble.modes": 2, "pfedme.lambda": 1.0, "server-share": 0.05, "fedbe.distil": False, "hostile-share": 0.25,
}  # fmt: skip
ROBUST = ["trimmed", "median", "krum", "rfa"]
# One of the means with each strategy; the others take as long again, three times.
PAIRS = [
    pytest.param(name, robust, marks=[] if (k + j) % len(ROBUST) == 0 else pytest.mark.long)
    for k, name in enumerate(STRATEGIES)
    for j, robust in enumerate(ROBUST)
]


@pytest.mark.parametrize(("name", "robust"), PAIRS)
def test_every_strategy_trains_with_every_robust_mean(name, robust, tmp_path, monkeypatch):
    monkeypatch.setenv("TEPAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tepal.server_app.run.write_report", lambda run: run / "report.html")
    config = {**defaults(), **CONFIG, "strategy": name, "robust": robust, "runs": str(tmp_path / "runs")}
    nodes = [Node(app, {"partition-id": k, "num-partitions": CLIENTS}) for k in range(CLIENTS)]
    last = read_lines(run(InProcessGrid(nodes, config), config))[-1]
    assert last["clients_replied"] == CLIENTS and not last["refused"] and not last["lost"] and not last["notes"]
    assert 0 <= last["accuracy"] <= 1
    assert not [*tmp_path.rglob(".parts-*")]


def test_the_run_config_reaches_the_strategy():
    keys = {"dataset": "digits", "model": "tiny-vit", "robust": "krum", "hostile-share": 0.3, "krum-keep": 2}
    config = read_run_config({**defaults(), **keys})
    strategy = build_strategy(config, build_model(config)[1])
    assert (strategy.robust, strategy.hostile_share, strategy.krum_keep) == ("krum", 0.3, 2)
