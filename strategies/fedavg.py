"""FedAvg: the weighted mean of the clients' models (McMahan et al. 2017, arXiv:1602.05629, algorithm 1).

The whole model is sent down and up in every round. This module also has the base classes of the other methods with one
global model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, Unpack

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import EVALUATE, MODEL, Plan, Reply, Scalar, Tree
from tepal.strategies.aggregate import Mean, WeightedMean
from tepal.strategies.method import Merger, Method, MethodError, Run, ServerModel
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy


@dataclass(frozen=True)
class ModelState:
    """A global model, and how many rounds were merged into it."""

    entries: Arrays
    merges: int = 0


State = TypeVar("State", bound=ModelState)


class ModelMerger(Generic[State]):
    """Merge the replies of a round into their weighted mean: w ← Σ_k (n_k / Σ n)·w_k for each entry.

    Entries that no client returned stay as they are.

    Args:
        state: of the method before the round.
        uniform: all clients have the same weight, whatever their numbers of examples n_k.
        mean: makes the mean of the clients' parts.
    """

    def __init__(self, state: State, *, uniform: bool = False, mean: Callable[[], Mean] = WeightedMean) -> None:
        self._state = state
        self._uniform = uniform
        self._mean = mean()

    def add(self, reply: Reply) -> None:
        self._mean.add(reply.parts[MODEL], 1.0 if self._uniform else reply.examples)

    def finish(self) -> State:
        return self._next_state(self._mean.result())

    def _next_state(self, entries: Arrays, **fields: Any) -> State:
        """The state after the round, in which these entries and fields are replaced."""
        merged = {**self._state.entries, **entries}
        return replace(self._state, entries=merged, merges=self._state.merges + 1, **fields)


class GlobalModelMethod(Method[State]):
    """Base class of methods with one global model that is sent as a whole. Subclasses define `init` and `merger`."""

    averages = True

    mean: Callable[[], Mean] = staticmethod(WeightedMean)
    """Makes the mean of the clients' parts for a merger; `init` sets it to that of the run."""

    objective: str = ""
    """Name of the clients' objective of local training; "" is the loss of their app."""

    def options(self) -> Mapping[str, Scalar]:
        """Options of a plan for training: what the objective and `apply_plan` read there."""
        return {}

    def plan(
        self, state: State, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        names = tuple(state.entries)
        entries, options = {MODEL: names}, self.options()
        return [
            Plan(
                client=client,
                round=round,
                needs=entries,
                trains=names,
                returns=entries,
                objective=self.objective,
                options=options,
            )
            for client in cohort
        ]

    def evaluation(self, state: State, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        needs = {MODEL: tuple(state.entries)}
        return [
            # The next round starts from the model that is scored now: a client that caches it does not need it again.
            Plan(client=client, round=round, action=EVALUATE, needs=needs, keeps=needs if more_rounds else {})
            for client in cohort
        ]

    def values(self, state: State, client: str, tree: Tree) -> Arrays:
        return state.entries

    def models(self, state: State) -> tuple[Arrays, ...]:
        return (state.entries,)


class FedAvgMethod(GlobalModelMethod[ModelState]):
    """The method of FedAvg, and the base class of methods that differ from it in a few functions."""

    def init(self, model: ServerModel, run: Run) -> ModelState:
        self.mean = run.mean
        return ModelState(only_start(model))

    def merger(self, state: ModelState, round: int) -> Merger[ModelState]:
        return ModelMerger(state, mean=self.mean)


Averaging = FedAvgMethod
"""Earlier name of `FedAvgMethod`."""


def only_start(model: ServerModel) -> Arrays:
    """Entries of the one model that a run starts from. Raises MethodError if the run was given several models."""
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
        super().__init__(FedAvgMethod(), **round_options)
