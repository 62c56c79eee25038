"""FedDyn: clients minimise losses whose penalties change from round to round, so that all minimisers agree in the limit
(Acar et al. 2021, arXiv:2111.04263, algorithm 1).

    client    θ_k ← argmin_θ L_k(θ) − ⟨g_k, θ⟩ + (α/2)·‖θ − θ^{t−1}‖²        g_k ← g_k − α·(θ_k − θ^{t−1})
    server    h ← h − (α/m)·Σ_{k∈P} (θ_k − θ^{t−1})                          θ^t ← 1/|P|·Σ_{k∈P} θ_k − h/α

P are the clients of the round, m is the number of all clients. Every client counts alike: the limit minimises the mean
of the L_k, whatever their numbers of examples. g_k, the gradient of L_k at θ_k, stays with its client; bytes are
FedAvg's. g_k and h start at zero, and h = 1/m·Σ_k g_k in every round.

What the paper leaves open is settled here so that this mean holds:

- m counts all clients that were ever available. One that joins later comes with g_k = 0, and h becomes the mean over
  more clients.
- g_k is as new as the last reply of its client that was merged.
- A client that lost its g_k says so, and begins with 0 again. The server does not know what it lost: h keeps 1/m of it,
  and the limit is off by that.
- Buffers, such as BatchNorm's statistics, are averaged, every client counted alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import ALPHA, Plan, Reply
from tepal.strategies.aggregate import with_joiners
from tepal.strategies.fedavg import GlobalModel, ModelMerger, ModelState, only_start
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class FedDynState(ModelState):
    """θ, and h by parameter."""

    h: Arrays = field(default_factory=dict)
    clients: Names = ()
    """All that were ever available: m of them."""


class FedDynMethod(GlobalModel[FedDynState]):
    """The method of FedDyn."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def init(self, model: ServerModel, run: Run) -> FedDynState:
        entries = only_start(model)
        return FedDynState(entries, h={name: np.zeros_like(entries[name]) for name in parameters_of(model)})

    def cohort(
        self, state: FedDynState, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[FedDynState, Sequence[str]]:
        clients = tuple(sorted({*state.clients, *available}))
        state = replace(state, h=with_joiners(state.h, len(state.clients), len(clients)), clients=clients)
        return super().cohort(state, available, size, rng)

    def plan(
        self, state: FedDynState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        return [replace(plan, objective="feddyn", options={ALPHA: self.alpha}) for plan in plans]

    def merger(self, state: FedDynState, round: int) -> FedDynMerger:
        return FedDynMerger(state, self.alpha)

    def describe(self) -> Mapping[str, str | int | float]:
        return {"alpha": self.alpha}


class FedDynMerger(ModelMerger[FedDynState]):
    """The mean over the replies, every client counted alike, and the step by h of the parameters."""

    def __init__(self, state: FedDynState, alpha: float) -> None:
        super().__init__(state, alike=True)
        self._alpha = alpha
        self._count = 0

    def add(self, reply: Reply) -> None:
        super().add(reply)
        self._count += 1

    def finish(self) -> FedDynState:
        old, merged = self._state, super().finish()
        share = self._alpha * self._count / len(old.clients)
        h, entries = {}, dict(merged.entries)
        for name, before in old.h.items():
            mean = merged.entries[name]
            h[name] = np.asarray(before - share * (mean - old.entries[name]), dtype=before.dtype)
            entries[name] = np.asarray(mean - h[name] / self._alpha, dtype=mean.dtype)
        return replace(merged, entries=entries, h=h)


@listed(
    "feddyn",
    title="FedDyn",
    does="penalties that change with each client, so that all minimisers agree in the limit",
    paper="Acar et al. 2021, arXiv:2111.04263",
)
class FedDyn(MethodStrategy):
    """FedDyn over Tepal's exchange. The client's app trains by its objective "feddyn"; the project's own app has it.

    Args:
        alpha: α of (α/2)·‖θ − θ_received‖²: the smaller, the further a client goes in a round. The paper searches
            0.001, 0.01 and 0.1.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, alpha: Positive = 0.01, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(FedDynMethod(alpha), **round_options)
