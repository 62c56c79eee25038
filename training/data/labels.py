"""Labels from the class names or numbers in files: a class's label is its position in the order of the names."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import cache
from logging import getLogger
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError, Reading

log = getLogger("flwr")

_SHOWN = 20  # names in a message


def name_of(text: str) -> str:
    """Return a class name in the one form (NFC) in which names are compared: macOS writes folders in another one."""
    return unicodedata.normalize("NFC", text)


def numbers_of(names: Sequence[str], reading: Reading, where: str, what: str) -> dict[str, int]:
    """Return class name → label: by `class-names`, else by position among the sorted `names`.

    If all names are whole numbers, they are sorted as numbers, so that 0 to n - 1 are their own labels. They are labels
    also beside `class-names`, unless one of these is a number.

    Args:
        names: the names found, by `name_of`, without repetition.
        reading: the run's settings.
        where: the file or folder, for messages.
        what: the kind of names, for messages, such as "class folders".

    Raises:
        DataError: a name is not in `class-names`; or these are not set, and the run has another number of classes.
    """
    if reading.class_names:
        if _are_labels(names, reading):
            return {name: int(name) for name in names}
        if unknown := sorted(set(names) - set(reading.class_names)):
            raise DataError(
                f"{where}: {what} {', '.join(unknown[:_SHOWN])} are not in the run's class-names "
                f"({', '.join(reading.class_names[:_SHOWN])}): rename or remove them, or extend class-names"
            )
        return {name: label for label, name in enumerate(reading.class_names)}
    if reading.classes and len(names) != reading.classes:
        raise DataError(
            f"{where}: {len(names)} {what} ({', '.join(sorted(names)[:_SHOWN])}), but the run has {reading.classes} "
            f"classes: labels are positions among the sorted names, so give every client the same {what} (for a class "
            "without images an empty folder), or set class-names"
        )
    ordered = sorted(names, key=lambda name: (int(name), name)) if all(map(_is_whole, names)) else sorted(names)
    return {name: label for label, name in enumerate(ordered)}


def labels_of(values: Sequence[Any], reading: Reading, where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the labels (n,) of a table's column, and the class names if the column has names.

    Whole numbers, also written as text ("1" or "1.0"), are labels, unless one of `class-names` is a number; all other
    values are names.

    Raises:
        DataError: a value is missing, or a number that is not whole; or the names are not the run's (see `numbers_of`).
    """
    names = [_name_in(value, row, reading, where) for row, value in enumerate(values)]
    if _are_labels(names, reading):
        return np.array([int(name) for name in names], dtype=np.int64), ()
    numbers = numbers_of(sorted(set(names)), reading, where, f"names in column {reading.label_column}")
    return np.array([numbers[name] for name in names], dtype=np.int64), tuple(numbers)


def _are_labels(names: Sequence[str], reading: Reading) -> bool:
    """Return whether all names are labels, written as whole numbers."""
    return all(map(_is_whole, names)) and not names_a_number(reading)


def names_a_number(reading: Reading) -> bool:
    """Return whether one of `class-names` is a number, so that all labels are names."""
    return any(_number(name) is not None for name in reading.class_names)


def names_of_numbers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes 0 to n - 1 in the one form; () if they are not all different names.

    A number is not a name here: the labels of other data may be such numbers. Nor is a name with a comma, which could
    not be one of `class-names`.
    """
    found = tuple(name_of(name.strip()) for name in names)
    named = all(name and "," not in name and _number(name) is None for name in found)
    return found if named and len(set(found)) == len(found) else ()


@cache
def remark_own_names(origin: str, names: tuple[str, ...]) -> None:
    """Warn once of names whose order at another site may be another one: they are not the numbers of the classes."""
    if names != tuple(map(str, range(len(names)))):
        log.warning(
            "%s: its classes are named (%s%s), and the run has no class-names: labels are positions in the sorted "
            "names, so every site must have the same names. Set class-names in the run config.",
            origin, ", ".join(names[:_SHOWN]), ", …" if len(names) > _SHOWN else "",
        )  # fmt: skip


def _name_in(value: Any, row: int, reading: Reading, where: str) -> str:
    """Return a cell as a name; a whole number has no decimal point in it. Raises DataError.

    Text with a fraction, such as 4.5, is a name for images and texts. With numbers as inputs it is hardly a class.
    """
    column = f"column {reading.label_column}"
    name = name_of(str(value).strip())
    if value is None or not name or (isinstance(value, float) and math.isnan(value)):  # as parquet has a missing one
        raise DataError(f"{where}: row {row + 1} has no label ({column}): add it or remove the row")
    number = None if name in reading.class_names or _is_decimal(name) else _number(name)
    if number is None:
        return name
    if number.is_integer():
        return str(int(number))
    if reading.labelled:
        raise DataError(
            f"{where}: row {row + 1} has {value} in {column} (label-column), which is no class: write classes as whole "
            'numbers from 0 on or as names; for a regression choose model="linear-attention" or a custom model with '
            'task="sequence-regression"'
        )
    if not isinstance(value, str):
        raise DataError(f"{where}: row {row + 1}: label {value} ({column}) is neither a whole number nor a name")
    return name


def _number(text: str) -> float | None:
    """Return the number that a text is; None for a name."""
    try:
        return None if "_" in text else float(text)  # Python reads 1_0 as 10
    except ValueError:
        return None


def _is_decimal(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _is_whole(text: str) -> bool:
    return _is_decimal(text) and len(text) < 18
