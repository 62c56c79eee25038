"""Which blocks of a model a round moves and trains: the picture of what partial exchange saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tepal.exchange.layout import Layout, Names
from tepal.strategies.method import ModelBlocks

QUERY_KEY, OTHER = "query and key", "other"


@dataclass(frozen=True)
class Cell:
    """A part of a model that is moved, trained and frozen together: of one stage, its query and key or the others."""

    stage: str
    """embedding, layer 1, layer 2, …, head, rest; or model, where no blocks are known."""
    kind: str
    """QUERY_KEY or OTHER."""
    names: Names
    nbytes: int


def cells(layout: Layout, blocks: ModelBlocks | None) -> tuple[Cell, ...]:
    """A model's cells from input to output, disjoint and complete."""

    def of(stage: str, names: Names) -> Iterator[Cell]:
        query_key = tuple(name for name in names if name in attention)
        other = tuple(name for name in names if name not in attention)
        for kind, chosen in ((QUERY_KEY, query_key), (OTHER, other)):
            if chosen:
                yield Cell(stage, kind, chosen, layout.nbytes(chosen))

    attention = set(blocks.query_key) if blocks else set()
    if blocks is None or not getattr(blocks, "layers", ()):
        return tuple(of("model", layout.names))
    stages = [("embedding", blocks.embedding)]
    stages += [(f"layer {number}", layer) for number, layer in enumerate(blocks.layers, start=1)]
    stages += [("rest", blocks.rest), ("head", blocks.head)]
    return tuple(cell for stage, names in stages for cell in of(stage, names))


class Travel:
    """What one round sent, trained and got back of each cell, counted in bytes of the values themselves.

    Before any encoding: it tells which parts moved, `Traffic` how many bytes that took.
    """

    def __init__(self, layout: Layout, parts: tuple[Cell, ...]) -> None:
        self.cells = parts
        self.down, self.trains, self.up = (np.zeros(len(parts)) for _ in range(3))
        self._cell = {name: k for k, cell in enumerate(parts) for name in cell.names}
        self._layout = layout
        self._counted: dict[Names, np.ndarray] = {}

    def sent(self, names: Names) -> None:
        """These entries of some tree went to a client."""
        self.down += self._bytes(names)

    def asked(self, names: Names) -> None:
        """A client was asked to train these entries."""
        self.trains += self._bytes(names)

    def returned(self, names: Names) -> None:
        """These entries of some tree came back from a client."""
        self.up += self._bytes(names)

    def shares(self, clients: int) -> Mapping[str, np.ndarray]:
        """`travel_down`, `travel_trains`, `travel_up`, each (cells,): how often a cell went, a client that was asked.

        1: once to (or at, or from) each; .5: to half of them; 2: to each twice, or with a second tree such as a control
        variate.
        """
        whole = np.array([cell.nbytes for cell in self.cells], float) * max(clients, 1)
        counts = {"travel_down": self.down, "travel_trains": self.trains, "travel_up": self.up}
        return {key: (count / whole).astype(np.float32) for key, count in counts.items()}

    def _bytes(self, names: Names) -> np.ndarray:
        if (counted := self._counted.get(names)) is None:  # the clients of a round are mostly asked the same
            counted = np.zeros(len(self.cells))
            for name in names:
                counted[self._cell[name]] += self._layout.by_name[name].nbytes
            self._counted[names] = counted
        return counted
