"""The best layers of one client by itself: a knapsack problem."""

from __future__ import annotations

import numpy as np

from tepal.strategies.layer_selection.checks import Floats, Ints, Mask
from tepal.strategies.layer_selection.problem import Problem, problem_of

_NODES = 1000  # of one knapsack by branch and bound; mostly it takes some ten
_FRONT = 4096  # states of one knapsack; far more than up to 100 layers with real costs need


def own_best(norms: Floats, limits: Floats, prices: Floats, *, fill: bool) -> Mask:
    problem = problem_of(norms, limits, prices, 0.0, "hamming")
    # `fill` makes a norm of 0 worth taking, after all others.
    gains = np.maximum(problem.gains, np.finfo(np.float64).tiny) if fill else problem.gains
    return best_rows(problem, gains, problem.budgets)


def best_rows(problem: Problem, gains: Floats, budgets: Ints) -> Mask:
    """(n, L) bool: for each client by itself, the layers of the largest sum of gains (n, L) within the budget."""
    limits, units = budgets.tolist(), problem.unit.tolist()
    rows = zip(gains, problem.costs, limits, units, strict=True)
    return np.array([best_row(*row) for row in rows])


def best_row(gains: Floats, costs: Ints, budget: int, unit: bool) -> Mask:
    """(L,) bool: the layers of the largest sum of gains within the budget; ties go to the layer nearer the output."""
    row = gains > 0
    if unit:
        if np.count_nonzero(row) > budget:
            last_first = np.argsort(-gains[::-1], kind="stable")[:budget]
            row = np.zeros(len(gains), dtype=bool)
            row[len(gains) - 1 - last_first] = True
        return row
    row &= costs <= budget
    return row if costs[row].sum() <= budget else _knapsack(gains, costs, budget, row)


def _knapsack(gains: Floats, costs: Ints, budget: int, among: Mask) -> Mask:
    """(L,) bool: the best of the layers `among`, which do not all fit: branch and bound over gain per cost."""
    layers = np.flatnonzero(among)[::-1]
    layers = layers[np.argsort(-gains[layers] / costs[layers], kind="stable")]
    sizes, worths = costs[layers].tolist(), gains[layers].tolist()
    row = np.zeros(len(gains), dtype=bool)
    best, best_taken = -1.0, 0
    open_nodes = [(0, budget, 0.0, 0)]  # decided layers, what is left of the budget, gain, bits of the layers taken
    for _ in range(_NODES):
        if not open_nodes:
            row[[layer for k, layer in enumerate(layers.tolist()) if best_taken >> k & 1]] = True
            return row
        k, left, gain, taken = open_nodes.pop()
        without = []
        while k < len(sizes) and sizes[k] <= left:
            without.append((k + 1, left, gain, taken))
            left, gain, taken, k = left - sizes[k], gain + worths[k], taken | 1 << k, k + 1
        if gain > best:
            best, best_taken = gain, taken
        # All others leave out one of these layers, or the first that does not fit: at best, a cut of it would.
        if k < len(sizes) and gain + left * (worths[k] / sizes[k]) > best * (1 + 1e-13):
            open_nodes += [*without, (k + 1, left, gain, taken)]
    row[layers[_front(costs[layers], gains[layers], budget)]] = True
    return row


def _front(sizes: Ints, worths: Floats, budget: int) -> Mask:
    """The knapsack where layers of nearly equal gain or cost make branches hard to tell apart; sorted as there.

    The front of (cost, gain) that no other choice beats in both grows layer by layer; what cannot reach the best
    complete choice any more, even if the rest could be cut to fill the budget, is dropped.
    """
    layers = range(len(sizes))
    total_cost, total_gain = np.append(0, np.cumsum(sizes)), np.append(0.0, np.cumsum(worths))
    spent, gained = np.zeros(1, dtype=np.int64), np.zeros(1)
    taken = np.zeros((1, len(layers)), dtype=bool)
    for k in range(len(layers)):
        fits = np.flatnonzero(spent + sizes[k] <= budget)
        more = taken[fits]
        more[:, k] = True
        spent = np.concatenate((spent[fits] + sizes[k], spent))
        gained = np.concatenate((gained[fits] + worths[k], gained))
        taken = np.concatenate((more, taken))
        # The rest comes in the order of gain per cost: a cut filling of what is left is an upper bound, and the
        # layers before the cut are a choice that is feasible.
        reach = total_cost[k + 1] + budget - spent
        cut = np.searchsorted(total_cost, reach, side="right") - 1
        full = gained + total_gain[cut] - total_gain[k + 1]
        over = np.minimum(cut, len(layers) - 1)
        bound = full + np.where(cut < len(layers), (reach - total_cost[cut]) * (worths[over] / sizes[over]), 0.0)
        alive = np.flatnonzero(bound >= full.max() * (1 - 1e-13))
        order = alive[np.lexsort((-gained[alive], spent[alive]))]
        best_before = np.maximum.accumulate(np.append(-1.0, gained[order][:-1]))
        order = order[gained[order] > best_before]
        if len(order) > _FRONT:
            order = order[np.sort(np.argsort(-bound[order], kind="stable")[:_FRONT])]
        spent, gained, taken = spent[order], gained[order], taken[order]
    best: Mask = taken[np.argmax(gained)]
    return best
