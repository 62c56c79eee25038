"""A round's record: what clients reported is kept, bounded and on one line each, and never ends the run."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.exchange import Traffic
from tepal.records.columns import bytes_text, score_text, seconds_text, step_text
from tepal.records.round_record import LONGEST_REASON, MOST_REASONS, RoundRecord
from tepal.records.run_directory import METRICS, RunDirectory, json_line, read_metrics, scored, summarise
from tepal.strategies.rounds.report import RoundReport
from tepal.training import tasks

HOSTILE = "a\nb\x1b[2J\x00\u202e"


def record_of(task=tasks.REGRESSION, **values):
    return RoundRecord.of(RoundReport(round=1, phase="train", **values), 1, task)


@pytest.mark.parametrize("loss", [-1.0, -0.0, 0.0, 2.25, 1e300, -1e300, math.nan, math.inf, -math.inf])
def test_an_error_without_a_root_is_not_known(loss):
    metrics = {"received-loss": loss}
    record = record_of(train_metrics=metrics, server_metrics={"loss": loss})
    expected = loss**0.5 if loss >= 0 else None
    assert record.received_rmse == expected and record.rmse == expected
    # and the round is kept with the loss that was reported
    assert record.loss == loss or math.isnan(loss)


def test_the_score_of_one_mode_is_not_that_of_the_ensemble():
    """A client that trains a mode scores that mode, which it received."""
    train = {"received-accuracy": 0.3, "received-loss": 2.0, "train-loss": 1.0}

    def record(number, of, **server):
        report = RoundReport(number, "train", eval_metrics_of=of, train_metrics=train, server_metrics=server)
        return RoundRecord.of(report, 1, tasks.IMAGES)

    for of, expected in (("ensemble", None), ("received", 0.3)):
        lines = [record(1, of), record(2, of), record(3, of, accuracy=0.9)]
        assert [line.accuracy for line in scored(lines)] == [expected, expected, 0.9]
        assert lines[0].train_loss == 1.0


@pytest.mark.parametrize(("task", "perplexity"), [(tasks.NEXT_CHARACTER, 2.0), (tasks.IMAGES, None)])
def test_scores_that_clients_give_a_round_later_are_all_of_the_round_before(task, perplexity):
    def record(number, loss):
        train = {"received-loss": loss, "received-macro-f1": loss / 2}
        return RoundRecord.of(RoundReport(number, "train", train_metrics=train), 1, task)

    lines = [json.loads(json_line(line.to_line())) for line in (record(1, 0.5), record(2, math.log(2)))]
    first, last = scored(list(map(RoundRecord.from_line, lines)))
    assert (first.loss, first.macro_f1, first.accuracy_of) == (math.log(2), math.log(2) / 2, "clients")
    assert first.perplexity == (perplexity and pytest.approx(perplexity))
    assert last.loss is last.macro_f1 is last.perplexity is None
    assert last.received_perplexity == first.perplexity


def test_a_line_without_such_scores_has_no_columns_of_them():
    """As of a line that an earlier version wrote; and a metric of the server with such a name is no client's."""
    line = record_of(server_metrics={"received-macro-f1": 0.5, "received-perplexity": 3.0}).to_line()
    assert line.keys().isdisjoint({"received_macro_f1", "received_perplexity"})
    assert RoundRecord.from_line(line).received_macro_f1 is None


@pytest.mark.parametrize("loss", [-1e300, 1e300, math.nan, math.inf, 0.0])
def test_a_perplexity_is_calculated_of_any_loss(loss):
    record_of(tasks.NEXT_CHARACTER, server_metrics={"loss": loss})


@pytest.mark.parametrize("write", [score_text, bytes_text, seconds_text, step_text])
@pytest.mark.parametrize("value", [1e300, -1e300, 1.7e308, 10**300, 0, -1, 1e18])
def test_no_number_is_hundreds_of_digits_long(write, value):
    assert 0 < len(write(value)) < 40


def test_numbers_of_a_usual_size_are_written_as_before():
    assert [score_text(0.73219), score_text(123456.7), bytes_text(1.5e15), bytes_text(2.5e17)] == [
        "0.7322", "123456.7000", "1.50 PB", "250 PB",
    ]  # fmt: skip
    assert seconds_text(999_999) == "277:46:39 h"


def test_notes_of_a_round_are_bounded_and_further_ones_counted(tmp_path):
    many = [("site-1", f"note {k} {HOSTILE}" + "x" * 10_000) for k in range(500)]
    record = record_of(notes=many)
    assert len(record.notes) == MOST_REASONS + 1 and record.notes[-1]["reason"] == "and 400 more"
    assert record.notes[0]["reason"].startswith(r"note 0 a\nb\x1b[2J\x00\u202e")
    run = RunDirectory.create(tmp_path, "fedavg", {})
    run.append(record)
    size = (run.path / "metrics.jsonl").stat().st_size
    assert size < 300_000 and read_metrics(run.path)[0].notes == record.notes


