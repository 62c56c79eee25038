"""Which mode a stratum trains and when; and what averaging modes by this schedule does to a model (the paper's toy)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepal.strategies.schedule import mode_of, mode_schedule, rounds_of

STRATA, MODES, AGES, SEEDS = st.integers(1, 30), st.integers(1, 12), st.integers(0, 10_000), st.integers(0, 2**63)


@given(STRATA, MODES, AGES, SEEDS)
def test_every_stratum_trains_every_mode_exactly_once_in_an_age(strata, modes, age, seed):
    schedule = mode_schedule(strata, modes, age, seed)
    assert schedule.shape == (strata, modes) and schedule.dtype.kind == "i"
    pairs = [(stratum, int(mode)) for stratum in range(strata) for mode in schedule[stratum]]
    assert sorted(pairs) == [(stratum, mode) for stratum in range(strata) for mode in range(modes)]


@given(STRATA, STRATA, MODES, AGES, SEEDS)
def test_what_a_stratum_trains_does_not_depend_on_how_many_others_there_are(few, more, modes, age, seed):
    schedule = mode_schedule(few, modes, age, seed)
    np.testing.assert_array_equal(schedule, mode_schedule(few + more, modes, age, seed)[:few])
    np.testing.assert_array_equal(schedule, mode_schedule(few, modes, age, seed))


@pytest.mark.parametrize("differs", ["seed", "age", "stratum"])
def test_seed_age_and_stratum_each_give_another_order(differs):
    """Of 60 modes two permutations are the same by chance once in 10^82."""
    by = {
        "seed": lambda k: mode_schedule(1, 60, 7, k)[0],
        "age": lambda k: mode_schedule(1, 60, k, 7)[0],
        "stratum": lambda k: mode_schedule(50, 60, 7, 7)[k],
    }[differs]
    assert len({tuple(by(k)) for k in range(50)}) == 50


def test_every_order_of_three_modes_is_drawn_equally_often():
    orders = [tuple(mode_schedule(1, 3, age, 0)[0]) for age in range(3000)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    # χ² of six cells: above 20.5 once in a thousand. The draws are fixed by their seed.
    assert len(counts) == 6 and sum((count - 500) ** 2 / 500 for count in counts) < 20.5


@given(STRATA, MODES, st.integers(1, 300), SEEDS)
def test_the_mode_of_one_stratum_is_that_of_the_schedule(strata, modes, round, seed):
    age = 0
    while round > (age + 1) * modes:  # ages have `modes` rounds each, and rounds count from 1
        age += 1
    column = mode_schedule(strata, modes, age, seed)[:, round - age * modes - 1]
    assert [mode_of(stratum, modes, round, seed) for stratum in range(strata)] == column.tolist()


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 40), st.integers(0, 99))
def test_the_rounds_of_a_mode_are_those_in_which_some_stratum_has_it(strata, modes, rounds, seed):
    for mode in range(modes):
        counted = 0
        for number in range(1, rounds + 1):
            if mode in [mode_of(stratum, modes, number, seed) for stratum in range(strata)]:
                counted += 1
        assert rounds_of(mode, strata, modes, rounds, seed) == counted


def test_a_run_draws_its_schedule_once_however_often_rounds_are_counted(monkeypatch):
    """They are counted for every client in every round."""
    draws = []
    make = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: draws.append(tuple(seed)) or make(seed))
    counts = [[rounds_of(mode, 20, 5, 200, seed=987_654_321) for mode in range(5)] for _ in range(10)]
    assert counts == [counts[0]] * 10
    assert len(draws) == len(set(draws)) <= 20 * 200 / 5
    draws.clear()
    assert rounds_of(0, 10**9, 5, 200, seed=987_654_321) == 200 and len(draws) < 100 * 200 / 5, "no more than it takes"


@pytest.mark.parametrize("out", [{"strata": 0}, {"modes": 0}, {"age": -1}, {"seed": -1}])
def test_numbers_out_of_range_are_errors(out):
    with pytest.raises(ValueError, match=f"{next(iter(out))}={next(iter(out.values()))}"):
        mode_schedule(**{"strata": 2, "modes": 3, "age": 0, "seed": 0, **out})


# ---- the paper's toy -------------------------------------------------------------------------------------------------

CLIENTS, POINTS, FEATURES, RUNS = 50, 2, 100, 40


def bias_and_variance(modes, data_seed):
    """Of the mean prediction of K linear models on 100 radial features, over 40 runs from other initial weights.

    The data are drawn once: client i has two points of y = a_i·sin(2πx) + N(0, 0.2²), a_i ~ N(1, 0.2²), and a feature
    is exp(−(x − ν)²/(2·0.08²)); x and ν are uniform in [−1, 1]. Initial weights are N(0, 1). Local training is 5 steps
    of rate 0.1 on the mean squared error; there are 100 rounds whatever K is. All runs are computed at once.
    """
    rng = np.random.default_rng(data_seed)
    centres = rng.uniform(-1, 1, FEATURES)
    scale, x = rng.normal(1, 0.2, (CLIENTS, 1)), rng.uniform(-1, 1, (CLIENTS, POINTS))
    y = scale * np.sin(2 * np.pi * x) + rng.normal(0, 0.2, x.shape)

    def features(x):
        return np.exp(-((x[..., None] - centres) ** 2) / (2 * 0.08**2))

    inputs = features(x)
    weights = np.random.default_rng(100 + data_seed).normal(size=(modes, FEATURES, RUNS))
    for server_round in range(100):
        age, place = divmod(server_round, modes)
        had = mode_schedule(CLIENTS, modes, age, seed=data_seed)[:, place]  # every client is a stratum of its own
        local = weights[had]
        for _ in range(5):
            errors = inputs @ local - y[..., None]
            local = local - 0.1 * (2 / POINTS) * inputs.transpose(0, 2, 1) @ errors
        for mode in set(had):
            weights[mode] = local[had == mode].mean(axis=0)
    grid = np.linspace(-1, 1, 201)
    predictions = features(grid) @ weights.mean(axis=0)
    bias = predictions.mean(axis=1) - np.sin(2 * np.pi * grid)
    return (bias**2).mean(), predictions.var(axis=1).mean()


def test_more_modes_lower_the_variance_and_leave_the_bias_as_it_is():
    """Table 1 of arXiv:2107.10663, where K = 1, 2, 10 have bias .109, .117, .112 and variance .0496, .0115, .0063.

    The table's bias is a root mean square over x, and its variance a mean. The paper does not say how many strata the
    toy has, nor how many clients take part: here all 50 do, each of them a stratum of its own. What one draw of the
    data has as bias differs by a third from the next, so that means over four draws are taken. Averaging two modes
    that know nothing of each other halves the variance; the paper's K = 2, a quarter, is not reached.
    """
    bias, variance = {}, {}
    for modes in (1, 2, 10):
        squares, variances = zip(*(bias_and_variance(modes, data_seed) for data_seed in range(4)), strict=True)
        bias[modes], variance[modes] = np.sqrt(np.mean(squares)), np.mean(variances)
    assert 0.08 < bias[1] < 0.13
    for modes in (2, 10):
        assert bias[modes] == pytest.approx(bias[1], rel=0.15)
    assert variance[10] < variance[1] / 6
    assert variance[2] == pytest.approx(variance[1] / 2, rel=0.2)
