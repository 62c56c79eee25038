"""What one client reports of its own: scores that others do not have, values out of range, notes, names of metrics."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange.bounds import LONGEST_NOTE, MOST_NOTES, metrics_of
from tepal.exchange.header import Header
from tepal.exchange.manifest import RECORD
from tepal.exchange.mod import PartialExchange
from tepal.exchange.plan import TRAIN, Outgoing, Plan
from tepal.exchange.traffic import Traffic
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import json_line, scored
from tepal.strategies import Ditto, FedAvg
from tepal.strategies.aggregate import mean_metrics, of_most
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.report import MOST_FIGURES, NOT_KEPT, Arrived, RoundReport
from tepal.training import tasks
from tests.unit.strategies.rounds.test_hostile_clients import app_of, figures, lies

START = {"w": np.zeros((4, 8), np.float32), "b": np.zeros(8, np.float32)}


def run(strategy, app, spoil, *, clients=10, rounds=3):
    """The reports and records of a run."""
    reports, records = [], []

    def on_round(report):
        reports.append(report)
        records.append(RoundRecord.of(report, 1000, tasks.IMAGES))

    strategy.on_round = on_round
    grid = InProcessGrid([Node(app, {"partition-id": k}) for k in range(clients)], spoil=spoil)
    strategy.start(grid, ArrayRecord({name: Array(array) for name, array in START.items()}), num_rounds=rounds)
    return reports, scored(records)


def scores_in_evaluations(**scores):
    """An app that scores the model in evaluations alone."""
    app = ClientApp(mods=[PartialExchange(None)])

    @app.train()
    def train(msg, context):
        made = {name: Array(array.numpy() + np.float32(1)) for name, array in msg.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(made), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        figures = MetricRecord({"num-examples": 4, **scores})
        return Message(RecordDict({"metrics": figures}), reply_to=msg)

    return app


# ---- scores that only a few have -------------------------------------------------------------------------------------

LIES = {"received_accuracy": 1.0, "trained_accuracy": 1.0, "received_loss": 0.0, "personal_accuracy": 1.0,
        "test_examples": 4}  # fmt: skip


@pytest.mark.parametrize("name", ["accuracy", "received-accuracy"])
def test_one_client_neither_switches_evaluations_off_nor_sets_the_runs_score(name):
    spoil = lies(figures(**LIES), actions=("train", "evaluate"))
    for spoiled in (lambda node, message, reply: reply, spoil):
        reports, records = run(FedAvg(), scores_in_evaluations(**{name: 0.25}), spoiled)
        changed = 0.1 * 0.75 if spoiled is spoil and name != "accuracy" else 0.0  # its share of a score that all have
        for report, record in zip(reports, records, strict=True):
            assert not any(key.startswith(("received-", "trained-")) for key in report.train_metrics)
            assert report.evaluate_metrics[name] == pytest.approx(0.25 + changed)
            assert record.accuracy == pytest.approx(0.25 + changed) and record.accuracy_of == "clients"
            assert (record.loss, record.trained_accuracy, record.received_accuracy) == (None, None, None)


def test_one_client_does_not_add_a_loss_to_evaluations():
    spoil = lies(figures(loss=1e-9, macro_f1=1.0), actions=("evaluate",))
    _, records = run(FedAvg(), scores_in_evaluations(accuracy=0.25), spoil)
    assert {(record.accuracy, record.loss, record.macro_f1) for record in records} == {(0.25, None, None)}


def test_a_personal_score_of_one_client_is_not_recorded():
    reports, _ = run(Ditto(), scores_in_evaluations(**{"personal-loss": 0.5}), lies(figures(trained_accuracy=1.0)))
    assert not any("accuracy" in report.record or report.over_clients.keys() - {"personal-loss"} for report in reports)


CLIENTS = {str(k): ({"num-examples": 10, "test-examples": 4 if k < 3 else 0}, 10) for k in range(10)}


def having(clients, **metrics):
    """The replies, with metrics of some."""
    metrics = {name.replace("_", "-"): value for name, value in metrics.items()}
    return {
        name: ({**own, **(metrics if int(name) in clients else {})}, weight)
        for name, (own, weight) in CLIENTS.items()
    }


def mean(replies, name):
    return mean_metrics(of_most(replies).values(), "num-examples").get(name)


@pytest.mark.parametrize(
    ("clients", "name", "found"),
    [
        ((0, 1, 2), "received-accuracy", 0.5),  # all that have test examples
        ((1, 2), "received-accuracy", 0.5),
        ((1,), "received-accuracy", None),
        ((1, 5, 6, 7, 8), "received-accuracy", None),  # clients without test examples do not count
        ((5, 6, 7, 8, 9), "received-accuracy", None),
        ((1, 2, 3, 4), "accuracy", None),
        ((1, 2, 3, 4, 5), "accuracy", 0.5),
        ((1,), "train-loss", None),
        ((1,), "of-a-method", 0.5),  # which only some clients have
        ((1,), "distillation-loss", 0.5),
    ],
)
def test_which_metrics_enter_the_means(clients, name, found):
    assert mean(having(clients, **{name: 0.5}), name) == found


def test_without_numbers_of_test_examples_every_client_counts():
    replies = {str(k): ({"received-loss": float(k)} if k < 5 else {}, 1) for k in range(10)}
    assert mean(replies, "received-loss") == 2.0
    assert mean({**replies, "10": ({}, 1)}, "received-loss") is None
    assert of_most({}) == {}


def test_scores_of_most_clients_are_means_as_before():
    app = app_of(metrics=lambda k: {"received-accuracy": 0.25 * (k % 2)} if k else {})
    reports, _ = run(FedAvg(), app, lambda node, message, reply: reply, clients=5)
    assert {report.train_metrics["received-accuracy"] for report in reports} == {0.125}
    assert not any(report.evaluate_metrics for report in reports[:-1]), "clients scored as they trained"


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["accuracy", "received-accuracy", "ensemble-highest-accuracy", "x-macro-f1"])
@given(value=st.floats() | st.integers())
def test_a_share_is_from_0_to_1(name, value):
    numbers, _, not_finite = metrics_of({"metrics": MetricRecord({name: value})}, ("metrics",))
    possible = not math.isnan(value) and min(max(value, 0), 1) == value
    assert (numbers, not_finite) == (({name: value}, ()) if possible else ({}, (name,)))


@pytest.mark.parametrize("name", ["loss", "received-loss", "accuracy-rank", "inaccuracy", "f1", "entropy"])
def test_other_metrics_may_be_larger(name):
    assert metrics_of({"metrics": MetricRecord({name: -2.5})}, ())[0] == {name: -2.5}


@pytest.mark.parametrize("value", [1e99, 1.01, -0.01, float("nan")])
def test_an_accuracy_that_is_none_changes_no_mean(value):
    app = app_of(metrics=lambda k: {"received-accuracy": 0.5})
    reports, records = run(FedAvg(), app, lies(figures(received_accuracy=value)), rounds=1)
    assert reports[0].train_metrics["received-accuracy"] == records[0].received_accuracy == 0.5
    assert reports[0].over_clients["received-accuracy"] == (0.5, 0.0)


# ---- notes -----------------------------------------------------------------------------------------------------------

EMOJI = "\U0001f600"


def test_notes_of_a_client_are_few_and_short_however_often_it_answers():
    asked = {}

    def spoil(node, message, reply):
        if node.config["partition-id"] != 1 or reply.has_error():
            return reply
        header = Header.from_content(reply.content)
        asked[header.round] = asked.get(header.round, 0) + (header.action == TRAIN)
        # It says twice that it lacks an entry, so that it is sent its message again.
        missing = {"x": ("w",)} if header.action == TRAIN and asked[header.round] <= 2 else {}
        fields = {"notes": (EMOJI * 2000,) * 20, "missing": missing}
        reply.content[RECORD] = type(header)(**{**vars(header), **fields}).with_checksum(reply.content).to_record()
        return reply

    reports, records = run(FedAvg(), app_of(), spoil, clients=4)
    for report, record in zip(reports[1:], records[1:], strict=True):
        assert asked[report.round] == 3, "it answered three times"
        notes = [note for name, note in report.notes if name == "client-1"]
        assert [len(note) for note in notes[:MOST_NOTES]] == [LONGEST_NOTE] * MOST_NOTES
        assert len(notes) == MOST_NOTES + 1 and notes[-1] == NOT_KEPT
        line = json_line(record.to_line())
        # 4 bytes of each emoji: 30,000 rounds of this client alone are less than what is read of a run.
        assert 4 * LONGEST_NOTE * MOST_NOTES < len(line) < 4500


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 9)), max_size=9))
def test_the_notes_of_each_node_are_counted_apart(answers):
    report = RoundReport(1, "train")
    for node, count in answers:
        plan = Plan(client=f"site-{node}", round=1, action=TRAIN, needs={})
        outgoing = Outgoing(plan, lambda tree: {}, node_id=node)
        report.add(Arrived(outgoing, Traffic(), ("note",) * count))
    for node in (1, 2):
        said = sum(count for who, count in answers if who == node)
        kept = [note for name, note in report.notes if name == f"site-{node}"]
        assert kept == ["note"] * said if said <= MOST_NOTES else kept == ["note"] * MOST_NOTES + [NOT_KEPT]


# ---- the line of the log ---------------------------------------------------------------------------------------------


def test_a_clients_metrics_neither_forge_nor_flood_the_line_of_a_round():
    def change(content, header):
        content["metrics"]["accuracy 0.9900, test-accuracy"] = 0.99
        for k in range(150):
            content["metrics"]["a" * 50 + f"{k}-loss"] = 1e90

    reports, _ = run(FedAvg(), app_of(), lies(change), clients=4)
    line = reports[0].in_a_line(2)
    assert "0.99" not in line and ", received-loss 0.5000, " in line and len(line) < 1200
    assert line.count("-loss") == MOST_FIGURES and line.endswith(f", {152 - MOST_FIGURES} more metrics.")


def test_a_line_has_the_scores_of_the_round_in_the_order_of_their_names():
    of_clients = {"train-loss": 1.5, "received-accuracy": 0.25, "steps": 7, "my-loss": 2.0}
    report = RoundReport(2, "train", train_metrics=of_clients, server_metrics={"accuracy": 0.5, "loss": 1234567.0})
    shown = "accuracy 0.5000, loss 1.235e+06, my-loss 2.0000, received-accuracy 0.2500, train-loss 1.5000."
    assert report.in_a_line(3).endswith(f" s, {shown}")