@pytest.mark.parametrize("kind", ["refused", "lost"])
def test_clients_that_failed_are_all_counted_and_the_first_reasons_kept(kind):
    record = record_of(**{kind: [(f"site-{k}{HOSTILE}", "x" * 10_000) for k in range(500)]})
    kept = record.value(kind)
    assert len(kept) == 500 and kept[-1]["client"].startswith(r"site-499a\nb")
    assert len({each["reason"] for each in kept[:MOST_REASONS]}) == 1 and "not kept" in kept[-1]["reason"]
    assert len(json.dumps(kept)) < 350_000
    assert summarise([record], {})["refused_replies"] == (500 if kind == "refused" else 0)


def test_few_incidents_are_kept_as_they_are():
    record = record_of(refused=[("a", "it is NaN")], notes=[("server", "restarted")], late=[("b", 3)], left_out=["c"])
    assert list(record.incidents()) == [
        ("refused", "a", "it is NaN"), ("late", "b", "it is an answer to round 3"),
        ("left_out", "c", "it failed several times in a row"), ("notes", "server", "restarted"),
    ]  # fmt: skip


def test_shares_left_out_are_means_over_messages_and_over_the_clients_that_were_merged():
    report = RoundReport(1, "train", replied=["b", "a"], left_out_down=[0.5, 0.25, 0.75, 0.1])
    report.left_out_up = {"a": 0.2, "b": 0.4, "refused": 1.0}
    line = RoundRecord.of(report, 1, tasks.IMAGES).to_line()
    assert line["wire_left_out_down"] == pytest.approx(0.4) and line["wire_left_out_up"] == pytest.approx(0.3)
    assert not [key for key in line if key.startswith("wire_budget")]


def test_without_auto_and_a_budget_a_line_has_neither():
    """And a metric of the server with such a name is none of the exchange's."""
    line = record_of(server_metrics={"wire-left-out-up": 0.5, "wire-budget": 3.0}).to_line()
    assert not [key for key in line if key.startswith("wire")]
    assert RoundRecord.from_line(line).wire_left_out_up is None, "as of a line that an earlier version wrote"


@pytest.mark.parametrize("sent", [0, 700])
def test_the_bytes_of_a_budget_are_recorded_by_direction(sent):
    report = RoundReport(1, "train", wire_budget=2000, down=Traffic(900, 5, 900, sent), up=Traffic(300, 5, 300, 300))
    line = RoundRecord.of(report, 1, tasks.IMAGES).to_line()
    assert {key: value for key, value in line.items() if key.startswith("wire")} == {
        "wire_budget": 2000, "wire_budget_down": sent, "wire_budget_up": 300,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value"),
    [("accuracy", "0.5"), ("accuracy", [1]), ("accuracy", True), ("phase", 3), ("refused", "text"), ("refused", ["a"]),
     ("refused", [{"client": 3}]), ("refused", {"a": 1}), ("bytes_down", 10**4000), ("notes", [[]])],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_its_column(column, value):
    with pytest.raises(ValueError, match=f"its {column} is .*, expected"):
        RoundRecord.from_line({"round": 1, column: value})


def test_what_no_number_represents_is_not_known():
    line = json.loads('{"round": 1, "accuracy": NaN, "loss": 1e999, "seconds": -Infinity, "bytes_up": 5}')
    record = RoundRecord.from_line(line)
    assert (record.accuracy, record.loss, record.seconds, record.bytes_up) == (None, None, None, 5)


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf, None])
def test_a_list_with_what_no_number_represents_is_not_known_and_the_line_is_read(tmp_path, unknown):
    run = RunDirectory.create(tmp_path, "fedavg", {})
    run.append(RoundRecord(round=1, accuracy=0.5, calibration_error=unknown, calibration_accuracy=[0.5, unknown]))
    [line] = read_metrics(run.path)
    assert (line.accuracy, line.calibration_error, line.calibration_accuracy) == (0.5, None, None)
    with pytest.raises(ValueError, match="its calibration_accuracy is list, expected a list of numbers"):
        RoundRecord.from_line({"round": 1, "calibration_accuracy": [0.5, "0.5"]})


LEAVES = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_line_of_json_is_read_as_what_it_was(value):
    line = json_line(value)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == json.loads(json.dumps(value)) == value


def test_a_lone_surrogate_is_an_escape_and_other_letters_are_not():
    line = json_line({"é": "\ud800|\U0001f600|\x00\n"})
    assert line == '{"é": "\\ud800|\U0001f600|\\u0000\\n"}\n'.encode()
    assert json.loads(line) == {"é": "\ud800|\U0001f600|\x00\n"}


def test_a_round_in_any_script_has_few_bytes_and_is_read_again(tmp_path):
    """The most that many clients can add to a round: a kind of emoji has four bytes in UTF-8, and twelve if escaped."""
    many = [(f"site-{k}", "\U0001f600" * 5000) for k in range(200)]
    record = record_of(refused=many, lost=many, notes=many)
    run = RunDirectory.create(tmp_path, "fedavg", {})
    line = json_line(record.to_line())
    (run.path / METRICS).write_bytes(line)
    assert len(line) < 3 * MOST_REASONS * (4 * LONGEST_REASON + 100) + 50_000
    assert read_metrics(run.path) == [record]
