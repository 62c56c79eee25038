"""FedDyn: a penalty that changes in every round leads all clients to one minimiser.

Acar et al. 2021, arXiv:2111.04263, algorithm 1:

    client    θ_k ← argmin_θ L_k(θ) − ⟨g_k, θ⟩ + (α/2)·‖θ − θ^{t−1}‖²        g_k ← g_k − α·(θ_k − θ^{t−1})
    server    h ← h − (α/m)·Σ_{k∈P} (θ_k − θ^{t−1})                          θ^t ← 1/|P|·Σ_{k∈P} θ_k − h/α

P are the clients of the round, m is the number of all clients. All clients have the same weight: the limit minimises
the mean of the L_k, whatever their numbers of examples. g_k, the gradient of L_k at θ_k, stays with its client; bytes
are FedAvg's. g_k and h start at zero, and h = 1/m·Σ_k g_k in every round, unless `robust` merges
other values than the clients keep.

What the paper leaves open is defined so that this equation holds:

- m counts all clients that were ever available. A client that joins later starts with g_k = 0, and h becomes the mean
  over more clients.
- g_k changes only with a reply that the server merged.
- A client that lost its g_k reports this, and starts with 0 again. The server does not know the lost g_k: h keeps 1/m
  of it, and the limit is off by that.
- Buffers, such as BatchNorm's statistics, are averaged with uniform weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import ALPHA, Reply, Scalar
from tepal.strategies.aggregate import Mean, WeightedMean, with_joiners
from tepal.strategies.fedavg import GlobalModelMethod, ModelMerger, ModelState, only_start
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class FedDynState(ModelState):
    """θ, and h for each parameter."""

    h: Arrays = field(default_factory=dict)
    clients: Names = ()
    """All m clients that were ever available."""


class FedDynMethod(GlobalModelMethod[FedDynState]):
    """The method of FedDyn."""

    averages = False  # h is the sum of what the clients remember exactly, and must not drift from it
    objective = "feddyn"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def init(self, model: ServerModel, run: Run) -> FedDynState:
        entries, self.mean = only_start(model), run.mean
        return FedDynState(entries, h={name: np.zeros_like(entries[name]) for name in parameters_of(model)})

    def cohort(
        self, state: FedDynState, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[FedDynState, Sequence[str]]:
        h, clients = with_joiners(state.h, state.clients, available)
        return super().cohort(replace(state, h=h, clients=clients), available, size, rng)

    def options(self) -> Mapping[str, Scalar]:
        return {ALPHA: self.alpha}

    def merger(self, state: FedDynState, round: int) -> FedDynMerger:
        return FedDynMerger(state, self.alpha, self.mean)

    def describe(self) -> Mapping[str, str | int | float]:
        return {"alpha": self.alpha}


class FedDynMerger(ModelMerger[FedDynState]):
    """Merge replies into h, and into their unweighted mean less h/α; buffers into their mean."""

    def __init__(self, state: FedDynState, alpha: float, mean: Callable[[], Mean] = WeightedMean) -> None:
        super().__init__(state, uniform=True, mean=mean)
        self._alpha = alpha
        self._count = 0

    def add(self, reply: Reply) -> None:
        super().add(reply)
        self._count += 1

    def finish(self) -> FedDynState:
        old, entries, h = self._state, self._mean.result(), {}
        share = self._alpha * self._count / len(old.clients)
        for name, before in old.h.items():
            mean = entries[name]
            h[name] = np.asarray(before - share * (mean - old.entries[name]), dtype=before.dtype)
            entries[name] = np.asarray(mean - h[name] / self._alpha, dtype=mean.dtype)
        return self._next_state(entries, h=h)


@listed(
    "feddyn",
    title="FedDyn",
    does="penalties that change in each round lead all clients to one minimiser",
    paper="Acar et al. 2021, arXiv:2111.04263",
)
class FedDyn(MethodStrategy):
    """FedDyn over Tepal's exchange. The client's app needs the objective "feddyn"; the project's own app has it.

    Args:
        alpha: α of (α/2)·‖θ − θ_received‖²: the smaller, the further a client goes in a round. The paper searches
            0.001, 0.01 and 0.1.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, alpha: Positive = 0.01, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(FedDynMethod(alpha), **round_options)
