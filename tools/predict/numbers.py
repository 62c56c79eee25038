"""Numbers for `tepal predict`: .npz files and tables, read for a regression model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tepal.training.data import DataConfig, DataError, NumberInfo
from tepal.training.data.config import Reading, separated
from tepal.training.data.formats.files import suffix_of
from tepal.training.data.formats.npz import npz_examples
from tepal.training.data.formats.numbers import checked_numbers, numbers_in
from tepal.training.data.formats.tables import TABLE_SUFFIXES, read_columns


@dataclass(frozen=True)
class NumberPrediction:
    """The prediction for one example.

    file, index: where the example is; the index counts from 0.
    outputs: mean over the members.
    deviations: standard deviation over the members.
    targets: from the file, None if it has none.
    """

    file: Path
    index: int
    outputs: tuple[float, ...]
    deviations: tuple[float, ...]
    targets: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs of one file (n, …), and their targets (n, outputs), None if it has none."""

    file: Path
    inputs: NDArray[np.float32]
    targets: NDArray[np.float32] | None


def read(files: Sequence[Path], info: NumberInfo, config: DataConfig) -> Iterator[Examples]:
    """The examples of each file: the test set of a .npz file, or all if it has none; all rows of a table.

    Args:
        files: .npz files, and tables with the columns that `config` names.
        info: features and outputs of the model.
        config: of the run that the model comes from.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: its content does not fit the model.
    """
    for given in files:
        file = Path(given).expanduser()
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        if suffix_of(file) in TABLE_SUFFIXES:
            part = ""
            inputs, targets = _of_table(file, config)
        elif file.suffix.lower() == ".npz":
            inputs, targets, part = npz_examples(file, "inputs")
        else:
            raise DataError(f"{file}: allowed for this model are .npz files and tables ({', '.join(TABLE_SUFFIXES)})")
        reading = Reading(numbers=True, features=info.features, outputs=info.outputs)
        known = np.zeros((inputs.shape[0] if inputs.ndim else 1, info.outputs)) if targets is None else targets
        numbers = checked_numbers({part: (inputs, known, None)}, str(file), reading).train
        yield Examples(file, numbers.inputs, None if targets is None else numbers.targets)


def _of_table(file: Path, config: DataConfig) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    inputs, targets = separated(config.feature_columns), separated(config.label_column)
    if not inputs:
        raise DataError(
            f"{file}: the model was trained without feature-columns, so that its input columns in a table are not "
            "known: give it arrays in a .npz file"
        )
    try:
        table = read_columns(file, [*inputs, *targets])
    except DataError:
        table, targets = read_columns(file, inputs), ()  # the targets may be missing
    return numbers_in(table, inputs, str(file)), numbers_in(table, targets, str(file)) if targets else None


def error_of(rows: Sequence[NumberPrediction]) -> float | None:
    """Root mean squared error over the examples whose targets are known; None without such examples."""
    squares = [
        (output - target) ** 2
        for row in rows
        for output, target in zip(row.outputs, row.targets or (), strict=row.targets is not None)
    ]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else None
