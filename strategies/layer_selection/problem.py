"""Problem (P1) of selective layer fine-tuning (arXiv:2408.15600): its objective, and the scaled form for the solvers.

    (P1)  max  Σ_i Σ_l m_il·‖g_il‖² − (λ/2)·Σ_i Σ_{j≠i} dist(m_i, m_j)     such that  Σ_l cost_il·m_il ≤ R_i

There are n clients and L layers (0 is next to the input); m_i ∈ {0,1}^L is the mask of client i, R_i its budget, and
g_il its gradient in layer l. The paper prints dist = ‖m_i − m_j‖₁² ("squared"); its authors' code has ‖m_i − m_j‖₁
("hamming").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from tepal.strategies.layer_selection.checks import Floats, Ints, Mask, check_options, checked_scores, fits

LEAST_GAIN = 1e-11  # of a step of a solver, relative to the largest squared norm: more than rounding errors


def objective(masks: ArrayLike, squared_norms: ArrayLike, coupling: float, *, distance: str = "hamming") -> float:
    """Value of (P1), in units of the squared norms.

    Args:
        masks: (n, L) bool, the layers of each client.
        squared_norms: (n, L), ‖g_il‖².
        coupling: λ ≥ 0.
        distance: "hamming" or "squared".

    Raises:
        ValueError: norms or coupling out of range, an unknown distance, masks of another shape than the norms.
    """
    norms = checked_scores(squared_norms, "squared_norms")
    check_options(coupling, distance)
    chosen = np.asarray(masks, dtype=bool)
    if chosen.shape != norms.shape:
        raise ValueError(f"masks have shape {chosen.shape}; it must be that of squared_norms, {norms.shape}")
    return float(norms[chosen].sum()) - coupling * _pair_sum(chosen, distance)


@dataclass(frozen=True)
class Problem:
    """(P1) with squared norms of at most 1, and integer costs, whose sums are exact."""

    gains: Floats  # (n, L)
    costs: Ints  # (n, L)
    budgets: Ints  # (n,)
    unit: Mask  # (n,): all costs of this client are 1
    coupling: float
    distance: str

    @property
    def clients(self) -> int:
        return len(self.gains)

    @property
    def layers(self) -> int:
        return int(self.gains.shape[1])

    def value(self, masks: Mask) -> float:
        return float(self.gains[masks].sum()) - self.coupling * _pair_sum(masks, self.distance)

    def slack(self, masks: Mask) -> Ints:
        """Remaining budget of each client, (n,)."""
        return np.asarray(self.budgets - (self.costs * masks).sum(axis=1))


def problem_of(norms: Floats, limits: Floats, prices: Floats, coupling: float, distance: str) -> Problem:
    """Scale (P1) with these squared norms (n, L), budgets (n,), costs (n, L), λ and distance."""
    scale = float(norms.max()) or 1.0
    gains = norms / scale
    costs = np.ones(norms.shape, dtype=np.int64)
    budgets = np.empty(len(norms), dtype=np.int64)
    for i, (price, limit) in enumerate(zip(prices, limits.tolist(), strict=True)):
        costs[i], budgets[i] = _whole_costs(price, limit)
    # A single difference then costs more than the sum of all norms, so that all masks are equal. A larger λ would only
    # add rounding errors.
    strongest = 2.0 * gains.size
    return Problem(gains, costs, budgets, (costs == 1).all(axis=1), min(coupling / scale, strongest), distance)


def _whole_costs(price: Floats, limit: float) -> tuple[Ints, int]:
    """Costs and budget of one client as integers: costs are rounded up, the budget down, by less than 1 in 2^50."""
    layers = len(price)
    if fits(price, limit):
        return np.ones(layers, dtype=np.int64), layers
    if (price == price[0]).all():
        return np.ones(layers, dtype=np.int64), int(Fraction(limit) // Fraction(float(price[0])))
    # A power of two scales without rounding, and L + 1 times the budget stays below 2^63.
    exponent = 62 - (layers + 1).bit_length() - math.frexp(limit)[1]
    budget = math.floor(Fraction(limit) * Fraction(2) ** exponent)
    whole = [min(math.ceil(Fraction(cost) * Fraction(2) ** exponent), budget + 1) for cost in price.tolist()]
    return np.array(whole, dtype=np.int64), budget


def distances(masks: Mask) -> Floats:
    """Hamming distances (n, n) of the masks."""
    signs = 1.0 - 2.0 * masks
    # Products of small integers are exact in float64, and much faster than in an integer dtype.
    different: Floats = (masks.shape[1] - signs @ signs.T) / 2
    return different


def _pair_sum(masks: Mask, distance: str) -> float:
    """Σ_{i<j} dist(m_i, m_j)."""
    if distance == "hamming":
        counts = masks.sum(axis=0)
        return float((counts * (len(masks) - counts)).sum())
    return float((distances(masks) ** 2).sum()) / 2
