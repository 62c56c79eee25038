"""FedNova: clients' changes are normalised by their numbers of local steps (Wang et al. 2020, arXiv:2007.07481).

    d_i = (w − w_i) / ‖a_i‖₁         τ_eff = Σ_i p_i·‖a_i‖₁         w ← w − τ_eff·Σ_i p_i·d_i         p_i = n_i / Σ n

‖a_i‖₁ is the sum of the weights with which the client's gradients enter its change (under plain SGD: the number of
steps); clients report it as the metric `accumulation`. With equal ‖a_i‖₁ it is FedAvg. Buffers, such as BatchNorm's
statistics, are averaged as in FedAvg.

So that no client alone decides the length of the server's step, an ‖a_i‖₁ counts in τ_eff for at most `MOST_TIMES` the
median of the round's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Names
from tepal.exchange.plan import ACCUMULATION, MODEL, TRAIN, Plan, Reply
from tepal.strategies.aggregate import Mean, WeightedMean
from tepal.strategies.fedavg import FedAvgMethod, ModelMerger, ModelState
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy

MOST_ACCUMULATION = 1e9
"""Largest ‖a_i‖₁ that a client may report. The least is 1: the last of its gradients enters with the weight 1."""

MOST_TIMES = 10.0
"""An ‖a_i‖₁ counts in τ_eff for at most so many times the median of the round's."""


class FedNovaMethod(FedAvgMethod):
    """The method of FedNova."""

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self._parameters = parameters_of(model)
        return super().init(model, run)

    def accept(self, plan: Plan, reply: Reply) -> None:
        if plan.action != TRAIN:
            return
        found = reply.metrics.get(ACCUMULATION)
        if found is None or not 1 <= found <= MOST_ACCUMULATION:
            shown = "not finite" if ACCUMULATION in reply.not_finite else "missing" if found is None else f"{found:g}"
            raise ValueError(
                f"FedNova needs the metric {ACCUMULATION!r} with every reply, and it is {shown}; it must be a number "
                f"from 1 to {MOST_ACCUMULATION:g}: the number of local steps under SGD "
                "(tepal.training.loop.accumulation computes it also for momentum and a proximal term)"
            )

    def merger(self, state: ModelState, round: int) -> FedNovaMerger:
        return FedNovaMerger(state, self._parameters, self.mean)


class FedNovaMerger(ModelMerger[ModelState]):
    """Merge replies into w − τ_eff·Σ p_i·d_i.

    That is w + τ_eff·(Σ p_i/‖a_i‖₁)·(m − w), where m is the mean of the w_i weighted by p_i/‖a_i‖₁.
    """

    def __init__(self, state: ModelState, parameters: Names, mean: Callable[[], Mean] = WeightedMean) -> None:
        super().__init__(state, mean=mean)  # its mean is that of the buffers
        self._parameters = frozenset(parameters)
        self._normalised = mean()
        self._steps: list[tuple[int, float]] = []
        """(n_i, ‖a_i‖₁)."""

    def add(self, reply: Reply) -> None:
        part, n, a = reply.parts[MODEL], reply.examples, reply.metrics[ACCUMULATION]
        parameters = {name: array for name, array in part.items() if name in self._parameters}
        buffers = {name: array for name, array in part.items() if name not in self._parameters}
        add_parameters, add_buffers = self._normalised.prepare(parameters, n / a), self._mean.prepare(buffers, n)
        add_parameters()
        add_buffers()
        self._steps.append((n, a))

    def finish(self) -> ModelState:
        total = math.fsum(n for n, _ in self._steps)
        most = MOST_TIMES * statistics.median(a for _, a in self._steps)
        tau = math.fsum(n * min(a, most) for n, a in self._steps) / total
        step = tau * math.fsum(n / a for n, a in self._steps) / total
        entries = self._mean.result()
        for name, m in self._normalised.result().items():
            w = self._state.entries[name]
            entries[name] = np.asarray(w + step * (m - w), dtype=w.dtype)
        return self._next_state(entries)


@listed(
    "fednova",
    title="FedNova",
    does="changes are normalised by the number of local steps",
    paper="Wang et al. 2020, arXiv:2007.07481",
)
class FedNova(MethodStrategy):
    """FedNova over Tepal's exchange. Takes the keyword arguments of `MethodStrategy` and no others."""

    def __init__(self, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(FedNovaMethod(), **round_options)
