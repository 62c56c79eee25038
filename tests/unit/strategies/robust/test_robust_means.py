"""Robust means against Flower's, against NumPy and against a general optimiser."""

import errno
import itertools
import os
import tracemalloc
from typing import get_args

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, MultiKrum
from flwr.serverapp.strategy import Krum as FlowerKrum
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from tepal.server_app.config.common import RoundConfig
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.robust import ROBUST, GeometricMedian, Krum, Median, TrimmedMean, clips, mean_factory
from tepal.strategies.robust.coordinates import dropped_of, network, sorted_rows

MEANS = {"trimmed": lambda: TrimmedMean(0.2), "median": Median, "krum": lambda: Krum(0.2), "rfa": GeometricMedian}
EACH = pytest.mark.parametrize("name", MEANS)


def mean_of(mean, parts, weights=None):
    for k, part in enumerate(parts):
        mean.add(part, 1 if weights is None else weights[k])
    return mean.result()


def parts_of(n, seed=0, size=300):
    rng = np.random.default_rng(seed)
    center = rng.normal(size=size)
    return [
        {"w": (center + rng.normal(size=size)).astype(np.float32).reshape(3, -1), "b": rng.normal(size=4)}
        for _ in range(n)
    ]


def flat(part):
    return np.concatenate([np.asarray(part[name], np.float64).ravel() for name in sorted(part)])


def of_flower(strategy, parts, weights):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    replies = []
    for part, weight in zip(parts, weights, strict=True):
        arrays = ArrayRecord({name: Array(array) for name, array in part.items()})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": weight})})
        replies.append(Message(content, 1, "train"))
    return {name: array.numpy() for name, array in strategy.aggregate_train(1, replies)[0].items()}


@pytest.mark.parametrize("n", [5, 10, 11])
def test_with_equal_entries_they_are_flowers(n):
    parts, weights = parts_of(n), [k % 4 + 1 for k in range(n)]
    f = dropped_of(0.2, n)
    for mean, strategy in (
        (TrimmedMean(0.2), FedTrimmedAvg(beta=0.2)),
        (Median(), FedMedian()),
        (Krum(0.2, 1), FlowerKrum(num_malicious_nodes=f)),
        (Krum(0.2, 3), MultiKrum(num_malicious_nodes=f, num_nodes_to_select=3)),
        (Krum(0.2), MultiKrum(num_malicious_nodes=f, num_nodes_to_select=n - f)),
    ):
        expected, found = of_flower(strategy, parts, weights), mean_of(mean, parts, weights)
        for name, array in expected.items():
            assert found[name].dtype == parts[0][name].dtype
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [3, 6, 9])
def test_the_geometric_median_has_the_least_sum_of_distances(n):
    rng = np.random.default_rng(n)
    points, weights = rng.normal(size=(n, 3)), rng.integers(1, 9, n)

    def cost(z):
        return weights @ np.linalg.norm(points - z, axis=1)

    found = mean_of(GeometricMedian(), [{"w": point} for point in points], weights)["w"]
    best = minimize(cost, points.mean(axis=0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}).fun
    assert cost(found) <= best * (1 + 1e-6)


@pytest.mark.parametrize("n", range(1, 20))
def test_the_network_sorts(n):
    values = np.random.default_rng(n).integers(0, 4, (n, 500)).astype(np.float32)
    np.testing.assert_array_equal(np.stack(sorted_rows(values)), np.sort(values, axis=0))
    if n <= 10:  # by the 0-1 principle: all inputs of zeros and ones
        bits = (np.arange(2**n) >> np.arange(n)[:, None]) & 1
        for low, high in network(n):
            bits[[low, high]] = np.minimum(bits[low], bits[high]), np.maximum(bits[low], bits[high])
        assert (np.diff(bits, axis=0) >= 0).all()


@EACH
@pytest.mark.parametrize("far", [100.0, 1e30, 3e38])
def test_hostile_clients_do_not_move_it_far_wherever_they_arrive(name, far):
    rng = np.random.default_rng(0)
    honest = [1 + 0.01 * rng.normal(size=50).astype(np.float32) for _ in range(9)]
    for places in ((0, 1), (0, 10), (9, 10)):
        arriving = iter(honest)
        parts = [
            {"w": np.full(50, far if k == places[0] else -far, np.float32) if k in places else next(arriving)}
            for k in range(11)
        ]
        found = mean_of(MEANS[name](), parts)["w"]
        assert np.abs(found - np.mean(honest, axis=0)).max() < 0.05


