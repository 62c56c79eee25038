"""Multiple choice: questions in a table, each with its choices and the right one among them.

The choices are in one column, as a list, as {"text": […], "label": […]} or as a list of {"text": …, "label": …} (ARC,
OpenBookQA), or each in a column of its own (PIQA: `choices-column="sol1,sol2"`). The right one is given by its
position from 0 on, its label, its letter (A is the first), or its text. Texts may be numbers: whether a column's
answers are positions or texts is decided for all its rows together, those of training and test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError

Choices = tuple[str, ...]
"""Choices of one question."""


def choices_of(
    columns: Sequence[Sequence[Any]], answers: Sequence[Any], place: Callable[[int], str]
) -> tuple[tuple[Choices, ...], NDArray[np.int64]]:
    """Return the choices of n questions, and the position of each right one (n,).

    Args:
        columns: one column with all choices of a question, or one column per choice.
        answers: n answers, as in the table.
        place: returns where a row is, for messages.

    Raises:
        DataError: a question has fewer than two choices, a choice is not text, or an answer is not among them; or all
            answers can be positions and can be texts, and these differ.
    """
    found, labels_of = [], []
    for row in range(len(answers)):
        cells = [column[row] for column in columns]
        choices, labels = _choices_in(cells[0] if len(cells) == 1 else cells)
        if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise DataError(f"{place(row)}: has the choices {list(choices)!r:.80}: give at least two texts")
        found.append(choices)
        labels_of.append(labels)
    as_texts = _are_texts(answers, found, labels_of, place)
    positions = [
        choices.index(str(answer).strip()) if as_texts and str(answer).strip() not in labels
        else _position(answer, choices, labels, place(row))
        for row, (answer, choices, labels) in enumerate(zip(answers, found, labels_of, strict=True))
    ]  # fmt: skip
    return tuple(found), np.array(positions, dtype=np.int64)


def _are_texts(
    answers: Sequence[Any],
    found: Sequence[Choices],
    labels_of: Sequence[Sequence[str]],
    place: Callable[[int], str],
) -> bool:
    """Return whether all answers that are no labels are texts of choices, and some are no positions.

    Raises DataError if all are both, and these differ.
    """
    rows = [(row, str(answer).strip()) for row, answer in enumerate(answers)]
    rows = [(row, text) for row, text in rows if text not in labels_of[row]]
    if not all(isinstance(answers[row], str) and found[row].count(text) == 1 for row, text in rows):
        return False
    if not all(_is_position(text, found[row]) for row, text in rows):
        return True
    for row, text in rows:
        if found[row].index(text) != int(text):
            raise DataError(
                f"{place(row)}: the answer {text!r} is a position from 0 on and also the text of another "
                "choice, and so it is in all rows: write the right choices as letters (A is the first)"
            )
    return False


def _is_position(text: str, choices: Choices) -> bool:
    return text.isdecimal() and int(text) < len(choices)


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
    if _is_position(text, choices):
        return int(text)
    if choices.count(text) == 1:
        return choices.index(text)
    if len(text) == 1 and 0 <= ord(text) - ord("A") < len(choices):
        return ord(text) - ord("A")
    raise DataError(
        f"{at}: the answer {answer!r} is not among its {len(choices)} choices: allowed are positions from 0 to "
        f"{len(choices) - 1}, letters from A on, and the choices' own labels and texts"
    )
