"""What was predicted for images and texts, and how it is shown: as CSV, and in the terminal."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tepal.tools.predict.numbers import NumberPrediction, numbers_table, write_numbers

SHOWN = 20  # rows of the table in the terminal

_COLUMNS = ("file", "index", "label", "class_name", "probability", "entropy", "disagreement", "true_label")


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one example.

    file, index: where the example is; the index counts from 0 in a .npz file, the rows of a table and the lines of
        plain text, and is None for an image file.
    label: the class number with the highest mean probability; `probability` is that.
    entropy: of the mean probabilities, in nats.
    disagreement: share of the members whose own label is another one.
    true_label: as the .npz file or the table has it, else None.
    class_name: the class's, the character, or the choice's text; "" where it has no name.
    """

    file: Path
    index: int | None
    label: int
    probability: float
    entropy: float
    disagreement: float
    true_label: int | None = None
    class_name: str = ""


def accuracy(rows: Sequence[Prediction]) -> float | None:
    """Share of correct labels among the examples whose true label is known; None where there is none."""
    correct = [row.label == row.true_label for row in rows if row.true_label is not None]
    return sum(correct) / len(correct) if correct else None


def write_csv(rows: Sequence[Prediction | NumberPrediction], file: Path) -> None:
    """One line for each example under a line of column names; what is not known is empty. Raises OSError."""
    if regressed := [row for row in rows if isinstance(row, NumberPrediction)]:
        write_numbers(regressed, file)
        return
    # Not written beside and renamed: `file` may be a pipe or a device. Names of files need not be valid text.
    with Path(file).open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in rows:
            writer.writerow([getattr(row, column) for column in _COLUMNS])


def results_table(rows: Sequence[Prediction | NumberPrediction]) -> Group:
    """The first rows, how many more there are, and the accuracy where labels are known, for the terminal."""
    if regressed := [row for row in rows if isinstance(row, NumberPrediction)]:
        return numbers_table(regressed)
    images = [row for row in rows if isinstance(row, Prediction)]
    labelled = [row for row in images if row.true_label is not None]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("file", overflow="fold")
    named = any(row.class_name for row in rows)
    there = (("label", True), ("class", named), ("true", bool(labelled)))
    for heading in (*(name for name, shown in there if shown), "probability", "entropy", "disagreement"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in images[:SHOWN]:
        known = [] if not labelled else ["" if row.true_label is None else str(row.true_label)]
        numbers = (f"{value:.4f}" for value in (row.probability, row.entropy, row.disagreement))
        name = [Text(row.class_name if row.class_name.strip() else repr(row.class_name))] if named else []
        table.add_row(_origin(row), str(row.label), *name, *known, *numbers)
    lines = [f"… and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
    if labelled:
        lines.append(f"Accuracy {accuracy(labelled):.4f} on {len(labelled):,} examples with a label")
    return Group(table, *map(Text, lines))


def _origin(row: Prediction) -> Text:
    # Text, since brackets in a string would be read as markup; and names that no terminal can print lose those bytes.
    name = os.fsencode(row.file).decode("utf-8", "replace")
    return Text(name if row.index is None else f"{name}[{row.index}]")
