"""Trials of a search: what is left of one whose training fails."""

import pytest

from tepal.records.run_directory import CHECKPOINTS
from tepal.strategies import RoundFailed
from tepal.strategies.in_process import InProcessGrid
from tepal.tools.reproduce.experiment import TrialInputs
from tepal.tools.reproduce.tuning import search_trials, tuned
from tepal.tools.spaces import Range

pytestmark = pytest.mark.usefixtures("no_report")
pytest.importorskip("optuna", reason="pip install 'tepal[search]'")

CONFIG = {"dataset": "digits", "model": "cnn", "strategy": "fedavg", "num-server-rounds": 3, "local-steps": 2}
RATES = {"learning-rate": Range(1e-3, 1e-2)}


def fails(reason):
    """Connects clients to which no more messages can be sent after the first round."""

    class Failing(InProcessGrid):
        pushed = 0

        def push_messages(self, messages):
            self.pushed += 1
            if self.pushed > 5:
                raise ConnectionError(reason)
            return super().push_messages(messages)

    return Failing


def test_a_trial_that_diverged_leaves_no_run_and_one_that_failed_otherwise_is_resumed(tmp_path):
    (trial,) = search_trials("fedavg", {"part": "validation", "config": CONFIG, "clients": 3}, RATES, 1)
    inputs, folder = TrialInputs(tmp_path), tmp_path / "runs" / "fedavg-search-0"
    with pytest.raises(RoundFailed, match="two clients are gone"):
        tuned(trial, inputs, RATES, grid=fails("two clients are gone"))
    assert any(folder.glob(f"runs/*/{CHECKPOINTS}/*"))
    values = tuned(trial, inputs, RATES, grid=fails("all clients diverged"))
    assert "all clients diverged" in values["failed"] and values["drawn"].keys() == RATES.keys()
    assert not folder.exists()
