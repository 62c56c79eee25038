"""Tables of data sets known by name: their files, their columns, and columns derived from others.

A column may be nested: "question.stem" is `stem` of the values in `question`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tepal.host.toml import separated
from tepal.training.data.config import COLUMNS, DataError, Reading
from tepal.training.data.examples import AnySource, Texts
from tepal.training.data.formats.choices import choices_of
from tepal.training.data.formats.columns import needed_columns
from tepal.training.data.formats.files import opened_text, suffix_of, without_copies
from tepal.training.data.formats.tables import (
    Column,
    Rows,
    by_split,
    check_texts,
    columns_in,
    read_columns,
    source_of,
)

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".tsv")

_LABELS = "-labels.lst"  # suffix of a file with a table's labels, one per line


@dataclass(frozen=True)
class DerivedColumn:
    """A column whose values are computed row by row, by `value`, from those of the columns `sources`."""

    sources: tuple[str, ...]
    value: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a data set.

    columns: defaults of the column settings of `Reading`. If the data set is published with several sets of columns,
        the first one that is complete in a file is used.
    derived: name → derived column.
    test: words in the names of files of the test set.
    suffixes: suffixes of its files; in a folder, the first one that a training table has is used.
    """

    columns: tuple[Mapping[str, str], ...]
    derived: Mapping[str, DerivedColumn] = field(default_factory=dict)
    test: tuple[str, ...] = ("test",)
    suffixes: tuple[str, ...] = SUFFIXES

    def fitted(self, reading: Reading, present: Sequence[str]) -> Reading:
        """Return the settings with these columns, except those that the run config names."""
        default = Reading()
        own = {name: value for name in COLUMNS if (value := getattr(reading, name)) != getattr(default, name)}
        possible = [replace(reading, **{**columns, **own}) for columns in self.columns]  # type: ignore[arg-type]
        possible.append(reading)
        return next((one for one in possible if set(self.needed(one, present)) <= set(present)), possible[0])

    def needed(self, reading: Reading, present: Sequence[str] = ()) -> list[str]:
        """Return the required columns of a file with the columns `present`."""
        return list(dict.fromkeys(one for name in needed_columns(reading) for one in self._sources(name, present)))

    def rows(self, table: Rows, reading: Reading) -> dict[str, Column]:
        """Return the columns that the settings name, read or derived from a file's columns."""
        present = list(table)
        found: dict[str, Column] = {}
        for name in needed_columns(reading):
            columns = [table[one] for one in self._sources(name, present)]
            if name in table:
                found[name] = columns[0]
            elif name in self.derived:
                found[name] = [self.derived[name].value(*values) for values in zip(*columns, strict=True)]
            else:
                found[name] = [_within(value, name.split(".")[1:]) for value in columns[0]]
        return found

    def _sources(self, name: str, present: Sequence[str]) -> tuple[str, ...]:
        if name in present:
            return (name,)
        return self.derived[name].sources if name in self.derived else (name.partition(".")[0],)


PLAIN = Tables(())
"""Tables of an unknown data set, whose columns the run config names."""


def has_tables(path: Path, tables: Tables) -> bool:
    """Return whether the path is a table, or a folder with a training table."""
    if path.is_dir():
        return any(_part_of(file, tables) == "train" for file in path.iterdir())
    return suffix_of(path) in tables.suffixes


def read_named(path: Path, reading: Reading, tables: Tables) -> AnySource:
    """Read the texts or images of a table, or of a folder of tables. Raises DataError as `read_tables` does."""
    files = [path]
    if path.is_dir():
        found = without_copies(file for file in path.iterdir() if _part_of(file, tables))
        train = {suffix_of(file) for file in found if _part_of(file, tables) == "train"}
        first = next(suffix for suffix in tables.suffixes if suffix in train)
        files = [file for file in found if suffix_of(file) == first]
    reading = tables.fitted(reading, _columns_in(files[0]))
    parts: dict[str, Any] = {}
    for file in sorted(files, key=lambda file: _part_of(file, tables), reverse=True):  # train, then test
        part = _part_of(file, tables) if path.is_dir() else ""
        read = _read(file, tables, reading)
        try:
            rows = tables.rows(read, reading)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        for name, values in rows.items():
            parts.setdefault(part, {}).setdefault(name, []).extend(values)
    if len(parts) == 1:
        (table,) = parts.values()
        parts = by_split(table, path, reading.split_column) if reading.split_column else {"": table}
    return source_of(parts, str(path), path if path.is_dir() else path.parent, reading)


def read_to_predict(path: Path, reading: Reading, tables: Tables) -> tuple[Texts, bool]:
    """Read texts to predict from a table; returns them and whether they have labels, whose column may be missing.

    Raises:
        DataError: a column of texts is missing or invalid.
    """
    present = _columns_in(path)
    reading = tables.fitted(replace(reading, group_column="", split_column=""), present)
    labelled = bool(reading.label_column) and set(tables.needed(reading, present)) <= set(present)
    if not labelled:
        reading = tables.fitted(replace(reading, group_column="", split_column="", label_column=""), present)
    reading = replace(reading, group_column="", split_column="")
    if not reading.text_column:
        raise DataError(f"{path}: the model's run config does not name a column of texts: set text-column")
    rows = tables.rows(_read(path, tables, reading), reading)
    if labelled:
        source = source_of({"": rows}, str(path), path.parent, reading)
        assert isinstance(source.train, Texts)
        return source.train, True
    check_texts(rows, reading, str(path))
    texts, seconds = rows[reading.text_column], rows.get(reading.second_text_column)
    choices = None
    if reading.choices_column:
        columns = [rows[name] for name in separated(reading.choices_column)]
        choices, _ = choices_of({"": (columns, [0] * len(texts))}, str(path))[""]
    return Texts(tuple(texts), None, None, None if seconds is None else tuple(seconds), choices), False


def _part_of(file: Path, tables: Tables) -> str:
    """Return "train" or "test" for a table of a folder, else ""."""
    if suffix_of(file) not in tables.suffixes:
        return ""
    words = re.split(r"[^a-z]+", file.name.lower())
    if "train" in words:
        return "train"
    return "test" if set(words) & set(tables.test) else ""


def _columns_in(file: Path) -> list[str]:
    """Return the columns of a table; empty if it cannot be read, which reading the table reports."""
    names = columns_in(file)
    return [*names, "label"] if names and _labels_file(file).exists() else names


def _read(file: Path, tables: Tables, reading: Reading) -> dict[str, Column]:
    columns = tables.needed(reading, _columns_in(file))
    labels_file = _labels_file(file)
    if "label" not in columns or not labels_file.exists():
        return read_columns(file, columns)
    read = read_columns(file, [name for name in columns if name != "label"])
    with opened_text(labels_file) as text:
        labels = text.read().split()
    if any(len(values) != len(labels) for values in read.values()):
        raise DataError(
            f"{labels_file}: {len(labels):,} labels, but {file.name} has {len(next(iter(read.values()))):,} rows: give "
            "one label for each row"
        )
    return {**read, "label": list(labels)}


def _labels_file(file: Path) -> Path:
    return file.with_name(file.name.partition(".")[0] + _LABELS)


def _within(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
