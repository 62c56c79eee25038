"""Multiple choice: questions in a table, each with its choices and the right one among them.

The choices are in one column, as a list, as {"text": […], "label": […]} or as a list of {"text": …, "label": …} (ARC,
OpenBookQA), or each in a column of its own (PIQA: `choices-column="sol1,sol2"`). The right one is given by its
position from 0 on, its label, its letter (A is the first), or its text. Texts may be numbers: whether a column's
answers are positions or texts is decided for all its rows together, those of training and test.
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
    parts: Mapping[str, tuple[Sequence[Sequence[Any]], Sequence[Any]]], origin: str
) -> dict[str, tuple[tuple[Choices, ...], NDArray[np.int64]]]:
    """Return, for each part of a data set, the choices of its n questions and the position of each right one (n,).

    Args:
        parts: part → its columns, which are one with all choices of a question or one per choice; and its n answers, as
            in the table.
        origin: the data set, for messages.

    Raises:
        DataError: a question has fewer than two choices, a choice is not text, or an answer is not among them; or all
            answers can be positions and can be texts, and these differ.
    """
    rows = [
        (f"{origin}: {part}: row {row + 1}" if part else f"{origin}: row {row + 1}", answers[row],
         *_choices_in([column[row] for column in columns]))
        for part, (columns, answers) in parts.items()
        for row in range(len(answers))
    ]  # fmt: skip
    for place, _, choices, _ in rows:
        if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise DataError(f"{place}: has the choices {list(choices)!r:.80}: give at least two texts")
    as_texts = _are_texts(rows)
    found: dict[str, tuple[tuple[Choices, ...], NDArray[np.int64]]] = {}
    end = 0
    for part, (_, answers) in parts.items():
        start, end = end, end + len(answers)
        positions = [
            choices.index(str(answer).strip()) if as_texts and str(answer).strip() not in labels
            else _position(answer, choices, labels, place)
            for place, answer, choices, labels in rows[start:end]
        ]  # fmt: skip
        found[part] = tuple(choices for _, _, choices, _ in rows[start:end]), np.array(positions, dtype=np.int64)
    return found


def _are_texts(rows: Sequence[tuple[str, Any, Choices, Sequence[str]]]) -> bool:
    """Return whether all answers that are no labels are texts of choices, and some are no positions.

    Raises DataError if all are both, and these differ.
    """
    rows = [row for row in rows if str(row[1]).strip() not in row[3]]
    texts = [(place, str(answer).strip(), choices) for place, answer, choices, _ in rows]
    if not all(isinstance(row[1], str) for row in rows) or any(choices.count(text) != 1 for _, text, choices in texts):
        return False
    if not all(_is_position(text, choices) for _, text, choices in texts):
        return True
    for place, text, choices in texts:
        if choices.index(text) != int(text):
            raise DataError(
                f"{place}: the answer {text!r} is a position from 0 on and also the text of another choice, and so it "
                "is in all rows: write the right choices as letters (A is the first)"
            )
    return False


def _is_position(text: str, choices: Choices) -> bool:
    return text.isdecimal() and int(text) < len(choices)


def _choices_in(cells: Sequence[Any]) -> tuple[Choices, Sequence[str]]:
    """Return the choices of a question, in one cell or one a cell, and their labels if they have labels."""
    cell = cells[0] if len(cells) == 1 else cells
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
