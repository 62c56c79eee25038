import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepal.strategies.layer_selection import (
    DISTANCES,
    SELECTIONS,
    choose,
    drawn_budget,
    knapsack,
    objective,
    relative_coupling,
    select_layers,
)
from tepal.strategies.layer_selection.ascent import ascend
from tepal.strategies.layer_selection.problem import distances, problem_of
from tepal.strategies.layer_selection.swaps import best_group, free_to_swap

DRAWN = [3, 1, 2, 1, 2, 2, 2, 1, 2, 2, 3, 1]  # of seed 0 and client-0 … client-11
POWER = {"hamming": 1, "squared": 2}


def value_by_loops(masks, norms, coupling, distance):
    """(P1) as the paper prints it, one pair of clients after the other."""
    total = float((np.asarray(norms) * masks).sum())
    for i, j in itertools.permutations(range(len(masks)), 2):
        total -= coupling / 2 * int((masks[i] != masks[j]).sum()) ** POWER[distance]
    return total


def best_of_all(norms, budgets, coupling, distance, costs=None):
    """The optimum of (P1) by trying every combination of rows that the budgets allow."""
    clients, layers = norms.shape
    costs = np.broadcast_to(np.ones(layers) if costs is None else costs, norms.shape)
    every = np.array(list(itertools.product((0, 1), repeat=layers)))
    rows = [every[every @ cost <= budget] for cost, budget in zip(costs, budgets, strict=True)]
    total = np.zeros([len(row) for row in rows])
    for i in range(clients):
        total += np.reshape(rows[i] @ norms[i], [-1 if k == i else 1 for k in range(clients)])
        for j in range(i):
            apart = np.abs(rows[j][:, None] - rows[i][None]).sum(axis=2) ** POWER[distance]
            total -= coupling * np.reshape(apart, [len(rows[k]) if k in (i, j) else 1 for k in range(clients)])
    return float(total.max())


def instance(seed, clients, layers, most):
    rng = np.random.default_rng(seed)
    norms = rng.gamma(1, size=layers) * rng.lognormal(0, 0.8, size=(clients, layers))
    return norms, rng.integers(1, most + 1, clients), rng.lognormal(0, 0.5, size=(clients, layers))


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_objective_is_p1(distance):
    rng = np.random.default_rng(0)
    masks, norms = rng.random((5, 4)) < 0.5, rng.random((5, 4))
    expected = value_by_loops(masks, norms, 0.3, distance)
    assert objective(masks, norms, 0.3, distance=distance) == pytest.approx(expected)


@pytest.mark.parametrize("solver", ["auto", "fast", "exact"])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("shape", [(3, 4), (4, 5)])
def test_no_combination_of_masks_is_better(shape, distance, solver):
    for seed, coupling in enumerate([0.003, 0.02, 0.1, 0.3, 1, 50]):
        norms, budgets, _ = instance(seed, *shape, 3)
        masks = select_layers(norms, budgets, coupling, distance=distance, solver=solver)
        found = objective(masks, norms, coupling, distance=distance)
        assert (masks.sum(axis=1) <= budgets).all()
        assert found == pytest.approx(best_of_all(norms, budgets, coupling, distance), rel=1e-6)


@pytest.mark.parametrize("distance", DISTANCES)
def test_no_combination_of_masks_is_better_when_layers_have_costs(distance):
    for seed, coupling in enumerate([0, 0.02, 0.1, 0.3, 1]):
        for costs_of in (lambda costs: costs, lambda costs: costs[0]):
            norms, budgets, costs = instance(seed, 4, 5, 4)
            costs = costs_of(costs)
            masks = select_layers(norms, budgets * 0.9, coupling, distance=distance, costs=costs)
            found = objective(masks, norms, coupling, distance=distance)
            best = best_of_all(norms, budgets * 0.9, coupling, distance, costs)
            assert found == pytest.approx(best, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "clients, layers, coupling, distance",
    [
        (10, 12, 0.03, "hamming"),
        (20, 12, 0.01, "hamming"),
        (20, 12, 0.1, "hamming"),
        (6, 8, 0.02, "squared"),
        (8, 8, 0.002, "squared"),
    ],
)
def test_the_fast_solver_reaches_the_exact_one(clients, layers, coupling, distance):
    norms, budgets, _ = instance(clients, clients, layers, 4)
    values = {}
    for solver in ("exact", "fast"):
        masks = select_layers(norms, budgets, coupling, distance=distance, solver=solver)
        values[solver] = objective(masks, norms, coupling, distance=distance)
    assert values["fast"] >= (1 - 1e-3) * values["exact"]
    assert values["exact"] >= (1 - 1e-6) * values["fast"]


