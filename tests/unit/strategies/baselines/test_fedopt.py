"""Adaptive optimizers at the server with replies that are far larger than usual, against the equations in NumPy."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest

from tepal.exchange.layout import Layout
from tepal.exchange.plan import MODEL, Reply
from tepal.strategies import FedAdagrad, FedAdam, FedAvgM, FedYogi
from tepal.strategies.baselines.fedopt import (
    FedAdagradMethod,
    FedAdamMethod,
    FedAvgMMethod,
    FedYogiMethod,
    OptimizerState,
)
from tepal.strategies.method import Run, ServerModel
from tepal.strategies.robust import mean_factory
from tepal.strategies.rounds.asking import SCHEDULES
from tepal.strategies.rounds.checkpoint import Checkpoints
from tepal.strategies.rounds.state_json import from_json, to_json
from tests.unit.strategies.rounds.test_hostile_clients import run, values

ETA, B1, B2, TAU = 0.3, 0.8, 0.95, 0.02
START = {"w": np.random.default_rng(0).normal(size=(3, 4)), "v": np.zeros(5), "running_mean": np.zeros(2)}
SECOND = {
    "adagrad": lambda v, d: v + d**2,
    "adam": lambda v, d: B2 * v + (1 - B2) * d**2,
    "yogi": lambda v, d: v - (1 - B2) * d**2 * np.sign(v - d**2),
}
METHODS = {
    "adagrad": lambda: FedAdagradMethod(ETA, B1, 0.0, TAU),
    "adam": lambda: FedAdamMethod(ETA, B1, B2, TAU),
    "yogi": lambda: FedYogiMethod(ETA, B1, B2, TAU),
}
EACH = pytest.mark.parametrize("name", METHODS)


def started(method, robust="none", factor=lambda _: 1.0):
    start = {name: array.copy() for name, array in START.items()}
    model = ServerModel("model", Layout.of_arrays(start), (start,), None)
    return method.init(model, Run(mean=mean_factory(robust, 0.2, 0, None), factor=factor))


def norm_of(change):
    """Over the parameters: buffers do not count."""
    return float(np.sqrt((change["w"] ** 2).sum() + (change["v"] ** 2).sum()))


def changes_of(count, rng, scales=None):
    """Changes of random directions; the norms are those given, or between 1 and 9."""
    scales = rng.uniform(1, 9, count) if scales is None else scales
    changes = [{name: rng.normal(size=array.shape) for name, array in START.items()} for _ in range(count)]
    return [
        {name: array * scale / norm_of(change) for name, array in change.items()}
        for change, scale in zip(changes, scales, strict=True)
    ]


def merged(method, state, changes, examples, *, error=0.0, round=1):
    """`error`: of the norms of the clients' changes, which are estimates, at most."""
    merger, rng = method.merger(state, round), np.random.default_rng(1)
    for k, (change, n) in enumerate(zip(changes, examples, strict=True)):
        part = {name: state.entries[name] + array for name, array in change.items()}
        found = {name: float((array**2).sum()) * rng.uniform(1 - error, 1) ** 2 for name, array in change.items()}
        merger.add(Reply(client=f"c{k}", parts={MODEL: part}, examples=int(n), metrics={}, squares={MODEL: found}))
    return merger.finish()


def paper(name):
    """The equations of Reddi et al., with Δ as it is given: `step(w, delta)`."""
    kept = SimpleNamespace(m=0.0, v=TAU**2)

    def step(w, delta):
        kept.m = B1 * kept.m + (1 - B1) * delta
        kept.v = SECOND[name](kept.v, delta)
        return w + ETA * kept.m / (np.sqrt(kept.v) + TAU)

    return step


def flat(arrays):
    return np.concatenate([arrays["w"].ravel(), arrays["v"]])


@EACH
@pytest.mark.parametrize("error", [0.0, 0.1])
@pytest.mark.parametrize("alike", [True, False])
def test_changes_within_ten_times_each_other_step_as_in_the_papers(name, error, alike):
    """Also if all clients change the model in the same direction, so that Δ is as long as the mean of the norms."""
    rng = np.random.default_rng(3)
    method, step = METHODS[name](), paper(name)
    state = started(method)
    for number in range(8):
        count = 1 + (number + 2) % 6
        changes, n = changes_of(count, rng), rng.integers(1, 50, count)
        if alike:
            changes = [changes[0]] * count
        delta = sum(share * flat(change) for share, change in zip(n / n.sum(), changes, strict=True))
        after = merged(method, state, changes, n, error=error)
        np.testing.assert_allclose(flat(after.entries), step(flat(state.entries), delta), rtol=0, atol=1e-12)
        state = after
    assert len(state.norms) == 5


