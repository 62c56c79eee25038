"""What an experiment is: cells that are computed one by one, and what is told of all of them, beside the paper's
numbers.

A cell is the smallest thing that is kept, so an experiment that was stopped goes on with the cells that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tepal.report.page import Figure

Values = Mapping[str, Any]
"""Of JSON's types."""


class NotAtHand(RuntimeError):
    """What this machine has not, be it of one cell or of all; the text says what, and where it comes from."""


@dataclass(frozen=True)
class Cell:
    """One thing to compute: its name, a file name without its end, and what it is computed from."""

    name: str
    options: Values
    needs: Sequence[str] = ()
    """Cells before it whose values, or files, it is computed from."""


@dataclass(frozen=True)
class Place:
    """What is there when a cell is computed: a folder for files, data sets by name, the values of cells it needs."""

    folder: Path
    data: Mapping[str, Path] = field(default_factory=dict)
    found: Mapping[str, Values] = field(default_factory=dict)


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

    def data(self, full: bool) -> Sequence[str]:
        """Data sets that must be there, by the names that a run config has for them."""

    def scale(self, full: bool) -> str:
        """What the small setting leaves out of the paper's, or that the full one leaves nothing out; a sentence."""

    def cells(self, full: bool) -> Sequence[Cell]:
        """Everything that is to be computed; a cell stands after those that it needs."""

    def compute(self, cell: Cell, place: Place) -> Values:
        """One cell. It depends on nothing but its options, the data and the cells that it needs. Raises NotAtHand."""

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        """What is told of cells, name → what was computed: of all, or of those that there are until now."""