@pytest.mark.parametrize(("distance", "changes"), [("hamming", 5), ("squared", 2)])
@pytest.mark.parametrize("clients", [5, 6])
def test_after_an_ascent_no_client_can_do_better_by_itself(clients, distance, changes):
    """A step of the fast solver: by any other row within a client's budget; squared, by one or two changes."""
    every = np.array(list(itertools.product((False, True), repeat=5)))
    for seed, coupling in itertools.product(range(4), [0.005, 0.05]):
        norms, budgets, _ = instance(seed, clients, 5, 3)
        problem = problem_of(norms, budgets.astype(float), np.ones(norms.shape), coupling, distance)
        masks = np.zeros(norms.shape, dtype=bool)
        assert ascend(problem, masks) and not ascend(problem, masks.copy())
        found = problem.value(masks)
        for i, budget in enumerate(budgets):
            for row in every[(every.sum(axis=1) <= budget) & ((every != masks[i]).sum(axis=1) <= changes)]:
                moved = masks.copy()
                moved[i] = row
                assert problem.value(moved) <= found + 1e-8


def test_the_clients_that_exchange_two_layers_at_once_are_the_best_of_all_groups():
    """A step of the fast solver, for the Hamming distance: every group of clients that are free to do so is tried."""
    better = 0
    for seed in range(10):
        norms, budgets, _ = instance(seed, 6, 4, 3)
        problem = problem_of(norms, budgets.astype(float), np.ones(norms.shape), 0.1, "hamming")
        masks = select_layers(norms, budgets, 0)
        slack, apart = problem.slack(masks), distances(masks)
        for a, b in itertools.combinations_with_replacement(range(4), 2):
            price = problem.costs[:, a] - (0 if a == b else problem.costs[:, b])
            who = free_to_swap(masks, price, slack, a, b)
            groups, values = list(itertools.product((False, True), repeat=len(who))), []
            for takes in groups:
                moved = masks.copy()
                moved[who, a] = takes
                if a != b:
                    moved[who, b] = ~np.array(takes, dtype=bool)
                assert ((problem.costs * moved).sum(axis=1) <= problem.budgets).all()
                values.append(problem.value(moved))
            found = best_group(problem, masks, apart, who, a, b)
            if max(values) <= problem.value(masks) + 1e-9:
                assert found is None
                continue
            better += 1
            assert tuple(found) == groups[int(np.argmax(values))]
    assert better > 10


def test_without_coupling_everybody_has_its_own_largest_norms():
    norms, budgets, _ = instance(3, 30, 9, 9)
    masks = select_layers(norms, budgets, 0)
    for mask, row, budget in zip(masks, norms, budgets, strict=True):
        assert set(np.flatnonzero(mask)) == set(sorted(range(9), key=lambda layer: row[layer])[-budget:])


