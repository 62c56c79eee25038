"""Inputs and targets of a regression, from arrays and from the columns of a table.

Inputs are (n, features), or sequences (n, length, features); targets are (n, outputs), or (n,) for one output. Both are
converted to float32 and not scaled: scale them in the data, with the same factors at every site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import Arrays, checked_groups, written
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import Numbers, Source

log = getLogger("flwr")

_MOST_CLASSES = 20


def checked_numbers(arrays: Mapping[str, Arrays], origin: str, reading: Reading) -> Source[Numbers]:
    """Check the training set and, if there is one, the test set (in this order), by names for messages.

    Raises DataError for invalid shapes or dtypes, NaN or infinite values, different shapes in training and test set,
    and other numbers of features or outputs than the run's.
    """
    parts = [
        _checked(inputs, targets, f"{origin}: {part}" if part else origin, reading, groups)
        for part, (inputs, targets, groups) in arrays.items()
    ]
    train, test = parts[0], parts[1] if len(parts) > 1 else None
    for what in ("inputs", "targets") if test is not None else ():
        of_train, of_test = (getattr(part, what).shape[1:] for part in (train, test))
        if of_train != of_test:
            raise DataError(
                f"{origin}: train {what} are {written(of_train)}, test {what} {written(of_test)}: use one shape"
            )
    _say_if_classes(train.targets, origin)
    return Source(train, test, 0, origin)


def _say_if_classes(targets: NDArray[np.float32], origin: str) -> None:
    """Warn of targets that are probably numbers of classes: few different whole ones."""
    values = np.unique(targets)
    if targets.shape[1] == 1 and 1 < len(values) <= min(_MOST_CLASSES, len(targets) // 2) and not (values % 1).any():
        log.warning(
            "%s: all targets are one of %d whole numbers, from %g to %g. They are trained as numbers, by their squared "
            "error. If they stand for classes, write an app of your own (docs/own-app.md): Tepal's classifies images "
            "and texts.", origin, len(values), values[0], values[-1],
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
    if len(inputs) != len(targets):
        raise DataError(f"{where}: {len(inputs):,} inputs but {len(targets):,} targets: give one target for each input")
    if not len(inputs):
        raise DataError(f"{where}: no examples (inputs have shape {inputs.shape}): give at least one")
    for what, found, expected in (
        ("features", inputs.shape[-1], reading.features),
        ("outputs", targets.shape[1], reading.outputs),
    ):
        if expected and found != expected:
            raise DataError(f"{where}: has {found} {what}, but the run has {expected}: correct {what}")
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


def numbers_in(table: Mapping[str, Sequence[Any]], columns: Sequence[str], where: str) -> NDArray[np.float32]:
    """Return columns of a table as (n, len(columns)). Raises DataError for a cell that is not a finite number."""
    return np.stack([_column(table[name], name, where) for name in columns], axis=1)


def _column(cells: Sequence[Any], name: str, where: str) -> NDArray[np.float32]:
    read = []
    for row, cell in enumerate(cells):
        try:
            read.append(float(cell))
        except (TypeError, ValueError, OverflowError) as error:
            found = "nothing" if cell is None or cell == "" else repr(cell)
            raise DataError(
                f"{where}: row {row + 1} has {found} in column {name}, which is not a number: repair or remove the row"
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
