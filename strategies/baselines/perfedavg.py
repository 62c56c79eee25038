"""Per-FedAvg: a global model that one local step personalises (Fallah et al. 2020, arXiv:2002.07948).

    F_i(w) = f_i(w − α·∇f_i(w))        w ← weighted mean of the clients' w_i after local steps along ∇F_i

Each client scores the global model after its step, w − α·∇f_i(w). The mean's weights are the clients' numbers of
examples; the paper's are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack

from tepal.exchange.plan import ALPHA, DELTA, HESSIAN_FREE, PERFEDAVG, Scalar
from tepal.strategies.options import NonNegative, Positive, RoundOptions, listed
from tepal.strategies.personal.averaging import COMMON_MODEL, PersonalisedMethod
from tepal.strategies.rounds.strategy import MethodStrategy


class PerFedAvgMethod(PersonalisedMethod):
    """The method of Per-FedAvg."""

    objective = PERFEDAVG

    def __init__(self, alpha: float, gradient: str, delta: float) -> None:
        self.alpha, self.gradient, self.delta = alpha, gradient, delta

    def options(self) -> Mapping[str, Scalar]:
        return {ALPHA: self.alpha, HESSIAN_FREE: self.gradient == "hessian-free", DELTA: self.delta}


@listed(
    "perfedavg",
    title="Per-FedAvg",
    does="an initial model that one local step personalises",
    paper="Fallah et al. 2020, arXiv:2002.07948",
    result=COMMON_MODEL,
)
class PerFedAvg(MethodStrategy):
    """Per-FedAvg over Tepal's exchange.

    Args:
        alpha: α, the size of the personalising step.
        gradient: how ∇F_i is computed: "first-order" omits the second derivative, "hessian-free" approximates it by a
            difference of gradients.
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
        super().__init__(PerFedAvgMethod(alpha, gradient, delta), **round_options)
