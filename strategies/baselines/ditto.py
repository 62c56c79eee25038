"""Ditto: FedAvg, and a personal model for each client (Li et al. 2021, arXiv:2012.04221, algorithm 1).

    v_k ← v_k − η·(∇F_k(v_k) + λ·(v_k − w^t))        w: as in FedAvg

v_k stays with its client and is scored. λ = 0 is local training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from tepal.exchange.plan import DITTO, LAMBDA, Scalar
from tepal.strategies.options import NonNegative, RoundOptions, listed
from tepal.strategies.personal.averaging import COMMON_MODEL, PersonalisedMethod
from tepal.strategies.rounds.strategy import MethodStrategy


class DittoMethod(PersonalisedMethod):
    """The method of Ditto."""

    objective = DITTO

    def __init__(self, lam: float) -> None:
        self.lam = lam

    def options(self) -> Mapping[str, Scalar]:
        return {LAMBDA: self.lam}


@listed(
    "ditto",
    title="Ditto",
    does="a personal model near the global one",
    paper="Li et al. 2021, arXiv:2012.04221",
    result=COMMON_MODEL,
)
class Ditto(MethodStrategy):
    """Ditto over Tepal's exchange.

    Args:
        lam: λ of the proximal term that keeps personal models near the global one. The paper takes the best of 0.1, 1
            and 2.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, lam: NonNegative = 1.0, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(DittoMethod(lam), **round_options)
