"""Texts for `tepal predict`: tables with the run's columns, and plain text, converted to what a model takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal import models
from tepal.training.data import DataError, Texts, opened_text, suffix_of, texts_to_predict
from tepal.training.data.formats.tables import TABLE_SUFFIXES
from tepal.training.data.inputs import InputConfig, encoded

_PLAIN = ".txt"


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples as a model takes them.

    origins: the (file, index) of each; the index is None for an image file.
    values: (n, …).
    labels: (n,), None if they are not known.
    names: of the classes, empty if they have none; for characters, these; for questions, the choices of each.
    """

    origins: Sequence[tuple[Path, int | None]]
    values: NDArray[Any]
    labels: NDArray[np.int64] | None
    names: Sequence[str] | Sequence[Sequence[str]]

    def name(self, place: int, label: int) -> str:
        """The name of a class, for the example at a position; "" if it has none."""
        if not self.names:
            return ""
        names = self.names if isinstance(self.names[0], str) else self.names[place]
        return str(names[label])


def text_batches(files: Sequence[Path], config: InputConfig, names: Sequence[str], size: int) -> Iterator[Batch]:
    """The texts of files and of those in folders, up to `size` together.

    Args:
        files: tables with the run config's columns, of which the labels may be missing; plain text, in which each
            line that is not empty is an example; folders of these.
        config: of the run that the model comes from.
        names: of the classes.
        size: most texts in a batch.

    Raises:
        OSError: a file does not exist.
        ValueError: a file has no texts, lacks a column or does not fit the model; the tokenizer is missing.
    """
    for file in _expanded(files):
        indices, texts, labelled = _read(file, config)
        for start in range(0, len(texts), size):
            part = texts.take(np.arange(start, min(start + size, len(texts))))
            try:
                values = encoded(part, config)
            except DataError as error:
                raise DataError(f"{file}: {error}") from error
            origins = [(file, index) for index in indices[start : start + size]]
            yield Batch(origins, values, part.labels if labelled else None, part.choices or names)


def _expanded(files: Sequence[Path]) -> list[Path]:
    """The files, with folders replaced by the texts in them, sorted by name."""
    found: list[Path] = []
    allowed = (*TABLE_SUFFIXES, _PLAIN)
    hint = f"allowed are {', '.join(allowed)}, also compressed (.gz, .xz)"
    for given in files:
        file = Path(given).expanduser()
        if file.is_dir():
            inside = [each for each in sorted(file.iterdir()) if each.is_file() and suffix_of(each) in allowed]
            if not inside:
                raise ValueError(f"{file}: no texts in this folder; {hint}")
            found += inside
        elif not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        elif suffix_of(file) in allowed:
            found.append(file)
        else:
            raise ValueError(f"{file}: this model takes texts; {hint}")
    return found


def _read(file: Path, config: InputConfig) -> tuple[Sequence[int], Texts, bool]:
    """Index of each text in the file, the texts, and whether they have labels."""
    if suffix_of(file) != _PLAIN:
        texts, labelled = texts_to_predict(config, file)
        return range(len(texts)), texts, labelled
    if config.kind == models.CHOICES or config.second_text_column:
        what = "questions and their choices" if config.kind == models.CHOICES else "pairs of texts"
        raise DataError(
            f"{file}: the model takes {what}, and plain text has none: give a table ({', '.join(TABLE_SUFFIXES)})"
        )
    with opened_text(file) as content:
        lines = [(index, line) for index, line in enumerate(re.split(r"\r\n?|\n", content.read())) if line.strip()]
    if not lines:
        raise DataError(f"{file}: no text; each line that is not empty is an example")
    return [index for index, _ in lines], Texts(tuple(line for _, line in lines), None), False
