"""Parts whose updates are scaled down: what is read of them, and their weighted mean, which does not read them."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.robust import Krum, Median
from tepal.strategies.scaled import ScaledPart, chosen

SHAPES = {"w": (3, 2), "b": (), "none": (0,)}


def arrays(seed, dtype="float32", shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("started", [True, False])
def test_an_entry_is_the_start_and_a_share_of_the_update(dtype, started):
    x, s = arrays(1, dtype), arrays(2, dtype) if started else {}
    part = ScaledPart({**x, "counter": np.array([7])}, s, 0.25)
    assert list(part) == ["w", "b", "none", "counter"] and len(part) == 4
    assert part["counter"][0] == 7
    for name, values in x.items():
        start = s[name].astype(float) if started else 0.0
        expected = start + 0.25 * (values.astype(float) - start)
        assert part[name].dtype == dtype
        np.testing.assert_allclose(part[name], expected, rtol=2e-3 if dtype == "float16" else 1e-6, atol=1e-3)


def test_a_large_entry_is_computed_in_pieces():
    x, s = np.arange(3_000_001, dtype=np.float32), np.full(3_000_001, 8, np.float32)
    np.testing.assert_array_equal(ScaledPart({"w": x}, {"w": s}, 0.5)["w"], 8 + (x - 8) / 2)


parts_ = st.lists(
    st.tuples(st.floats(0.01, 1), st.floats(0.1, 100), st.integers(0, 2), st.booleans()), min_size=1, max_size=120
)


@settings(max_examples=60, deadline=None)
@given(parts_, st.sampled_from(["float16", "float32", "float64"]), st.integers(0, 1000))
def test_the_weighted_mean_of_scaled_parts_is_that_of_their_values(specs, dtype, seed):
    """Whatever is scaled, in groups of 50, and from several starts: Σ w·(s + c·(x − s)) / Σ w in float64."""
    starts = [arrays(seed + k, dtype) for k in range(2)] + [{}]
    mean, sums, total = WeightedMean(), dict.fromkeys(SHAPES, 0.0), 0.0
    counters = []
    for k, (c, weight, which, scales) in enumerate(specs):
        x = arrays(5000 + seed + k, dtype)
        part = {**x, "counter": np.array(k)}
        mean.add(ScaledPart(part, starts[which], c) if scales else part, weight)
        for name, values in x.items():
            start = starts[which][name].astype(float) if name in starts[which] else 0.0
            sums[name] = sums[name] + weight * (start + (c if scales else 1) * (values.astype(float) - start))
        counters.append((k, weight))
        total += weight
    result = mean.result()
    for name, value in sums.items():
        tolerance = 2e-3 if dtype == "float16" else 1e-5
        np.testing.assert_allclose(result[name], value / total, rtol=tolerance, atol=tolerance)
        assert result[name].dtype == dtype
    exact = sum(k * weight for k, weight in counters) / total
    # A mean halfway between two whole numbers is rounded to either, by the last digits of the sums.
    assert result["counter"].dtype.kind == "i" and abs(result["counter"] - exact) <= 0.5 + 1e-9


class Unread(ScaledPart):
    def __getitem__(self, name):
        raise AssertionError("computed")


def test_the_weighted_mean_does_not_compute_the_parts_values():
    mean = WeightedMean()
    mean.add(Unread(arrays(1), arrays(2), 0.5), 1.0)
    mean.result()


@pytest.mark.parametrize("factor", [1 / 16, 1 / 17, 1e-3])
def test_a_part_that_is_scaled_down_far_costs_no_digits(factor):
    """Five clients, of which one is far from the others' values before it is scaled down."""
    rng, shapes = np.random.default_rng(0), {"w": (200_000,)}
    s = {"w": (0.01 * rng.normal(size=200_000)).astype(np.float32)}
    updates = [rng.normal(size=200_000) / (factor if k == 0 else 1) for k in range(5)]
    mean, expected = WeightedMean(), np.zeros(shapes["w"])
    for k, u in enumerate(updates):
        x = {"w": (s["w"] + u).astype(np.float32)}
        c = factor if k == 0 else 1.0
        mean.add(ScaledPart(x, s, c), 1.0)
        expected += (s["w"] + c * (x["w"].astype(float) - s["w"])) / 5
    np.testing.assert_allclose(mean.result()["w"], expected, atol=5e-6)


@pytest.mark.parametrize("started", [True, False])
def test_scaled_parts_need_no_second_model(started):
    """Of a million numbers; with robust means one entry at a time."""
    shapes = {f"w{k}": (1_000_000,) for k in range(8)}
    x, s = arrays(1, shapes=shapes), arrays(2, shapes=shapes) if started else {}
    for mean, most in ((WeightedMean(), 9.0), (Median(), 3.0)):
        tracemalloc.start()
        mean.add(ScaledPart(x, s, 0.5), 1.0)
        added = tracemalloc.get_traced_memory()[1]
        mean.result()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        entry = x["w0"].nbytes
        assert added <= most * entry and peak <= 12 * entry


def test_starts_of_another_shape_are_refused_before_anything_is_added():
    mean = WeightedMean()
    with pytest.raises(ValueError, match="as what it starts from"):
        mean.add(ScaledPart({"w": np.ones((3, 2))}, {"w": np.ones((2, 3))}, 0.5), 1.0)
    assert mean.result() == {}


def test_some_entries_of_a_scaled_part_are_scaled():
    part = ScaledPart(arrays(1), arrays(2), 0.5)
    some = chosen(part, ["w"])
    assert list(some) == ["w"] and list(chosen(dict(part), ["b"])) == ["b"]
    np.testing.assert_array_equal(some["w"], part["w"])


def test_large_entries_have_the_same_mean():
    """Entries of which the mean is in float32, and is updated by several threads."""
    shapes = {"w": (1_500_000,)}
    s = arrays(0, shapes=shapes)
    scaled, plain = WeightedMean(), WeightedMean()
    for k in range(3):
        part = ScaledPart(arrays(k + 1, shapes=shapes), s, 1 / (k + 1))
        scaled.add(part, k + 1)
        plain.add(dict(part), k + 1)
    np.testing.assert_allclose(scaled.result()["w"], plain.result()["w"], rtol=1e-5, atol=1e-6)


def test_values_that_did_not_change_stay_bit_for_bit():
    s = arrays(0)
    mean = WeightedMean()
    for c in (0.3, 0.7, 0.9):
        mean.add(ScaledPart(s, s, c), 3.0)
    for name, values in mean.result().items():
        np.testing.assert_array_equal(values, s[name])


@pytest.mark.parametrize("robust", [Median, lambda: Krum(0.2)])
def test_robust_means_read_the_scaled_values(robust):
    s = arrays(0)
    parts = [ScaledPart(arrays(k + 1), s, 0.5) for k in range(5)]
    scaled, plain = robust(), robust()
    for part in parts:
        scaled.add(part, 1.0)
        plain.add({name: part[name].copy() for name in part}, 1.0)
    found = scaled.result()
    for name, values in plain.result().items():
        np.testing.assert_array_equal(found[name], values)


def test_a_weight_that_scaling_makes_zero_is_refused_and_adds_nothing():
    mean = WeightedMean()
    with pytest.raises(ValueError, match="weight is 4"):
        mean.add(ScaledPart(arrays(1), arrays(2), 0.5), 5e-324)
    assert mean.result() == {}
