"""The solution of (P1), by the exact solver where that is quick, else by the fast one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tepal.strategies.layer_selection.checks import Mask, check_options, checked_budgets, checked_scores
from tepal.strategies.layer_selection.exact import solve_exact, suits_exact
from tepal.strategies.layer_selection.fast import solve_fast
from tepal.strategies.layer_selection.knapsack import own_best
from tepal.strategies.layer_selection.problem import problem_of

SOLVERS = ("auto", "exact", "fast")
_SECONDS = 2.0  # of one solution of the program


def select_layers(
    squared_norms: ArrayLike,
    budgets: ArrayLike,
    coupling: float,
    *,
    distance: str = "hamming",
    costs: ArrayLike | None = None,
    solver: str = "auto",
) -> Mask:
    """Solve (P1) (arXiv:2408.15600): the layers that each client trains.

    λ = 0 is each client's own best layers; λ → ∞ with equal budgets is the best layers of the summed squared norms for
    everybody. Of equally good layers of one client the one nearer the output wins. Masks are not filled up: a layer
    that adds nothing to the objective is left out, except for λ = 0 with unit costs, which is each client's top R_i.
    The result is a function of the clients' values: their order changes the order of the masks only.

    Args:
        squared_norms: (n, L), ‖g_il‖² ≥ 0.
        budgets: (n,), R_i, in layers, or in the unit of `costs`.
        coupling: λ ≥ 0, in units of the squared norms. Without any other client it has no effect.
        distance: "hamming" or "squared".
        costs: of a layer, for all clients (L,) or for each (n, L), in bytes or milliseconds, say; None: 1 per layer.
            No mask costs more than its budget, not even by rounding. A budget below every cost gives an empty mask.
        solver: "exact", a mixed-integer program, for small cases whose clients have norms of like size (it tolerates
            about 1e-6 of the largest); "fast", a local search; "auto", exact where that takes a few milliseconds and
            is exact, and else fast.

    Returns:
        (n, L) bool.

    Raises:
        ValueError: arrays of the wrong shape or out of range, an unknown distance or solver.
        TimeoutError: of "exact", costs and budgets that are too close for it.
    """
    norms = checked_scores(squared_norms, "squared_norms")
    check_options(coupling, distance)
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(SOLVERS)}")
    limits, prices = checked_budgets(budgets, costs, norms.shape)
    if coupling == 0 or len(norms) <= 1:
        return own_best(norms, limits, prices, fill=costs is None)
    # In an order that the values give, every tie is broken the same way however the clients were listed.
    order = np.lexsort(np.column_stack((norms, limits, prices)).T)
    problem = problem_of(norms[order], limits[order], prices[order], coupling, distance)
    masks = np.empty(norms.shape, dtype=bool)
    if solver == "exact":
        masks[order] = solve_exact(problem)[0]
    elif solver == "auto" and suits_exact(problem):
        try:
            masks[order] = solve_exact(problem, _SECONDS)[0]
        except TimeoutError:  # costs and budgets that differ by less than the program sees
            masks[order] = solve_fast(problem)
    else:
        masks[order] = solve_fast(problem)
    return masks
