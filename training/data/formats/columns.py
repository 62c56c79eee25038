"""Columns of tables by their names: those that a run needs, and whether a table has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tepal.host.toml import separated
from tepal.training.data.config import EVERY, DataError, Reading


def with_every_column(reading: Reading, present: Sequence[str], origin: str) -> Reading:
    """Return the settings with `feature-columns`="*" replaced by columns of a table; others are unchanged.

    These are the columns with a name that have no other use. (A column without a name is the index that pandas writes,
    or a comma at the end of each line.) Raises DataError if there are none, or one has a comma in its name.
    """
    if reading.feature_columns != EVERY:
        return reading
    used = {*separated(reading.label_column), *separated(reading.group_column), reading.split_column, ""}
    columns = [name for name in dict.fromkeys(present) if name.strip() not in used]
    if not columns:
        raise DataError(f'{origin}: feature-columns="{EVERY}", but it has no other column than {", ".join(present)}')
    if wrong := [name for name in columns if "," in name or name != name.strip()]:
        raise DataError(
            f'{origin}: feature-columns="{EVERY}", and column {wrong[0]!r} has a comma or a space at an end of its '
            "name: rename it, or name the columns in feature-columns"
        )
    return replace(reading, feature_columns=",".join(columns))


def needed_columns(reading: Reading) -> list[str]:
    """Return the columns to read from a table; the first one has examples. Raises DataError."""
    if reading.numbers:
        examples = [*_columns_of_numbers(reading)]
    else:
        texts = [reading.text_column, reading.second_text_column, *separated(reading.choices_column)]
        examples = [*(texts if reading.text_column else [reading.image_column]), reading.label_column]
    asked = [*examples, *separated(reading.group_column), reading.split_column]
    return list(dict.fromkeys(filter(None, asked)))


def _columns_of_numbers(reading: Reading) -> tuple[str, ...]:
    """Return the columns of inputs and targets. Raises DataError if the run config does not name them."""
    for key, columns in (("feature-columns", reading.feature_columns), ("label-column", reading.label_column)):
        if not columns:
            raise DataError(
                f"{key} is empty, and a model for numbers needs it to read a table: set it (feature-columns names the "
                f'inputs, separated by commas, or is "{EVERY}" for all other columns; label-column names the column of '
                "the classes, or in a regression of the targets)"
            )
    if reading.labelled and len(separated(reading.label_column)) > 1:
        raise DataError(
            f"label-column={reading.label_column!r} names several columns, and a classification has one: name the "
            "column of the classes"
        )
    if both := sorted({*separated(reading.feature_columns)} & {*separated(reading.label_column)}):
        raise DataError(
            f"column {both[0]} is in feature-columns and in label-column: remove the "
            f"{'class' if reading.labelled else 'target'} from the inputs"
        )
    return *separated(reading.feature_columns), *separated(reading.label_column)


def check_columns(where: object, columns: Sequence[str], present: Sequence[str] | Mapping[str, Any]) -> None:
    """Raise DataError if columns are missing from `present`, or one of them occurs in it more than once."""
    if missing := [name for name in columns if name not in present]:
        numbers = '. Numbers need a model for numbers, such as model="mlp", and feature-columns'
        listed = ", ".join(map(str, present)) or "none"
        raise DataError(
            f"{where}: has no column {' and no column '.join(missing)}; it has {listed}: "
            "set the right names in the run config (image-column, text-column, second-text-column, choices-column, "
            "feature-columns, label-column, group-column, split-column)"
            + (numbers if "image" in missing else "")
        )
    times = {} if isinstance(present, Mapping) else Counter(present)
    if twice := [name for name in columns if times.get(name, 0) > 1]:
        raise DataError(f"{where}: column {twice[0]} occurs {times[twice[0]]} times: rename or remove one")
