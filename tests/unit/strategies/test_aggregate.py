import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tepal.strategies.aggregate import WeightedMean, mean_metrics, with_joiners

FLOATS = st.floats(-1e3, 1e3, width=32)


def mean_of(parts):
    mean = WeightedMean()
    for part, weight in parts:
        mean.add(part, weight)
    return mean.result()


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), FLOATS), st.integers(1, 10**6)), max_size=6))
@example([({"a": 7.888609052210118e-23}, 1), ({"a": 1.0}, 1), ({"a": -1.0}, 1)])
def test_each_entry_is_weighted_over_the_parts_that_have_it(parts):
    arrays = [({name: np.full((2, 1), value, np.float32) for name, value in part.items()}, w) for part, w in parts]
    result = mean_of(arrays)
    assert set(result) == {name for part, _ in parts for name in part}
    for name, array in result.items():
        having = [(Fraction(part[name]), w) for part, w in parts if name in part]
        exact = sum(value * w for value, w in having) / sum(w for _, w in having)
        assert array.shape == (2, 1) and array.dtype == np.float32
        largest = max(abs(float(value)) for value, _ in having)  # rounding is relative to it, also where values cancel
        np.testing.assert_allclose(array, float(exact), rtol=1e-6, atol=max(1e-12 * largest, 1e-30))


@given(st.permutations(range(6)))
def test_the_order_of_replies_does_not_matter(order):
    rng = np.random.default_rng(0)
    parts = [({"w": rng.normal(size=200).astype(np.float32)}, int(rng.integers(1, 500))) for _ in range(6)]
    np.testing.assert_allclose(mean_of([parts[k] for k in order])["w"], mean_of(parts)["w"], rtol=1e-7)


def assert_close(mean, parts):
    """To 1e-6 of the largest of the values that an element is the mean of."""
    values = np.stack([part.astype(np.float64) for part, _ in parts])
    expected = np.average(values, axis=0, weights=[weight for _, weight in parts])
    assert (np.abs(mean - expected) <= 1e-6 * np.abs(values).max(axis=0)).all()


@pytest.mark.parametrize("shape", [(500, 300), (3, 1 << 20)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_entries_are_averaged_in_float32_piece_by_piece_like_small_ones(shape, dtype):
    rng = np.random.default_rng(0)
    parts = [({"w": rng.random(shape, np.float32).astype(dtype)}, k + 1) for k in range(3)]
    mean = mean_of(parts)["w"]
    assert mean.dtype == dtype and mean.shape == shape
    if dtype == np.float32:
        assert_close(mean, [(part["w"], weight) for part, weight in parts])
    else:
        expected = np.average([part["w"].astype(np.float64) for part, _ in parts], axis=0, weights=[1, 2, 3])
        np.testing.assert_allclose(mean, expected, rtol=1e-3)


@pytest.mark.parametrize("count", [50, 51, 1000])
@pytest.mark.parametrize("around", [0.0, 5.0], ids=["of both signs", "alike"])
def test_the_order_of_many_replies_shows_by_less_than_a_millionth_of_the_values(count, around):
    size = 70_000  # more than what is averaged in float64
    rng = np.random.default_rng(count)
    values = (around + rng.normal(size=(count, size))).astype(np.float32)
    weights = rng.integers(1, 1000, count)
    parts = [({"w": values[k]}, int(weights[k])) for k in range(count)]
    one, other = mean_of(parts)["w"], mean_of([parts[k] for k in rng.permutation(count)])["w"]
    largest = np.abs(values).max(axis=0)
    assert (np.abs(one - other) <= 1e-6 * largest).all()
    expected = weights @ values.astype(np.float64) / weights.sum()
    assert (np.abs(one - expected) <= 1e-6 * largest).all()


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60))
def test_what_all_parts_have_alike_stays_as_it_is(weights):
    part = {"small": np.array([0.1, -3e-7], np.float32), "n": np.array(2**40 + 1), "large": ALIKE}
    result = mean_of([(part, weight) for weight in weights])
    assert all(np.array_equal(result[name], part[name]) for name in part)


