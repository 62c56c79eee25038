"""SCAFFOLD: clients correct their gradients by how theirs differ from everybody's (Karimireddy et al. 2020,
arXiv:1910.06378, algorithm 1 with option II).

    client    y ← y − η_l·(g_i(y) − c_i + c), K times        c_i⁺ = c_i − c + (x − y)/(K·η_l)
    server    x ← x + η_g/|S|·Σ_{i∈S} (y_i − x)              c ← c + 1/N·Σ_{i∈S} (c_i⁺ − c_i)

All variates start at zero. c goes down beside the model and c_i⁺ − c_i comes up beside it, so that the bytes are twice
FedAvg's. c_i stays with its client; it is as new as the last reply that was merged, so that c = 1/N·Σ_i c_i always.
N is the number of clients that were there at the start; one that joins later comes with c_i = 0 and N grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import CONTROL, MODEL, SCAFFOLD, Plan, Reply, Tree
from tepal.strategies.aggregate import WeightedMean, with_joiners
from tepal.strategies.fedavg import GlobalModel, ModelState, only_start
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class ControlledState(ModelState):
    """x, and c by parameter."""

    control: Arrays = field(default_factory=dict)
    clients: Names = ()
    """All that were ever there: N of them."""


class Controlled(GlobalModel[ControlledState]):
    """The method of SCAFFOLD."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def init(self, model: ServerModel, run: Run) -> ControlledState:
        entries = only_start(model)
        return ControlledState(entries, control={name: np.zeros_like(entries[name]) for name in parameters_of(model)})

    def cohort(
        self, state: ControlledState, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[ControlledState, Sequence[str]]:
        known = tuple(sorted({*state.clients, *available}))
        control = with_joiners(state.control, len(state.clients), len(known))
        _, cohort = super().cohort(state, available, size, rng)
        return replace(state, control=control, clients=known), cohort

    def plan(
        self, state: ControlledState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        of_control = tuple(state.control)
        return [
            replace(
                plan,
                needs={**plan.needs, CONTROL: of_control},
                returns={**plan.returns, CONTROL: of_control},
                objective=SCAFFOLD,
            )
            for plan in super().plan(state, round, phase, cohort, probe_replies)
        ]

    def values(self, state: ControlledState, client: str, tree: Tree) -> Arrays:
        return state.control if tree == CONTROL else state.entries

    def merger(self, state: ControlledState, round: int) -> ControlledMerger:
        return ControlledMerger(state, self.learning_rate)

    def describe(self) -> Mapping[str, str | int | float]:
        return {"learning rate": self.learning_rate}


class ControlledMerger:
    """Means over the replies, every client counted alike."""

    def __init__(self, state: ControlledState, learning_rate: float) -> None:
        self._state = state
        self._learning_rate = learning_rate
        self._models, self._changes = WeightedMean(), WeightedMean()
        self._count = 0

    def add(self, reply: Reply) -> None:
        self._models.add(reply.parts[MODEL], 1.0)
        self._changes.add(reply.parts[CONTROL], 1.0)
        self._count += 1

    def finish(self) -> ControlledState:
        state = self._state
        share = self._count / len(state.clients)
        control = {
            name: np.asarray(state.control[name] + share * change, dtype=change.dtype)
            for name, change in self._changes.result().items()
        }
        x, y = state.entries, self._models.result()
        moved = {
            name: np.asarray(x[name] + self._learning_rate * (y[name] - x[name]), dtype=x[name].dtype)
            for name in control
        }
        return replace(state, entries={**x, **y, **moved}, merges=state.merges + 1, control=control)


@listed(
    "scaffold",
    title="SCAFFOLD",
    does="control variates correct client drift",
    paper="Karimireddy et al. 2020, arXiv:1910.06378",
    travels="P + C down, P + C up (C: the parameters, which is P without buffers)",
)
class Scaffold(MethodStrategy):
    """SCAFFOLD over Tepal's exchange. Clients must train with plain SGD: only then is (x − y)/(K·η_l) a mean gradient.

    Args:
        learning_rate: η_g, of the server.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, learning_rate: Positive = 1.0, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(Controlled(learning_rate), **round_options)
