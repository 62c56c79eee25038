"""Ascent by rows: each client in turn takes a better row of the mask, the others fixed."""

from __future__ import annotations

import numpy as np

from tepal.strategies.layer_selection.checks import Mask
from tepal.strategies.layer_selection.knapsack import best_row
from tepal.strategies.layer_selection.problem import LEAST_GAIN, Problem


def ascend(problem: Problem, masks: Mask) -> bool:
    """Better rows, in place, until no client gains by itself. Returns whether anything changed."""
    return _ascend_squared(problem, masks) if problem.distance == "squared" else _ascend_hamming(problem, masks)


def _ascend_hamming(problem: Problem, masks: Mask) -> bool:
    """Each client's best row given the others, in place, until nobody gains. Returns whether anything changed."""
    others = problem.clients - 1
    having = masks.sum(axis=0)
    changed, still, i = False, 0, 0
    while still < problem.clients:
        # A layer that k of the n − 1 others have agrees with k and differs from n − 1 − k.
        row = masks[i]
        gains = problem.gains[i] + problem.coupling * (2 * (having - row) - others)
        best = best_row(gains, problem.costs[i], int(problem.budgets[i]), bool(problem.unit[i]))
        still += 1
        if (best != row).any() and gains[best].sum() - gains[row].sum() > LEAST_GAIN:
            having += best.astype(np.int64) - row
            masks[i] = best
            changed, still = True, 1
        i = (i + 1) % problem.clients
    return changed


def _ascend_squared(problem: Problem, masks: Mask) -> bool:
    """As `_ascend_hamming`, but a row is improved by changing one or two layers at a time: it is not separable."""
    signs = 1.0 - 2.0 * masks
    gram = signs.T @ signs
    clients, layers = masks.shape
    slack = problem.slack(masks)
    changed, still, i = False, 0, 0
    while still < clients:
        sign = signs[i]
        # Changing layer a moves the distance to client j by s_ja = ±1. The square then grows by 2·d_j·s_ja + 1, and
        # with layer b, too, by 2·s_ja·s_jb more.
        apart = (layers - signs @ sign) / 2
        one = problem.gains[i] * sign - problem.coupling * (2 * sign * (apart @ signs) + clients - 1)
        two = one[:, None] + one - 2 * problem.coupling * (sign[:, None] * gram * sign - 1)
        two.flat[:: layers + 1] = one
        price = problem.costs[i] * sign.astype(np.int64)
        prices = price[:, None] + price
        prices.flat[:: layers + 1] = price
        two[prices > slack[i]] = -np.inf
        flat = int(two.argmax())
        still += 1
        if two.flat[flat] > LEAST_GAIN:
            gram -= np.outer(sign, sign)
            a, b = divmod(flat, layers)
            slack[i] -= prices[a, b]
            for layer in {a, b}:
                masks[i, layer] ^= True
                sign[layer] *= -1
            gram += np.outer(sign, sign)
            changed, still = True, 0
            continue  # the same client again, until nothing more is to be gained from it
        i = (i + 1) % clients
    return changed