@EACH
def test_an_entry_is_averaged_over_those_who_sent_it(name):
    rng = np.random.default_rng(1)
    sent = {"a": range(9), "b": range(9), "c": range(2, 8)}
    values = {entry: {k: rng.normal(size=20) for k in who} for entry, who in sent.items()}
    parts = [{entry: values[entry][k] for entry in sent if k in values[entry]} for k in range(9)]
    found = mean_of(MEANS[name](), parts, range(1, 10))
    together = mean_of(MEANS[name](), [{e: values[e][k] for e in "ab"} for k in range(9)], range(1, 10))
    alone = mean_of(MEANS[name](), [{"c": values["c"][k]} for k in range(2, 8)], range(3, 9))
    for entry, expected in {**together, **alone}.items():
        np.testing.assert_allclose(found[entry], expected, rtol=1e-9)
    if name in ("trimmed", "median"):
        for entry, who in sent.items():
            ordered = np.sort([values[entry][k] for k in who], axis=0)
            drop = len(ordered) // 5 if name == "trimmed" else (len(ordered) - 1) // 2
            np.testing.assert_allclose(found[entry], ordered[drop : len(ordered) - drop].mean(axis=0), rtol=1e-12)


@EACH
@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(8)), equal=st.booleans())
def test_the_order_of_replies_does_not_matter(name, order, equal):
    parts, weights = parts_of(8), [1 if equal else k + 1 for k in range(8)]
    one = mean_of(MEANS[name](), parts, weights)
    other = mean_of(MEANS[name](), [parts[k] for k in order], [weights[k] for k in order])
    for entry, array in one.items():
        np.testing.assert_allclose(other[entry], array, rtol=1e-6, atol=1e-6)


def test_krum_breaks_ties_by_content():
    # The nearest pair of three has equal scores, whichever arrives first.
    parts = [{"w": np.array(values, np.float32)} for values in ([0, 0], [0.1, 0], [5, 5])]
    found = [mean_of(Krum(0.2, 1), order)["w"].tolist() for order in itertools.permutations(parts)]
    assert all(each == found[0] for each in found) and found[0] != [5, 5]


@EACH
@pytest.mark.parametrize("heavy", [1, 1000])
def test_counters_have_their_median_flags_the_majority_and_neither_enters_distances(name, heavy):
    """One of five clients has usual floating-point values, and with them a counter and a flag of its own."""
    parts = [
        {"w": np.array([0.1 * k, 1.0]), "n": np.array([count, 3]), "f": np.array([k < 3, k != 2])}
        for k, count in enumerate([7, 8, 10**15, 10, 9])
    ]
    weights = [1, 1, heavy, 1, 1]
    found = mean_of(MEANS[name](), parts, weights)
    assert found["n"].dtype == np.int64 and found["n"].tolist() == [9, 3]
    assert found["f"].dtype == bool and found["f"].tolist() == [True, True]
    without = mean_of(MEANS[name](), [{"w": part["w"]} for part in parts], weights)
    np.testing.assert_array_equal(found["w"], without["w"])
    assert list(found) == ["w", "n", "f"]


@EACH
def test_a_counter_has_the_median_of_the_clients_that_sent_it(name):
    parts = [{"w": np.array([float(k)])} | ({"n": np.array(k**3)} if k > 1 else {}) for k in range(7)]
    assert mean_of(MEANS[name](), parts)["n"] == 64
    assert mean_of(MEANS[name](), [{"n": part["n"]} for part in parts[2:]])["n"] == 64  # nothing has a distance


def pull_of_the_others(points, weights, k):
    """Length of the sum of the weighted unit vectors from a point to the others, and the weight at the point."""
    others = [(w, p - points[k]) for w, p in zip(weights, points, strict=True) if not np.array_equal(p, points[k])]
    pull = sum((w * step / np.linalg.norm(step) for w, step in others), np.zeros(points.shape[1]))
    return np.linalg.norm(pull), sum(weights) - sum(w for w, _ in others)


