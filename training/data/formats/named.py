"""Tables of data sets that are known by name: their files, their columns, and columns that are made of others.

A column may lie within another: "question.stem" is `stem` of what is in `question`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tepal.training.data.config import DataError, Reading, separated
from tepal.training.data.examples import AnySource, Texts
from tepal.training.data.formats.choices import choices_of
from tepal.training.data.formats.files import opened_text, suffix_of
from tepal.training.data.formats.tables import (
    Column,
    Rows,
    by_split,
    check_columns,
    check_text,
    needed_columns,
    read_columns,
    source_of,
)

JSON = ".json"
"""Suffix of a table that is one list of objects."""
SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv")

_LABELS = "-labels.lst"  # ends the name of a file with a table's labels, one a line, beside it
_COLUMNS = (
    "image_column", "text_column", "second_text_column", "choices_column", "label_column", "group_column",
    "split_column",
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A column that is made of others, row by row."""

    of: tuple[str, ...]
    make: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Tables:
    """How a data set comes in tables.

    columns: what the run config's columns are where it does not name them, by the names of `Reading`. Several, where
        the data set is handed out in several ways: the first one counts whose columns are all there.
    made: columns that are in no file, by their names.
    test: words that tell a file of the test set by its name.
    suffixes: of its files; of a folder those with the first of them that a table for training has.
    """

    columns: tuple[Mapping[str, str], ...]
    made: Mapping[str, Made] = field(default_factory=dict)
    test: tuple[str, ...] = ("test",)
    suffixes: tuple[str, ...] = SUFFIXES

    def fitted(self, reading: Reading, there: Sequence[str]) -> Reading:
        """The reading with these columns, but for those that the run config names."""
        usual = Reading()
        own = {name: value for name in _COLUMNS if (value := getattr(reading, name)) != getattr(usual, name)}
        ways = [replace(reading, **{**columns, **own}) for columns in self.columns]  # type: ignore[arg-type]
        ways.append(reading)
        return next((way for way in ways if set(self.needed(way, there)) <= set(there)), ways[0])

    def needed(self, reading: Reading, there: Sequence[str] = ()) -> list[str]:
        """The columns of a file that are needed, where it has the columns `there`."""
        needed: list[str] = []
        for name in needed_columns(reading):
            needed += self._of(name, there)
        return list(dict.fromkeys(needed))

    def rows(self, table: Rows, reading: Reading) -> dict[str, Column]:
        """The columns that a reading names, of those of a file."""
        there = list(table)
        found: dict[str, Column] = {}
        for name in needed_columns(reading):
            columns = [table[one] for one in self._of(name, there)]
            if name in table:
                found[name] = columns[0]
            elif name in self.made:
                found[name] = [self.made[name].make(*values) for values in zip(*columns, strict=True)]
            else:
                found[name] = [_within(value, name.split(".")[1:]) for value in columns[0]]
        return found

    def _of(self, name: str, there: Sequence[str]) -> tuple[str, ...]:
        if name in there:
            return (name,)
        return self.made[name].of if name in self.made else (name.partition(".")[0],)


PLAIN = Tables(())
"""Of a data set that is not known: the run config names the columns."""


def has_tables(path: Path, tables: Tables) -> bool:
    """Whether there is a table at the path, or one for training in the folder."""
    if path.is_dir():
        return any(_part_of(file, tables) == "train" for file in path.iterdir())
    return suffix_of(path) in tables.suffixes


def read_named(path: Path, reading: Reading, tables: Tables) -> AnySource:
    """The texts or images of a table, or of a folder of tables. Raises DataError as `read_tables` does."""
    files = [path]
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if _part_of(file, tables))
        train = {suffix_of(file) for file in found if _part_of(file, tables) == "train"}
        first = next(suffix for suffix in tables.suffixes if suffix in train)
        files = [file for file in found if suffix_of(file) == first]
    reading = tables.fitted(reading, _there(files[0]))
    parts: dict[str, dict[str, Column]] = {}
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
        return source_of(
            by_split(table, path, reading.split_column) if reading.split_column else {"": table},
            str(path),
            path if path.is_dir() else path.parent,
            reading,
        )
    return source_of(parts, str(path), path, reading)


