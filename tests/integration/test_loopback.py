"""Flower's own SuperLink and SuperNodes, unchanged: this project's app against its simulation, and a foreign app.

A SuperNode as it comes has a process for every message and looks for one every three seconds: some ten seconds for an
exchange. So these are the fewest that show that they take part; all else is shown with warm nodes.
"""

import os

import pytest

from tepal.host.processes import MARK, marked
from tepal.host.superlink import explain
from tests.integration.foreign_app import LINE, MODEL, QUERY_AND_KEY, quickstart, uploads
from tests.integration.loopback import ROOT, loopback, partitions
from tests.integration.own_app import (
    CONFIG,
    assert_same_measures,
    assert_same_models,
    bytes_of_model,
    simulated_in_process,
)
from tests.lines import read_lines

pytestmark = pytest.mark.deployment

CLIENTS = 2
SHORT = {
    **CONFIG, "num-server-rounds": 2, "fedfrozen.warmup-rounds": 1, "min-clients": CLIENTS, "fraction-evaluate": 0.0
}  # fmt: skip


def test_a_failing_block_leaves_no_process_and_no_folder(monkeypatch):
    token = f"loopback-failing-{os.getpid()}"
    monkeypatch.setenv(MARK, token)
    with pytest.raises(ZeroDivisionError), loopback(partitions(1), warm=False) as running:
        commands = [" ".join(process.cmdline()) for process in marked(token)]
        for program in ("flower-superlink", "flower-supernode", "flower-superexec"):
            assert any(program in command for command in commands)
        _ = 1 / 0
    assert marked(token) == []
    assert not running.folder.exists()


@pytest.fixture(scope="module")
def deployment():
    with loopback(partitions(CLIENTS), warm=False) as running:
        yield running


def test_a_foreign_app_that_applies_the_plan_uploads_less_in_its_frozen_round(deployment, tmp_path):
    """Each message has a process of its own: what a client keeps between them lies on its disk."""
    outcome = deployment.run(quickstart(tmp_path / "quickstart", LINE))
    log = outcome.log.read_text()
    assert outcome.status == "completed", explain(log, outcome.details)
    assert uploads(log) == {1: (CLIENTS, CLIENTS * MODEL), 2: (CLIENTS, CLIENTS * (MODEL - QUERY_AND_KEY))}


@pytest.mark.long
def test_a_run_on_stock_nodes_is_the_run_of_the_simulation(deployment, tmp_path):
    outcome = deployment.run(ROOT, {**SHORT, "runs": str(tmp_path / "runs")})
    assert outcome.status == "completed", explain(outcome.log.read_text(), outcome.details)
    run = (tmp_path / "runs" / "latest").resolve()
    (tmp_path / "simulated").mkdir()
    simulated = simulated_in_process(tmp_path / "simulated", CLIENTS, SHORT)
    assert_same_models(run, simulated)
    assert_same_measures(run, simulated)
    full, theta = bytes_of_model(CLIENTS)
    rounds = read_lines(run)[1:]
    assert [(line["phase"], line["bytes_down"], line["bytes_up"], line["resent"]) for line in rounds] == [
        ("warm-up", full, full, 0), ("frozen", full, theta, 0)
    ]  # fmt: skip
