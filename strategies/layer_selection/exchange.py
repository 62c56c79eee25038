"""Exchange of layers: a group of clients takes one layer in place of another at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tepal.strategies.layer_selection.checks import Floats, Ints, Mask
from tepal.strategies.layer_selection.problem import LEAST_GAIN, Problem, distances


def exchange_layers(problem: Problem, masks: Mask) -> bool:
    """Many clients exchange one layer for another at once, in place. Returns whether anything changed."""
    apart = distances(masks)
    slack = problem.slack(masks)
    changed = False
    for a in range(problem.layers - 1, -1, -1):
        for b in range(a, -1, -1):  # a == b: no other layer, take a or leave it
            price = problem.costs[:, a] - (0 if a == b else problem.costs[:, b])
            who = free_to_exchange(masks, price, slack, a, b)
            takes = best_group(problem, masks, apart, who, a, b)
            if takes is None:
                continue
            slack[who] -= price[who] * (takes.astype(np.int64) - masks[who, a])
            masks[who, a] = takes
            if a != b:
                masks[who, b] = ~takes
            apart = distances(masks)
            changed = True
    return changed


def free_to_exchange(masks: Mask, price: Ints, slack: Ints, a: int, b: int) -> Ints:
    """Clients that have exactly one of the layers a and b, and the budget for the other; a == b: a, or room for it."""
    has_a = masks[:, a]
    free = np.where(has_a, True if a == b else -price <= slack, price <= slack)
    if a != b:
        free &= has_a != masks[:, b]
    return np.flatnonzero(free)


def best_group(problem: Problem, masks: Mask, apart: Floats, who: Ints, a: int, b: int) -> Mask | None:
    """Which of the free clients `who` take layer a (the others b, or nothing); None where nothing better is found.

    Whether client i takes a is x_i; with D the distances in the other layers, (P1) is then
    Σ x_i·h_i − λ·Σ_{i<j} W_ij·|x_i − x_j|. The clients are ranked by h_i, and the best head of that ranking takes a.
    For the Hamming distance W is constant and this is the optimum over all groups.
    """
    if not who.size:
        return None
    distance: Callable[[Floats], Floats] = np.square if problem.distance == "squared" else np.positive
    alone = a == b
    has_a, has_b = masks[:, a].astype(np.float64), masks[:, b].astype(np.float64)
    # Distance, in a and b, of each client from one that takes a, and from one that does not.
    to_a, to_b = 1 - has_a, has_a
    in_these = np.abs(has_a[who][:, None] - has_a)
    if not alone:
        to_a, to_b = to_a + has_b, to_b + 1 - has_b
        in_these = in_these + np.abs(has_b[who][:, None] - has_b)
    rest = apart[who] - in_these

    mine = problem.gains[who, a] - (0.0 if alone else problem.gains[who, b])  # h
    fixed = np.ones(problem.clients, dtype=bool)
    fixed[who] = False
    if fixed.any():
        held = rest[:, fixed]
        pull = distance(held + to_b[fixed]) - distance(held + to_a[fixed])
        mine = mine + problem.coupling * pull.sum(axis=1)
    among = rest[:, who]
    weights = distance(among + (1.0 if alone else 2.0)) - distance(among)  # W
    np.fill_diagonal(weights, 0.0)

    with_a = masks[who, a]
    rank = np.lexsort((~with_a, -mine))
    weights = weights[np.ix_(rank, rank)]
    cut = np.cumsum(weights.sum(axis=1) - 2 * np.tril(weights).sum(axis=1))
    values = np.append(0.0, np.cumsum(mine[rank]) - problem.coupling * cut)
    now_cut = weights[with_a[rank]][:, ~with_a[rank]].sum()
    now = mine[with_a].sum() - problem.coupling * now_cut
    head = int(values.argmax())
    if values[head] - now <= LEAST_GAIN:
        return None
    takes = np.zeros(len(who), dtype=bool)
    takes[rank[:head]] = True
    return takes
