"""What a run scored, client by client and example by example, against the run's own means."""

import numpy as np
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tepal.strategies.in_process import InProcessGrid, Node
from tepal.tools.reproduce.runs import measured
from tepal.tools.reproduce.scores import ClientScores, packed, unpacked

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


def test_a_client_without_a_score_in_the_last_round_keeps_its_latest():
    reported = {(1, 0): 0.25, (1, 1): 0.5, (2, 1): 0.75, (3, 0): 1.0}  # (round, client) → accuracy; others fail

    def app(message, context):
        accuracy = reported.get((int(message.metadata.group_id), context.node_config["partition-id"]))
        if accuracy is None:
            return Message(Error(0, "its training diverged"), reply_to=message)
        metrics = MetricRecord({"received-accuracy": accuracy, "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    scores = ClientScores(app)
    nodes = [Node(scores, {"partition-id": k}) for k in range(2)]
    grid = InProcessGrid(nodes)
    for number in (1, 2, 3):
        sent = [Message(RecordDict(), node, "evaluate", group_id=str(number)) for node in grid.get_node_ids()]
        assert len(list(grid.send_and_receive(sent))) == 2
    assert scores.last() == {"0": (1.0, 10), "1": (0.75, 10)}
