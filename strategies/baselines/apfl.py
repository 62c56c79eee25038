"""APFL: each client mixes a personal model with the global one (Deng et al. 2020, arXiv:2003.13461, algorithm 1).

    v̄_i = α_i·v_i + (1 − α_i)·w        w: as in FedAvg, with uniform weights; v_i: trained at the mixture v̄_i

v_i and α_i stay with their client; v̄_i is scored. α = 0 is FedAvg's model, α = 1 is local training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Unpack

from pydantic import Field

from tepal.exchange import plan
from tepal.exchange.plan import ADAPTIVE, ALPHA, Scalar
from tepal.strategies.fedavg import ModelMerger, ModelState
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.personal.averaging import COMMON_MODEL, PersonalisedMethod
from tepal.strategies.rounds.strategy import MethodStrategy


class APFLMethod(PersonalisedMethod):
    """The method of APFL."""

    objective = plan.APFL

    def __init__(self, alpha: float, adaptive: bool) -> None:
        self.alpha, self.adaptive = alpha, adaptive

    def merger(self, state: ModelState, round: int) -> ModelMerger[ModelState]:
        return ModelMerger(state, uniform=True, mean=self.mean)

    def options(self) -> Mapping[str, Scalar]:
        return {ALPHA: self.alpha, ADAPTIVE: self.adaptive}


@listed(
    "apfl",
    title="APFL",
    does="a mixture of a personal model and the global one",
    paper="Deng et al. 2020, arXiv:2003.13461",
    result=COMMON_MODEL,
)
class APFL(MethodStrategy):
    """APFL over Tepal's exchange.

    Args:
        alpha: α of every client at the start: the share of its personal model in the mixture.
        adaptive: whether each client's α is trained, by its gradient.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self,
        *,
        alpha: Annotated[float, Field(ge=0, le=1)] = 0.5,
        adaptive: bool = True,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(APFLMethod(alpha, adaptive), **round_options)
