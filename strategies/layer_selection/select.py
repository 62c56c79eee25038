"""Solve (P1), by the exact solver if it takes milliseconds, otherwise by the fast one."""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import ArrayLike

from tepal.strategies.layer_selection.checks import Mask, check_options, checked_budgets, checked_scores
from tepal.strategies.layer_selection.exact import solve_exact, suits_exact
from tepal.strategies.layer_selection.fast import solve_fast
from tepal.strategies.layer_selection.knapsack import best_rows
from tepal.strategies.layer_selection.problem import problem_of

SOLVERS = ("auto", "exact", "fast")
_SECONDS = 2.0  # limit of one solution by the exact solver


def select_layers(
    squared_norms: ArrayLike,
    budgets: ArrayLike,
    coupling: float,
    *,
    distance: str = "hamming",
    costs: ArrayLike | None = None,
    solver: str = "auto",
) -> Mask:
    """Select the layers that each client trains by solving (P1) (arXiv:2408.15600).

    With λ = 0 these are each client's own best layers; for λ → ∞ and equal budgets, for all clients the layers with the
    largest sums of squared norms. Of equally good layers of a client the one nearer the output is selected. Masks are
    not filled: a layer that adds nothing to the objective is not selected, except for λ = 0 with unit costs, which
    selects each client's top R_i. The order of the clients does not change which layers each of them trains.

    Args:
        squared_norms: (n, L), ‖g_il‖² ≥ 0.
        budgets: (n,), R_i, in layers, or in the unit of `costs`.
        coupling: λ ≥ 0, in units of the squared norms. For a single client it has no effect.
        distance: "hamming" or "squared".
        costs: of a layer, for all clients (L,) or for each (n, L), for example in bytes or milliseconds; None: 1 per
            layer. No mask exceeds its budget, not even by rounding. A budget below every cost gives an empty mask.
        solver: "exact", a mixed-integer program, for small cases whose clients have norms of similar size (its
            tolerance is about 1e-6 of the largest); "fast", a local search; "auto", exact where it takes a few
            milliseconds and the tolerance does not matter, otherwise fast.

    Returns:
        (n, L) bool.

    Raises:
        ValueError: arrays of the wrong shape or out of range, an unknown distance or solver.
        TimeoutError: with "exact", sums of costs differ from budgets by less than its tolerance.
    """
    norms = checked_scores(squared_norms, "squared_norms")
    check_options(coupling, distance)
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(SOLVERS)}")
    limits, prices = checked_budgets(budgets, costs, norms.shape)
    if coupling == 0 or len(norms) <= 1:
        problem = problem_of(norms, limits, prices, 0.0, "hamming")
        least = np.finfo(np.float64).tiny if costs is None else 0.0  # for the top R_i, a norm of 0 is selected last
        return best_rows(problem, np.maximum(problem.gains, least), problem.budgets)
    # Sorted by their values, so that ties are broken the same way in whatever order the clients are given.
    order = np.lexsort(np.column_stack((norms, limits, prices)).T)
    problem = problem_of(norms[order], limits[order], prices[order], coupling, distance)
    masks = np.empty(norms.shape, dtype=bool)
    if solver == "exact":
        masks[order] = solve_exact(problem)[0]
        return masks
    if solver == "auto" and suits_exact(problem):
        with contextlib.suppress(TimeoutError):  # costs and budgets that differ by less than the program's tolerance
            masks[order] = solve_exact(problem, _SECONDS)[0]
            return masks
    masks[order] = solve_fast(problem)
    return masks
