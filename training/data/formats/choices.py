"""Multiple choice: questions in a table, each with its choices and the right one among them.

The choices are in one column, as a list, as {"text": […], "label": […]} or as a list of {"text": …, "label": …} (ARC,
OpenBookQA), or each in a column of its own (PIQA: `choices-column="sol1,sol2"`). Which one is right is told by its
place from 0 on, by its label, by its letter (A is the first), or by its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError

Choices = tuple[str, ...]
"""Of one question."""


def choices_of(
    columns: Sequence[Sequence[Any]], answers: Sequence[Any], where: str
) -> tuple[tuple[Choices, ...], NDArray[np.int64]]:
    """The choices of n questions, and the place of the right one of each (n,).

    Args:
        columns: of choices: one with all of a question's, or several with one each.
        answers: (n), as the table tells them.
        where: for errors, which name the row.

    Raises:
        DataError: fewer than two choices, a choice that is no text, or an answer that is none of them.
    """
    found, places = [], []
    for row, answer in enumerate(answers):
        cells = [column[row] for column in columns]
        choices, labels = _one(cells[0] if len(cells) == 1 else cells)
        at = f"{where}: row {row + 1}"
        if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise DataError(f"{at}: needs two choices or more, all of them texts; it has {list(choices)!r:.80}")
        found.append(choices)
        places.append(_place(answer, choices, labels, at))
    return tuple(found), np.array(places, dtype=np.int64)


def _one(cell: Any) -> tuple[Choices, Sequence[str]]:
    """The choices of a question, and their labels where they have such."""
    if isinstance(cell, Mapping):
        return tuple(cell.get("text") or ()), [str(label) for label in cell.get("label") or ()]
    if isinstance(cell, list | tuple) and cell and all(isinstance(choice, Mapping) for choice in cell):
        return tuple(choice.get("text", "") for choice in cell), [str(choice.get("label", "")) for choice in cell]
    return (tuple(cell) if isinstance(cell, list | tuple) else ()), ()


def _place(answer: Any, choices: Choices, labels: Sequence[str], at: str) -> int:
    told = str(answer).strip()
    if told in labels:
        return list(labels).index(told)
    if told.isdecimal() and int(told) < len(choices):
        return int(told)
    if choices.count(told) == 1:
        return choices.index(told)
    if len(told) == 1 and 0 <= ord(told) - ord("A") < len(choices):
        return ord(told) - ord("A")
    raise DataError(
        f"{at}: the answer {answer!r} is none of its {len(choices)} choices: allowed are places from 0 to "
        f"{len(choices) - 1}, letters from A on, and the choices' own labels and texts"
    )