@pytest.mark.parametrize("far", [1.0, 1e4, 1e8, 1e30])
def test_a_geometric_median_that_is_one_of_the_parts_is_exactly_that_part(far):
    """However far the others are: shares of 1e-6 for them would move it."""
    rng = np.random.default_rng(2)
    at_a_part = 0
    for case in range(60):
        n = int(rng.integers(2, 7))
        points, weights = rng.normal(size=(n, 4)), rng.integers(1, 40, n).astype(float)
        light = rng.permutation(n)[: n // 2]
        points[light] *= far
        weights[light] *= 0.9 * (weights.sum() - weights[light].sum()) / weights[light].sum()  # less than half
        if case % 4 == 0 and n > 2:
            points[0] = points[1]
        medians = [k for k in range(n) if np.less(*pull_of_the_others(points, weights, k))]
        found = mean_of(GeometricMedian(), [{"w": point} for point in points], weights)["w"]
        if medians:
            at_a_part += 1
            np.testing.assert_array_equal(found, points[medians[0]])
        else:
            best = min(weights @ np.linalg.norm(points - point, axis=1) for point in (*points, points.mean(axis=0)))
            assert weights @ np.linalg.norm(points - found, axis=1) <= best * (1 + 1e-8)
    assert 10 < at_a_part < 60


def test_of_two_parts_the_heavier_is_the_geometric_median():
    near, far = np.array([1.0, 2.0], np.float32), np.array([3e38, -3e38], np.float32)
    for weights, expected in (([39, 26], near), ([26, 39], far)):
        for order in (1, -1):
            parts = [{"w": near}, {"w": far}][::order]
            found = mean_of(GeometricMedian(), parts, weights[::order])["w"]
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("make", [WeightedMean, *MEANS.values()], ids=["none", *MEANS])
def test_integers_at_their_limits_do_not_overflow(make):
    for dtype in (np.int64, np.uint64, np.int8):
        limits = np.iinfo(dtype)
        for value in (limits.max, limits.min):
            assert mean_of(make(), [{"n": np.array([value], dtype)}] * 4)["n"].tolist() == [value]


@pytest.mark.parametrize("make", [WeightedMean, *MEANS.values()], ids=["none", *MEANS])
def test_a_part_that_is_refused_leaves_no_trace(make):
    good = parts_of(5)
    bad = [
        ({"w": good[0]["w"] * 9, "b": np.ones(5)}, 1),
        ({"w": good[0]["w"] * 9, "b": np.ones(4, np.float32)}, 1),
        ({"x": np.ones(3), "b": np.array(["a"] * 4)}, 1),
        *((good[0], weight) for weight in (0, -1, float("nan"), float("inf"), 1e101)),
    ]
    mean = make()
    for k, part in enumerate(good):
        mean.add(part, k + 1)
        for wrong, weight in bad:
            with pytest.raises(ValueError, match="must be"):
                mean.add(wrong, weight)
    found, expected = mean.result(), mean_of(make(), good, range(1, 6))
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@EACH
def test_a_full_disk_loses_one_part(name, monkeypatch, tmp_path):
    good = parts_of(5)
    mean = mean_factory(name, 0.2, 0, tmp_path / "new")()
    write, left = os.pwrite, [0]

    def full(handle, data, offset):
        left[0] -= 1
        if left[0] == 0:
            write(handle, data[:8], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    for k, part in enumerate(good):
        for failing in (1, 2):
            left[0] = failing
            with pytest.raises(OSError, match="No space"):
                mean.add({name: array * 9 for name, array in part.items()}, 100)
        left[0] = -1
        mean.add(part, k + 1)
    found, expected = mean.result(), mean_of(MEANS[name](), good, range(1, 6))
    for entry, array in expected.items():
        np.testing.assert_array_equal(found[entry], array)
    assert list((tmp_path / "new").iterdir()) == []


@EACH
def test_memory_is_bounded_however_many_parts_there_are(name):
    size, n = 1 << 22, 12
    value = np.random.default_rng(0).normal(size=size).astype(np.float32)
    mean = MEANS[name]()
    tracemalloc.start()
    for k in range(n):
        mean.add({"w": value}, k + 1)
    found = mean.result()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found["w"], value)  # equal values stay as they are
    assert most <= value.nbytes + (64 << 20)


def test_the_factory_checks_its_arguments():
    assert mean_factory("none", 0.2, 0, None) is mean_factory("clip", 0.2, 0, None) is WeightedMean
    for robust in ROBUST:
        mean_factory(robust, 0.0, 1, None)().result()
    for robust in ("trimmed", "median", "krum", "rfa"):
        assert type(mean_factory(f"clip+{robust}", 0.2, 0, None)()) is type(mean_factory(robust, 0.2, 0, None)())
        assert clips(f"clip+{robust}") and not clips(robust)
    assert clips("clip") and not clips("none")
    for wrong in (
        ("best", 0.2, 0),
        ("clip+none", 0.2, 0),
        ("krum+clip", 0.2, 0),
        ("krum", 0.5, 0),
        ("krum", -0.1, 0),
        ("krum", float("nan"), 0),
        ("krum", 0.2, -1),
    ):
        with pytest.raises(ValueError, match="must be"):
            mean_factory(*wrong, None)


def test_the_run_config_takes_the_same_values():
    assert get_args(RoundConfig.model_fields["robust"].annotation) == ROBUST
