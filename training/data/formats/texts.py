"""Texts: what is checked of them, and running text by speaker, cut into passages.

Running text has no labels: its next characters are what is learned (`CharVocabulary.windows`). An example is a passage,
so that no part of a text that is tested on is trained on. A file of plain text (.txt) has speeches by speaker: a line
`NAME:` after an empty line, then what is said. All that a speaker says is one text, and the speaker is its group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from tepal.training.data.checks import check_labels
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import Source, Texts
from tepal.training.data.formats.files import opened_text

LONGEST_PASSAGE = 400
"""Characters; passages end at the ends of lines, where there are any."""

_SPEAKER = re.compile(r"(?:\A|\n[ \t]*\n)\s*(?P<name>[^\s:][^\n:]*):[ \t]*(?=\n|\Z)")


def checked_texts(
    parts: Mapping[str, Texts], origin: str, reading: Reading, *, classes: int = 0, names: tuple[str, ...] = ()
) -> Source[Texts]:
    """Check the labels of the training texts and, if there are any, the test texts (in this order).

    Raises DataError for no text, and for a label that is no class of the run.
    """
    limit = reading.classes or classes
    for part, texts in parts.items():
        where = f"{origin}: {part}" if part else origin
        if not len(texts):
            raise DataError(f"{where}: no texts; at least one is needed")
        if texts.labels is not None:
            check_labels(texts.labels, limit, where)
    train, test = [*parts.values(), None][:2]
    assert train is not None
    labels = [part.labels for part in parts.values() if part.labels is not None]
    found = 1 + max(int(one.max()) for one in labels) if labels else 0
    return Source(train, test, (limit or found) if labels else 0, origin, names)


def running_text(texts: Iterable[tuple[str, str]]) -> Texts:
    """Passages of running texts, which are given as (group, text)."""
    cut = [(group, passage) for group, text in texts for passage in passages(text)]
    return Texts(tuple(passage for _, passage in cut), None, np.array([group for group, _ in cut], dtype=np.str_))


def passages(text: str, longest: int = LONGEST_PASSAGE) -> list[str]:
    """A text cut into pieces of at most `longest` characters, at the ends of lines where that can be."""
    found, piece = [], ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > longest:
            found.append(piece)
            piece = ""
        piece += line
        while len(piece) > longest:
            found.append(piece[:longest])
            piece = piece[longest:]
    return [*found, piece] if piece else found


def read_speakers(path: Path, reading: Reading) -> Source[Texts]:
    """Plain text with lines `NAME:` before what is said. Raises DataError where there is none."""
    with opened_text(path) as content:
        text = content.read().replace("\r\n", "\n")
    names = list(_SPEAKER.finditer(text))
    if not names:
        raise DataError(f"{path}: no speaker; expected are lines NAME: at the start or after an empty line")
    if before := text[: names[0].start()].strip():
        raise DataError(f"{path}: begins with {before[:40]!r}, before the first line NAME:; remove what nobody says")
    ends = [*(name.start() for name in names[1:]), len(text)]
    said: dict[str, list[str]] = {}
    for name, end in zip(names, ends, strict=True):
        said.setdefault(name["name"].strip(), []).append(text[name.end() : end].strip("\n"))
    spoken = running_text((name, "\n".join(filter(None, speeches))) for name, speeches in said.items())
    return checked_texts({"": spoken}, str(path), reading)