def test_of_equal_layers_the_one_nearer_the_output_wins_and_zeros_count_as_layers():
    norms = [[1, 2, 2, 0, 0], [0, 0, 0, 0, 0]]
    assert select_layers(norms, [1, 2], 0).astype(int).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert select_layers(norms, [4, 1], 0).astype(int).tolist() == [[1, 1, 1, 0, 1], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("coupling", [1e3, 1e9, 1e300])
def test_with_endless_coupling_everybody_has_the_largest_summed_norms(distance, coupling):
    norms, _, _ = instance(4, 20, 12, 1)
    masks = select_layers(norms, np.full(20, 3), coupling, distance=distance)
    assert (masks == np.isin(np.arange(12), np.argsort(norms.sum(axis=0))[-3:])).all()


def test_a_lone_client_is_not_held_back():
    assert select_layers([[3, 1, 2]], [2], 1e6).tolist() == [[True, False, True]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_mask_costs_more_than_its_budget(data):
    clients, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    reals = st.one_of(st.integers(1, 9).map(lambda k: k / 10), st.floats(1e-6, 1e6), st.integers(1, 10**12))

    def rows(elements):
        return st.lists(
            st.lists(elements, min_size=layers, max_size=layers), min_size=clients, max_size=clients
        )  # fmt: skip

    norms, costs = data.draw(rows(st.floats(0, 1e3))), data.draw(rows(reals))
    held = [data.draw(st.lists(st.sampled_from(row), min_size=1, unique=True)) for row in costs]
    budgets = [sum(row) for row in held]  # often met exactly, or missed by a rounding
    coupling, distance = data.draw(st.floats(0, 10)), data.draw(st.sampled_from(DISTANCES))
    masks = select_layers(norms, budgets, coupling, distance=distance, costs=costs, solver="fast")
    for mask, row, budget in zip(masks, costs, budgets, strict=True):
        assert sum(Fraction(cost) for cost, taken in zip(row, mask, strict=True) if taken) <= Fraction(budget)


@pytest.mark.parametrize("nodes", [knapsack._NODES, 0])
def test_one_client_with_costs_has_the_best_of_all_subsets(nodes, monkeypatch):
    monkeypatch.setattr(knapsack, "_NODES", nodes)  # 0: by the front of cost and gain
    rng = np.random.default_rng(0)
    for _ in range(60):
        norms, costs = rng.integers(0, 5, (1, 9)).astype(float), rng.integers(1, 60, 9)
        budget = rng.integers(1, costs.sum())
        masks = select_layers(norms, [budget], 0, costs=costs)
        assert costs[masks[0]].sum() <= budget
        assert norms[masks].sum() == best_of_all(norms, [budget], 0, "hamming", costs)


@pytest.mark.parametrize("solver", ["fast", "exact"])
def test_a_budget_is_met_to_the_last_digit(solver):
    norms = [[5, 4, 1], [5, 4, 1]]
    exactly = select_layers(norms, [3e9, 0.25], 0.1, costs=[[1e9, 2e9, 3e9], [0.125, 0.125, 1]], solver=solver)
    assert exactly.astype(int).tolist() == [[1, 1, 0], [1, 1, 0]]
    # The doubles .1 and .2 add up to more than the double .3, and one byte is one byte.
    missed = select_layers(norms, [0.3, 3e9 - 1], 0.1, costs=[[0.1, 0.2, 1], [1e9, 2e9, 4e9]], solver=solver)
    assert (missed.sum(axis=1) == 1).all()


def test_a_budget_below_every_layer_trains_none_and_an_endless_one_all():
    masks = select_layers([[3, 1], [3, 1]], [0.5, math.inf], 0.01, costs=[1, 2])
    assert masks.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("costly", [False, True])
def test_the_order_of_clients_does_not_matter(distance, costly):
    norms, budgets, costs = instance(6, 8, 6, 3)
    order = np.random.default_rng(0).permutation(8)
    options = {"distance": distance, "solver": "fast"}
    here = select_layers(norms, budgets, 0.05, costs=costs if costly else None, **options)
    there = select_layers(norms[order], budgets[order], 0.05, costs=costs[order] if costly else None, **options)
    assert (there == here[order]).all() and len(np.unique(here, axis=0)) > 1


def test_the_unit_of_norms_does_not_matter():
    norms, budgets, _ = instance(7, 8, 6, 3)
    masks = [select_layers(norms * scale, budgets, 0.05 * scale) for scale in (1, 2.0**-200, 2.0**200)]
    assert (masks[0] == masks[1]).all() and (masks[0] == masks[2]).all()


def layers_of(selection, budgets, layers=5, **options):
    masks = choose(selection, np.ones((len(budgets), layers)), budgets, **options)
    return ["".join("01"[int(taken)] for taken in mask) for mask in masks]


def test_positions_do_not_look_at_scores():
    budgets = [1, 2, 3, 4, 5]
    assert layers_of("top", budgets) == ["00001", "00011", "00111", "01111", "11111"]
    assert layers_of("bottom", budgets) == ["10000", "11000", "11100", "11110", "11111"]
    assert layers_of("both", budgets) == ["10000", "10001", "11001", "11011", "11111"]
    assert layers_of("full", [1, 1]) == ["11111", "11111"]


def test_positions_stop_at_the_first_layer_that_does_not_fit():
    costs = [2, 1, 4, 3, 1]
    assert layers_of("top", [5, 8.5, 0.5], costs=costs) == ["00011", "00111", "00000"]
    assert layers_of("bottom", [3, 6.9, 7], costs=costs) == ["11000", "11000", "11100"]
    assert layers_of("both", [2, 6, 7], costs=costs) == ["10000", "11001", "11011"]


def test_scores_of_a_client_are_its_own_matter_but_gradients_are_coupled():
    scores = [[5, 4, 0], [0, 4, 5], [0, 4, 5]]
    for selection in ("snr", "rgn"):
        own = choose(selection, scores, [1, 2, 1], coupling=100)
        assert own.astype(int).tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert choose("gradient", scores, [1, 1, 1], coupling=100).astype(int).tolist() == [[0, 1, 0]] * 3
    assert choose("gradient", scores, [1, 1, 1]).astype(int).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert choose("snr", [[9, 5, 5]], [4], costs=[4, 2, 2]).tolist() == [[False, True, True]]


def test_drawn_budgets_have_the_shares_of_the_truncated_normal():
    def below(x):  # of a normal variable of mean 1 and deviation 1
        return math.erf((x - 1) / math.sqrt(2)) / 2

    edges = [1, 1.5, 2.5, 3.5, 4]
    shares = [(below(b) - below(a)) / below(4) for a, b in itertools.pairwise(edges)]
    assert shares == pytest.approx([0.384, 0.485, 0.122, 0.010], abs=6e-4)
    draws = [drawn_budget(seed, f"client-{k}") for seed in range(4) for k in range(5000)]
    for budget, share in enumerate(shares, start=1):
        deviation = math.sqrt(share * (1 - share) / len(draws))
        assert draws.count(budget) / len(draws) == pytest.approx(share, abs=4 * deviation)


def test_a_drawn_budget_is_the_same_everywhere():
    assert [drawn_budget(0, f"client-{k}") for k in range(12)] == DRAWN
    assert [drawn_budget(1, f"client-{k}") for k in range(12)] != DRAWN


NORMS = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"squared_norms": [1.0, 2.0]}, r"squared_norms have shape \(2,\)"),
        ({"squared_norms": np.ones((0, 3))}, "at least one"),
        ({"squared_norms": [[1, -2], [3, 4]]}, r"squared_norms\[0, 1\] is -2.*client 0, layer 1"),
        ({"squared_norms": [[1, 2], [math.nan, 4]]}, r"squared_norms\[1, 0\] is nan"),
        ({"squared_norms": [[1, 2], [3, math.inf]]}, "is inf"),
        ({"budgets": [1]}, r"budgets have shape \(1,\).*\(2,\)"),
        ({"budgets": [0, 1]}, "budget 0 of client 0: .*between 1 and 2"),
        ({"budgets": [1, 3]}, "budget 3 of client 1: .*between 1 and 2"),
        ({"budgets": [1, math.nan]}, "budget nan of client 1"),
        ({"budgets": [1, -1], "costs": [1, 1]}, "budget -1 of client 1: it must be positive"),
        ({"budgets": [1, math.nan], "costs": [1, 1]}, "budget nan"),
        ({"coupling": -0.5}, "coupling is -0.5"),
        ({"coupling": math.inf}, "coupling is inf"),
        ({"coupling": math.nan}, "coupling is nan"),
        ({"distance": "cosine"}, "distance is 'cosine'.*hamming, squared"),
        ({"solver": "quick"}, "solver is 'quick'.*auto, exact, fast"),
        ({"costs": [1, 2, 3]}, r"costs have shape \(3,\).*\(2,\) or \(2, 2\)"),
        ({"costs": [1, 0]}, "costs contain 0"),
        ({"costs": [1, math.inf]}, "costs contain inf"),
    ],
)
def test_what_cannot_be_solved_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        select_layers(**{"squared_norms": NORMS, "budgets": [1, 1], "coupling": 1.0, **arguments})


