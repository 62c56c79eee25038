"""pFedMe: the global model minimises the clients' Moreau envelopes (Dinh et al. 2020, arXiv:2006.08848, algorithm 1).

    F_i(w) = min_θ f_i(θ) + (λ/2)·‖θ − w‖²        w ← (1 − β)·w + β·(unweighted mean of the clients' w_i)

θ̃_i, the client's approximate minimiser for the w that it received, stays with the client and is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Unpack

import numpy as np
from pydantic import Field

from tepal.exchange.layout import Names
from tepal.exchange.plan import INNER_RATE, INNER_STEPS, LAMBDA, OUTER_STEP, PFEDME, Scalar
from tepal.strategies.aggregate import Mean, WeightedMean
from tepal.strategies.fedavg import ModelMerger, ModelState
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.personal.averaging import COMMON_MODEL, PersonalisedMethod
from tepal.strategies.rounds.strategy import MethodStrategy


class PFedMeMethod(PersonalisedMethod):
    """The method of pFedMe."""

    objective = PFEDME

    def __init__(
        self, lam: float, inner_steps: int, inner_learning_rate: float, beta: float, outer_step: float = 0.0
    ) -> None:
        self.lam, self.inner_steps, self.inner_learning_rate, self.beta = lam, inner_steps, inner_learning_rate, beta
        self.outer_step = outer_step

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self._parameters = parameters_of(model)
        return super().init(model, run)

    def options(self) -> Mapping[str, Scalar]:
        return {
            LAMBDA: self.lam,
            INNER_STEPS: self.inner_steps,
            INNER_RATE: self.inner_learning_rate,
            OUTER_STEP: self.outer_step,
        }

    def merger(self, state: ModelState, round: int) -> PFedMeMerger:
        return PFedMeMerger(state, self.beta, self._parameters, self.mean)

    def describe(self) -> Mapping[str, str | int | float]:
        return {**super().describe(), "beta": self.beta}


class PFedMeMerger(ModelMerger[ModelState]):
    """Merge parameters into (1 − β)·w + β·mean(w_i), and buffers into their mean."""

    def __init__(
        self, state: ModelState, beta: float, parameters: Names, mean: Callable[[], Mean] = WeightedMean
    ) -> None:
        super().__init__(state, uniform=True, mean=mean)
        self._beta, self._parameters = beta, parameters

    def finish(self) -> ModelState:
        old, mean = self._state.entries, self._mean.result()
        moved = {
            name: np.asarray((1 - self._beta) * old[name] + self._beta * mean[name], dtype=old[name].dtype)
            for name in self._parameters
        }
        return self._next_state({**mean, **moved})


@listed(
    "pfedme",
    title="pFedMe",
    does="personal models that minimise Moreau envelopes",
    paper="Dinh et al. 2020, arXiv:2006.08848",
    result=COMMON_MODEL,
)
class PFedMe(MethodStrategy):
    """pFedMe over Tepal's exchange. The clients' learning rate is η of w ← w − ηλ(w − θ̃), unless `outer_step` is set.

    Args:
        lam: λ, the larger, the nearer θ stays to w. The paper has 15 in most of its experiments.
        inner_steps: K, steps of gradient descent that approximate θ̃ for one batch.
        inner_learning_rate: learning rate of these steps.
        beta: β of the server's step (1 − β)·w + β·mean(w_i); 1 is the mean.
        outer_step: s of w ← w − s·(w − θ̃), which replaces ηλ, whatever the learning rate and its schedule; 1 sets w to
            θ̃. 0: ηλ as in the paper, with the round's learning rate η; a step with ηλ above 1 goes beyond θ̃.
        round_options: see `MethodStrategy`.
    """

    def __init__(
        self,
        *,
        lam: Positive = 15.0,
        inner_steps: Annotated[int, Field(ge=1)] = 5,
        inner_learning_rate: Positive = 0.01,
        beta: Positive = 1.0,
        outer_step: Annotated[float, Field(ge=0, le=1)] = 0.0,
        **round_options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(PFedMeMethod(lam, inner_steps, inner_learning_rate, beta, outer_step), **round_options)
