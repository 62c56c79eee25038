"""FedNova: what clients report is a mean gradient of theirs, whatever number of steps they took (Wang et al. 2020,
arXiv:2007.07481).

    d_i = (w − w_i) / ‖a_i‖₁         τ_eff = Σ_i p_i·‖a_i‖₁         w ← w − τ_eff·Σ_i p_i·d_i         p_i = n_i / Σ n

‖a_i‖₁ is how many gradients the client's way comes to (for SGD: its number of steps); clients report it as the metric
`accumulation`. With equal ‖a_i‖₁ it is FedAvg. Buffers, such as a BatchNorm's statistics, are averaged as in FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Names
from tepal.exchange.plan import ACCUMULATION, MODEL, TRAIN, Plan, Reply
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.fedavg import Averaging, ModelState
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


class Normalised(Averaging):
    """The method of FedNova."""

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self._parameters = parameters_of(model)
        return super().init(model, run)

    def accept(self, plan: Plan, reply: Reply) -> None:
        if plan.action == TRAIN and not reply.metrics.get(ACCUMULATION, 0) > 0:
            raise ValueError(
                f"FedNova needs the metric {ACCUMULATION!r} with every reply: the number of local steps under SGD "
                "(tepal.training.loop.accumulation knows it for momentum and a proximal term, too)"
            )

    def merger(self, state: ModelState, round: int) -> NormalisedMerger:
        return NormalisedMerger(state, self._parameters)


class NormalisedMerger:
    """w − τ_eff·Σ p_i·d_i = w + τ_eff·(Σ p_i/‖a_i‖₁)·(m − w), where m is the mean of the w_i weighted by p_i/‖a_i‖₁."""

    def __init__(self, state: ModelState, parameters: Names) -> None:
        self._state = state
        self._parameters = frozenset(parameters)
        self._normalised, self._plain = WeightedMean(), WeightedMean()
        self._examples: list[float] = []
        self._accumulated: list[float] = []

    def add(self, reply: Reply) -> None:
        part, n, a = reply.parts[MODEL], reply.examples, reply.metrics[ACCUMULATION]
        self._normalised.add({name: array for name, array in part.items() if name in self._parameters}, n / a)
        self._plain.add({name: array for name, array in part.items() if name not in self._parameters}, n)
        self._examples.append(n)
        self._accumulated.append(a)

    def finish(self) -> ModelState:
        total = math.fsum(self._examples)
        pairs = list(zip(self._examples, self._accumulated, strict=True))
        tau = math.fsum(n * a for n, a in pairs) / total
        step = tau * math.fsum(n / a for n, a in pairs) / total
        entries = {**self._state.entries, **self._plain.result()}
        for name, m in self._normalised.result().items():
            w = self._state.entries[name]
            entries[name] = np.asarray(w + step * (m - w), dtype=w.dtype)
        return replace(self._state, entries=entries, merges=self._state.merges + 1)


@listed(
    "fednova",
    title="FedNova",
    does="changes are normalised by the number of local steps",
    paper="Wang et al. 2020, arXiv:2007.07481",
)
class FedNova(MethodStrategy):
    """FedNova over Tepal's exchange. Takes the keyword arguments of `MethodStrategy` and no others."""

    def __init__(self, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(Normalised(), **round_options)
