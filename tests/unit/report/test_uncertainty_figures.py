"""The figures of calibration and of images of no class: every bar and point against the rounds' lines."""

import pytest

from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import RunDirectory
from tepal.report import uncertainty_figures as drawn
from tepal.report.page import spoken
from tepal.report.run_page import write_report
from tepal.training import uncertainty
from tests.unit.report.test_report import Page

KEYS = ["reliability", "calibration-rounds", "flagged"]
EXAMPLES = [0] * 7 + [5, 0, 1, 2, 3, 4, 5, 80]
ACCURACY = [0.0] * 7 + [0.2, 0.0, 1.0, 0.5, 0.0, 0.75, 0.8, 0.95]
PROBABILITY = [0.0 if not n else (k + 0.25) / 15 for k, n in enumerate(EXAMPLES)]


def line(number, **values):
    return RoundRecord.from_line({"round": number, "seconds": 1.0, **values})


def scored(number, error=0.0625, **values):
    bins = {"probability": PROBABILITY, "accuracy": ACCURACY, "examples": EXAMPLES}
    lists = {f"calibration_{name}": each for name, each in bins.items()}
    return line(number, loss=0.5, accuracy=0.9, accuracy_of="server", calibration_error=error, **lists, **values)


FLAGS = {"entropy_threshold": 0.75, "flagged_letters": 0.5, "flagged_noise": 0.875, "flagged_covered": 0.25}


@pytest.fixture
def page(tmp_path):
    def write(*lines):
        run = RunDirectory.create(tmp_path, "fedavg", {"strategy": "fedavg", "num-server-rounds": 3})
        for each in lines:
            run.append(each)
        return Page(write_report(run.path))

    return write


def test_the_reliability_diagram_is_of_the_last_scored_round(page):
    shown = page(scored(1, 0.5), scored(2, 0.25), line(3))
    bars, diagonal = shown.figures["reliability"]["data"]
    assert bars["x"] == pytest.approx([(2 * k + 1) / 30 for k in range(15)]) and bars["width"] == pytest.approx(1 / 15)
    assert bars["y"] == [right if n else None for right, n in zip(ACCURACY, EXAMPLES, strict=True)]
    assert [count for _, count in bars["customdata"]] == [str(n) for n in EXAMPLES]
    assert [sure for sure, _ in bars["customdata"]] == PROBABILITY
    assert (diagonal["x"], diagonal["y"]) == ([0, 1], [0, 1])
    assert "100 held-out examples after round 2" in shown.text
    assert "Expected calibration error 0.2500, negative log-likelihood 0.5000 nats" in shown.text
    assert "Uncertainty of the predictions" in shown.text


def test_calibration_error_and_flagged_images_are_drawn_by_round(page):
    shown = page(scored(1, 0.5, **FLAGS), line(2), scored(3, 0.25, **{**FLAGS, "flagged_noise": 1.0}))
    [errors] = shown.figures["calibration-rounds"]["data"]
    assert (errors["x"], errors["y"]) == ([1, 3], [0.5, 0.25])
    curves = {trace["name"]: trace["y"] for trace in shown.figures["flagged"]["data"]}
    assert curves == {
        "letters flagged": [0.5, 0.5], "noise flagged": [0.875, 1.0], "covered images flagged": [0.25, 0.25],
        "held-out images flagged, at most": [0.05, 0.05],
    }  # fmt: skip
    assert "After round 3: letters flagged 0.5000, noise flagged 1.0000, covered images flagged 0.2500." in shown.text
    assert "(0.7500 nats in the last one)" in shown.text
    headings, first, *_ = shown.table("round", "phase")
    values = dict(zip(headings, first, strict=True))
    assert (values["calibration error"], values["noise flagged"]) == ("0.5000", "0.8750")


def test_a_run_without_them_has_neither_the_section_nor_the_columns(page):
    shown = page(line(1, accuracy=0.5, accuracy_of="clients"))
    assert not shown.figures.keys() & set(KEYS) and "Uncertainty" not in shown.text
    assert "calibration" not in shown.text and "flagged" not in shown.text


@pytest.mark.parametrize(
    "lists",
    [
        {"calibration_examples": None}, {"calibration_examples": [1, 2]}, {"calibration_accuracy": []},
        {"calibration_examples": [10**299] * 15, "calibration_accuracy": [-1e299] * 15},
    ],
)  # fmt: skip
def test_bins_that_no_run_writes_are_drawn_or_left_out_without_an_error(lists):
    odd = RoundRecord.from_line({**scored(1).to_line(), **lists})
    figures = drawn.uncertainty_figures([odd])
    assert figures[-1].key == "calibration-rounds" and len(figures) == 1 + (len(lists) == 2)
    assert all(len(each.caption) < 400 and len(spoken(each)) < 400 for each in figures)


def test_numbers_that_stand_twice_are_the_same():
    assert drawn.BINS == uncertainty.BINS and drawn._FALSE_ALARMS == uncertainty.FALSE_ALARMS
