"""FedProx: FedAvg whose clients are held near the model that they got (Li et al. 2020, arXiv:1812.06127).

Client k minimises h_k(w; w^t) = F_k(w) + (μ/2)·‖w − w^t‖² (eq. 2) over all trained entries; the server averages as
FedAvg does. μ = 0 is FedAvg. Flower's own FedProx sends μ likewise, and leaves the term to the app.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tepal.exchange.plan import PROXIMAL, Plan, Reply
from tepal.strategies.fedavg import Averaging, ModelState
from tepal.strategies.method import check_number
from tepal.strategies.rounds.strategy import MethodStrategy


class Proximal(Averaging):
    """The method of FedProx."""

    def __init__(self, mu: float) -> None:
        check_number("mu", mu, mu >= 0, "0 or more")
        self.mu = mu

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], heard: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, heard)
        return [replace(plan, options={**plan.options, PROXIMAL: self.mu}) for plan in plans]

    def describe(self) -> Mapping[str, str | int | float]:
        return {"mu": self.mu}


class FedProx(MethodStrategy):
    """FedProx over Tepal's exchange.

    Args:
        mu: μ ≥ 0 of the proximal term. The paper takes the best of 0.001, 0.01, 0.1 and 1.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, mu: float = 0.01, **round_options: Any) -> None:
        super().__init__(Proximal(mu), **round_options)
