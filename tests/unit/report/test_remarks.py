"""What is remarked of a run whose figures look well and are not."""

import pytest

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tepal.report.remarks import remarks
from tepal.report.run_page import write_report
from tepal.tools.terminal import final_table


def lines(*rounds, **same):
    return [RoundRecord(round=number, **{**same, **each}) for number, each in enumerate(rounds, 1)]


SERVER = {"accuracy_of": "server"}


def test_a_model_with_one_answer_is_remarked_whatever_its_accuracy():
    metrics = lines({"accuracy": 0.9, "predicted_classes": 1, "largest_class": 0.9}, **SERVER)
    (said,) = remarks(metrics)
    assert "After round 1 the model answers the same class for every held-out example" in said
    assert "0.9000 of the held-out examples have the most frequent class" in said


@pytest.mark.parametrize(("accuracy", "remarked"), [(0.39, True), (0.4, True), (0.41, False)])
def test_an_accuracy_up_to_that_of_a_constant_answer_is_a_guess(accuracy, remarked):
    metrics = lines({"accuracy": accuracy, "predicted_classes": 3, "largest_class": 0.4}, **SERVER)
    assert bool(remarks(metrics)) == remarked
    if remarked:
        assert "is not above that of a constant answer" in remarks(metrics)[0]


def test_only_the_last_score_counts():
    before = {"accuracy": 0.2, "predicted_classes": 1, "largest_class": 0.4}
    assert remarks(lines(before, {"accuracy": 0.8, "predicted_classes": 4, "largest_class": 0.4}, **SERVER)) == []
    assert len(remarks(lines(before, {}, **SERVER))) == 1, "the last round has no score"


def test_a_loss_that_rises_while_that_of_training_falls_is_remarked():
    losses = [(1.0, 1.0), (0.5, 0.4), (0.55, 0.2), (0.61, 0.07)]
    metrics = lines(*({"loss": test, "train_loss": train} for test, train in losses), **SERVER)
    (said,) = remarks(metrics)
    assert "from 0.5000 in round 2 to 0.6100, while the training loss fell to 0.0700" in said
    assert remarks(metrics[:3]) == [], "less than a fifth more"


def test_a_loss_that_rises_with_that_of_training_is_not_learning_by_heart():
    metrics = lines({"loss": 0.5, "train_loss": 0.4}, {"loss": 0.9, "train_loss": 0.8}, **SERVER)
    assert remarks(metrics) == []


def test_losses_on_different_test_data_are_not_compared():
    metrics = lines({"loss": 0.1, "train_loss": 0.5, "accuracy_of": "clients"},
                    {"loss": 0.9, "train_loss": 0.1, "accuracy_of": "server"})  # fmt: skip
    assert remarks(metrics) == []


def test_nothing_is_remarked_of_a_run_without_figures():
    assert remarks([]) == remarks(lines({})) == []


def test_terminal_and_page_show_them(tmp_path):
    run = RunDirectory.create(tmp_path, "fedavg", {"strategy": "fedavg"})
    record = RoundRecord(round=1, accuracy=0.25, accuracy_of="server", predicted_classes=1, largest_class=0.25)
    run.append(record)
    assert "answers the same class" in write_report(run.path).read_text()
    text = "".join(str(part) for part in final_table({}, [record]).renderables[1:])
    assert text.startswith("Note: After round 1 the model answers the same class")