def limit_by_sorting(norms, n):
    """Σ p·min(norm, 10·median), where the median is that of each norm repeated n times."""
    repeated = np.sort(np.repeat(norms, n))
    usual = repeated[(len(repeated) - 1) // 2]
    return float(n / n.sum() @ np.minimum(norms, 10 * usual))


@EACH
def test_a_far_larger_change_counts_as_what_the_clients_could_honestly_reach_together(name):
    rng = np.random.default_rng(4)
    method, step = METHODS[name](), paper(name)
    state, limited = started(method), []
    for number in range(9):
        norms, n = rng.uniform(1, 2, 5), rng.integers(10, 20, 5)
        norms[2] *= 900 if number in (0, 1, 6) else 1
        changes = changes_of(5, rng, norms)
        delta = sum(share * flat(change) for share, change in zip(n / n.sum(), changes, strict=True))
        most = limit_by_sorting(norms, n)
        limited.append(np.linalg.norm(delta) > most)
        delta *= min(1.0, most / np.linalg.norm(delta))
        after = merged(method, state, changes, n)
        np.testing.assert_allclose(flat(after.entries), step(flat(state.entries), delta), rtol=0, atol=1e-12)
        assert after.norms[-1] == pytest.approx(np.linalg.norm(delta))
        state = after
    assert [number for number, was in enumerate(limited) if was] == [0, 1, 6]


@EACH
@pytest.mark.parametrize("robust", ["none", "krum"])
def test_where_all_clients_change_the_model_alike_the_last_rounds_say_what_is_usual(name, robust):
    rng = np.random.default_rng(5)
    method, step, earlier = METHODS[name](), paper(name), []
    state, limited = started(method, robust), []
    for number in range(12):
        (change,) = changes_of(1, rng, [rng.uniform(1, 2) * (300 if number in (5, 8) else 1)])
        after = merged(method, state, [change] * 4, [7] * 4)
        norm, delta = norm_of(change), flat(change)
        usual = sorted(earlier[-5:])
        most = 10 * float(np.median(usual)) if len(usual) >= 3 else np.inf
        limited.append(norm > most)
        earlier.append(min(norm, most))
        expected = step(flat(state.entries), delta * min(1.0, most / norm))
        np.testing.assert_allclose(flat(after.entries), expected, rtol=0, atol=1e-12)
        state = after
    assert [number for number, was in enumerate(limited) if was] == [5, 8]


def test_momentum_without_a_second_moment_is_not_limited():
    method = FedAvgMMethod(1.0, 0.9)
    state = started(method)
    changes = changes_of(5, np.random.default_rng(6), [1, 1, 900, 1, 1])
    after = merged(method, state, changes, [1] * 5)
    np.testing.assert_allclose(flat(after.entries) - flat(state.entries), sum(map(flat, changes)) / 5, atol=1e-12)
    assert after.norms == ()


def test_rounds_in_which_nothing_changes_do_not_stop_the_ones_after_them():
    rng = np.random.default_rng(7)
    method, step = METHODS["adam"](), paper("adam")
    state = started(method)
    still = [{name: np.zeros_like(array) for name, array in START.items()}] * 4
    for _ in range(4):
        state = merged(method, state, still, [1] * 4)
        step(flat(state.entries), 0 * flat(state.entries))
    changes = changes_of(4, rng)
    expected = step(flat(state.entries), sum(map(flat, changes)) / 4)
    np.testing.assert_allclose(flat(merged(method, state, changes, [1] * 4).entries), expected, rtol=0, atol=1e-12)


def test_the_norms_survive_a_checkpoint_and_an_earlier_versions_state_has_none():
    rng = np.random.default_rng(8)
    method = METHODS["adam"]()
    state = started(method)
    for _ in range(4):
        state = merged(method, state, changes_of(4, rng), [1] * 4)
    arrays = {}
    written = to_json(state, arrays)
    again = from_json(written, arrays)
    assert again.norms == state.norms and len(again.norms) == 4 == len(again.factors)
    assert again.factors == state.factors
    large = changes_of(4, rng, [500.0] * 4)
    found = [merged(method, each, large, [1] * 4).entries for each in (state, again)]
    np.testing.assert_array_equal(flat(found[0]), flat(found[1]))
    del written["fields"]["norms"], written["fields"]["factors"]
    old = from_json(written, arrays)
    assert isinstance(old, OptimizerState) and old.norms == ()
    assert len(merged(method, old, large, [1] * 4).norms) == 1


@EACH
def test_where_the_learning_rate_rises_what_is_usual_rises_with_it(name):
    """A run with a cosine over 40 rounds is resumed with 80: the step after it is that of the paper."""
    rng = np.random.default_rng(9)
    method, step = METHODS[name](), paper(name)
    state = started(method, factor=partial(SCHEDULES["cosine"], rounds=40))
    for number in range(1, 81):
        factor = SCHEDULES["cosine"](number, 40 if number <= 40 else 80)
        if number == 41:
            assert state.factors == tuple(SCHEDULES["cosine"](k, 40) for k in range(36, 41))
            method = METHODS[name]()
            started(method, factor=partial(SCHEDULES["cosine"], rounds=80))
        changes = changes_of(4, rng, rng.uniform(1, 2, 4) * factor)
        delta = sum(flat(change) for change in changes) / 4
        after = merged(method, state, changes, [1] * 4, round=number)
        np.testing.assert_allclose(flat(after.entries), step(flat(state.entries), delta), rtol=0, atol=1e-12)
        state = after


def test_where_the_learning_rate_falls_what_is_usual_stays():
    """Changes of an app that does not follow the schedule are not limited in its last rounds."""
    rng = np.random.default_rng(10)
    method, step = METHODS["adam"](), paper("adam")
    state = started(method, factor=partial(SCHEDULES["cosine"], rounds=40))
    for number in range(1, 41):
        changes = changes_of(4, rng, [1.0] * 4)
        delta = sum(flat(change) for change in changes) / 4
        after = merged(method, state, changes, [1] * 4, round=number)
        np.testing.assert_allclose(flat(after.entries), step(flat(state.entries), delta), rtol=0, atol=1e-12)
        state = after


def test_norms_without_their_learning_rates_are_forgotten():
    """As those of an earlier version, which may be of the last rounds of a run that is prolonged now."""
    rng = np.random.default_rng(11)
    method = METHODS["adam"]()
    state = replace(started(method), norms=(1e-6,) * 5)
    changes = changes_of(4, rng)
    after = merged(method, state, changes, [1] * 4)
    expected = paper("adam")(flat(state.entries), sum(map(flat, changes)) / 4)
    np.testing.assert_allclose(flat(after.entries), expected, rtol=0, atol=1e-12)
    assert len(after.norms) == len(after.factors) == 1


@cache
def reached(strategy, lie_in=0):
    """Mean value of a model after 20 rounds, in one of which a client sends 900 times the model that it trained."""
    lie = values(lambda name, array: array * 900)  # just below what a round refuses
    arrays, history = run(
        strategy(fraction_evaluate=0.0),
        lambda content, header: lie(content, header) if header.round == lie_in else None,
        rounds=20,
    )
    assert len(history) == 20
    return np.mean([array.mean() for array in arrays.values()])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("strategy", [FedAdagrad, FedAdam, FedYogi])
def test_one_extreme_reply_does_not_slow_down_the_whole_run(strategy, number):
    assert reached(strategy, number) > 0.7 * reached(strategy)


@pytest.mark.parametrize("strategy", [FedAvgM, FedAdagrad, FedYogi, FedAdam])
def test_a_parameter_without_dimensions_is_trained_and_saved(strategy, tmp_path):
    """As the temperature of CLIP."""
    start = {"w": np.zeros((4, 8), np.float32), "temperature": np.array(0.5, np.float32)}
    made = strategy(learning_rate=0.1, checkpoints=tmp_path)
    arrays, history = run(made, None, rounds=3, start=start, clients_that_lie=())
    assert len(history) == 3 and not any(report.refused + report.lost for report in history)
    assert arrays["temperature"].shape == () and 0.5 < arrays["temperature"] < 1.5
    state = Checkpoints(tmp_path).latest().state
    assert {type(state.entries["temperature"]), type(state.first["temperature"])} == {np.ndarray}


@pytest.mark.parametrize("tau", [1e-3, 1e-8])
@pytest.mark.parametrize("name", METHODS)
def test_the_moments_of_a_half_precision_model_are_not_in_half_precision(name, tau):
    """Squares of changes of 3e-4 are below the least float16, and so is τ² of these two."""
    method = {
        "adagrad": FedAdagradMethod(0.01, B1, 0.0, tau), "adam": FedAdamMethod(0.01, B1, B2, tau),
        "yogi": FedYogiMethod(0.01, B1, B2, tau),
    }[name]  # fmt: skip
    start = {"w": np.zeros(4, np.float16)}
    model = ServerModel("model", Layout.of_arrays(start), (start,), None)
    state, v = method.init(model, Run(mean=mean_factory("none", 0.2, 0, None))), np.full(4, tau**2)
    change = np.array([3e-4, 3e-4, -3e-4, 0.0], np.float16)
    for _ in range(50):
        part = {"w": state.entries["w"] + change}
        merger = method.merger(state, 1)
        squares = {"w": float((change.astype(np.float64) ** 2).sum())}
        merger.add(Reply(client="c", parts={MODEL: part}, examples=1, metrics={}, squares={MODEL: squares}))
        delta = part["w"].astype(np.float64) - state.entries["w"]
        v = SECOND[name](v, delta)
        state = merger.finish()
    assert state.entries["w"].dtype == np.float16 and state.second["w"].dtype == state.first["w"].dtype == np.float32
    assert np.isfinite(state.entries["w"]).all() and state.entries["w"][3] == 0
    np.testing.assert_allclose(state.second["w"], v, rtol=1e-4)
