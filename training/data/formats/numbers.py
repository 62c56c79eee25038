"""Numbers: inputs and what is regressed on them, from arrays, and from the columns of a table.

Inputs are (n, features), or sequences of them (n, length, features); targets (n, outputs), where (n,) is one output.
Both are float32. They are taken as they are: who wants them scaled does it in the data, with the same numbers at every
site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import Arrays, checked_groups, written
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import Numbers, Source


def checked_numbers(arrays: Mapping[str, Arrays], origin: str, reading: Reading) -> Source[Numbers]:
    """Check the train part and, if there is one, the test part (in this order), keyed by what to call them.

    Raises DataError for arrays of other shapes or no numbers, for NaN and infinity, for parts that differ, and where
    there are not as many features or outputs as the run has.
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
                f"{origin}: train {what} are {written(of_train)}, test {what} {written(of_test)}: they must have one "
                "shape"
            )
    return Source(train, test, 0, origin)


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
        raise DataError(f"{where}: {len(inputs):,} inputs but {len(targets):,} targets; each input needs its own")
    if not len(inputs):
        raise DataError(f"{where}: no examples (inputs have shape {inputs.shape}); at least one is needed")
    for what, found, expected in (
        ("features", inputs.shape[-1], reading.features),
        ("outputs", targets.shape[1], reading.outputs),
    ):
        if expected and found != expected:
            raise DataError(f"{where}: has {found} {what}, and the run's examples have {expected} (by {what})")
    groups = None if groups is None else checked_groups(groups, len(targets), where)
    return Numbers(_finite(inputs, where, "input"), _finite(targets, where, "target"), groups)


def _finite(array: NDArray[Any], where: str, what: str) -> NDArray[np.float32]:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where}: {what}s are {array.dtype}; they must be numbers")
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
    """Columns of a table side by side, (n, len(columns)). DataError for a cell that is no finite number."""
    return np.stack([_column(table[name], name, where) for name in columns], axis=1)


def _column(cells: Sequence[Any], name: str, where: str) -> NDArray[np.float32]:
    read = []
    for row, cell in enumerate(cells):
        try:
            read.append(float(cell))
        except (TypeError, ValueError, OverflowError) as error:
            said = "nothing" if cell is None or cell == "" else repr(cell)
            raise DataError(
                f"{where}: row {row + 1} has {said} in column {name}, which is no number: repair or remove the row"
            ) from error
    with np.errstate(over="ignore"):
        numbers = np.array(read).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        raise DataError(
            f"{where}: row {wrong[0] + 1} has {read[wrong[0]]:g} in column {name} ({len(wrong):,} such in all), which "
            "is NaN, infinite or too large for float32: repair or remove the row"
        )
    return numbers
