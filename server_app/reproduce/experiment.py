"""What an experiment is: cells that are computed one by one, and what is told of all of them, beside the paper's
numbers.

A cell is the smallest thing that is kept, so an experiment that was stopped goes on with the cells that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tepal.server_app.page import Figure

Values = Mapping[str, Any]
"""Of JSON's types."""


class NotAtHand(RuntimeError):
    """A cell needs what this machine has not; the text says what, and where it comes from. The others are computed."""


@dataclass(frozen=True)
class Cell:
    """One thing to compute: its name, a file name without its end, and what it is computed from."""

    name: str
    options: Values


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers below a title; None is what is not known."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]


@dataclass(frozen=True)
class Outcome:
    """What came out: tables, figures, and sentences on what holds of the paper's claims and what does not."""

    tables: Sequence[Table]
    figures: Sequence[Figure] = ()
    findings: Sequence[str] = ()


class Experiment(Protocol):
    """An experiment of a paper."""

    name: str
    title: str
    paper: str
    """Authors' table or figure, and arXiv number."""

    @property
    def deviations(self) -> Sequence[str]:
        """What is not as in the paper, or not given there and chosen here; sentences."""

    def scale(self, full: bool) -> str:
        """What the small setting leaves out of the paper's, or that the full one leaves nothing out; a sentence."""

    def cells(self, full: bool) -> Sequence[Cell]:
        """Everything that is to be computed."""

    def compute(self, cell: Cell) -> Values:
        """One cell. It depends on nothing but the cell's options. Raises NotAtHand."""

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        """What is told of cells, name → what was computed: of all, or of those that there are until now."""
