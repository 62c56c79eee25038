"""Numbers for `tepal predict`: .npz files and tables, read for a regression or a classification of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.host.toml import separated
from tepal.tools.predict.texts import Batch
from tepal.training.data import DataConfig, DataError, NumberInfo, TableInfo, normalised_numbers
from tepal.training.data.config import Reading
from tepal.training.data.formats.files import suffix_of
from tepal.training.data.formats.npz import labels_in, npz_examples
from tepal.training.data.formats.numbers import checked_labelled, checked_numbers, numbers_in
from tepal.training.data.formats.tables import TABLE_SUFFIXES, TEXT_AS_TARGET, columns_in, read_columns


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
    for file in map(_checked_path, files):
        part = ""
        targets: NDArray[Any] | None = None
        if suffix_of(file) in TABLE_SUFFIXES:
            inputs, table = _of_table(file, config)
            if table:
                targets = numbers_in(table, list(table), str(file), TEXT_AS_TARGET)
        else:
            inputs, targets, part = npz_examples(file, "inputs")
        reading = Reading(numbers=True, features=info.features, outputs=info.outputs, normalised=True)
        known = np.zeros((inputs.shape[0] if inputs.ndim else 1, info.outputs)) if targets is None else targets
        numbers = checked_numbers({part: (inputs, known, None)}, str(file), reading).train
        values = normalised_numbers(numbers.inputs, config.normalise)
        yield Examples(file, values, None if targets is None else numbers.targets)


def table_batches(files: Sequence[Path], info: TableInfo, config: DataConfig, size: int) -> Iterator[Batch]:
    """The numbers of files for a classification, as in `read`, up to `size` together; classes are optional.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: its content does not fit the model.
    """
    reading = Reading(
        numbers=True, labelled=True, features=info.features, classes=info.classes, class_names=config.names,
        label_column=config.label_column, normalised=True,
    )  # fmt: skip
    for file in map(_checked_path, files):
        part = ""
        labels: Sequence[Any] | None = None
        if suffix_of(file) in TABLE_SUFFIXES:
            inputs, table = _of_table(file, config)
            labels = table.get(config.label_column)
        else:
            inputs, array, part = npz_examples(file, "inputs")
            labels = None if array is None else labels_in(array, file)
        of_any_class = [config.names[0] if config.names else 0] * (inputs.shape[0] if inputs.ndim else 1)
        arrays = {part: (inputs, of_any_class if labels is None else labels, None)}
        numbers = checked_labelled(arrays, str(file), reading).train
        for start in range(0, len(numbers), size):
            some = numbers.take(np.arange(start, min(start + size, len(numbers))))
            origins = [(file, index) for index in range(start, start + len(some))]
            values = normalised_numbers(some.inputs, config.normalise)
            yield Batch(origins, values, None if labels is None else some.labels, config.names)


def _checked_path(given: Path) -> Path:
    file = Path(given).expanduser()
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file or folder")
    if suffix_of(file) not in TABLE_SUFFIXES and file.suffix.lower() != ".npz":
        raise DataError(f"{file}: allowed for this model are .npz files and tables ({', '.join(TABLE_SUFFIXES)})")
    return file


def _of_table(file: Path, config: DataConfig) -> tuple[NDArray[np.float32], dict[str, list[Any]]]:
    """The inputs of a table, and the columns of targets or classes, if it has them all."""
    inputs, targets = separated(config.feature_columns), separated(config.label_column)
    if not inputs:
        raise DataError(
            f"{file}: the model was trained without feature-columns, so that its input columns in a table are not "
            "known: give it arrays in a .npz file"
        )
    present = columns_in(file)
    targets = targets if set(targets) <= set(present) else ()
    table = read_columns(file, [*inputs, *targets])
    return numbers_in(table, inputs, str(file)), {name: table[name] for name in targets}


def error_of(rows: Sequence[NumberPrediction]) -> float | None:
    """Root mean squared error over the examples whose targets are known; None without such examples."""
    squares = [
        (output - target) ** 2
        for row in rows
        for output, target in zip(row.outputs, row.targets or (), strict=row.targets is not None)
    ]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else None
