"""FedNova with clients whose numbers of steps differ, honestly or not, against the paper's equations."""

import numpy as np
import pytest

from tepal.exchange.layout import Layout
from tepal.exchange.plan import ACCUMULATION, MODEL, Reply
from tepal.strategies import FedNova
from tepal.strategies.baselines.fednova import FedNovaMethod, NovaState
from tepal.strategies.fedavg import ModelState
from tepal.strategies.method import Run, ServerModel
from tepal.strategies.robust import mean_factory
from tepal.strategies.rounds.state_json import from_json, to_json
from tests.unit.strategies.rounds.test_hostile_clients import app_of, figures, run

RNG = np.random.default_rng(0)
START = {"w": RNG.normal(size=(3, 4)), "bn.running_mean": RNG.normal(size=4)}


def method_of(robust="none"):
    method = FedNovaMethod()
    start = {name: array.copy() for name, array in START.items()}
    model = ServerModel("model", Layout.of_arrays(start), (start,), None)
    return method, method.init(model, Run(mean=mean_factory(robust, 0.2, 0, None)))


def changes_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [{name: rng.normal(size=array.shape) for name, array in START.items()} for _ in range(count)]


def merged(method, state, changes, steps, examples=None, number=1):
    merger = method.merger(state, number)
    for k, (change, a) in enumerate(zip(changes, steps, strict=True)):
        part = {name: state.entries[name] + change[name] for name in START}
        n = 1 if examples is None else examples[k]
        merger.add(Reply(client=f"c{k}", parts={MODEL: part}, examples=n, metrics={ACCUMULATION: float(a)}))
    return merger.finish()


def step_of(changes, steps, examples=None):
    """−τ_eff·Σ p_i·d_i, and the mean change of the buffer."""
    n = np.ones(len(steps)) if examples is None else np.array(examples, float)
    p, a = n / n.sum(), np.array(steps, float)
    normalised = [change["w"] / of for change, of in zip(changes, a, strict=True)]
    return (p @ a) * np.tensordot(p, normalised, 1), np.tensordot(p, [c["bn.running_mean"] for c in changes], 1)


@pytest.mark.parametrize("seed", range(4))
def test_clients_within_ten_times_each_others_steps_are_merged_as_in_the_paper_in_any_order(seed):
    rng = np.random.default_rng(seed)
    method, state = method_of()
    for number in range(1, 8):  # past the number of rounds that are remembered
        count = int(rng.integers(1, 9))
        steps = 30 * rng.uniform(1, 10, count)
        if count > 1:
            steps[rng.permutation(count)[:2]] = 30, 300
        examples, changes = rng.integers(1, 900, count), changes_of(count, number)
        after = merged(method, state, changes, steps, examples, number)
        step, buffer = step_of(changes, steps, examples)
        np.testing.assert_allclose(after.entries["w"] - state.entries["w"], step, rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            after.entries["bn.running_mean"] - state.entries["bn.running_mean"], buffer, rtol=0, atol=1e-12
        )
        state = after
    assert len(state.accumulations) == 5 and state.merges == 7


