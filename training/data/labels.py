"""Labels from the class names or numbers in files: a class's label is its position in the order of the names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError, Reading

_SHOWN = 20  # names in a message


def numbers_of(names: Sequence[str], reading: Reading, where: str, what: str) -> dict[str, int]:
    """Return class name → label: by `class-names`, else by position among the sorted `names`.

    Args:
        names: the names found, without repetition.
        reading: the run's settings.
        where: the file or folder, for messages.
        what: the kind of names, for messages, such as "class folders".

    Raises:
        DataError: a name is not in `class-names`; or these are not set, and the run has another number of classes.
    """
    if reading.class_names:
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
    return {name: label for label, name in enumerate(sorted(names))}


def labels_of(values: Sequence[Any], reading: Reading, where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the labels (n,) of a table's column, and the class names if the column has names.

    Whole numbers, also written as text, are labels; all other values are names.

    Raises:
        DataError: a value is missing, or the names are not the run's (see `numbers_of`).
    """
    column = f"column {reading.label_column}"
    for row, value in enumerate(values):
        if value is None or value == "":
            raise DataError(f"{where}: row {row + 1} has no label ({column}): add it or remove the row")
        if isinstance(value, float) and not value.is_integer():
            raise DataError(f"{where}: row {row + 1}: label {value} ({column}) is neither a whole number nor a name")
    names = [str(int(value) if isinstance(value, float) else value).strip() for value in values]
    if not set(names) <= set(reading.class_names) and all(map(_is_number, names)):
        return np.array([int(name) for name in names], dtype=np.int64), ()
    numbers = numbers_of(sorted(set(names)), reading, where, f"names in {column}")
    return np.array([numbers[name] for name in names], dtype=np.int64), tuple(numbers)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 18