def test_what_cannot_be_chosen_is_named():
    with pytest.raises(ValueError, match=r"selection is 'middle'.*gradient, snr"):
        choose("middle", NORMS, [1, 1])
    for selection in SELECTIONS:
        with pytest.raises(ValueError, match="shape"):
            choose(selection, [1.0, 2.0], [1, 1])
    with pytest.raises(ValueError, match="budget 3 of client 0"):
        choose("top", NORMS, [3, 1])
    with pytest.raises(ValueError, match="masks have shape"):
        objective([[True]], NORMS, 1.0)


@pytest.mark.parametrize("factor", [1e4, 1e8, 1e12])
def test_a_client_with_far_larger_gradients_does_not_choose_for_the_others(factor):
    norms = np.random.default_rng(5).random((3, 12))
    norms[0] *= factor
    masks = select_layers(norms, [2, 2, 2], 0.01)
    alone = select_layers(norms, [2, 2, 2], 0.0)
    # λ is small beside everybody's norms: whoever gives up its own best layers gains at most what disagreement costs.
    assert (norms * masks).sum(axis=1)[1:] == pytest.approx((norms * alone).sum(axis=1)[1:], abs=0.01 * 2 * 2 * 4)


@pytest.mark.parametrize("lie", [1e6, 1e13, 1e100])
@pytest.mark.parametrize("distance", DISTANCES)
def test_an_extreme_score_does_not_dissolve_the_coupling_of_the_others(distance, lie):
    """Beside 1e100, λ and the others' scores would be rounding errors."""
    coupled = 0
    for seed in range(2):
        scores, budgets, _ = instance(seed, 5, 4, 1)
        scores[2] = lie * np.array([0.5, 0, 0, 1])
        limited = scores.copy()
        limited[2] = 1000 * sorted(scores.max(axis=1))[2] * np.array([0.5, 0, 0, 1])
        for coupling in (0.05, 0.3, 2):
            masks = choose("gradient", scores, budgets, coupling=coupling, distance=distance)
            found = objective(masks, limited, coupling, distance=distance)
            assert found == pytest.approx(best_of_all(limited, budgets, coupling, distance), rel=1e-9)
            # The liar's layer is the same with all that it could honestly say: then the rest is the others' problem.
            assert masks[2].tolist() == [False, False, False, True]
            own = choose("gradient", scores, budgets, distance=distance)
            coupled += int((masks != own).any())
            beside = best_beside(np.delete(scores, 2, axis=0), masks[2], coupling, distance)
            assert found - limited[2, 3] == pytest.approx(beside, rel=1e-6)
    assert coupled >= 3


