"""Runs that are resumed with more rounds: what was usual at the end of a schedule does not judge its new rounds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tepal.exchange.mod import PartialExchange
from tepal.strategies import FedAvg
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.norms import LARGEST
from tepal.strategies.rounds.past import Past
from tests.quiet import quiet  # noqa: F401

ROUNDS = 211
"""From here on, a cosine over twice the rounds begins at more than `LARGEST` times the usual rate of the last ones."""


class Stop(Exception):
    """The server ends here."""


def stepping_app():
    """Clients that step by the learning rate of their message, each with a length of its own."""
    app = ClientApp(mods=[PartialExchange()])

    @app.train()
    def train(msg, context):
        k, rate = int(context.node_config["partition-id"]), msg.content["config"]["lr"]
        made = {n: Array(a.numpy() + rate * (1 + 0.1 * k)) for n, a in msg.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 1, "rate": rate})
        return Message(RecordDict({"arrays": ArrayRecord(made), "metrics": metrics}), reply_to=msg)

    return app


def grid_of(folder):
    return InProcessGrid([Node(stepping_app(), {"partition-id": k, "cache-path": f"{folder}/cache"}) for k in range(3)])


def saved(folder):
    return Checkpoints(folder / "checkpoints")


def run(folder, rounds, *, resume=False, schedule="cosine", timeout=60, **options):
    """(Values at the end, reports, what the last checkpoint has beside the state)."""
    history = []
    strategy = FedAvg(
        schedule=schedule, fraction_evaluate=0, deterministic=True, checkpoints=saved(folder), resume=resume,
        **{"on_round": history.append, **options},
    )  # fmt: skip
    grid = grid_of(folder)
    initial = ArrayRecord({"w": Array(np.zeros(2))})
    result = strategy.start(
        grid, initial, num_rounds=rounds, timeout=timeout, train_config=ConfigRecord({"lr": 1.0})
    )
    return result.arrays["w"].numpy(), history, saved(folder).latest().standing


def as_if_ended(folder, scale):
    """Scale what the newest checkpoint remembers of the usual changes: as in the last rounds of a much longer run."""
    checkpoint = saved(folder).latest()
    standing = json.loads(json.dumps(checkpoint.standing))
    for norms in standing["norms"]["rounds"]:
        for values in norms.values():
            values[:] = [scale * value for value in values]
    standing["past"]["changes"] = [scale * change for change in standing["past"]["changes"]]
    saved(folder).save(replace(checkpoint, standing=standing))


def test_a_run_that_is_prolonged_after_the_end_of_its_cosine_refuses_nobody(tmp_path):
    _, before, _ = run(tmp_path, ROUNDS)
    history = []

    def few(report):
        history.append(report)
        if len(history) == 5:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path, 2 * ROUNDS, resume=True, on_round=few)
    usual = before[-3].train_metrics["rate"]
    assert history[0].round == ROUNDS + 1 and history[0].train_metrics["rate"] > LARGEST * usual
    assert not any(report.refused or report.notes or len(report.replied) < 3 for report in history)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_run_whose_usual_changes_were_tiny_can_be_prolonged_only_if_its_learning_rate_rises(tmp_path, schedule):
    """With a constant schedule, changes that are far larger than before are as suspicious as ever."""
    run(tmp_path, 6, schedule=schedule)
    as_if_ended(tmp_path, 1e-6)
    if schedule == "cosine":
        _, history, _ = run(tmp_path, 12, resume=True, schedule=schedule)
        assert [len(report.replied) for report in history] == [3] * 6
        assert not any(report.refused or report.notes for report in history)
    else:
        with pytest.raises(RuntimeError, match="times as large as usual"):
            run(tmp_path, 12, resume=True, schedule=schedule, timeout=1)


def test_a_checkpoint_of_an_earlier_version_may_be_of_the_last_rounds_of_a_cosine(tmp_path):
    """It does not say at which learning rate its rounds were: the next round is judged as a first one."""
    run(tmp_path, 6)
    as_if_ended(tmp_path, 1e-6)
    checkpoint = saved(tmp_path).latest()
    standing = {key: value for key, value in checkpoint.standing.items() if key != "factor"}
    saved(tmp_path).save(replace(checkpoint, standing=standing))
    _, history, _ = run(tmp_path, 12, resume=True)
    assert [len(report.replied) for report in history] == [3] * 6


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_run_that_is_resumed_with_as_many_rounds_is_the_run_without_a_break(tmp_path, schedule):
    """Bit for bit, with all that is remembered of what is usual."""

    def stop(report):
        if report.round == 6:
            raise Stop

    whole, _, known = run(tmp_path / "whole", 10, schedule=schedule, robust="clip")
    broken = FedAvg(
        schedule=schedule, fraction_evaluate=0, deterministic=True, robust="clip", on_round=stop,
        checkpoints=saved(tmp_path / "broken"),
    )  # fmt: skip
    grid = grid_of(tmp_path / "broken")
    with pytest.raises(Stop):
        broken.start(
            grid, ArrayRecord({"w": Array(np.zeros(2))}), num_rounds=10, train_config=ConfigRecord({"lr": 1.0})
        )
    arrays, history, again = run(tmp_path / "broken", 10, resume=True, schedule=schedule, robust="clip")
    assert history[0].round == 6 and arrays.tobytes() == whole.tobytes()
    assert (again["norms"], again["past"], again["factor"]) == (known["norms"], known["past"], known["factor"])


def test_whether_most_clients_failed_is_in_the_checkpoint():
    past = Past()
    assert past.to_facts()["most_failed"] is False
    past.most_failed = True
    again = Past()
    again.restore(json.loads(json.dumps(past.to_facts())))
    assert again.most_failed is True
    again.restore({})  # of an earlier version
    assert again.most_failed is False