def read_asked(path: Path, reading: Reading, tables: Tables) -> tuple[Texts, bool]:
    """The texts of a table that a model is asked about, and whether they have labels: their column may be missing.

    Raises:
        DataError: a column of texts is missing, or what is there is wrong.
    """
    there = _there(path)
    reading = tables.fitted(replace(reading, group_column="", split_column=""), there)
    labelled = bool(reading.label_column) and set(tables.needed(reading, there)) <= set(there)
    if not labelled:
        reading = tables.fitted(replace(reading, group_column="", split_column="", label_column=""), there)
    reading = replace(reading, group_column="", split_column="")
    if not reading.text_column:
        raise DataError(f"{path}: the model's run config names no column of texts: text-column is empty")
    rows = tables.rows(_read(path, tables, reading), reading)
    if labelled:
        source = source_of({"": rows}, str(path), path.parent, reading)
        assert isinstance(source.train, Texts)
        return source.train, True
    texts, seconds = rows[reading.text_column], rows.get(reading.second_text_column)
    check_text(texts, reading.text_column, str(path))
    if seconds is not None:
        check_text(seconds, reading.second_text_column, str(path))
    choices = None
    if reading.choices_column:
        columns = [rows[name] for name in separated(reading.choices_column)]
        choices, _ = choices_of(columns, [0] * len(texts), str(path))
    return Texts(tuple(texts), None, None, None if seconds is None else tuple(seconds), choices), False


def _part_of(file: Path, tables: Tables) -> str:
    """ "train" or "test" for one of a folder's tables, else ""."""
    if suffix_of(file) not in tables.suffixes:
        return ""
    words = re.split(r"[^a-z]+", file.name.lower())
    if "train" in words:
        return "train"
    return "test" if set(words) & set(tables.test) else ""


def _there(file: Path) -> list[str]:
    """The columns of a table; none where it cannot be read, which is said when it is."""
    try:
        names = _names(file)
    except (DataError, ImportError, OSError, StopIteration, ValueError, csv.Error):
        return []
    return [*names, "label"] if _labels_beside(file).exists() else names


def _names(file: Path) -> list[str]:
    if suffix_of(file) == JSON:
        return list(_objects(file)[0])
    if suffix_of(file) == ".parquet":
        from pyarrow import parquet

        return list(parquet.ParquetFile(file).schema_arrow.names)
    with opened_text(file) as text:
        if suffix_of(file) == ".csv":
            return next(csv.reader(text))
        return list(json.loads(next(line for line in text if line.strip())))


def _read(file: Path, tables: Tables, reading: Reading) -> dict[str, Column]:
    columns = tables.needed(reading, _there(file))
    beside = _labels_beside(file)
    if "label" not in columns or not beside.exists():
        return _table(file, columns)
    read = _table(file, [name for name in columns if name != "label"])
    with opened_text(beside) as text:
        labels = text.read().split()
    if any(len(values) != len(labels) for values in read.values()):
        raise DataError(
            f"{beside}: {len(labels):,} labels, and {file.name} has {len(next(iter(read.values()))):,} rows: each row "
            "needs one"
        )
    return {**read, "label": list(labels)}


def _labels_beside(file: Path) -> Path:
    return file.with_name(file.name.partition(".")[0] + _LABELS)


def _table(file: Path, columns: Sequence[str]) -> dict[str, Column]:
    if suffix_of(file) != JSON:
        return read_columns(file, columns)
    rows = _objects(file)
    for number, row in enumerate(rows, 1):
        check_columns(f"{file}: object {number}", columns, row)
    return {name: [row[name] for row in rows] for name in columns}


def _objects(file: Path) -> list[dict[str, Any]]:
    with opened_text(file) as text:
        try:
            content = json.load(text)
        except ValueError as error:
            raise DataError(f"{file}: not JSON ({error}): it is cut off or damaged; copy it again") from error
    if not isinstance(content, list) or not content or not all(isinstance(row, dict) for row in content):
        raise DataError(f"{file}: expected is a list of JSON objects, one for each example")
    return content


def _within(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
