"""What a run scored, client by client and example by example, against the run's own means."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tepal.tools.reproduce.runs import measured
from tepal.tools.reproduce.scores import packed, unpacked

SMALL = {"dataset": "digits", "model": "cnn", "num-server-rounds": 2, "local-steps": 2, "min-clients": 2,
         "score-in-training": False}  # fmt: skip


@given(arrays.arrays(bool, st.integers(0, 50)))
def test_flags_come_back_from_their_text(flags):
    text = packed(flags)
    assert text.isascii() and (unpacked(text) == flags).all() and len(unpacked(text)) == len(flags)


@pytest.mark.parametrize(("strategy", "own"), [("fedavg", False), ("fedacs", True), ("fedensemble", False)])
def test_means_are_those_of_the_clients_and_of_the_examples(tmp_path, strategy, own):
    values = measured({**SMALL, "strategy": strategy, "fedensemble.modes": 2}, 4, tmp_path / "cell")
    scores, examples = zip(*values["of_clients"].values(), strict=True)
    assert list(values["of_clients"]) == ["0", "1", "2", "3"] and min(examples) > 0
    assert values["clients"] == pytest.approx(np.mean(scores), abs=1e-6), "each client counts alike"
    if own:
        assert values["correct"] is None
    else:
        assert unpacked(values["correct"]).mean() == pytest.approx(values["server"], abs=1e-6)


def test_a_clients_score_is_of_the_last_round_with_an_evaluation(tmp_path):
    values = measured({**SMALL, "strategy": "fedavg", "fraction-evaluate": 0.5}, 4, tmp_path / "cell")
    assert 0 < len(values["of_clients"]) <= 4
