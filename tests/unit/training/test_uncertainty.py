"""Calibration error and entropy threshold, against loops over examples and bins, and closed forms."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepal.training import tasks
from tepal.training.prediction import score_ensemble
from tepal.training.uncertainty import BINS, Calibration, entropy_threshold, flagged
from tests.unit.training.test_prediction import Spoken, examples, network, probabilities, spoken, states

OUTCOMES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


def calibration(outcomes):
    sure, right = zip(*outcomes, strict=True) if outcomes else ((), ())
    return Calibration.of(torch.tensor(sure, dtype=torch.float64), torch.tensor(right, dtype=torch.bool))


def by_loops(outcomes):
    """Guo et al. 2017, equation 3, and the content of each bin: (examples, correct, sum of probabilities)."""
    bins = []
    for k in range(BINS):
        low, high = k / BINS, (k + 1) / BINS
        inside = [(p, right) for p, right in outcomes if low < p <= high or (k == 0 and p == 0)]
        bins.append((len(inside), sum(right for _, right in inside), math.fsum(p for p, _ in inside)))
    error = math.fsum(abs(right / n - total / n) * n / len(outcomes) for n, right, total in bins if n)
    return error, bins


@given(OUTCOMES)
def test_the_error_is_what_loops_over_bins_and_examples_find(outcomes):
    found = calibration(outcomes)
    error, bins = by_loops(outcomes)
    assert found.error == pytest.approx(error, abs=1e-12)
    assert [*zip(found.examples, found.correct, strict=True)] == [(n, right) for n, right, _ in bins]
    assert found.probability == pytest.approx([total for *_, total in bins])
    assert 0 <= found.error <= 1


@given(OUTCOMES, st.lists(st.integers(0, 60), max_size=4))
def test_batches_that_are_added_are_as_one(outcomes, cuts):
    ends = sorted({min(cut, len(outcomes)) for cut in cuts} | {0, len(outcomes)})
    first, *others = [calibration(outcomes[a:b]) for a, b in pairwise(ends)]
    for other in others:
        first += other
    whole = calibration(outcomes)
    assert (first.examples, first.correct) == (whole.examples, whole.correct)
    assert first.probability == pytest.approx(whole.probability)
    assert first.error == pytest.approx(whole.error, abs=1e-12)


def test_closed_forms():
    always_right = [(1.0, True)] * 7
    always_wrong = [(1.0, False)] * 7
    as_often_as_said = [(0.75, True)] * 3 + [(0.75, False)]
    too_sure = [(0.9, True), (0.9, False)]
    in_two_bins = [(0.25, False)] * 2 + [(1.0, True)] * 2  # their differences do not cancel: (2 · 1/4 + 0) / 4
    for outcomes, error in (
        (always_right, 0), (always_wrong, 1), (as_often_as_said, 0), (too_sure, 0.4), (in_two_bins, 0.125)
    ):  # fmt: skip
        assert calibration(outcomes).error == pytest.approx(error, abs=1e-15)
    assert calibration([(2 / 15, True)]).examples[1] == 1, "a bin contains its upper end"
    with pytest.raises(ValueError, match="no examples"):
        _ = calibration([]).error


def test_metrics_have_the_means_of_each_bin_and_0_for_an_empty_one():
    metrics = calibration([(0.5, True), (0.52, False), (1.0, True)]).metrics
    lists = [metrics[f"calibration-{name}"] for name in ("probability", "accuracy", "examples")]
    assert all(len(each) == BINS for each in lists)
    filled = {k: values for k, values in enumerate(zip(*lists, strict=True)) if values != (0, 0, 0)}
    assert filled == {7: (pytest.approx(0.51), 0.5, 2), 14: (1, 1, 1)}
    assert metrics["calibration-error"] == pytest.approx(0.02 / 3)


@pytest.mark.parametrize("members", [1, 3])
def test_an_ensembles_score_has_the_calibration_of_its_mean_probability(members):
    inputs, labels = examples(200)
    scored = score_ensemble(network(), states(members), inputs, labels, None)
    mean = np.mean([probabilities(state, inputs) for state in states(members)], axis=0)
    outcomes = [(p.max(), p.argmax() == y) for p, y in zip(mean, labels.tolist(), strict=True)]
    assert scored.calibration.error == pytest.approx(by_loops(outcomes)[0], rel=1e-4)
    assert sum(scored.calibration.examples) == 200


def test_a_member_that_is_there_thrice_is_calibrated_as_once_and_a_regression_is_not():
    inputs, labels = examples()
    once, thrice = (score_ensemble(network(), states(1) * times, inputs, labels, None) for times in (1, 3))
    assert once.calibration.error == pytest.approx(thrice.calibration.error, rel=1e-9)
    assert once.calibration.examples == thrice.calibration.examples
    assert once.calibration.correct == thrice.calibration.correct
    regression = score_ensemble(
        Spoken(np.zeros((2, 1))), [Spoken(np.zeros((2, 1))).state_dict()], torch.zeros(2, 1), torch.zeros(2, 1), None,
        tasks.REGRESSION,
    )  # fmt: skip
    assert regression.calibration is None


def test_outputs_that_are_not_numbers_do_not_end_a_run():
    model, weights = spoken([[math.nan, 0.0], [1.0, 0.0]])
    scored = score_ensemble(model, weights, torch.zeros(2, 1), torch.tensor([0, 1]), None)
    assert math.isnan(scored.calibration.error) and sum(scored.calibration.examples) == 2


@given(st.lists(st.floats(0, 3) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=90))
def test_the_threshold_is_the_smallest_that_few_enough_exceed(entropies):
    threshold = entropy_threshold(torch.tensor(entropies, dtype=torch.float64))
    few_enough = [t for t in entropies if 100 * sum(e > t for e in entropies) <= 5 * len(entropies)]
    assert threshold == min(few_enough)


@pytest.mark.parametrize(("count", "above"), [(1, 0), (19, 0), (20, 1), (39, 1), (40, 2), (360, 18), (10_000, 500)])
def test_of_different_entropies_five_percent_are_above_the_threshold(count, above):
    entropies = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    assert int((entropies > entropy_threshold(entropies)).sum()) == above


def test_shares_that_are_flagged():
    known = torch.arange(20).double()
    others = {"few": torch.tensor([0.0, 18.0, 18.5, 30.0]).double(), "all": torch.full((3,), 19.0).double()}
    assert flagged(known, others) == {"entropy-threshold": 18, "flagged-few": 0.5, "flagged-all": 1}
    others["few"][0] = math.nan
    assert flagged(known, others) == {}
