"""What a regression's model says of numbers in .npz files and tables: how they are read, and how results are shown."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tepal.training.data import DataConfig, DataError, NumberInfo
from tepal.training.data.config import Reading, separated
from tepal.training.data.formats.files import suffix_of
from tepal.training.data.formats.npz import npz_examples
from tepal.training.data.formats.numbers import checked_numbers, numbers_in
from tepal.training.data.formats.tables import TABLE_SUFFIXES, read_columns

NPZ = ".npz"
SHOWN = 20  # rows of the table in the terminal


@dataclass(frozen=True)
class NumberPrediction:
    """What was predicted for one example.

    file, index: where the example is; the index counts from 0.
    outputs: the mean over the members; `deviations` their standard deviations around it.
    targets: as the file has them, else None.
    """

    file: Path
    index: int
    outputs: tuple[float, ...]
    deviations: tuple[float, ...]
    targets: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs of one file, and their targets, where it has such."""

    file: Path
    inputs: NDArray[np.float32]
    targets: NDArray[np.float32] | None


def read(files: Sequence[Path], info: NumberInfo, config: DataConfig) -> Iterator[Examples]:
    """The inputs of each file: of a .npz file its test set where there is one, else all; of a table all rows.

    Args:
        files: .npz files, and tables with the columns that `config` names.
        info: of the model.
        config: of the run that the model comes from.

    Raises:
        OSError: a file is not there. ValueError: what is in it does not fit; the text names it.
    """
    for given in files:
        file = Path(given).expanduser()
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        if suffix_of(file) in TABLE_SUFFIXES:
            part = ""
            inputs, targets = _of_table(file, config)
        elif file.suffix.lower() == NPZ:
            inputs, targets, part = npz_examples(file, "inputs")
        else:
            raise DataError(f"{file}: read are .npz files and tables ({', '.join(TABLE_SUFFIXES)}) for this model")
        reading = Reading(numbers=True, features=info.features, outputs=info.outputs)
        known = np.zeros((inputs.shape[0] if inputs.ndim else 1, info.outputs)) if targets is None else targets
        numbers = checked_numbers({part: (inputs, known, None)}, str(file), reading).train
        yield Examples(file, numbers.inputs, None if targets is None else numbers.targets)


def _of_table(file: Path, config: DataConfig) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    inputs, targets = separated(config.feature_columns), separated(config.label_column)
    if not inputs:
        raise DataError(
            f"{file}: the model was trained without feature-columns, so which of a table's are its inputs is not "
            "known: give it arrays in a .npz file"
        )
    try:
        table = read_columns(file, [*inputs, *targets])
    except DataError:
        table, targets = read_columns(file, inputs), ()  # what is to be predicted need not be known
    return numbers_in(table, inputs, str(file)), numbers_in(table, targets, str(file)) if targets else None


def error_of(rows: Sequence[NumberPrediction]) -> float | None:
    """Root mean squared error over the examples whose targets are known; None where there is none."""
    apart = [
        (output - target) ** 2
        for row in rows
        for output, target in zip(row.outputs, row.targets or (), strict=row.targets is not None)
    ]
    return math.sqrt(math.fsum(apart) / len(apart)) if apart else None


def write_numbers(rows: Sequence[NumberPrediction], file: Path) -> None:
    """One line for each example under a line of column names; what is not known is empty. Raises OSError."""
    with Path(file).open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_headings(rows))
        for row in rows:
            targets = row.targets or ("",) * len(row.outputs)
            writer.writerow([row.file, row.index, *row.outputs, *row.deviations, *targets])


def _headings(rows: Sequence[NumberPrediction]) -> list[str]:
    outputs = len(rows[0].outputs) if rows else 1
    columns = [
        name if outputs == 1 else f"{name}_{number}"
        for name in ("output", "deviation", "target")
        for number in range(outputs)
    ]
    return ["file", "index", *columns]


def numbers_table(rows: Sequence[NumberPrediction]) -> Group:
    """The first rows, how many more there are, and the error where targets are known, for the terminal."""
    known = [row for row in rows if row.targets is not None]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("example", overflow="fold")
    for heading in ("output", "deviation", *(["target"] if known else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:SHOWN]:
        shown = (row.outputs, row.deviations, *([row.targets or ()] if known else []))
        table.add_row(Text(f"{row.file}[{row.index}]"), *(" ".join(f"{n:.4g}" for n in numbers) for numbers in shown))
    lines = [f"… and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
    if (error := error_of(rows)) is not None:
        lines.append(f"RMSE {error:.4f} on {len(known):,} examples with a target")
    return Group(table, *map(Text, lines))
