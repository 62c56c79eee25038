"""FedNova: clients' changes are normalised by their numbers of local steps (Wang et al. 2020, arXiv:2007.07481).

    d_i = (w − w_i) / ‖a_i‖₁         τ_eff = Σ_i p_i·‖a_i‖₁         w ← w − τ_eff·Σ_i p_i·d_i         p_i = n_i / Σ n

‖a_i‖₁ is the sum of the weights with which the client's gradients enter its change (under plain SGD: the number of
steps); clients report it as the metric `accumulation`. With equal ‖a_i‖₁ it is FedAvg. Buffers, such as BatchNorm's
statistics, are averaged as in FedAvg.

So that no client alone decides the server's step, an ‖a_i‖₁ counts in τ_eff for at most `MOST_TIMES` the median of the
round's, and everywhere for at least 1/`MOST_TIMES` of what is usual: otherwise the client that reports 1 where the
others take 1,000 steps would weigh 1,000 times as much as they do. What is usual is the median of the clients' values
in the last rounds, in a first round that of the values so far; of fewer than `FEWEST` values none says so. The method
is the paper's, bit for bit, while the clients' ‖a_i‖₁ are within a factor of `MOST_TIMES` of each other.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Names
from tepal.exchange.plan import ACCUMULATION, MODEL, TRAIN, Plan, Reply
from tepal.strategies.aggregate import Mean, WeightedMean
from tepal.strategies.fedavg import FedAvgMethod, ModelMerger, ModelState
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.rounds.norms import ROUNDS, quantiles
from tepal.strategies.rounds.strategy import MethodStrategy
from tepal.strategies.scaled import chosen

MOST_ACCUMULATION = 1e9
"""Largest ‖a_i‖₁ that a client may report. The least is 1: the last of its gradients enters with the weight 1."""

MOST_TIMES = 10.0
"""An ‖a_i‖₁ counts in τ_eff for at most so many times the median of the round's, and for at least the same part of what
is usual."""

FEWEST = 3
"""Values from which their median says what is usual: of two, either may be the unusual one."""


@dataclass(frozen=True)
class NovaState(ModelState):
    """A global model, and the ‖a_i‖₁ of the last rounds, ascending, at most 21 quantiles of each."""

    accumulations: tuple[tuple[float, ...], ...] = ()


class FedNovaMethod(FedAvgMethod):
    """The method of FedNova."""

    def init(self, model: ServerModel, run: Run) -> NovaState:
        self._parameters = parameters_of(model)
        return NovaState(super().init(model, run).entries)

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
        if not isinstance(state, NovaState):  # from a checkpoint of an earlier version
            state = NovaState(state.entries, state.merges)
        return FedNovaMerger(state, self._parameters, self.mean)


class FedNovaMerger(ModelMerger[NovaState]):
    """Merge replies into w − τ_eff·Σ p_i·d_i.

    That is w + τ_eff·(Σ p_i/‖a_i‖₁)·(m − w), where m is the mean of the w_i weighted by p_i/‖a_i‖₁.

    In a first round what is usual becomes known with the replies. The weight of m so far is then computed anew, so that
    a reply that was merged before with too much weight has that weight among the ones before it only.
    """

    def __init__(self, state: NovaState, parameters: Names, mean: Callable[[], Mean] = WeightedMean) -> None:
        super().__init__(state, mean=mean)  # its mean is that of the buffers
        self._parameters = frozenset(parameters)
        self._normalised = mean()
        self._steps: list[tuple[int, float]] = []
        """(n_i, ‖a_i‖₁)."""
        self._weights: list[float] = []
        """With which the replies are in the mean."""
        self._ascending: list[float] = []
        """The ‖a_i‖₁."""
        self._raised = False
        """Whether one of them counted for more than it is as its reply was merged."""
        self._earlier = sorted(a for found in state.accumulations for a in found)

    def add(self, reply: Reply) -> None:
        part, n, a = reply.parts[MODEL], reply.examples, reply.metrics[ACCUMULATION]
        parameters = chosen(part, (name for name in part if name in self._parameters))
        buffers = chosen(part, (name for name in part if name not in self._parameters))
        ascending = self._ascending.copy()
        insort(ascending, a)
        least = self._least(ascending)
        weight = self._weight(n, a, least)
        add_parameters, add_buffers = self._normalised.prepare(parameters, weight), self._mean.prepare(buffers, n)
        add_parameters()
        add_buffers()
        self._steps.append((n, a))
        self._weights.append(weight)
        self._ascending = ascending
        self._raised |= a < least

    def _least(self, ascending: Sequence[float]) -> float:
        """The least ‖a_i‖₁ that counts, with these values of the round so far."""
        usual = self._earlier if len(self._earlier) >= FEWEST else ascending
        return median_low(usual) / MOST_TIMES if len(usual) >= FEWEST else 0.0

    def _weight(self, n: int, a: float, least: float) -> float:
        """The weight of the next reply: n / ‖a‖₁, in the unit in which the mean has the replies before it."""
        weight = n / max(a, least)
        if self._steps and (self._raised or self._ascending[0] < least):
            so_far = math.fsum(n / max(a, least) for n, a in self._steps)
            weight *= math.fsum(self._weights) / so_far
        return weight

    def finish(self) -> NovaState:
        total = math.fsum(n for n, _ in self._steps)
        most, least = MOST_TIMES * median(self._ascending), self._least(self._ascending)
        tau = math.fsum(n * max(min(a, most), least) for n, a in self._steps) / total
        step = tau * math.fsum(n / max(a, least) for n, a in self._steps) / total
        entries = self._mean.result()
        for name, m in self._normalised.result().items():
            w = self._state.entries[name]
            entries[name] = np.asarray(w + step * (m - w), dtype=w.dtype)
        accumulations = (*self._state.accumulations, tuple(quantiles(self._ascending)))[-ROUNDS:]
        return self._next_state(entries, accumulations=accumulations)


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
