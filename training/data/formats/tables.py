"""Tables: .csv, .tsv, JSON lines (.jsonl) and .parquet, with images, texts or numbers in named columns.

Images are encoded bytes (as in the parquet files of dataset hubs, also as {"bytes": …, "path": …}), or paths relative
to the table's folder. A table's test set are the rows with "test" in `split-column`; or the table is a folder with
files train*.<suffix> and test*.<suffix>, all in one format. Without test*.<suffix>, `split-column` applies to a folder,
too.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.host.toml import separated
from tepal.training.data.checks import Arrays, checked_source
from tepal.training.data.config import EVERY, DataError, Reading
from tepal.training.data.examples import AnySource, ImageArrays, LabelledNumbers, Numbers, Source, Texts
from tepal.training.data.formats.choices import choices_of
from tepal.training.data.formats.columns import check_columns, needed_columns, with_every_column
from tepal.training.data.formats.files import opened_text, suffix_of, without_copies
from tepal.training.data.formats.images import read_image, read_images
from tepal.training.data.formats.numbers import checked_labelled, checked_numbers, numbers_in
from tepal.training.data.formats.texts import checked_texts, running_text
from tepal.training.data.labels import labels_of

JSON = ".json"
"""Suffix of a table that is one JSON list of objects."""
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SEPARATORS = {".csv": ",", ".tsv": "\t"}

Column = list[Any]
Rows = Mapping[str, Column]
"""Column name → its values, one for each row."""

_LONGEST_CELL = 2**27  # characters; the csv module's own limit is 131,072


def is_tables(names: set[str]) -> bool:
    """Return whether a folder with these files has a training table."""
    return any(_part_of(Path(name)) == "train" for name in names)


def _part_of(file: Path) -> str:
    """Return "train" or "test" for a table of a folder, else ""."""
    if suffix_of(file) not in TABLE_SUFFIXES:
        return ""
    return next((part for part in ("train", "test") if file.name.lower().startswith(part)), "")


def _files(folder: Path) -> list[Path]:
    """Return the tables in a folder, sorted. Raises DataError for several formats."""
    files = without_copies(file for file in folder.iterdir() if _part_of(file))
    first = {suffix_of(file): file.name for file in reversed(files)}
    if len(first) > 1:
        raise DataError(
            f"{folder}: has tables in several formats, {' and '.join(sorted(first.values()))}: keep those of one format"
        )
    return files


def read_tables(path: Path, reading: Reading) -> AnySource:
    """Read a table, or a folder of tables: numbers for a model that takes them, texts with `text-column`, else images.

    Raises:
        DataError: a column is missing, a label is not one of the run's classes, or too many images cannot be read.
    """
    if reading.feature_columns == EVERY:
        first = _files(path)[0] if path.is_dir() else path
        present = columns_in(first)
        if not present:
            read_columns(first, separated(reading.label_column))  # raises what is wrong with the file
            raise DataError(f"{path}: has no row: give at least one")
        reading = with_every_column(reading, present, str(path))
    return source_of(read_parts(path, reading), str(path), path if path.is_dir() else path.parent, reading)


def source_of(tables: Mapping[str, Rows], origin: str, folder: Path, reading: Reading) -> AnySource:
    """Return the source for the rows of one part ("") or two ("train", "test").

    Paths are relative to `folder`. Raises DataError as `read_tables` does; the message begins with `origin`.
    """
    for part, table in tables.items():
        if not table[needed_columns(reading)[0]]:
            raise DataError(f"{origin}: has no {part + ' ' if part else ''}row: give at least one")
    if reading.numbers:
        return _numbers(tables, origin, reading)
    return _texts(tables, origin, reading) if reading.text_column else _images(tables, origin, folder, reading)


def _numbers(
    tables: Mapping[str, Rows], origin: str, reading: Reading
) -> Source[Numbers] | Source[LabelledNumbers]:
    columns, of = separated(reading.feature_columns), separated(reading.label_column)
    where = {part: f"{origin}: {part}" if part else origin for part in tables}
    inputs = {part: numbers_in(table, columns, where[part]) for part, table in tables.items()}
    groups = {part: _groups(table, reading, range(len(inputs[part]))) for part, table in tables.items()}
    if reading.labelled:
        labelled = {part: (inputs[part], table[of[0]], groups[part]) for part, table in tables.items()}
        return checked_labelled(labelled, origin, reading, columns)
    targets = {part: numbers_in(table, of, where[part], TEXT_AS_TARGET) for part, table in tables.items()}
    arrays: dict[str, Arrays] = {part: (inputs[part], targets[part], groups[part]) for part in tables}
    return checked_numbers(arrays, origin, reading, columns)


TEXT_AS_TARGET = (
    'repair or remove the row; or if label-column has classes, choose a model that classifies numbers, model="mlp" or '
    '"ft-transformer"'
)
"""What to do about text in a column of targets."""


def _images(tables: Mapping[str, Rows], origin: str, folder: Path, reading: Reading) -> Source[ImageArrays]:
    if not reading.label_column:
        raise DataError(f"{origin}: images need labels: set label-column")
    labels, names = _labels(tables, origin, reading)
    read = partial(_image, folder=folder, reading=reading)
    arrays: dict[str, Arrays] = {}
    for part, table in tables.items():
        where = f"{origin}: {part}" if part else origin
        cells = [(f"row {row + 1}", value) for row, value in enumerate(table[reading.image_column])]
        images, rows = read_images(cells, read, where, reading.shape, reading.unreadable)
        arrays[part] = images, labels[part][rows], _groups(table, reading, rows)
    return checked_source(arrays, origin, reading, classes=len(names), names=names)


def _texts(tables: Mapping[str, Rows], origin: str, reading: Reading) -> Source[Texts]:
    """Return texts with labels or, without `label-column`, passages of running text. Raises DataError."""
    for table in tables.values():
        check_texts(table, reading, origin)
    if reading.choices_column:
        return _questions(tables, origin, reading)
    parts: dict[str, Texts] = {}
    labels, names = _labels(tables, origin, reading) if reading.label_column else ({}, ())
    for part, table in tables.items():
        texts = table[reading.text_column]
        groups = _groups(table, reading, range(len(texts)))
        seconds = tuple(table[reading.second_text_column]) if reading.second_text_column else None
        if reading.label_column:
            parts[part] = Texts(tuple(texts), labels[part], groups, seconds)
        else:
            parts[part] = running_text(zip([""] * len(texts) if groups is None else groups, texts, strict=True))
    return checked_texts(parts, origin, reading, classes=len(names), names=names)


def _questions(tables: Mapping[str, Rows], origin: str, reading: Reading) -> Source[Texts]:
    if not reading.label_column:
        raise DataError(f"{origin}: questions need a column with the right choice: set label-column")
    columns = {part: [table[name] for name in separated(reading.choices_column)] for part, table in tables.items()}
    given = {part: (columns[part], table[reading.label_column]) for part, table in tables.items()}
    parts = {}
    for part, (choices, labels) in choices_of(given, origin).items():
        questions, groups = tuple(tables[part][reading.text_column]), _groups(tables[part], reading, range(len(labels)))
        parts[part] = Texts(questions, labels, groups, choices=choices)
    return checked_texts(parts, origin, reading)


def check_texts(table: Rows, reading: Reading, origin: str) -> None:
    """Raise DataError for a value in a column of texts that is not text."""
    for name in filter(None, (reading.text_column, reading.second_text_column)):
        for row, value in enumerate(table[name]):
            if not isinstance(value, str):
                raise DataError(
                    f"{origin}: row {row + 1}: {type(value).__name__} in column {name} is not text: repair the row"
                )


def _labels(
    tables: Mapping[str, Rows], origin: str, reading: Reading
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Return each part's labels, and the class names of all parts, if there are names."""
    columns = {part: table[reading.label_column] for part, table in tables.items()}
    labels, names = labels_of([value for column in columns.values() for value in column], reading, origin)
    ends = np.cumsum([len(column) for column in columns.values()])
    return dict(zip(columns, np.split(labels, ends[:-1]), strict=True)), names


