from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.strategies.aggregate import WeightedMean, mean_metrics

FLOATS = st.floats(-1e3, 1e3, width=32)


def mean_of(parts):
    mean = WeightedMean()
    for part, weight in parts:
        mean.add(part, weight)
    return mean.result()


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), FLOATS), st.integers(1, 10**6)), max_size=6))
def test_each_entry_is_weighted_over_the_parts_that_have_it(parts):
    arrays = [({name: np.full((2, 1), value, np.float32) for name, value in part.items()}, w) for part, w in parts]
    result = mean_of(arrays)
    assert set(result) == {name for part, _ in parts for name in part}
    for name, array in result.items():
        having = [(Fraction(part[name]), w) for part, w in parts if name in part]
        exact = sum(value * w for value, w in having) / sum(w for _, w in having)
        assert array.shape == (2, 1) and array.dtype == np.float32
        np.testing.assert_allclose(array, float(exact), rtol=1e-6, atol=1e-30)


@given(st.permutations(range(6)))
def test_the_order_of_replies_does_not_matter(order):
    rng = np.random.default_rng(0)
    parts = [({"w": rng.normal(size=200).astype(np.float32)}, int(rng.integers(1, 500))) for _ in range(6)]
    np.testing.assert_allclose(mean_of([parts[k] for k in order])["w"], mean_of(parts)["w"], rtol=1e-7)


def test_large_entries_are_added_chunk_by_chunk_like_small_ones():
    rng = np.random.default_rng(0)
    parts = [({"w": rng.normal(size=(500, 300)).astype(np.float32)}, k + 1) for k in range(3)]
    expected = np.average([p["w"].astype(np.float64) for p, _ in parts], axis=0, weights=[1, 2, 3])
    np.testing.assert_allclose(mean_of(parts)["w"], expected, rtol=1e-6)


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
