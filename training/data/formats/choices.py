"""Multiple choice: questions in a table, each with its choices and the right one among them.

The choices are in one column, as a list, as {"text": […], "label": […]} or as a list of {"text": …, "label": …} (ARC,
OpenBookQA), or each in a column of its own (PIQA: `choices-column="sol1,sol2"`). The right one is given by its
position from 0 on, its label, its letter (A is the first), or its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError

Choices = tuple[str, ...]
"""Choices of one question."""


def choices_of(
    columns: Sequence[Sequence[Any]], answers: Sequence[Any], where: str
) -> tuple[tuple[Choices, ...], NDArray[np.int64]]:
    """Return the choices of n questions, and the position of each right one (n,).

    Args:
        columns: one column with all choices of a question, or one column per choice.
        answers: n answers, as in the table.
        where: the table, for messages.

    Raises:
        DataError: a question has fewer than two choices, a choice is not text, or an answer is not among them.
    """
    found, positions = [], []
    for row, answer in enumerate(answers):
        cells = [column[row] for column in columns]
        choices, labels = _choices_in(cells[0] if len(cells) == 1 else cells)
        at = f"{where}: row {row + 1}"
        if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise DataError(f"{at}: has the choices {list(choices)!r:.80}: give at least two texts")
        found.append(choices)
        positions.append(_position(answer, choices, labels, at))
    return tuple(found), np.array(positions, dtype=np.int64)


def _choices_in(cell: Any) -> tuple[Choices, Sequence[str]]:
    """Return the choices of a question, and their labels if they have labels."""
    if isinstance(cell, Mapping):
        return tuple(cell.get("text") or ()), [str(label) for label in cell.get("label") or ()]
    if isinstance(cell, list | tuple) and cell and all(isinstance(choice, Mapping) for choice in cell):
        return tuple(choice.get("text", "") for choice in cell), [str(choice.get("label", "")) for choice in cell]
    return (tuple(cell) if isinstance(cell, list | tuple) else ()), ()


def _position(answer: Any, choices: Choices, labels: Sequence[str], at: str) -> int:
    text = str(answer).strip()
    if text in labels:
        return list(labels).index(text)
    if text.isdecimal() and int(text) < len(choices):
        return int(text)
    if choices.count(text) == 1:
        return choices.index(text)
    if len(text) == 1 and 0 <= ord(text) - ord("A") < len(choices):
        return ord(text) - ord("A")
    raise DataError(
        f"{at}: the answer {answer!r} is not among its {len(choices)} choices: allowed are positions from 0 to "
        f"{len(choices) - 1}, letters from A on, and the choices' own labels and texts"
    )