def _image(cell: tuple[str, Any], folder: Path, reading: Reading) -> NDArray[np.uint8]:
    row, value = cell
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return read_image(BytesIO(value), reading.shape, row)
    if isinstance(value, str) and value:
        return read_image(folder / value, reading.shape, f"{row} ({value})")
    raise DataError(f"{row}: {type(value).__name__} in column {reading.image_column} is neither an image nor a path")


def _groups(table: Rows, reading: Reading, rows: Sequence[int]) -> NDArray[np.str_] | None:
    """Return the groups of some rows; None if the run names no column of groups."""
    if not reading.group_column:
        return None
    columns = [table[name] for name in separated(reading.group_column)]
    return np.array(["/".join(str(values[row]) for values in columns) for row in rows], dtype=np.str_)


def read_parts(path: Path, reading: Reading) -> dict[str, Rows]:
    """Read the rows of a table or a folder of tables: {"": all}, or {"train": …, "test": …} if there is a test set.

    Raises:
        DataError: a file cannot be read, a column is missing, or a folder has tables in several formats.
    """
    columns = needed_columns(reading)
    if not path.is_dir():
        table = read_columns(path, columns)
        return by_split(table, path, reading.split_column) if reading.split_column else {"": table}
    tables: dict[str, dict[str, Column]] = {}
    for file in sorted(_files(path), key=_part_of, reverse=True):  # train, then test
        for name, values in read_columns(file, columns).items():
            tables.setdefault(_part_of(file), {}).setdefault(name, []).extend(values)
    if len(tables) > 1:
        return dict(tables)
    return by_split(tables["train"], path, reading.split_column) if reading.split_column else {"": tables["train"]}


