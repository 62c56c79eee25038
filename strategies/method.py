"""What a method is: its mathematics and what it sends, without Flower. `strategies.base` runs the rounds around it.

A method's memory is an explicit state: a dataclass of arrays and scalars. Arrays in a state are never changed in
place; an entry that a round does not touch stays the very same array, which is how "bit-identical" is kept and how
the exchange knows that it need not be sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tepal.exchange.layout import Arrays, Layout, Names
from tepal.exchange.plan import Plan, Reply, Tree


class ModelBlocks(Protocol):
    """The blocks of a model, as `tepal.models.blocks.find_blocks` gives them."""

    @property
    def query_key(self) -> Names: ...
    @property
    def value(self) -> Names: ...
    @property
    def value_projection(self) -> Names: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def model(self) -> str: ...


@dataclass(frozen=True)
class ServerModel:
    """The model that a run starts from, as a method sees it."""

    name: str
    layout: Layout
    entries: Arrays
    blocks: ModelBlocks | None
    """None when the strategy was given no model: then every tensor is one entry, and no block is known."""


class Merger(Protocol):
    """Takes the replies of one round one by one, and holds none of them."""

    def add(self, reply: Reply) -> None: ...

    def finish(self) -> Any:
        """The method's next state."""


class Method(Protocol):
    """The parts of a round that differ between methods. `state` is whatever `init` returned or a merger finished."""

    phases: tuple[str, ...]
    """Actions of one round's exchanges, in order; the replies to the last one are merged."""

    def init(self, model: ServerModel, seed: int) -> Any:
        """The first state. Raises ValueError for a model that the method cannot train."""

    def grain(self, model: ServerModel) -> Mapping[str, Names]:
        """Label → entries, disjoint and complete: the blocks in which entries are sent, kept and recorded."""

    def plan(
        self, state: Any, round: int, phase: str, cohort: Sequence[str], heard: Mapping[str, Reply]
    ) -> list[Plan]:
        """What each client of the cohort is asked. `heard`: replies of this round's earlier phase, by client."""

    def evaluation(self, state: Any, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        """What each client of the cohort is asked to score. `more_rounds`: what it gets now is worth keeping."""

    def values(self, state: Any, client: str, tree: Tree) -> Arrays:
        """The values that this client gets of this tree."""

    def merger(self, state: Any, round: int) -> Merger:
        """Merges the replies of the round's last phase."""

    def model(self, state: Any) -> Arrays:
        """All entries of the global model."""

    def phase_name(self, state: Any) -> str:
        """What a round that starts from this state is called in logs and reports."""

    def describe(self) -> Mapping[str, str | int | float]:
        """Name → value of the method's options, for the log at the start of a run."""
