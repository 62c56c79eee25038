"""Checks of texts, and running text by speaker, divided into passages.

Running text has no labels: its next characters are the targets (`CharVocabulary.windows`). An example is a passage, so
that test passages are not part of the training text. A plain text file (.txt) has speeches by speaker: a line `NAME:`
after an empty line, followed by the speech. All speeches of a speaker are one text, and the speaker is its group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from tepal.training.data.checks import check_labels, check_numbers
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import Source, Texts
from tepal.training.data.formats.files import opened_text

LONGEST_PASSAGE = 400
"""Longest passage in characters; passages end at line ends if possible."""

_SPEAKER = re.compile(r"(?:\A|\n[ \t]*\n)\s*(?P<name>[^\s:][^\n:]*):[ \t]*(?=\n|\Z)")


def checked_texts(
    parts: Mapping[str, Texts], origin: str, reading: Reading, *, classes: int = 0, names: tuple[str, ...] = ()
) -> Source[Texts]:
    """Check the labels of the training texts and, if there are any, the test texts (in this order).

    Raises DataError if there is no text, or a label is not one of the run's classes.
    """
    limit = reading.classes or classes
    for part, texts in parts.items():
        where = f"{origin}: {part}" if part else origin
        if not len(texts):
            raise DataError(f"{where}: no texts: give at least one")
        if texts.labels is not None:
            check_labels(texts.labels, limit, where)
    train, test = [*parts.values(), None][:2]
    assert train is not None
    labels = [part.labels for part in parts.values() if part.labels is not None]
    found = 1 + max(int(one.max()) for one in labels) if labels else 0
    if not limit and labels and train.choices is None:
        check_numbers(found, labels, origin)
    return Source(train, test, (limit or found) if labels else 0, origin, names)


def running_text(texts: Iterable[tuple[str, str]]) -> Texts:
    """Return the passages of running texts, given as (group, text)."""
    cut = [(group, passage) for group, text in texts for passage in passages(text)]
    return Texts(tuple(passage for _, passage in cut), None, np.array([group for group, _ in cut], dtype=np.str_))


def passages(text: str, longest: int = LONGEST_PASSAGE) -> list[str]:
    """Divide a text into passages of at most `longest` characters, at line ends if possible."""
    found, piece = [], ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > longest:
            found.append(piece)
            piece = ""
        piece += line
        if len(piece) > longest:
            cut = (len(piece) - 1) // longest * longest
            found += [piece[at : at + longest] for at in range(0, cut, longest)]
            piece = piece[cut:]
    return [*found, piece] if piece else found


def read_speakers(path: Path, reading: Reading) -> Source[Texts]:
    """Read plain text with lines `NAME:` before speeches. Raises DataError if there is none."""
    with opened_text(path) as content:
        text = content.read().replace("\r\n", "\n")
    names = list(_SPEAKER.finditer(text))
    if not names:
        raise DataError(f"{path}: no speaker found: write lines NAME: at the start or after an empty line")
    if before := text[: names[0].start()].strip():
        raise DataError(f"{path}: begins with {before[:40]!r} before the first line NAME: remove this text")
    ends = [*(name.start() for name in names[1:]), len(text)]
    speeches_of: dict[str, list[str]] = {}
    for name, end in zip(names, ends, strict=True):
        speeches_of.setdefault(name["name"].strip(), []).append(text[name.end() : end].strip("\n"))
    spoken = running_text((name, "\n".join(filter(None, speeches))) for name, speeches in speeches_of.items())
    return checked_texts({"": spoken}, str(path), reading)