def best_beside(norms, fixed, coupling, distance):
    """The others' optimum with one layer each, where one client's mask is fixed."""
    layers = norms.shape[1]
    rows = [np.zeros(layers, bool), *np.eye(layers, dtype=bool)]
    with_fixed = np.vstack((norms, np.zeros(layers)))
    return max(
        value_by_loops(np.array([*masks, fixed]), with_fixed, coupling, distance)
        for masks in itertools.product(rows, repeat=len(norms))
    )


def test_scores_within_the_limit_and_of_too_few_clients_are_taken_as_they_are():
    rng = np.random.default_rng(1)
    scores = rng.random((5, 6))
    scores[0] *= 900 / scores[0].max() * np.median(scores[1:].max(axis=1))
    for few in (scores, scores[:2] * [[1e9], [1]], np.vstack((scores[:2] * [[1e9], [1]], np.zeros((4, 6))))):
        budgets = np.full(len(few), 2)
        for coupling in (0.0, 0.1):
            found = choose("gradient", few, budgets, coupling=coupling)
            assert (found == select_layers(few, budgets, coupling)).all()


@given(st.integers(0, 1000), st.floats(0, 5), st.sampled_from([1e-6, 1e-3, 1e3, 1e6]))
def test_a_relative_coupling_is_in_the_unit_of_the_norms(seed, share, scale):
    norms, _, _ = instance(seed, 5, 4, 3)
    coupling = relative_coupling(norms, share)
    assert coupling * 4 == pytest.approx(share * sorted(max(row) for row in norms)[2])
    assert relative_coupling(scale * norms, share) == pytest.approx(scale * coupling)
    assert relative_coupling(norms[[3, 0, 4, 2, 1]], share) == coupling


