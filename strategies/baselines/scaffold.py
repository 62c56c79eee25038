"""SCAFFOLD: control variates correct the drift of the clients.

Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1 with option II:

    client    y ← y − η_l·(g_i(y) − c_i + c), K times        c_i⁺ = c_i − c + (x − y)/(K·η_l)
    server    x ← x + η_g/|S|·Σ_{i∈S} (y_i − x)              c ← c + 1/N·Σ_{i∈S} (c_i⁺ − c_i)

All control variates start at zero. c is sent with the model and c_i⁺ − c_i is returned with it, so the bytes are twice
FedAvg's. c_i stays with its client and changes only with a reply that the server merged, so that c = 1/N·Σ_i c_i in
every round, unless `robust` merges other values than the clients keep. N is the number of all clients that were ever
available; one that joins later starts with c_i = 0, and N grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import CONTROL, MODEL, SCAFFOLD, Plan, Reply, Tree
from tepal.strategies.aggregate import Mean, WeightedMean, with_joiners
from tepal.strategies.fedavg import GlobalModelMethod, ModelMerger, ModelState, only_start
from tepal.strategies.method import Run, ServerModel, parameters_of
from tepal.strategies.options import Positive, RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class ScaffoldState(ModelState):
    """x, and c for each parameter."""

    control: Arrays = field(default_factory=dict)
    clients: Names = ()
    """All N clients that were ever available."""


class ScaffoldMethod(GlobalModelMethod[ScaffoldState]):
    """The method of SCAFFOLD."""

    objective = SCAFFOLD

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def init(self, model: ServerModel, run: Run) -> ScaffoldState:
        entries, self.mean = only_start(model), run.mean
        return ScaffoldState(entries, control={name: np.zeros_like(entries[name]) for name in parameters_of(model)})

    def cohort(
        self, state: ScaffoldState, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[ScaffoldState, Sequence[str]]:
        control, clients = with_joiners(state.control, state.clients, available)
        return super().cohort(replace(state, control=control, clients=clients), available, size, rng)

    def plan(
        self, state: ScaffoldState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        control = {CONTROL: tuple(state.control)}
        plans = super().plan(state, round, phase, cohort, probe_replies)
        return [replace(plan, needs={**plan.needs, **control}, returns={**plan.returns, **control}) for plan in plans]

    def values(self, state: ScaffoldState, client: str, tree: Tree) -> Arrays:
        return state.control if tree == CONTROL else state.entries

    def merger(self, state: ScaffoldState, round: int) -> ScaffoldMerger:
        return ScaffoldMerger(state, self.learning_rate, self.mean)

    def describe(self) -> Mapping[str, str | int | float]:
        return {"learning rate": self.learning_rate}


class ScaffoldMerger(ModelMerger[ScaffoldState]):
    """Merge replies into x, c and the buffers, with uniform weights."""

    def __init__(
        self, state: ScaffoldState, learning_rate: float, mean: Callable[[], Mean] = WeightedMean
    ) -> None:
        super().__init__(state, uniform=True, mean=mean)
        self._learning_rate = learning_rate
        self._changes = mean()
        self._count = 0

    def add(self, reply: Reply) -> None:
        model, changes = reply.parts[MODEL], reply.parts[CONTROL]
        add_model, add_changes = self._mean.prepare(model, 1.0), self._changes.prepare(changes, 1.0)
        add_model()
        add_changes()
        self._count += 1

    def finish(self) -> ScaffoldState:
        state, x, y = self._state, self._state.entries, self._mean.result()
        share = self._count / len(state.clients)
        control = {
            name: np.asarray(state.control[name] + share * change, dtype=change.dtype)
            for name, change in self._changes.result().items()
        }
        moved = {
            name: np.asarray(x[name] + self._learning_rate * (y[name] - x[name]), dtype=x[name].dtype)
            for name in control
        }
        return self._next_state({**y, **moved}, control=control)


@listed(
    "scaffold",
    title="SCAFFOLD",
    does="control variates correct client drift",
    paper="Karimireddy et al. 2020, arXiv:1910.06378",
    transfers="P + C down, P + C up (C: the parameters, which is P without buffers)",
)
class Scaffold(MethodStrategy):
    """SCAFFOLD over Tepal's exchange. Clients must train with SGD: only then is (x − y)/(K·η_l) a mean gradient.

    With momentum K is not the number of steps, but `tepal.training.loop.accumulation` of it, and the mean is weighted.

    Args:
        learning_rate: η_g, of the server.
        round_options: see `MethodStrategy`.
    """

    def __init__(self, *, learning_rate: Positive = 1.0, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(ScaffoldMethod(learning_rate), **round_options)
