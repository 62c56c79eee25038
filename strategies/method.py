"""The interface of a method: its mathematics and what it sends, without Flower.

`MethodStrategy` (`strategies/rounds/strategy.py`) runs the rounds around it. What a method remembers between rounds is
an explicit state: a dataclass of arrays and scalars. Arrays in a state are never changed in place. An entry that a
round does not change stays the same array object: it is bit-identical without a comparison, and is not sent again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tepal.exchange.layout import Arrays, Layout, Names, is_buffer
from tepal.exchange.plan import MODEL, Plan, Reply, Tree
from tepal.strategies.aggregate import Mean, WeightedMean

State = TypeVar("State")
"""What a method remembers from round to round: a dataclass of arrays and scalars."""
NextState = TypeVar("NextState", covariant=True)


class MethodError(ValueError):
    """A method that cannot train this model with these options; the text says why, and what to do."""


def check_number(name: str, value: float, good: bool, allowed: str) -> None:
    """Check an option. Raises ValueError unless `good`, and for NaN and infinity; `allowed` describes good values."""
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
    """The model that a run starts from."""

    name: str
    layout: Layout
    starts: tuple[Arrays, ...]
    """Entries of each initial model: of one model, or of one for each mode of an ensemble."""
    blocks: ModelBlocks | None
    """None if the strategy was given no model: then every tensor is one entry, and no block is known."""

    @property
    def entries(self) -> Arrays:
        return self.starts[0]


@dataclass(frozen=True)
class Run:
    """What a run gives its method."""

    seed: int = 0
    """All random numbers of the method derive from it, the round and the clients' names."""
    folder: Path | None = None
    """The folder of the checkpoints; None if the run saves none."""
    keep: int = 0
    """The number of checkpoints that are kept: the run may return to the states of the last `keep` that were saved."""
    mean: Callable[[], Mean] = WeightedMean
    """Makes a mean of the clients' parts: the weighted mean, or a robust one (`tepal.strategies.robust`)."""
    factor: Callable[[int], float] = lambda _round: 1.0
    """The factor of the learning rate in a round, counted from 1, by its schedule."""


def parameters_of(model: ServerModel) -> Names:
    """The entries that can be trained, in the order of the layout: floating-point entries that are not buffers.

    Where no model is given, BatchNorm's buffers are known by their names.
    """
    buffers = (
        set(filter(is_buffer, model.layout.names))
        if model.blocks is None
        else set(model.blocks.buffers)
    )
    return tuple(
        entry.name
        for entry in model.layout.entries
        if np.dtype(entry.dtype).kind == "f" and entry.name not in buffers
    )


class Merger(Protocol[NextState]):
    """Merges the replies of one round one by one, without keeping them."""

    def add(self, reply: Reply) -> None:
        """Merge a reply. If this raises, the merger is as if the reply had not arrived."""
        ...

    def finish(self) -> NextState:
        """The method's next state."""
        ...


class Storage(Protocol[State]):
    """Values outside of a method's state, such as the clients' models, that are too large for a checkpoint every round.

    A state refers to them. They must stay unchanged as long as the run may return to such a state.
    """

    def restore(self, state: State, older: Iterable[State]) -> State:
        """Check what the state of a checkpoint refers to, and return the state without what is lost.

        Args:
            state: of the checkpoint with which the run is resumed.
            older: states of earlier checkpoints to which the run may return as well, read one by one.
        """
        ...

    def flush(self) -> None:
        """Wait until everything is on disk: the current state is about to be saved. Raises OSError."""

    def saved(self, state: State) -> None:
        """A checkpoint with this state was written; the run may return to it until `Run.keep` more are written."""

    def close(self) -> None:
        """Release files and memory: the run has ended."""


class Method(ABC, Generic[State]):
    """The parts of a round that differ between methods. A state is the result of `init` or of a merger's `finish`.

    A method is a subclass of `Method[ItsState]`. It must define the abstract functions; the others have a default.
    """

    phases: tuple[str, ...] = ("train",)
    """Actions of one round's exchanges, in order; the replies to the last one are merged."""

    train_metrics_of: str = "received"
    """The model that the clients' metrics of training describe: the "received" or the "trained" one."""

    eval_metrics_of: str = "received"
    """The model that the metrics of an evaluation describe, as in their names: "received", "ensemble" or "personal"."""

    averages: bool = False
    """Whether of the replies' values only their means over the clients are needed. Uploads may then be less exact."""

    storage: Storage[State] | None = None
    """Values outside of the state, if the method has any; made by `init`."""

    def begin(self, rounds: int) -> None:
        """Called before everything else of a run, with the number of its rounds in total."""

    def resumed(self, options: Mapping[str, Any]) -> None:
        """Called after `begin` if the run is resumed, with what `describe` returned when the checkpoint was written.

        A method whose options follow from the number of rounds takes them over: a run may be prolonged.
        """
        return None

    @abstractmethod
    def init(self, model: ServerModel, run: Run) -> State:
        """Return the first state. Raises MethodError for a model that the method cannot train."""

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        """Label → entries, disjoint and complete: the blocks in which entries are sent, cached and recorded."""
        return {"model": model.layout.names}

    def cohort(
        self, state: State, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[State, Sequence[str]]:
        """Draw the clients that train in a round: `size` of the available clients (sorted).

        A method that remembers which clients it has drawn returns a changed state. Raises MethodError if the available
        clients do not suffice.
        """
        return state, [available[k] for k in rng.choice(len(available), size, replace=False)]

    @abstractmethod
    def plan(
        self, state: State, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        """Make a plan for each client of the cohort. `probe_replies`: replies to the round's earlier phase, by client.
        """

    def progress(self, state: State, plan: Plan, rounds: int) -> tuple[int, int]:
        """(t, T): this plan is round t of T for the model that it trains. The learning rate's schedule depends on it.
        """
        return plan.round, rounds

    def accept(self, plan: Plan, reply: Reply) -> None:
        """Check a reply that fits its plan. Raises ValueError, with the reason, if the method cannot use it."""
        return None

    @abstractmethod
    def evaluation(self, state: State, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        """Make the plans of an evaluation. `more_rounds`: parts that are sent now are worth caching."""

    @abstractmethod
    def values(self, state: State, client: str, tree: Tree) -> Arrays:
        """The values of a tree that this client is sent."""

    def initial_values(self, model: ServerModel, state: State) -> Mapping[Tree, Arrays]:
        """Tree → the values with which all clients begin, which they may make themselves. `state`: the first one."""
        return {MODEL: model.entries}

    @abstractmethod
    def merger(self, state: State, round: int) -> Merger[State]:
        """The merger of the replies to the round's last phase."""

    @abstractmethod
    def models(self, state: State) -> tuple[Arrays, ...]:
        """All entries of the run's result: of the global model, or of each mode of an ensemble."""

    def phase_name(self, state: State) -> str:
        """The name of a round that starts from this state, in logs and reports."""
        return "train"

    def describe(self) -> Mapping[str, str | int | float]:
        """Option → value, for the log. Called before `init`; a run is resumed only with equal options."""
        return {}

    def record(self, state: State, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """Arrays (of numbers or text) that describe a round's plans, for the run directory: name → array."""
        return {}

    def change(self, before: State, after: State) -> Mapping[str, np.ndarray]:
        """Arrays that describe how a round changed the state, added to those of `record`."""
        return {}
