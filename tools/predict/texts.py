"""Texts for `tepal predict`: tables with the run's columns of texts, and plain text, as a run's model takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal import models
from tepal.training.data import DataError, Texts, opened_text, suffix_of, texts_to_predict
from tepal.training.data.inputs import InputConfig, encoded

TABLES = (".csv", ".jsonl", ".ndjson", ".parquet")
PLAIN = ".txt"


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples as a model takes them (n, …), the (file, index) of each, and what the classes are called.

    labels: (n,), None where none are known.
    names: of the classes, none where they have none; of characters these; of questions each one's choices.
    """

    origins: Sequence[tuple[Path, int | None]]
    values: NDArray[Any]
    labels: NDArray[np.int64] | None
    names: Sequence[str] | Sequence[Sequence[str]]

    def name(self, place: int, label: int) -> str:
        """What a class is called, of the example at a place; "" where it has no name."""
        if not self.names:
            return ""
        names = self.names if isinstance(self.names[0], str) else self.names[place]
        return str(names[label])


def expanded_texts(files: Sequence[Path]) -> list[Path]:
    """Files with texts, folders replaced by those in them. Raises OSError or ValueError that names the file."""
    found: list[Path] = []
    suffixes = ", ".join((*TABLES, PLAIN))
    for given in files:
        file = Path(given).expanduser()
        if file.is_dir():
            inside = [one for one in sorted(file.iterdir()) if one.is_file() and suffix_of(one) in (*TABLES, PLAIN)]
            if not inside:
                raise ValueError(f"{file}: no texts in this folder; read are {suffixes}, also compressed (.gz, .xz)")
            found += inside
        elif not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        elif suffix_of(file) not in (*TABLES, PLAIN):
            raise ValueError(f"{file}: this model takes texts; read are {suffixes}, also compressed (.gz, .xz)")
        else:
            found.append(file)
    return found


def text_batches(files: Sequence[Path], config: InputConfig, names: Sequence[str], size: int) -> Iterator[Batch]:
    """The texts of the files, `size` at a time.

    Args:
        files: tables, whose columns are the run config's, the one of labels may be missing; or plain text, where each
            line that is not empty is an example.
        names: of the classes.

    Raises:
        DataError: a column is missing, or what is there does not fit the model; TokenizerError: see `tokens_of`.
    """
    for file in files:
        indices, texts, labelled = _read(file, config)
        for start in range(0, len(texts), size):
            part = texts.take(np.arange(start, min(start + size, len(texts))))
            try:
                values = encoded(part, config)
            except DataError as error:
                raise DataError(f"{file}: {error}") from error
            origins = [(file, index) for index in indices[start : start + size]]
            yield Batch(origins, values, part.labels if labelled else None, part.choices or names)


def _read(file: Path, config: InputConfig) -> tuple[Sequence[int], Texts, bool]:
    if suffix_of(file) == PLAIN:
        return *_lines(file, config), False
    texts, labelled = texts_to_predict(config, file)
    return range(len(texts)), texts, labelled


def _lines(file: Path, config: InputConfig) -> tuple[list[int], Texts]:
    if config.kind == models.CHOICES or config.second_text_column:
        what = "questions and their choices" if config.kind == models.CHOICES else "pairs of texts"
        raise DataError(f"{file}: the model takes {what}, and plain text has none: give a table ({', '.join(TABLES)})")
    with opened_text(file) as content:
        lines = [(index, line) for index, line in enumerate(content.read().splitlines()) if line.strip()]
    if not lines:
        raise DataError(f"{file}: no text; each line that is not empty is one")
    return [index for index, _ in lines], Texts(tuple(line for _, line in lines), None)
