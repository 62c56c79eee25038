"""Per-FedAvg: a global model from which one step of a client makes a good one (Fallah et al. 2020, arXiv:2002.07948).

    F_i(w) = f_i(w − α·∇f_i(w))        w ← mean of the clients' w_i after local steps along ∇F_i

What is scored is what each client makes of the global model by its one step of size α.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepal.exchange.plan import ALPHA, DELTA, HESSIAN_FREE, PERFEDAVG, Scalar
from tepal.strategies.method import check_number, check_one_of
from tepal.strategies.personal.averaging import Personalised
from tepal.strategies.rounds.strategy import MethodStrategy

GRADIENTS = ("first-order", "hessian-free")


class MetaLearning(Personalised):
    """The method of Per-FedAvg."""

    objective = PERFEDAVG

    def __init__(self, alpha: float, gradient: str, delta: float) -> None:
        check_number("alpha", alpha, alpha >= 0, "0 or more")
        check_number("delta", delta, delta > 0, "positive")
        check_one_of(gradient=(gradient, GRADIENTS))
        self.alpha, self.gradient, self.delta = alpha, gradient, delta

    def options(self) -> Mapping[str, Scalar]:
        return {ALPHA: self.alpha, HESSIAN_FREE: self.gradient == "hessian-free", DELTA: self.delta}


class PerFedAvg(MethodStrategy):
    """Per-FedAvg over Tepal's exchange.

    Args:
        alpha: α ≥ 0, the size of a client's own step.
        gradient: of F_i: "first-order" leaves the second derivative out, "hessian-free" takes it from a difference of
            gradients.
        delta: δ > 0, the step of that difference, in units of the gradient.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self, *, alpha: float = 0.01, gradient: str = "first-order", delta: float = 1e-3, **round_options: Any
    ) -> None:
        super().__init__(MetaLearning(alpha, gradient, delta), **round_options)