def by_split(table: Rows, path: Path, column: str) -> dict[str, Rows]:
    """Divide a table by a column with "train" and "test": {"train": …}, and "test" if it occurs. Raises DataError."""
    kinds = {str(value) for value in table[column]}
    if not {"train"} <= kinds <= {"train", "test"}:
        raise DataError(
            f"{path}: column {column} (split-column) has {', '.join(sorted(kinds)[:5])}; allowed are train and test, "
            "and at least one row must be train"
        )
    parts: dict[str, Rows] = {}
    for part in sorted(kinds, reverse=True):  # train, then test
        rows = [row for row, value in enumerate(table[column]) if str(value) == part]
        parts[part] = {name: [values[row] for row in rows] for name, values in table.items()}
    return parts


def read_columns(file: Path, columns: Sequence[str]) -> dict[str, Column]:
    """Read columns of a table, or of a .json file. Raises DataError if it is damaged or lacks a column."""
    suffix = suffix_of(file)
    if suffix == ".parquet":
        return _parquet(file, columns)
    return _csv(file, columns) if suffix in SEPARATORS else _json(file, columns)


def _csv(file: Path, columns: Sequence[str]) -> dict[str, Column]:
    csv.field_size_limit(_LONGEST_CELL)
    read: dict[str, Column] = {name: [] for name in columns}
    with opened_text(file) as text:
        kind = suffix_of(file)
        rows = csv.DictReader(text, strict=True, delimiter=SEPARATORS[kind])
        try:
            check_columns(file, columns, rows.fieldnames or ())
            for row in rows:
                if kind == ".tsv" and any(map(_has_rows, row.values())):
                    raise DataError(
                        f"{file}: the row that ends in line {rows.line_num} has a cell with tabs and line ends, "
                        "probably because a quotation mark is not closed: double quotation marks inside quoted cells, "
                        "or remove them"
                    )
                if any(map(str.strip, row.get(None, ()))):  # type: ignore[call-overload]
                    raise DataError(
                        f"{file}: line {rows.line_num} has more values than the header: quote cells that have "
                        f"{'commas' if SEPARATORS[kind] == ',' else 'tabs'}"
                    )
                for name in columns:
                    if row[name] is None:
                        raise DataError(
                            f"{file}: line {rows.line_num} has no value for column {name}: it is too short, repair it"
                        )
                    read[name].append(row[name])
        except csv.Error as error:
            raise DataError(f"{file}: line {rows.line_num} is not {kind[1:].upper()} ({error}): repair it") from error
    return read


def _has_rows(cell: object) -> bool:
    """Return whether a cell of a .tsv has what separates cells and rows."""
    return isinstance(cell, str) and "\t" in cell and ("\n" in cell or "\r" in cell)


def _json(file: Path, columns: Sequence[str]) -> dict[str, Column]:
    read: dict[str, Column] = {name: [] for name in columns}
    for place, row in json_rows(file):
        check_columns(f"{file}: {place}", columns, row)
        for name in columns:
            read[name].append(row[name])
    return read


def json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (its place, row) for JSON lines, or for a .json file with one list of objects. Raises DataError."""
    with opened_text(file) as text:
        if suffix_of(file) == JSON:
            try:
                rows = json.load(text)
            except ValueError as error:
                raise DataError(f"{file}: not JSON ({error}): it is truncated or damaged, copy it again") from error
            if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
                raise DataError(f"{file}: expected a list of JSON objects, one for each example")
            yield from ((f"object {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}: line {number} is not JSON ({error}): repair it") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}: line {number} is not a JSON object: write one object per line")
            yield f"line {number}", row


def _parquet(file: Path, columns: Sequence[str]) -> dict[str, Column]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{file}: reading parquet files needs pyarrow ({error}): pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as content:
            check_columns(file, columns, content.schema_arrow.names)
            table = content.read(columns=list(columns))
    except (ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a readable parquet file ({error}): it is truncated or damaged, copy it again"
        ) from error
    return {name: table[name].to_pylist() for name in columns}


def columns_in(file: Path) -> list[str]:
    """Return the columns of a table; empty if it cannot be read, which reading the table reports."""
    try:
        return _names(file)
    except (DataError, ImportError, OSError, StopIteration, ValueError, csv.Error):
        return []


def _names(file: Path) -> list[str]:
    if suffix_of(file) == ".parquet":
        from pyarrow import parquet

        return list(parquet.ParquetFile(file).schema_arrow.names)
    if separator := SEPARATORS.get(suffix_of(file)):
        with opened_text(file) as text:
            return next(csv.reader(text, delimiter=separator))
    return list(next(json_rows(file))[1])
