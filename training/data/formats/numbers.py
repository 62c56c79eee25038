"""Numbers with targets (regression) or with classes, from arrays and from the columns of a table.

Inputs are (n, features), or in a regression also sequences (n, length, features); targets are (n, outputs), or (n,) for
one output; classes are (n,), whole numbers or names. Numbers are converted to float32 and not scaled: see `normalise`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import Arrays, check_count, check_labels, checked_groups, written
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import LabelledNumbers, Numbers, Source
from tepal.training.data.labels import labels_of

log = getLogger("flwr")

_MOST_CLASSES = 20
_LARGE = 10.0  # mean or standard deviation of a feature that is not scaled


def checked_numbers(
    arrays: Mapping[str, Arrays], origin: str, reading: Reading, columns: tuple[str, ...] = ()
) -> Source[Numbers]:
    """Check the training set and, if there is one, the test set (in this order), by names for messages.

    `columns` are the names of the inputs' columns in a table. Raises DataError for invalid shapes or dtypes, NaN or
    infinite values, different shapes in training and test set, and other numbers of features or outputs than the run's.
    """
    parts = [
        _checked(inputs, targets, f"{origin}: {part}" if part else origin, reading, groups)
        for part, (inputs, targets, groups) in arrays.items()
    ]
    _check_one_shape([part.inputs for part in parts], "inputs", origin)
    _check_one_shape([part.targets for part in parts], "targets", origin)
    _warn_of_classes(parts[0].targets, origin, reading, table=bool(columns))
    _warn_of_scale(parts[0].inputs, origin, reading, columns)
    return Source(parts[0], parts[1] if len(parts) > 1 else None, 0, origin, columns=columns)


def checked_labelled(
    arrays: Mapping[str, tuple[NDArray[Any], Sequence[Any], NDArray[Any] | None]],
    origin: str,
    reading: Reading,
    columns: tuple[str, ...] = (),
) -> Source[LabelledNumbers]:
    """As `checked_numbers`, for inputs, the class of each (a whole number or a name), and groups.

    Raises DataError also for values that are no classes, and for other classes than the run's.
    """
    values = [label for part in arrays.values() for label in part[1]]
    labels, names = labels_of(values, reading, origin)
    classes = reading.classes or len(names) or 1 + int(labels.max(initial=0))
    check_labels(labels, classes if reading.classes or names else 0, origin)
    if len(labels) and not reading.classes:
        where = f"{origin}: column {reading.label_column} (label-column)"
        if len(set(labels.tolist())) < 2:
            raise DataError(f"{where} has one class in all rows: a classification needs at least two")
        most = max(_MOST_CLASSES, len(labels) // 2 if names else len(labels))
        check_count(classes, [labels], where, most=most)
    parts, begin = [], 0
    for part, (inputs, own, groups) in arrays.items():
        where = f"{origin}: {part}" if part else origin
        if inputs.ndim != 2 or not inputs.shape[1]:
            raise DataError(
                f"{where}: inputs have shape {inputs.shape}; a classification of numbers takes (n, features)"
            )
        _check_sizes(inputs, len(own), "classes", where, {"features": (inputs.shape[1], reading.features)})
        groups = None if groups is None else checked_groups(groups, len(own), where)
        parts.append(LabelledNumbers(_finite(inputs, where, "input"), labels[begin : begin + len(own)], groups))
        begin += len(own)
    _check_one_shape([part.inputs for part in parts], "inputs", origin)
    _warn_of_scale(parts[0].inputs, origin, reading, columns)
    return Source(parts[0], parts[1] if len(parts) > 1 else None, classes, origin, names, columns)


def _check_sizes(inputs: NDArray[Any], count: int, what: str, where: str, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Raise DataError for another number of targets or classes than inputs, none, or other sizes than the run's."""
    if len(inputs) != count:
        raise DataError(f"{where}: {len(inputs):,} inputs but {count:,} {what}: give as many of both")
    if not len(inputs):
        raise DataError(f"{where}: no examples (inputs have shape {inputs.shape}): give at least one")
    for size, (found, expected) in sizes.items():
        if expected and found != expected:
            raise DataError(f"{where}: has {found} {size}, but the run has {expected}: correct {size}")


def _check_one_shape(arrays: Sequence[NDArray[Any]], what: str, origin: str) -> None:
    shapes = [array.shape[1:] for array in arrays]
    if len(set(shapes)) > 1:
        raise DataError(
            f"{origin}: train {what} are {written(shapes[0])}, test {what} {written(shapes[1])}: use one shape"
        )