def test_a_layer_is_trained_alone_above_the_share_of_the_usual_largest_norm():
    """Nine clients have a budget of one layer; the tenth has two, and gradients in a layer of its own."""
    for own, share, alone in ((0.21, 0.2, True), (0.19, 0.2, False), (0.9, 1.0, False), (1.1, 1.0, True)):
        norms = np.zeros((10, 3))
        norms[:, 0] = 1
        norms[9, 2] = own
        masks = choose("gradient", norms, [1] * 9 + [2], coupling=relative_coupling(norms, share))
        assert masks[:9].tolist() == [[True, False, False]] * 9 and masks[9].tolist() == [True, False, alone]


def test_a_single_client_and_clients_without_gradients_are_not_coupled():
    assert relative_coupling([[1.0, 2.0]], 0.2) == relative_coupling(np.zeros((3, 2)), 0.2) == 0
    # Who has no gradients does not say what is usual.
    assert relative_coupling([[1.0, 2.0], [0, 0], [4.0, 0], [0, 0]], 0.5) == pytest.approx(0.5 * 3 / 3)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25])
def test_who_may_train_more_layers_does(share):
    """With a relative coupling, budgets of 1 to 4 layers are used: more layers the larger the budget."""
    trained = {budget: [] for budget in range(1, 5)}
    for seed in range(20):
        norms, _, _ = instance(seed, 12, 12, 1)
        budgets = np.random.default_rng(seed).integers(1, 5, 12)
        masks = choose("gradient", norms, budgets, coupling=relative_coupling(norms, share))
        times_thousand = choose("gradient", 1000 * norms, budgets, coupling=relative_coupling(1000 * norms, share))
        assert (times_thousand == masks).all()
        for budget, mask in zip(budgets, masks, strict=True):
            trained[int(budget)].append(int(mask.sum()))
    one, two, three, four = (np.mean(trained[budget]) for budget in range(1, 5))
    assert one == 1 and two > 1.4 and three > two + 0.3 and four > three + 0.2


@given(st.integers(0, 1000), st.floats(0, 5), st.booleans())
def test_filled_budgets_have_the_layers_of_p1_and_then_the_largest_norms(seed, share, priced):
    norms, budgets, prices = instance(seed, 4, 5, 4)
    costs = prices if priced else np.ones((4, 5))
    how = {"coupling": relative_coupling(norms, share), "costs": prices if priced else None}
    masks = choose("gradient", norms, budgets, **how)
    for mask, filled, own, cost, budget in zip(
        masks, choose("gradient", norms, budgets, fill=True, **how), norms, costs, budgets, strict=True
    ):
        expected, left = list(np.flatnonzero(mask)), sorted(np.flatnonzero(~mask), key=lambda layer: -own[layer])
        for layer in left:
            if sum(cost[[*expected, layer]]) <= budget:
                expected.append(layer)
        assert sorted(expected) == np.flatnonzero(filled).tolist()
        assert priced or filled.sum() == budget


def test_costs_that_miss_the_budget_by_a_hair_do_not_keep_the_server_busy():
    norms = np.random.default_rng(6).random((3, 16))
    costs = np.tile(1 + 1e-9 * np.arange(16), (3, 1))
    budgets = np.full(3, 8 - 1e-9)
    masks = select_layers(norms, budgets, 0.1, costs=costs)
    assert ((costs * masks).sum(axis=1) <= budgets).all() and masks.sum() >= 3 * 6
    with pytest.raises(TimeoutError, match="less than the program's tolerance"):
        select_layers(norms[:, :8], np.full(3, 4 - 1e-9), 0.1, costs=costs[:, :8], solver="exact")


@pytest.mark.parametrize(
    ("coupling", "distance", "named"),
    [(-1.0, "hamming", "coupling is -1"), (math.nan, "hamming", "coupling is nan"), (1.0, "euclid", "is 'euclid'")],
)
def test_what_has_no_objective_is_named(coupling, distance, named):
    with pytest.raises(ValueError, match=named):
        objective([[True, False]] * 2, NORMS, coupling, distance=distance)