ALIKE = np.random.default_rng(0).normal(size=70_000).astype(np.float32)


def test_the_largest_numbers_do_not_overflow():
    largest = np.full(70_000, np.finfo(np.float32).max)
    result = mean_of([({"w": largest, "s": largest[:3]}, 10**15) for _ in range(3)])
    assert np.array_equal(result["w"], largest) and np.array_equal(result["s"], largest[:3])


def test_a_mean_has_one_array_of_an_entry_however_many_parts_there_are():
    parts = [{"w": np.full(1 << 20, k, np.float32)} for k in range(3)]
    mean = WeightedMean()
    tracemalloc.start()
    for part in parts:
        mean.add(part, 1)
    result = mean.result()
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = parts[0]["w"].nbytes
    assert result["w"][0] == 1 and size <= held <= 1.1 * size and most <= 1.5 * size


def test_views_with_any_strides_are_averaged_where_they_lie():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"k": whole[:, 2:4], "t": whole.T}
    result = mean_of([(views, 1), (views, 3)])
    np.testing.assert_array_equal(result["k"], whole[:, 2:4])
    np.testing.assert_array_equal(result["t"], whole.T)


def test_counters_stay_integers_and_flags_stay_flags():
    result = mean_of([({"n": np.array(10), "f": np.array([True, False])}, 1),
                      ({"n": np.array(13), "f": np.array([True, True])}, 3)])  # fmt: skip
    assert result["n"] == round((10 + 39) / 4) and result["n"].dtype == np.int64 and result["n"].shape == ()
    assert result["f"].tolist() == [True, True] and result["f"].dtype == bool


def test_float16_is_summed_wider_than_it_is():
    parts = [({"w": np.full(3, 60000, np.float16)}, 1000.0) for _ in range(4)]
    assert mean_of(parts)["w"].tolist() == [60000] * 3


def test_scalars_accumulate():
    assert mean_of([({"s": np.array(1.0)}, 1), ({"s": np.array(4.0)}, 2)])["s"] == 3.0


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_an_error(weight):
    with pytest.raises(ValueError, match="positive"):
        WeightedMean().add({"w": np.ones(1)}, weight)


def test_a_part_of_another_shape_is_an_error_and_leaves_no_trace():
    mean = WeightedMean()
    mean.add({"a": np.ones(2), "b": np.ones(2)}, 1)
    with pytest.raises(ValueError, match="'b'"):
        mean.add({"a": np.zeros(2), "b": np.zeros(3)}, 1)
    assert mean.result()["a"].tolist() == [1, 1]


def test_metrics_weigh_by_what_they_were_measured_on():
    replies = [
        ({"num-examples": 10, "test-examples": 4, "train-loss": 1.0, "received-accuracy": 0.5}, 10),
        ({"num-examples": 30, "test-examples": 1, "train-loss": 2.0, "received-accuracy": 1.0, "extra": 7.0}, 30),
    ]
    found = mean_metrics(replies, "num-examples")
    assert found == pytest.approx(
        {"num-examples": 40, "test-examples": 5, "train-loss": 1.75, "received-accuracy": 0.6, "extra": 7.0}
    )


def test_joiners_come_with_zero_to_a_mean():
    of_two = {"w": np.mean([[3.0, 1.0], [6.0, 0.0]], axis=0, dtype=np.float32)}
    of_three = with_joiners(of_two, "ab", "bc")[0]["w"]
    assert of_three.dtype == np.float32
    np.testing.assert_allclose(of_three, np.mean([[3.0, 1.0], [6.0, 0.0], [0.0, 0.0]], axis=0), rtol=1e-6)
    assert with_joiners(of_two, "ab", "b")[0]["w"] is of_two["w"]
    assert with_joiners({"w": np.zeros(2)}, "", "abcde")[0]["w"].tolist() == [0, 0]
    alone = with_joiners({"w": np.array(1.5, np.float32)}, "a", "abc")[0]["w"]
    assert isinstance(alone, np.ndarray) and alone == 0.5
