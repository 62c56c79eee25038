"""The parts of an experiment: its trials, which are computed one by one, and the results that are made of their values.

A trial is the smallest unit that is kept, so that an interrupted experiment continues with the missing trials.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepal.records.columns import Column
from tepal.report.page import Figure
from tepal.report.table import Table

Values = Mapping[str, Any]
"""What was computed of a trial, in JSON's types."""


WEIGHTS = "weights"
"""Folder of pretrained weights in an experiment's folder."""


class MissingData(RuntimeError):
    """Data or weights of a trial, or of all trials, are missing; the text names them and where they come from."""


@dataclass(frozen=True)
class Trial:
    """One thing to compute and keep: a training run, or the communication cost of one model.

    Args:
        name: unique in the experiment, and a file name without suffix.
        options: all that it is computed from, besides data and the trials that it needs.
        needs: names of earlier trials whose values or files it is computed from.
        optional: the results are whole without it.
    """

    name: str
    options: Values
    needs: Sequence[str] = ()
    optional: bool = False


@dataclass(frozen=True)
class TrialInputs:
    """What a trial can use: a folder for its files, data sets by name, and the values of the trials that it needs.

    `device`: on which clients train, such as "cuda:1"; "": a GPU if there is one, else the CPU.
    """

    folder: Path
    data: Mapping[str, Path] = field(default_factory=dict)
    needed: Mapping[str, Values] = field(default_factory=dict)
    device: str = ""


HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "undecided", "not tested"
"""Verdicts on a claim."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Args:
        text: what the paper claims, as a sentence.
        measured: what was measured about it.
        verdict: `HOLDS`, `FAILS`, `UNDECIDED` or, if what was computed is no test of it, `UNTESTED`.
    """

    text: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Reproduction:
    """What an experiment reproduced: tables, figures, other findings as sentences, and the paper's claims."""

    tables: Sequence[Table]
    figures: Sequence[Figure] = ()
    findings: Sequence[str] = ()
    claims: Sequence[Claim] = ()

    @property
    def shown_tables(self) -> list[Table]:
        """The claims with their verdicts, if there are any, and the tables."""
        return [*([claims_table(self.claims)] if self.claims else []), *self.tables]


def joined(*parts: Reproduction) -> Reproduction:
    """All tables, figures, findings and claims of several parts."""
    names = ("tables", "figures", "findings", "claims")
    return Reproduction(*([each for part in parts for each in getattr(part, name)] for name in names))


class Experiment(ABC):
    """An experiment of a paper."""

    name: str
    title: str
    paper: str
    """The paper's table or figure, and its arXiv number."""
    deviations: Sequence[str]
    """Sentences on what differs from the paper, and on what the paper omits and was chosen here."""
    datasets: Sequence[str] = ()
    """Names, as in a run config, of the data sets that are needed."""
    small_scale: str
    """A sentence on what the small setting reduces."""
    full_scale: str
    """A sentence on the sizes of the full setting."""

    def data(self, full: bool) -> Sequence[str]:
        """Names of the data sets that a setting needs."""
        return self.datasets

    def weights(self, full: bool) -> Mapping[str, str]:
        """Pretrained weights that a setting needs and that do not come with Tepal: their folder's name below
        `WEIGHTS` → what belongs into it."""
        return {}

    def scale(self, full: bool) -> str:
        """A sentence on the sizes of a setting."""
        return self.full_scale if full else self.small_scale

    @abstractmethod
    def trials(self, full: bool) -> Sequence[Trial]:
        """All trials of a setting, each after those that it needs."""

    @abstractmethod
    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        """Compute a trial from its options, the data and the trials that it needs alone. Raises MissingData."""

    @abstractmethod
    def results(self, found: Mapping[str, Values]) -> Reproduction:
        """The tables, figures and findings of the trials that are computed so far, given as name → values."""


def claims_table(claims: Sequence[Claim]) -> Table:
    """Claims with what was measured and the verdicts."""
    columns = [Column(heading, left=True) for heading in ("claim", "measured", "verdict")]
    return Table("Claims", columns, [(each.text, each.measured, each.verdict) for each in claims])


def table(title: str, headings: Iterable[str], rows: Sequence[Sequence[str | float | int | None]]) -> Table:
    """A table whose first column is text; floats are shown with four decimals, None is a value that is not known."""
    return Table(title, [Column(text, text=_text, left=not k) for k, text in enumerate(headings)], rows)


def _text(value: str | float | int) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else value
