"""The exact solver of (P1): a mixed-integer program, with which the fast solver is also tested."""

from __future__ import annotations

import math

import numpy as np

from tepal.strategies.layer_selection.checks import Mask
from tepal.strategies.layer_selection.problem import Problem

_EXACT_UP_TO = 160  # variables of the program, clients²·layers/2, that are solved in a few milliseconds
_MAX_RATIO = 1e4  # of the largest to the smallest client's norm: beyond it the program's tolerance matters
_CUTS = 20  # how many times solutions that exceed a budget are excluded


def suits_exact(problem: Problem) -> bool:
    """Whether the program takes milliseconds, and its tolerance is small compared with every client's norms."""
    highest = problem.gains.max(axis=1)
    highest = highest[highest > 0]
    small = problem.clients**2 * problem.layers // 2 <= _EXACT_UP_TO
    return small and bool(highest.size == 0 or highest.max() <= _MAX_RATIO * highest.min())


def solve_exact(problem: Problem, time_limit: float = math.inf) -> tuple[Mask, float]:
    """Solve (P1) as a linear mixed-integer program.

    Variables: the masks m; z_ijl ≥ |m_il − m_jl| for i < j, with equality at the optimum, as λ > 0; for the squared
    distance also q_ij ≥ (2k + 1)·d − k·(k + 1) for d = Σ_l z_ijl and every k, the lines through (k, k²) and
    (k + 1, (k + 1)²), which at whole numbers d is q_ij ≥ d².

    Args:
        problem: (P1), scaled.
        time_limit: in seconds.

    Returns:
        Masks (n, L), and an upper bound on the optimal value, which is their value unless time ran out.

    Raises:
        TimeoutError: no masks were found within the time limit.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, layers = problem.clients, problem.layers
    first, second = np.triu_indices(n, 1)
    pairs = len(first)
    pair_signs = sparse.identity(n, format="csr")[first] - sparse.identity(n, format="csr")[second]
    differ = sparse.kron(pair_signs, sparse.identity(layers), format="csr")
    z = sparse.identity(pairs * layers, format="csr")
    within = sparse.block_diag([row[None, :] for row in problem.costs / np.maximum(problem.budgets, 1)[:, None]])
    blocks = [[within, None], [differ, -z], [-differ, -z]]
    upper = [np.minimum(problem.budgets, 1.0), np.zeros(2 * pairs * layers)]
    penalty = np.full(pairs * layers, problem.coupling)
    if problem.distance == "squared":
        blocks = [[*row, None] for row in blocks]
        apart = sparse.kron(sparse.identity(pairs), np.ones((1, layers)))
        for k in range(layers):
            blocks.append([None, (2 * k + 1) * apart, -sparse.identity(pairs)])
            upper.append(np.full(pairs, float(k * (k + 1))))
        penalty = np.concatenate((np.zeros(pairs * layers), np.full(pairs, problem.coupling)))
    matrix, limits = sparse.bmat(blocks, format="csr"), np.concatenate(upper)
    weights = np.concatenate((-problem.gains.ravel(), penalty))
    whole = np.zeros(len(weights))
    whole[: n * layers] = 1
    highest = np.full(len(weights), np.inf)
    highest[: n * layers] = (problem.costs <= problem.budgets[:, None]).ravel()
    highest[n * layers : (n + pairs) * layers] = 1
    options = {"mip_rel_gap": 0.0} | ({"time_limit": time_limit} if time_limit < math.inf else {})
    for _ in range(_CUTS):
        constraint = LinearConstraint(matrix, -np.inf, limits)
        result = milp(weights, integrality=whole, bounds=Bounds(0, highest), constraints=constraint, options=options)
        if result.x is None:
            raise TimeoutError(f"no solution of {n} clients × {layers} layers in {time_limit:g} s: {result.message}")
        masks: Mask = result.x[: n * layers].reshape(n, layers) > 0.5
        over = np.flatnonzero(problem.slack(masks) < 0)
        if not over.size:
            return masks, -float(result.mip_dual_bound)
        # The program tolerates budgets exceeded by about 1e-6: exclude these sets of layers, and solve again.
        sets = np.zeros((len(over), len(weights)))
        for row, i in zip(sets, over, strict=True):
            row[i * layers : (i + 1) * layers] = masks[i]
        matrix = sparse.vstack((matrix, sparse.csr_matrix(sets)), format="csr")
        limits = np.append(limits, masks[over].sum(axis=1) - 1.0)
    raise TimeoutError(
        f"{_CUTS} solutions of {n} clients × {layers} layers exceeded a budget by less than the program's tolerance: "
        "choose another solver"
    )