@pytest.mark.parametrize("place", range(6))
def test_one_step_beside_hundreds_counts_as_a_tenth_of_the_usual_number(place):
    steps, changes = [500, 400, 800, 600, 700], changes_of(6)
    method, first = method_of()
    second = merged(method, first, changes[:5], steps)
    steps.insert(place, 1)
    for state, usual in ((first, 500), (second, 600)):
        if state is first and place < 5:
            continue  # what is usual is known after this reply
        after = merged(method, state, changes, steps)
        step, _ = step_of(changes, [max(a, usual / 10) for a in steps])
        np.testing.assert_allclose(after.entries["w"] - state.entries["w"], step, rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", range(12))
def test_in_a_first_round_one_step_takes_at_most_the_weight_of_the_reply_beside_it(place):
    count = 12
    changes = [{name: np.zeros_like(array) for name, array in START.items()} for _ in range(count)]
    for change in changes:
        change["w"] = np.array([[1.0, 0, 0, 0]] * 3)
    changes[place]["w"] = np.array([[0, 1.0, 0, 0]] * 3)  # so that the step shows the weights
    steps = [1.0 if k == place else 1000.0 for k in range(count)]
    method, state = method_of()
    step = merged(method, state, changes, steps).entries["w"][0] - START["w"][0]
    tau = (11 * 1000 + 100) / 12
    honest, liar = 11 / 12 / 1000 * tau, 1 / 12 / 100 * tau
    one = honest / 11
    assert step.sum() == pytest.approx(honest + liar)
    assert liar - 1e-9 <= step[1] <= liar + one + 1e-9


@pytest.mark.parametrize("robust", ["none", "trimmed", "median", "krum", "rfa"])
@pytest.mark.parametrize("order", [(1.0, 5e3), (5e3, 1.0), (5e3, 5e3), (1.0, 1.0)])
def test_the_step_is_at_most_ten_times_a_usual_one_with_any_mean(robust, order):
    steps = [*order, *[5e3] * 7, 1.0]
    changes = [{name: np.ones_like(array) for name, array in START.items()} for _ in steps]
    method, state = method_of(robust)
    for number in (1, 2):
        after = merged(method, state, changes, steps, number=number)
        assert 0 < np.abs(after.entries["w"] - state.entries["w"]).max() <= 10
        state = after


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 0.5, 1e3])
def test_when_all_clients_change_their_steps_the_mean_of_their_changes_remains(factor):
    method, state = method_of()
    changes = changes_of(4)
    for number in (1, 2):
        state = merged(method, state, changes, [4e7] * 4, number=number)
    after = merged(method, state, changes, [4e7 * factor] * 4, number=3)
    step, _ = step_of(changes, [1] * 4)
    np.testing.assert_allclose(after.entries["w"] - state.entries["w"], step, rtol=0, atol=1e-12)


def test_two_clients_do_not_say_which_of_them_is_usual():
    method, state = method_of()
    changes = changes_of(2)
    after = merged(method, state, changes, [1, 1000])
    step, _ = step_of(changes, [1, 1000])
    np.testing.assert_allclose(after.entries["w"] - START["w"], step, rtol=1e-12)


def test_the_usual_numbers_survive_a_checkpoint_and_an_earlier_versions_state_has_none():
    method, state = method_of()
    rng = np.random.default_rng(5)
    changes, steps = changes_of(60), rng.uniform(100, 200, 60)
    state = merged(method, state, changes, steps)
    arrays = {}
    again = from_json(to_json(state, arrays), arrays)
    assert isinstance(again, NovaState) and again.accumulations == state.accumulations
    (kept,) = state.accumulations
    assert len(kept) == 21 and set(kept) <= set(steps) and kept[0] == min(steps) and kept[-1] == max(steps)
    assert kept[10] == pytest.approx(np.median(steps), rel=0.02)
    after = [merged(method, each, changes[:4], [100, 1, 150, 130], number=2).entries["w"] for each in (state, again)]
    np.testing.assert_array_equal(*after)

    old = ModelState(state.entries, merges=1)
    new = merged(method, old, changes[:4], [100, 120, 150, 130], number=2)
    step, _ = step_of(changes[:4], [100, 120, 150, 130])
    np.testing.assert_allclose(new.entries["w"] - old.entries["w"], step, rtol=0, atol=1e-12)
    assert new.merges == 2 and new.accumulations == ((100, 120, 130, 150),)


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("steps", [500.0, 20000.0])
def test_a_client_that_reports_one_step_neither_ends_a_run_nor_undoes_it(steps, first):
    app = app_of(metrics=lambda k: {"accumulation": steps})
    lie = figures(accumulation=1.0)

    def change(content, header):
        if header.round >= first:
            lie(content, header)

    arrays, history = run(FedNova(), change, rounds=8, app=app)
    assert [len(report.replied) for report in history] == [5] * 8
    for array in arrays.values():
        assert np.abs(array - 1).max() < 0.2
