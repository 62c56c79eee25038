"""The fast solver of (P1): a local search from several starts.

The penalty rewards agreement, so (P1) has many local optima: no single client gains by leaving a layer on which it
agrees with others. The search therefore starts from several degrees of consensus, improves the masks row by row, one
client at a time, and then swaps layers for groups of clients together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tepal.strategies.layer_selection.ascent import ascend
from tepal.strategies.layer_selection.checks import Mask
from tepal.strategies.layer_selection.knapsack import best_rows
from tepal.strategies.layer_selection.problem import Problem
from tepal.strategies.layer_selection.swaps import swap_layers

_STARTS = 9  # degrees of consensus, evenly spaced if the budgets allow more
_LEADERS = 12  # clients whose own best layers are tried for all clients
_OTHER_COUPLINGS = (0.5, 2.0)  # factors of λ for which the best result is improved, to get further starts
_POLISHED = 2  # results of the row ascent, the best ones, for which layers are swapped


def solve_fast(problem: Problem) -> Mask:
    """Find masks (n, L) with a high value of (P1); usually it is the optimum."""
    found: dict[bytes, tuple[float, Mask]] = {}
    for start in {masks.tobytes(): masks for masks in _starts(problem)}.values():
        ascend(problem, start)
        found.setdefault(start.tobytes(), (problem.value(start), start))
    best = sorted(found.values(), key=lambda item: -item[0])[:_POLISHED]
    top = max((_polished(problem, masks) for _, masks in best), key=problem.value)
    for factor in _OTHER_COUPLINGS:
        # The optimum for another λ is a further start, and often leads to another local optimum.
        moved = _polished(replace(problem, coupling=factor * problem.coupling), top)
        top = max(top, _polished(problem, moved), key=problem.value)
    return top


def _polished(problem: Problem, masks: Mask) -> Mask:
    """Improve a copy of the masks until neither a change of a row nor a swap of two layers improves it."""
    masks = masks.copy()
    ascend(problem, masks)
    while swap_layers(problem, masks) and ascend(problem, masks):
        pass
    return masks


def _starts(problem: Problem) -> Iterator[Mask]:
    """Starts: consensus on t layers, with and without each client's best other layers; one client's layers for all."""
    summed = problem.gains.sum(axis=0)
    consensus = (problem.layers - 1 - np.argsort(-summed[::-1], kind="stable")).tolist()
    # The number of layers that the largest budget allows, which for unit costs is that budget.
    cumulated = np.cumsum(np.sort(problem.costs, axis=1), axis=1)
    most = int((cumulated <= problem.budgets[:, None]).sum(axis=1).max())
    for t in _spread(most + 1, _STARTS):
        alone = np.zeros(problem.gains.shape, dtype=bool)
        left = problem.budgets.copy()
        for layer in consensus[:t]:
            alone[:, layer] = problem.costs[:, layer] <= left
            left -= problem.costs[:, layer] * alone[:, layer]
        yield alone | best_rows(problem, np.where(alone, 0.0, problem.gains), left)
        yield alone
    everybody = np.broadcast_to(summed, problem.gains.shape)
    leaders = best_rows(problem, problem.gains, problem.budgets)
    if not problem.unit.all():  # for unit costs these masks are consensus on t layers
        leaders = np.concatenate((leaders, best_rows(problem, everybody, problem.budgets)))
    leaders = np.unique(leaders, axis=0)
    for k in _spread(len(leaders), _LEADERS):
        yield best_rows(problem, everybody * leaders[k], problem.budgets)


def _spread(count: int, at_most: int) -> list[int]:
    """The numbers 0 … count − 1, or `at_most` of them, evenly spaced."""
    return sorted({round(k) for k in np.linspace(0, count - 1, min(count, at_most)).tolist()})
