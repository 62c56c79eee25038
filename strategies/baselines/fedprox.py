"""FedProx: FedAvg with a proximal term in the clients' loss (Li et al. 2020, arXiv:1812.06127).

Client k minimises h_k(w; w^t) = F_k(w) + (μ/2)·‖w − w^t‖² (eq. 2) over all trained entries; the server averages as
FedAvg does. μ = 0 is FedAvg. As with Flower's FedProx, the server sends μ and the client's app adds the term.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from tepal.exchange.plan import PROXIMAL, Scalar
from tepal.strategies.fedavg import FedAvgMethod
from tepal.strategies.options import NonNegative, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


class FedProxMethod(FedAvgMethod):
    """The method of FedProx."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def options(self) -> Mapping[str, Scalar]:
        return {PROXIMAL: self.mu}

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
        mu: μ of (μ/2)·‖w − w_received‖² over the trained entries. The paper takes the best of 0.001, 0.01, 0.1 and 1.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, mu: NonNegative = 0.01, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(FedProxMethod(mu), **round_options)
