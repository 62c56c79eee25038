"""The fast solver of (P1): ascent by rows and exchange of layers, from many degrees of consensus.

The penalty rewards agreement, so (P1) has many local optima: clients that agree on a layer do not leave it one by one.
The fast solver therefore starts from many degrees of consensus, improves row by row (a client against all others), and
then layer by layer: every client that may exchange layer b for layer a is free to, and the best group of them does it
at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tepal.strategies.layer_selection.ascent import ascend
from tepal.strategies.layer_selection.checks import Mask
from tepal.strategies.layer_selection.exchange import exchange_layers
from tepal.strategies.layer_selection.knapsack import best_rows
from tepal.strategies.layer_selection.problem import Problem

_STARTS = 9  # degrees of consensus, evenly spread when the budgets allow more
_LEADERS = 12  # clients whose own best layers are tried as everybody's
_OTHER_COUPLINGS = (0.5, 2.0)  # factors of λ under which the best result is moved
_POLISHED = 2  # the best results of the row ascent go on to exchanges of layers


def solve_fast(problem: Problem) -> Mask:
    found: dict[bytes, tuple[float, Mask]] = {}
    for start in {masks.tobytes(): masks for masks in _starts(problem)}.values():
        ascend(problem, start)
        found.setdefault(start.tobytes(), (problem.value(start), start))
    best = sorted(found.values(), key=lambda item: -item[0])[:_POLISHED]
    top = max((_polished(problem, masks) for _, masks in best), key=problem.value)
    for factor in _OTHER_COUPLINGS:
        # The optimum of a somewhat different problem is a start, too, and often from another valley.
        moved = _polished(replace(problem, coupling=factor * problem.coupling), top)
        top = max(top, _polished(problem, moved), key=problem.value)
    return top


def _polished(problem: Problem, masks: Mask) -> Mask:
    """A copy of the masks that neither a row nor an exchange of two layers improves."""
    masks = masks.copy()
    ascend(problem, masks)
    while exchange_layers(problem, masks) and ascend(problem, masks):
        pass
    return masks


def _starts(problem: Problem) -> Iterator[Mask]:
    """Consensus on t layers, with and without each client's own best of the rest, and on one client's best layers."""
    summed = problem.gains.sum(axis=0)
    consensus = (problem.layers - 1 - np.argsort(-summed[::-1], kind="stable")).tolist()
    # How many layers the largest budget holds, which for unit costs is that budget.
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
    if not problem.unit.all():  # else these are among the consensus on t layers
        leaders = np.concatenate((leaders, best_rows(problem, everybody, problem.budgets)))
    leaders = np.unique(leaders, axis=0)
    for k in _spread(len(leaders), _LEADERS):
        yield best_rows(problem, everybody * leaders[k], problem.budgets)


def _spread(count: int, at_most: int) -> list[int]:
    """0 … count − 1, or as many of these numbers as are wanted, evenly spread."""
    return sorted({round(k) for k in np.linspace(0, count - 1, min(count, at_most)).tolist()})
