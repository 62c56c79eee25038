"""Articles in formats of their publishers: XGLUE's news by language, and 20 Newsgroups by date.

XGLUE-NC: xglue.nc.<language>.train, .dev and .test have lines of title, body and category, separated by tabs. The first
two are the training set; a .test without categories is skipped. The language is the group. Liang et al., XGLUE
(arXiv:2004.01401).

20 Newsgroups: 20news-bydate-train/<newsgroup>/<file> and 20news-bydate-test/…, in Latin-1. A message's header, up to
the first empty line, names the newsgroup, and is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import Source, Texts
from tepal.training.data.formats.files import opened, opened_text
from tepal.training.data.formats.folders import class_folders
from tepal.training.data.formats.texts import checked_texts
from tepal.training.data.labels import labels_of, numbers_of

log = getLogger("flwr")

_XGLUE = re.compile(r"xglue\.nc\.(?P<language>\w+)\.(?P<part>train|dev|test)")
_BY_DATE = {"train": "20news-bydate-train", "test": "20news-bydate-test"}


def is_xglue(path: Path) -> bool:
    """Return whether a folder has XGLUE's files, or the path is one of them, such as a client's language."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    return any((found := _XGLUE.fullmatch(name)) and (not path.is_dir() or found["part"] != "test") for name in names)


def read_xglue(path: Path, reading: Reading) -> Source[Texts]:
    """Read titles, with bodies as second texts. Raises DataError for an invalid line or an unknown category."""
    rows: dict[str, list[tuple[str, str, str, str]]] = {"train": [], "test": []}
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if found := _XGLUE.fullmatch(file.name):
            part = "test" if found["part"] == "test" and path.is_dir() else "train"
            if part == "test" and not _has_categories(file):
                log.warning("%s has no categories and is skipped.", file)
                continue
            rows[part] += [(*row, found["language"]) for row in _lines(file, reading)]
    parts = {part: some for part, some in rows.items() if some}
    categories = [category for some in parts.values() for _, _, category, _ in some]
    labels, names = labels_of(categories, reading, str(path))
    found_texts, start = {}, 0
    for part, some in parts.items():
        titles, bodies, _, languages = zip(*some, strict=True)
        own = labels[start : start + len(some)]
        found_texts[part if len(parts) > 1 else ""] = Texts(titles, own, np.array(languages, np.str_), bodies)
        start += len(some)
    return checked_texts(found_texts, str(path), reading, classes=len(names), names=names)


def _has_categories(file: Path) -> bool:
    with opened_text(file) as text:
        return next(iter(text), "").count("\t") == 2


def _lines(file: Path, reading: Reading) -> Iterator[tuple[str, str, str]]:
    with opened_text(file) as text:
        for number, line in enumerate(text, 1):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) != 3 or (reading.class_names and cells[2].strip() not in reading.class_names):
                raise DataError(
                    f"{file}: line {number} has {len(cells)} columns, the last one {cells[-1][:40]!r}; expected are "
                    f"title, body and category ({', '.join(reading.class_names)}), separated by tabs"
                )
            yield cells[0], cells[1], cells[2].strip()


def is_newsgroups(path: Path) -> bool:
    """Return whether a folder has 20 Newsgroups by date."""
    return (path / _BY_DATE["train"]).is_dir()


def read_newsgroups(root: Path, reading: Reading) -> Source[Texts]:
    """Read the bodies of the messages. Raises DataError for newsgroups that are not the run's."""
    folders = {part: root / name for part, name in _BY_DATE.items() if (root / name).is_dir()}
    by_group = {part: class_folders(folder) for part, folder in folders.items()}
    found = sorted({group.name for groups in by_group.values() for group in groups})
    numbers = numbers_of(found, reading, str(root), "newsgroups")
    parts = {}
    for part, groups in by_group.items():
        files = [(file, numbers[group.name]) for group in groups for file in sorted(group.iterdir()) if file.is_file()]
        texts = tuple(_body(file) for file, _ in files)
        parts[part] = Texts(texts, np.array([label for _, label in files], np.int64))
    return checked_texts(parts, str(root), reading, classes=len(numbers), names=tuple(numbers))


def _body(file: Path) -> str:
    with opened(file) as content:
        text = content.read().decode("latin-1").replace("\r\n", "\n")
    return text.partition("\n\n")[2].strip()
