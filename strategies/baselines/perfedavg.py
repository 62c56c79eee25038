"""Per-FedAvg: a global model from which one step of a client makes a good one (Fallah et al. 2020, arXiv:2002.07948).

    F_i(w) = f_i(w − α·∇f_i(w))        w ← mean of the clients' w_i after local steps along ∇F_i

What is scored is what each client makes of the global model by its one step of size α.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack

from tepal.exchange.plan import ALPHA, DELTA, HESSIAN_FREE, PERFEDAVG, Scalar
from tepal.strategies.options import NonNegative, Positive, RoundOptions, listed
from tepal.strategies.personal.averaging import COMMON_MODEL, Personalised
from tepal.strategies.rounds.strategy import MethodStrategy


class MetaLearning(Personalised):
    """The method of Per-FedAvg."""

    objective = PERFEDAVG

    def __init__(self, alpha: float, gradient: str, delta: float) -> None:
        self.alpha, self.gradient, self.delta = alpha, gradient, delta

    def options(self) -> Mapping[str, Scalar]:
        return {ALPHA: self.alpha, HESSIAN_FREE: self.gradient == "hessian-free", DELTA: self.delta}


@listed(
    "perfedavg",
    title="Per-FedAvg",
    does="an initial model that one local step makes personal",
    paper="Fallah et al. 2020, arXiv:2002.07948",
    result=COMMON_MODEL,
)
class PerFedAvg(MethodStrategy):
    """Per-FedAvg over Tepal's exchange.

    Args:
        alpha: α, the size of a client's own step.
        gradient: of F_i: "first-order" leaves the second derivative out, "hessian-free" takes it from a difference of
            gradients.
        delta: δ, the step of that difference, in units of the gradient.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self,
        *,
        alpha: NonNegative = 0.01,
        gradient: Literal["first-order", "hessian-free"] = "first-order",
        delta: Positive = 1e-3,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(MetaLearning(alpha, gradient, delta), **round_options)
