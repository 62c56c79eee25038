"""What a method is: its mathematics and what it sends, without Flower. `strategies.base` runs the rounds around it.

A method's memory is an explicit state: a dataclass of arrays and scalars. Arrays in a state are never changed in
place; an entry that a round does not touch stays the very same array, which is how "bit-identical" is kept and how
the exchange knows that it need not be sent again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from tepal.exchange.layout import Arrays, Layout, Names
from tepal.exchange.plan import Plan, Reply, Tree

State = TypeVar("State")
"""What a method remembers from round to round: a dataclass of arrays and scalars."""
NextState = TypeVar("NextState", covariant=True)


class MethodError(ValueError):
    """A method that cannot train this model with these options; the text says why, and what to do."""


def check_number(name: str, value: float, good: bool, allowed: str) -> None:
    """Raises ValueError unless `good`, and for NaN and infinity; `allowed` says what is."""
    if not (good and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be {allowed}")


class ModelBlocks(Protocol):
    """The blocks of a model, as `tepal.models.blocks.find_blocks` gives them."""

    @property
    def query_key(self) -> Names: ...
    @property
    def value(self) -> Names: ...
    @property
    def value_projection(self) -> Names: ...
    @property
    def layers(self) -> tuple[Names, ...]: ...
    @property
    def embedding(self) -> Names: ...
    @property
    def head(self) -> Names: ...
    @property
    def rest(self) -> Names: ...
    @property
    def buffers(self) -> Names: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def model(self) -> str: ...


@dataclass(frozen=True)
class ServerModel:
    """What a run starts from, as a method sees it."""

    name: str
    layout: Layout
    starts: tuple[Arrays, ...]
    """Entries of every model that the run was given: one, or one for each mode of an ensemble."""
    blocks: ModelBlocks | None
    """None when the strategy was given no model: then every tensor is one entry, and no block is known."""

    @property
    def entries(self) -> Arrays:
        return self.starts[0]


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""How names of buffers end, BatchNorm's, where no model says what is a buffer."""


def parameters_of(model: ServerModel) -> Names:
    """Entries that are trained: floating-point numbers that are no buffer's. In the order of the layout."""
    buffers = (
        {name for name in model.layout.names if name.rpartition(".")[2] in BUFFERS}
        if model.blocks is None
        else set(model.blocks.buffers)
    )
    return tuple(
        entry.name
        for entry in model.layout.entries
        if np.dtype(entry.dtype).kind == "f" and entry.name not in buffers
    )


class Merger(Protocol[NextState]):
    """Takes the replies of one round one by one, and holds none of them."""

    def add(self, reply: Reply) -> None: ...

    def finish(self) -> NextState:
        """The method's next state."""


class Method(ABC, Generic[State]):
    """The parts of a round that differ between methods. A state is what `init` returned or a merger finished.

    A method is a subclass of `Method[ItsState]`. It must define what is abstract here; all else has a default.
    """

    phases: tuple[str, ...] = ("train",)
    """Actions of one round's exchanges, in order; the replies to the last one are merged."""

    train_metrics_of: str = "received"
    """Which of the models that clients score as they train is the method's: the "received" or the "trained" one."""

    eval_metrics_of: str = "received"
    """How the metrics of an evaluation are named, by the model they are of: "received", "ensemble" or "personal"."""

    @abstractmethod
    def init(self, model: ServerModel, seed: int) -> State:
        """The first state. Raises MethodError for a model that the method cannot train."""

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        """Label → entries, disjoint and complete: the blocks in which entries are sent, kept and recorded."""
        return {"model": model.layout.names}

    def cohort(
        self, state: State, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[State, Sequence[str]]:
        """Who trains in a round: `size` of the available clients (sorted). A state that remembers clients may change.

        Raises MethodError where the method needs other clients than there are.
        """
        return state, [available[k] for k in rng.choice(len(available), size, replace=False)]

    @abstractmethod
    def plan(
        self, state: State, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        """Plan what each client of the cohort is asked. `probe_replies`: of the round's earlier phase, by client."""

    def progress(self, state: State, plan: Plan, rounds: int) -> tuple[int, int]:
        """(t, T): this plan is round t of T for the model that it trains; the learning rate's schedule goes by it."""
        return plan.round, rounds

    def accept(self, plan: Plan, reply: Reply) -> None:
        """Raises ValueError, with the reason, for a reply that fits the plan and is still of no use to this method."""
        return None

    @abstractmethod
    def evaluation(self, state: State, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        """What each client of the cohort is asked to score. `more_rounds`: what it gets now is worth keeping."""

    @abstractmethod
    def values(self, state: State, client: str, tree: Tree) -> Arrays:
        """The values that this client gets of this tree."""

    @abstractmethod
    def merger(self, state: State, round: int) -> Merger[State]:
        """Merges the replies of the round's last phase."""

    @abstractmethod
    def models(self, state: State) -> tuple[Arrays, ...]:
        """All entries of what the run delivers: the global model, or every mode of an ensemble."""

    def phase_name(self, state: State) -> str:
        """What a round that starts from this state is called in logs and reports."""
        return "train"

    def describe(self) -> Mapping[str, str | int | float]:
        """Name → value of the method's options, for the log at the start of a run."""
        return {}

    def record(self, state: State, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """What there is to know of a round beside its metrics, from its plans: name → array of numbers or text."""
        return {}

    def change(self, before: State, after: State) -> Mapping[str, np.ndarray]:
        """What there is to know of how a round changed the state: name → array, added to the record."""
        return {}

    # What a method keeps outside of its state, because it is too large for a checkpoint a round.

    def open(self, folder: Path | None, keep: int) -> None:
        """A run begins. `folder`: where it keeps its last `keep` checkpoints; None when it has none."""
        return None

    def resume(self, state: State, older: Iterable[State]) -> State:
        """The state of a checkpoint, made ready. `older`: further states that the run may go back to, read lazily."""
        return state

    def settle(self, state: State) -> None:
        """All that this state refers to must be on disk when this returns: it is about to be saved."""
        return None

    def saved(self, state: State) -> None:
        """The run may go back to this state, until it has been saved `keep` times more."""
        return None

    def close(self) -> None:
        """The run has ended."""
        return None
