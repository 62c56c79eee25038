"""Predictions as CSV, and as a table for the terminal."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tepal.host.text import visible
from tepal.report.table import FORMULA
from tepal.tools.predict.numbers import NumberPrediction, error_of

SHOWN = 20  # rows of the table in the terminal

_COLUMNS = ("file", "index", "label", "class_name", "probability", "entropy", "disagreement", "true_label")


@dataclass(frozen=True)
class Prediction:
    """The prediction for one example of images or texts.

    file, index: where the example is; the index counts from 0 in a .npz file, the rows of a table and the lines of
        plain text, and is None for an image file.
    label: the class number with the highest mean probability.
    probability: of that class, the mean over the members.
    entropy: of the mean probabilities, in nats.
    disagreement: share of the members that predict another label.
    true_label: from the .npz file or the table, None if it has none.
    class_name: the name of the class, the character, or the text of the choice; "" if it has none.
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
    """Share of correct labels among the examples whose true label is known; None without such examples."""
    correct = [row.label == row.true_label for row in rows if row.true_label is not None]
    return sum(correct) / len(correct) if correct else None


def write_csv(rows: Sequence[Prediction] | Sequence[NumberPrediction], file: Path) -> None:
    """Write one line for each example below the column names; unknown values are empty. Raises OSError."""
    # Not written to a temporary file and renamed: `file` may be a pipe or a device. File names need not be valid text.
    with Path(file).open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
        writer = csv.writer(out, lineterminator="\n")
        if rows and isinstance(rows[0], NumberPrediction):
            count = len(rows[0].outputs)
            names = ("output", "deviation", "target")
            columns = [name if count == 1 else f"{name}_{k}" for name in names for k in range(count)]
            writer.writerow(["file", "index", *columns])
        else:
            writer.writerow(_COLUMNS)
        writer.writerows(map(_values, rows))


def _values(row: Prediction | NumberPrediction) -> list[Any]:
    file = f"./{row.file}" if str(row.file).startswith(FORMULA) else row.file  # to be opened by this name, too
    if isinstance(row, Prediction):
        name = row.class_name  # one character, as of a model of characters, is no formula
        safe = {"file": file, "class_name": f"'{name}" if len(name) > 1 and name.startswith(FORMULA) else name}
        return [safe.get(column, getattr(row, column)) for column in _COLUMNS]
    return [file, row.index, *row.outputs, *row.deviations, *(row.targets or ("",) * len(row.outputs))]


def results_table(rows: Sequence[Prediction] | Sequence[NumberPrediction]) -> Group:
    """The first rows, the number of further ones, and the accuracy or error if labels or targets are known."""
    numbers = [row for row in rows if isinstance(row, NumberPrediction)]
    table, scores = (
        _numbers_table(numbers) if numbers else _labels_table([r for r in rows if isinstance(r, Prediction)])
    )
    more = [f"… and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
    return Group(table, *map(Text, [*more, *scores]))


def _labels_table(rows: Sequence[Prediction]) -> tuple[Table, list[str]]:
    labelled = [row for row in rows if row.true_label is not None]
    named = any(row.class_name for row in rows)
    optional = [name for name, shown in (("class", named), ("true", bool(labelled))) if shown]
    table = _table("file", ["label", *optional, "probability", "entropy", "disagreement"])
    for row in rows[:SHOWN]:
        name = [Text(visible(row.class_name))] if named else []
        true = [] if not labelled else ["" if row.true_label is None else str(row.true_label)]
        measures = (f"{value:.4f}" for value in (row.probability, row.entropy, row.disagreement))
        table.add_row(_origin(row), str(row.label), *name, *true, *measures)
    return table, [f"Accuracy {accuracy(rows):.4f} on {len(labelled):,} examples with a label"] if labelled else []


def _numbers_table(rows: Sequence[NumberPrediction]) -> tuple[Table, list[str]]:
    known = [row for row in rows if row.targets is not None]
    table = _table("example", ["output", "deviation", *(["target"] if known else [])])
    for row in rows[:SHOWN]:
        shown = (row.outputs, row.deviations, *([row.targets or ()] if known else []))
        table.add_row(_origin(row), *(" ".join(f"{n:.4g}" for n in numbers) for numbers in shown))
    return table, [f"RMSE {error_of(rows):.4f} on {len(known):,} examples with a target"] if known else []


def _table(first: str, others: Iterable[str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _origin(row: Prediction | NumberPrediction) -> Text:
    # Text, since brackets in a string would be read as markup. Bytes that are not valid UTF-8 are replaced.
    name = visible(os.fsencode(row.file).decode("utf-8", "replace"))
    return Text(name if row.index is None else f"{name}[{row.index}]")
