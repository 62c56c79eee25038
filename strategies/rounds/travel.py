"""How often a round sends, trains and returns each segment of a model, for the report's diagram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tepal.exchange.layout import Layout, Names
from tepal.strategies.method import ModelBlocks

QUERY_KEY, OTHER = "query and key", "other"


@dataclass(frozen=True)
class Segment:
    """Entries that are sent, trained and frozen together: the query and key projections of one stage, or its others."""

    stage: str
    """embedding, layer 1, layer 2, …, head, rest; or model, if no blocks are known."""
    kind: str
    """QUERY_KEY or OTHER."""
    names: Names
    nbytes: int


def segments(layout: Layout, blocks: ModelBlocks | None) -> tuple[Segment, ...]:
    """A model's segments from input to output, disjoint and complete."""

    def of(stage: str, names: Names) -> Iterator[Segment]:
        query_key = tuple(name for name in names if name in attention)
        other = tuple(name for name in names if name not in attention)
        for kind, chosen in ((QUERY_KEY, query_key), (OTHER, other)):
            if chosen:
                yield Segment(stage, kind, chosen, layout.nbytes(chosen))

    attention = set(blocks.query_key) if blocks else set()
    if blocks is None or not getattr(blocks, "layers", ()):
        return tuple(of("model", layout.names))
    stages = [("embedding", blocks.embedding)]
    stages += [(f"layer {number}", layer) for number, layer in enumerate(blocks.layers, start=1)]
    stages += [("rest", blocks.rest), ("head", blocks.head)]
    return tuple(segment for stage, names in stages for segment in of(stage, names))


class Travel:
    """Counts the bytes of each segment that one round sends, trains and returns.

    They are the bytes of the values before any encoding: they show which segments travelled, and `Traffic` shows how
    many bytes the messages had.
    """

    def __init__(self, layout: Layout, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.down, self.trains, self.up = (np.zeros(len(segments)) for _ in range(3))
        self._segment = {name: k for k, segment in enumerate(segments) for name in segment.names}
        self._layout = layout
        self._counted: dict[Names, np.ndarray] = {}

    def sent(self, names: Names) -> None:
        """Count entries of a tree that were sent to a client."""
        self.down += self._bytes(names)

    def asked(self, names: Names) -> None:
        """Count entries that a client was asked to train."""
        self.trains += self._bytes(names)

    def returned(self, names: Names) -> None:
        """Count entries of a tree that a client returned."""
        self.up += self._bytes(names)

    def shares(self, clients: int) -> Mapping[str, np.ndarray]:
        """`travel_down`, `travel_trains`, `travel_up`, each (segments,): times per client that a segment was sent.

        1: once to (or by) each client; .5: to half of them; 2: twice to each, or with a second tree such as a control
        variate.
        """
        whole = np.array([segment.nbytes for segment in self.segments], float) * max(clients, 1)
        counts = {"travel_down": self.down, "travel_trains": self.trains, "travel_up": self.up}
        return {key: (count / whole).astype(np.float32) for key, count in counts.items()}

    def _bytes(self, names: Names) -> np.ndarray:
        if (counted := self._counted.get(names)) is None:  # most clients of a round have the same entries
            counted = np.zeros(len(self.segments))
            for name in names:
                counted[self._segment[name]] += self._layout.by_name[name].nbytes
            self._counted[names] = counted
        return counted
