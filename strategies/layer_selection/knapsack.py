"""The best layers of a single client: a knapsack problem."""

from __future__ import annotations

import numpy as np

from tepal.strategies.layer_selection.checks import Floats, Ints, Mask
from tepal.strategies.layer_selection.problem import Problem

_NODES = 1000  # at most, of the branch and bound of one knapsack; usually it needs about ten
_FRONT = 4096  # states of one knapsack, at most; 100 layers with real costs need far fewer


def best_rows(problem: Problem, gains: Floats, budgets: Ints) -> Mask:
    """(n, L) bool: for each client, the layers with the largest sum of gains (n, L) within the budget."""
    limits, units = budgets.tolist(), problem.unit.tolist()
    rows = zip(gains, problem.costs, limits, units, strict=True)
    return np.array([best_row(*row) for row in rows])


def best_row(gains: Floats, costs: Ints, budget: int, unit: bool) -> Mask:
    """(L,) bool: the layers with the largest sum of gains within the budget; in a tie, the layer nearer the output."""
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
    """(L,) bool: the best of the layers `among`, which exceed the budget: branch and bound by gain per cost."""
    layers = np.flatnonzero(among)[::-1]
    layers = layers[np.argsort(-gains[layers] / costs[layers], kind="stable")]
    sizes, worths = costs[layers].tolist(), gains[layers].tolist()
    row = np.zeros(len(gains), dtype=bool)
    best, best_taken = -1.0, 0
    open_nodes = [(0, budget, 0.0, 0)]  # decided layers, remaining budget, gain, bits of the selected layers
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
        # Every other choice omits one of these layers, or has the first that does not fit: a fraction of it is a bound.
        if k < len(sizes) and gain + left * (worths[k] / sizes[k]) > best * (1 + 1e-13):
            open_nodes += [*without, (k + 1, left, gain, taken)]
    row[layers[_front(costs[layers], gains[layers], budget)]] = True
    return row


def _front(sizes: Ints, worths: Floats, budget: int) -> Mask:
    """Solve a knapsack by its Pareto front, for layers with nearly equal gain or cost, sorted as in `_knapsack`.

    The front are the choices to which no other is superior in both cost and gain. It is extended layer by layer; a
    choice is dropped if it cannot reach the best complete choice, even with fractions of the remaining layers.
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
        # The remaining layers are sorted by gain per cost: filling the budget with them, the last one in part, is an
        # upper bound, and without the last one it is a feasible choice.
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
