"""FedAvg: everything travels, both ways, every round (McMahan et al. 2017, arXiv:1602.05629, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, Unpack

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import EVALUATE, MODEL, Plan, Reply, Tree
from tepal.strategies.aggregate import WeightedMean
from tepal.strategies.method import Merger, Method, MethodError, Run, ServerModel
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class ModelState:
    """A global model and how often it was merged."""

    entries: Arrays
    merges: int = 0


State = TypeVar("State", bound=ModelState)


class ModelMerger(Generic[State]):
    """w ← Σ_k (n_k / Σ n) w_k over the replies, entry by entry; entries that nobody returned stay as they are.

    `alike`: every client counts alike, whatever its n_k.
    """

    def __init__(self, state: State, *, alike: bool = False) -> None:
        self._state = state
        self._alike = alike
        self._mean = WeightedMean()

    def add(self, reply: Reply) -> None:
        self._mean.add(reply.parts[MODEL], 1.0 if self._alike else reply.examples)

    def finish(self) -> State:
        merged = {**self._state.entries, **self._mean.result()}
        return replace(self._state, entries=merged, merges=self._state.merges + 1)


class GlobalModel(Method[State]):
    """The base of methods with one global model that travels whole. Subclasses begin and merge it."""

    def plan(
        self, state: State, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        names = tuple(state.entries)
        return [
            Plan(client=client, round=round, needs={MODEL: names}, trains=names, returns={MODEL: names})
            for client in cohort
        ]

    def evaluation(self, state: State, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        needs = {MODEL: tuple(state.entries)}
        return [
            # The next round starts from the model that is scored now: a client that keeps it needs no second copy.
            Plan(client=client, round=round, action=EVALUATE, needs=needs, keeps=needs if more_rounds else {})
            for client in cohort
        ]

    def values(self, state: State, client: str, tree: Tree) -> Arrays:
        return state.entries

    def models(self, state: State) -> tuple[Arrays, ...]:
        return (state.entries,)


class Averaging(GlobalModel[ModelState]):
    """The method of FedAvg."""

    def init(self, model: ServerModel, run: Run) -> ModelState:
        return ModelState(only_start(model))

    def merger(self, state: ModelState, round: int) -> Merger[ModelState]:
        return ModelMerger(state)


def only_start(model: ServerModel) -> Arrays:
    """The entries of the one model that a run starts from. Raises MethodError where it was given several."""
    if len(model.starts) > 1:
        raise MethodError(
            f"the initial arrays are of {len(model.starts)} models, and this method trains one: give it those of "
            "one, or choose FedEnsemble"
        )
    return model.entries


@listed(
    "fedavg",
    title="FedAvg",
    does="weighted mean of the clients' models",
    paper="McMahan et al. 2017, arXiv:1602.05629",
)
class FedAvg(MethodStrategy):
    """Federated averaging over Tepal's exchange. Takes the keyword arguments of `MethodStrategy` and no others."""

    def __init__(self, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(Averaging(), **round_options)
