"""What each trial of a search gets of a cluster, and that shares of GPUs are for a cluster. Without Ray."""

import pytest
from typer.testing import CliRunner

from tepal.tools.cluster import engine as on_cluster
from tepal.tools.search.__main__ import app

pytest.importorskip("optuna", reason="pip install 'tepal[search]'")

PLAN = """
clients = 3
[common]
num-server-rounds = 1
[common.search]
learning-rate = {choices = [0.01, 0.1]}
[[variant]]
name = "FedAvg"
strategy = "fedavg"
"""


@pytest.fixture
def searched(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "a.toml").write_text(PLAN)

    def search(*options):
        return CliRunner().invoke(app, [str(tmp_path / "a.toml"), "--folder", str(tmp_path / "search"), *options])

    return search


def test_each_trial_has_its_share_of_a_machine(searched, monkeypatch):
    asked = []

    def engine_on(address, _app, **resources):
        asked.append((address, resources))
        raise ValueError("it goes no further")

    monkeypatch.setattr(on_cluster, "engine_on", engine_on)
    ended = searched("--ray", "far:1", "--cpus", "2", "--gpus", "0.25", "--memory", "4")
    assert ended.exit_code == 1 and "it goes no further" in ended.output
    assert asked == [("far:1", {"clients": 3, "cpus": 2.0, "gpus": 0.25, "memory": 4.0, "spread": False})]


def test_a_share_of_a_gpu_of_this_machine_is_refused(searched):
    ended = searched("--gpus", "0.25")
    assert ended.exit_code == 1 and "--gpus 0.25 needs a Ray cluster: add --ray ADDRESS" in ended.output
