"""Coordinate ascent: each client in turn gets a better row of the mask, while the other rows are fixed."""

from __future__ import annotations

import numpy as np

from tepal.strategies.layer_selection.checks import Mask
from tepal.strategies.layer_selection.knapsack import best_row
from tepal.strategies.layer_selection.problem import LEAST_GAIN, Problem


def ascend(problem: Problem, masks: Mask) -> bool:
    """Improve the masks row by row, in place, until no single row can be improved. Returns whether any changed."""
    return _ascend_squared(problem, masks) if problem.distance == "squared" else _ascend_hamming(problem, masks)


def _ascend_hamming(problem: Problem, masks: Mask) -> bool:
    """Replace each row by the best one, given the others: for the Hamming distance a knapsack problem."""
    others = problem.clients - 1
    counts = masks.sum(axis=0)
    changed, unchanged, i = False, 0, 0
    while unchanged < problem.clients:
        # A layer that k of the n − 1 others train agrees with k masks and differs from n − 1 − k.
        row = masks[i]
        gains = problem.gains[i] + problem.coupling * (2 * (counts - row) - others)
        best = best_row(gains, problem.costs[i], int(problem.budgets[i]), bool(problem.unit[i]))
        unchanged += 1
        if (best != row).any() and gains[best].sum() - gains[row].sum() > LEAST_GAIN:
            counts += best.astype(np.int64) - row
            masks[i] = best
            changed, unchanged = True, 1
        i = (i + 1) % problem.clients
    return changed


def _ascend_squared(problem: Problem, masks: Mask) -> bool:
    """Change one or two layers of a row at a time: the squared distance is not a sum over layers."""
    signs = 1.0 - 2.0 * masks
    gram = signs.T @ signs
    clients, layers = masks.shape
    slack = problem.slack(masks)
    changed, unchanged, i = False, 0, 0
    while unchanged < clients:
        sign = signs[i]
        # Changing layer a changes the distance d_j to client j by s_ja = ±1, and its square by 2·d_j·s_ja + 1.
        # Changing layer b as well adds 2·s_ja·s_jb.
        apart = (layers - signs @ sign) / 2
        one = problem.gains[i] * sign - problem.coupling * (2 * sign * (apart @ signs) + clients - 1)
        two = one[:, None] + one - 2 * problem.coupling * (sign[:, None] * gram * sign - 1)
        two.flat[:: layers + 1] = one
        price = problem.costs[i] * sign.astype(np.int64)
        prices = price[:, None] + price
        prices.flat[:: layers + 1] = price
        two[prices > slack[i]] = -np.inf
        flat = int(two.argmax())
        unchanged += 1
        if two.flat[flat] > LEAST_GAIN:
            gram -= np.outer(sign, sign)
            a, b = divmod(flat, layers)
            slack[i] -= prices[a, b]
            for layer in {a, b}:
                masks[i, layer] ^= True
                sign[layer] *= -1
            gram += np.outer(sign, sign)
            changed, unchanged = True, 0
            continue  # with the same client, until its row cannot be improved
        i = (i + 1) % clients
    return changed
