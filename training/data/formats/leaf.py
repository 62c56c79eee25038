"""LEAF's JSON: {"users": […], "user_data": {user: {"x": […], "y": […]}}}, each user a group.

A file, or a folder of files, or a folder with the folders train and test. FEMNIST: x are 784 floats in 0..1, an image
row by row. Shakespeare: x are 80 characters, y is the next character (an id of `CharVocabulary`). Other texts: y is a
label. Caldas et al., LEAF: A Benchmark for Federated Settings (arXiv:1812.01097).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import Arrays, checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import AnySource, Texts
from tepal.training.data.formats.files import opened_text, suffix_of, without_copies
from tepal.training.data.formats.folders import class_folders
from tepal.training.data.formats.texts import checked_texts
from tepal.training.data.vocabulary import CharVocabulary

FEMNIST_CLASSES = 62  # digits, upper-case and lower-case letters

_LAYOUT = 'expected LEAF\'s {"users": […], "user_data": {user: {"x": […], "y": […]}}}'

Users = dict[str, tuple[list[Any], list[Any]]]
"""User → x and y of that user."""


def is_leaf(folder: Path) -> bool:
    """Return whether a folder has LEAF's files."""
    return bool((_files(folder) and not class_folders(folder)) or _files(folder / "train"))


def _files(folder: Path) -> list[Path]:
    """Return the JSON files in a folder, sorted; none if there is no such folder."""
    return without_copies(file for file in folder.iterdir() if suffix_of(file) == ".json") if folder.is_dir() else []


def read_leaf(path: Path, reading: Reading) -> AnySource:
    """Read the images or texts of all users. Raises DataError, with file and user, for another layout."""
    if path.is_dir() and not _files(path):
        parts = {part: _files(path / part) for part in ("train", "test") if _files(path / part)}
    else:
        parts = {"": _files(path) if path.is_dir() else [path]}
    images: dict[str, list[Arrays]] = {}
    texts: dict[str, list[Texts]] = {}
    characters = False
    for part, files in parts.items():
        for file in files:  # one by one: pixels as Python floats take eight times the memory
            users = {user: xy for user, xy in _users(file).items() if xy[0]}
            x, y = next(iter(users.values()), ([], []))
            if x and isinstance(x[0], str):
                characters |= isinstance(y[0], str)
                texts.setdefault(part, []).append(_texts(users, file))
            elif x:
                images.setdefault(part, []).append(_images(users, file))
    if bool(texts) == bool(images):
        raise DataError(f"{path}: has {'both images and texts' if texts else 'no examples'}: {_LAYOUT}")
    if texts:
        classes = len(CharVocabulary()) if characters else 0
        joined = {part: _joined(some) for part, some in texts.items()}
        return replace(checked_texts(joined, str(path), reading, classes=classes), next_characters=True)
    return checked_source(
        {part: _stacked(some, path) for part, some in images.items()}, str(path), reading, classes=FEMNIST_CLASSES
    )


def _users(file: Path) -> Users:
    with opened_text(file) as text:
        try:
            content = json.load(text)
        except ValueError as error:
            raise DataError(
                f"{file}: not JSON ({error}): it is truncated or damaged, or JSON lines (rename it to .jsonl)"
            ) from error
    try:
        users = {str(user): (list(data["x"]), list(data["y"])) for user, data in content["user_data"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: {_LAYOUT} (missing or invalid: {error})") from error
    for user, (x, y) in users.items():
        if len(x) != len(y):
            raise DataError(f"{file}: user {user} has {len(x):,} x and {len(y):,} y: give one y for each x")
    return users


def _images(users: Users, file: Path) -> Arrays:
    first = next(iter(users.values()))[0][0]
    pixels = len(first) if isinstance(first, list) else 0
    side = math.isqrt(pixels)
    for user, (x, _) in users.items():
        if not all(isinstance(image, list) and len(image) == pixels for image in x):
            raise DataError(f"{file}: user {user}: x must be lists of equal length: {_LAYOUT}")
    if not pixels or side * side != pixels:
        raise DataError(f"{file}: x have {pixels} numbers, expected the pixels of a square image, row by row")
    try:
        flat = np.concatenate([np.array(x, dtype=np.float32) for x, _ in users.values()])
        labels = np.concatenate([np.array(y) for _, y in users.values()])
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: x are not lists of numbers ({error}): {_LAYOUT}") from error
    return flat.reshape(-1, side, side), labels, _groups(users)


def _stacked(arrays: list[Arrays], path: Path) -> Arrays:
    """Concatenate the arrays of several files. Raises DataError for images of different sizes."""
    if len(shapes := {images.shape[1:] for images, _, _ in arrays}) > 1:
        raise DataError(
            f"{path}: its files have images of several sizes, {', '.join(map(str, sorted(shapes)))}: use one "
            "folder for each"
        )
    images, labels, groups = (np.concatenate(column) for column in zip(*arrays, strict=True))
    return images, labels, groups


def _texts(users: Users, file: Path) -> Texts:
    labels: list[int] = []
    for user, (x, y) in users.items():
        if (other := next((text for text in x if not isinstance(text, str)), None)) is not None:
            raise DataError(f"{file}: user {user}: an x is {type(other).__name__}, but others are text")
        labels += [_label(label, user, file) for label in y]
    texts = tuple(text for x, _ in users.values() for text in x)
    return Texts(texts, np.array(labels, dtype=np.int64), _groups(users))


def _joined(texts: list[Texts]) -> Texts:
    """Concatenate the texts of several files."""
    labels = np.concatenate([one.labels for one in texts if one.labels is not None])
    groups = np.concatenate([one.groups for one in texts if one.groups is not None])
    return Texts(tuple(text for one in texts for text in one.texts), labels, groups)


def _label(label: object, user: str, file: Path) -> int:
    """Return a class number, or the id of a character. Raises DataError."""
    characters = CharVocabulary().characters
    if isinstance(label, str) and len(label) == 1 and label in characters:
        return characters.index(label)
    if isinstance(label, bool) or not isinstance(label, int):
        raise DataError(
            f"{file}: user {user}: y={label!r} is neither a class number nor one of the {len(characters)} characters "
            "of LEAF's Shakespeare"
        )
    return label


def _groups(users: Users) -> NDArray[np.str_]:
    return np.repeat(np.array(list(users), dtype=np.str_), [len(x) for x, _ in users.values()])