def _warn_of_classes(targets: NDArray[np.float32], origin: str, reading: Reading, *, table: bool) -> None:
    """Warn of targets that are probably numbers of classes: few different whole ones."""
    values = np.unique(targets)
    if targets.shape[1] == 1 and 1 < len(values) <= min(_MOST_CLASSES, len(targets) // 2) and not (values % 1).any():
        column = f' and label-column="{reading.label_column}"' if table else ""
        log.warning(
            "%s: all targets are one of %d whole numbers, from %g to %g. They are trained as numbers, by their squared "
            'error. If they stand for classes, set model="mlp" or "ft-transformer"%s, which is a classification.',
            origin, len(values), values[0], values[-1], column,
        )  # fmt: skip


def _warn_of_scale(inputs: NDArray[np.float32], origin: str, reading: Reading, columns: tuple[str, ...]) -> None:
    """Warn of a feature that is far from mean 0 and standard deviation 1, if the run does not scale numbers."""
    if reading.normalised:
        return
    features = inputs.reshape(-1, inputs.shape[-1]).astype(np.float64)
    means, deviations = features.mean(axis=0), features.std(axis=0)
    largest = int(np.maximum(abs(means), deviations).argmax())
    if max(abs(means[largest]), deviations[largest]) > _LARGE:
        log.warning(
            "%s: %s has mean %.4g and standard deviation %.4g, and models learn slowly or not at all from features far "
            'from 0 and 1: set normalise to "dataset", or to the features\' means and standard deviations.',
            origin, f"column {columns[largest]}" if columns else f"feature {largest}", means[largest],
            deviations[largest],
        )  # fmt: skip


def _checked(
    inputs: NDArray[Any], targets: NDArray[Any], where: str, reading: Reading, groups: NDArray[Any] | None
) -> Numbers:
    if inputs.ndim not in (2, 3) or 0 in inputs.shape[1:]:
        raise DataError(
            f"{where}: inputs have shape {inputs.shape}; allowed are (n, features) and (n, length, features)"
        )
    if targets.ndim == 1:
        targets = targets[:, None]
    if targets.ndim != 2 or not targets.shape[1]:
        raise DataError(f"{where}: targets have shape {targets.shape}; allowed are (n,) and (n, outputs)")
    sizes = {"features": (inputs.shape[-1], reading.features), "outputs": (targets.shape[1], reading.outputs)}
    _check_sizes(inputs, len(targets), "targets", where, sizes)
    groups = None if groups is None else checked_groups(groups, len(targets), where)
    return Numbers(_finite(inputs, where, "input"), _finite(targets, where, "target"), groups)


def _finite(array: NDArray[Any], where: str, what: str) -> NDArray[np.float32]:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where}: {what}s are {array.dtype}: save numbers")
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1))
    if len(wrong):
        raise DataError(
            f"{where}: {what} {wrong[0]} ({len(wrong):,} in all) has a value that is NaN, infinite or too large for "
            "float32: repair or remove it"
        )
    return numbers


def numbers_in(
    table: Mapping[str, Sequence[Any]], columns: Sequence[str], where: str, cure: str = "repair or remove the row"
) -> NDArray[np.float32]:
    """Return columns of a table as (n, len(columns)).

    Raises DataError for a cell that is not a finite number; `cure` is what to do about a cell with text.
    """
    return np.stack([_column(table[name], name, where, cure) for name in columns], axis=1)


def _column(cells: Sequence[Any], name: str, where: str, cure: str) -> NDArray[np.float32]:
    read = []
    for row, cell in enumerate(cells):
        try:
            read.append(float(cell))
        except (TypeError, ValueError, OverflowError) as error:
            missing = cell is None or cell == ""
            raise DataError(
                f"{where}: row {row + 1} has {'nothing' if missing else repr(cell)} in column {name}, which is not a "
                f"number: {'repair or remove the row' if missing else cure}"
            ) from error
    with np.errstate(over="ignore"):
        numbers = np.array(read).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        raise DataError(
            f"{where}: row {wrong[0] + 1} has {read[wrong[0]]:g} in column {name} ({len(wrong):,} in all), which "
            "is NaN, infinite or too large for float32: repair or remove the row"
        )
    return numbers
