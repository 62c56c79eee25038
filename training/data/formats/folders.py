"""Images in folders: `root/<class>/<file>`, or `root/<group>/<class>/<file>` with groups such as domains."""

from __future__ import annotations

import os
from logging import getLogger
from pathlib import Path

from tepal.training.data.checks import Arrays, checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.formats.images import IMAGE_SUFFIXES, read_listed
from tepal.training.data.labels import name_of, numbers_of

log = getLogger("flwr")

Entry = tuple[Path, str, str]
"""A file, its class, and its group ("" for none)."""

_LONG = {"training": "train", "testing": "test"}
_DEEPEST = 4  # folders in a class folder in which images are looked for; links may be circular
_VALIDATION = {"val", "valid", "validation"}


def class_folders(root: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    return sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))


def read_folder(root: Path, reading: Reading) -> Source[ImageArrays]:
    """Read images by class, or by group and class. Groups "train" and "test" are a training and a test set.

    They may be called "training" and "testing". Upper and lower case are the same in these, and a validation set beside
    "train" is training data. A label is the position of the class among `class-names`, else among the sorted names of
    the class folders, as numbers if all are whole numbers; an empty class folder counts. Beside `class-names` of which
    none is a number, whole numbers are labels.

    Raises:
        DataError: there are no images, they are at several depths, too many cannot be read, or the classes are not the
            run's; or there are other groups beside "train" and "test".
    """
    names, entries = _entries(root)
    numbers = numbers_of(names, reading, f"{root}", "class folders")
    parts = _parts(entries, root)
    read: dict[str, Arrays] = {}
    for part, some in parts.items():
        listed = [(file, numbers[name], group) for file, name, group in some]
        images, labels, groups = read_listed(listed, f"{root}: {part}" if part else str(root), reading)
        read[part] = images, labels, None if part or not groups.astype(bool).any() else groups
    classes = reading.class_names or tuple(numbers)
    return checked_source(read, str(root), reading, classes=len(classes), names=classes)


def _parts(entries: list[Entry], root: Path) -> dict[str, list[Entry]]:
    """Return {"train": …}, with "test" if there is one, or {"": all} if the groups are no sets. Raises DataError."""
    names = {group: group.lower() for _, _, group in entries}
    short = {group: _LONG[name] for group, name in names.items() if name in _LONG}
    names |= {group: name for group, name in short.items() if name not in names.values()}
    groups = {name: group for group, name in names.items()}
    others = sorted(groups.keys() - {"train", "test"} - _VALIDATION)
    if "train" not in groups or (others and "test" not in groups) or len(groups) == 1:
        return {"": entries}
    if others:
        raise DataError(
            f"{root}: has the folder {groups[others[0]]} beside {groups['train']} and {groups['test']}, so that it is "
            "unclear what is for tests: move it away, or into one of them"
        )
    if validation := sorted(groups[group] for group in groups.keys() & _VALIDATION):
        log.warning(
            "%s: the images in %s are used for training, like those in %s. If this is wrong, move the folder away.",
            root, ", ".join(validation), groups["train"],
        )  # fmt: skip
    parts: dict[str, list[Entry]] = {"train": []}
    for entry in entries:
        parts.setdefault("test" if names[entry[2]] == "test" else "train", []).append(entry)
    return parts


def _entries(root: Path) -> tuple[list[str], list[Entry]]:
    """Return the class names, in any order, and the images. Raises DataError."""
    expected = (
        "expected are images as root/<class name>/<file> or root/<group>/<class name>/<file>, with "
        f"{', '.join(IMAGE_SUFFIXES)}"
    )
    folders = class_folders(root)
    if not folders:
        raise DataError(f"{root}: no class folder; {expected}")
    if entries := [(file, name_of(folder.name), "") for folder in folders for file in _images(folder)]:
        _check_depth(root, entries[0][0], folders)
        return [*{name_of(folder.name) for folder in folders}], entries
    inner = [(group.name, folder) for group in folders for folder in class_folders(group)]
    entries = [(file, name_of(folder.name), group) for group, folder in inner for file in _images(folder)]
    if not entries:
        raise DataError(f"{root}: no image in its class folders ({len(folders)}); {expected}")
    _check_depth(root, entries[0][0], [folder for _, folder in inner])
    return [*{name_of(folder.name) for _, folder in inner}], entries


def _check_depth(root: Path, image: Path, folders: list[Path]) -> None:
    """Raise DataError if folders in some class folders have images, which would be left out beside `image`."""
    for folder in folders:
        if (deeper := _deeper_image(folder)) is not None:
            raise DataError(
                f"{root}: the image {deeper.relative_to(root)} is at another depth than {image.relative_to(root)}, but "
                "all must be at the same depth, or else it would be left out: move it, or the other one"
            )


def _deeper_image(folder: Path) -> Path | None:
    """Return an image in a folder of this folder, down to `_DEEPEST` of them; None if there is none."""
    for here, inner, _ in os.walk(folder, followlinks=True):
        depth = len(Path(here).relative_to(folder).parts)
        inner[:] = sorted(name for name in inner if not name.startswith(".")) if depth < _DEEPEST else []
        if depth and (images := _images(Path(here))):
            return images[0]
    return None


def _images(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()
    ]
