"""Swaps of layers: a group of clients trains one layer in place of another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tepal.strategies.layer_selection.checks import Floats, Ints, Mask
from tepal.strategies.layer_selection.problem import LEAST_GAIN, Problem, distances


def swap_layers(problem: Problem, masks: Mask) -> bool:
    """Try all pairs of layers, and swap each for the best group of clients, in place. Returns whether any changed."""
    apart = distances(masks)
    slack = problem.slack(masks)
    changed = False
    for a in range(problem.layers - 1, -1, -1):
        for b in range(a, -1, -1):  # a == b: layer a is added or removed, and none swapped
            price = problem.costs[:, a] - (0 if a == b else problem.costs[:, b])
            who = free_to_swap(masks, price, slack, a, b)
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


def free_to_swap(masks: Mask, price: Ints, slack: Ints, a: int, b: int) -> Ints:
    """Clients that train exactly one of the layers a and b, and whose budget allows the other.

    If a == b: clients that train layer a, or whose budget allows it.
    """
    has_a = masks[:, a]
    free = np.where(has_a, True if a == b else -price <= slack, price <= slack)
    if a != b:
        free &= has_a != masks[:, b]
    return np.flatnonzero(free)


def best_group(problem: Problem, masks: Mask, apart: Floats, who: Ints, a: int, b: int) -> Mask | None:
    """The best group of the clients `who` to train layer a, while the others of them train b (if a == b: not a).

    Let x_i be 1 if client i trains a, else 0. (P1) is then Σ x_i·h_i − λ·Σ_{i<j} W_ij·|x_i − x_j| plus a constant. The
    clients are ranked by h_i, and the first ones train a, as many as is best. For the Hamming distance W is constant,
    and this is the optimum over all groups.

    Returns:
        (len(who),) bool; None if no group is better than the present one.
    """
    if not who.size:
        return None
    distance: Callable[[Floats], Floats] = np.square if problem.distance == "squared" else np.positive
    alone = a == b
    has_a, has_b = masks[:, a].astype(np.float64), masks[:, b].astype(np.float64)
    # Distance, in a and b, of each client from one with x_i = 1, and from one with x_i = 0.
    to_a, to_b = 1 - has_a, has_a
    in_these = np.abs(has_a[who][:, None] - has_a)
    if not alone:
        to_a, to_b = to_a + has_b, to_b + 1 - has_b
        in_these = in_these + np.abs(has_b[who][:, None] - has_b)
    rest = apart[who] - in_these

    h = problem.gains[who, a] - (0.0 if alone else problem.gains[who, b])
    fixed = np.ones(problem.clients, dtype=bool)
    fixed[who] = False
    if fixed.any():
        to_fixed = rest[:, fixed]
        closer = distance(to_fixed + to_b[fixed]) - distance(to_fixed + to_a[fixed])
        h = h + problem.coupling * closer.sum(axis=1)
    among = rest[:, who]
    weights = distance(among + (1.0 if alone else 2.0)) - distance(among)  # W
    np.fill_diagonal(weights, 0.0)

    with_a = masks[who, a]
    rank = np.lexsort((~with_a, -h))
    weights = weights[np.ix_(rank, rank)]
    cut = np.cumsum(weights.sum(axis=1) - 2 * np.tril(weights).sum(axis=1))
    values = np.append(0.0, np.cumsum(h[rank]) - problem.coupling * cut)
    now_cut = weights[with_a[rank]][:, ~with_a[rank]].sum()
    now = h[with_a].sum() - problem.coupling * now_cut
    head = int(values.argmax())
    if values[head] - now <= LEAST_GAIN:
        return None
    takes = np.zeros(len(who), dtype=bool)
    takes[rank[:head]] = True
    return takes
