"""FedProx: FedAvg whose clients are held near the model that they got (Li et al. 2020, arXiv:1812.06127).

Client k minimises h_k(w; w^t) = F_k(w) + (μ/2)·‖w − w^t‖² (eq. 2) over all trained entries; the server averages as
FedAvg does. μ = 0 is FedAvg. Flower's own FedProx sends μ likewise, and leaves the term to the app.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from tepal.exchange.plan import PROXIMAL, Plan, Reply
from tepal.strategies.fedavg import Averaging, ModelState
from tepal.strategies.options import NonNegative, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


class Proximal(Averaging):
    """The method of FedProx."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        return [replace(plan, options={**plan.options, PROXIMAL: self.mu}) for plan in plans]

    def describe(self) -> Mapping[str, str | int | float]:
        return {"mu": self.mu}


@listed(
    "fedprox",
    title="FedProx",
    does="clients stay near the model that they received",
    paper="Li et al. 2020, arXiv:1812.06127",
)
class FedProx(MethodStrategy):
    """FedProx over Tepal's exchange.

    Args:
        mu: μ of (μ/2)·‖w − w_received‖² over what trains. The paper takes the best of 0.001, 0.01, 0.1 and 1.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, mu: NonNegative = 0.01, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(Proximal(mu), **round_options)
