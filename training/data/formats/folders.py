"""Images in folders: `root/<class>/<file>`, or `root/<group>/<class>/<file>` with groups such as domains."""

from __future__ import annotations

from pathlib import Path

from tepal.training.data.checks import Arrays, checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.formats.images import IMAGE_SUFFIXES, read_listed
from tepal.training.data.labels import numbers_of

Entry = tuple[Path, str, str]
"""A file, its class, and its group ("" for none)."""


def class_folders(root: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    return sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))


def read_folder(root: Path, reading: Reading) -> Source[ImageArrays]:
    """Read images by class, or by group and class. Groups "train" and "test" are a training and a test set.

    A label is the position of the class among `class-names`, else among the sorted names of the class folders; an empty
    class folder counts.

    Raises:
        DataError: there are no images, too many cannot be read, or the classes are not the run's.
    """
    names, entries = _entries(root)
    numbers = numbers_of(names, reading, f"{root}", "class folders")
    parts = {"": entries}
    if {group for _, _, group in entries} == {"train", "test"}:
        parts = {part: [entry for entry in entries if entry[2] == part] for part in ("train", "test")}
    read: dict[str, Arrays] = {}
    for part, some in parts.items():
        listed = [(file, numbers[name], group) for file, name, group in some]
        images, labels, groups = read_listed(listed, str(root / part), reading)
        read[part] = images, labels, None if part or not groups.astype(bool).any() else groups
    return checked_source(read, str(root), reading, classes=len(numbers), names=tuple(numbers))


def _entries(root: Path) -> tuple[list[str], list[Entry]]:
    """Return the class names, sorted, and the images. Raises DataError."""
    expected = (
        "expected are images as root/<class name>/<file> or root/<group>/<class name>/<file>, with "
        f"{', '.join(IMAGE_SUFFIXES)}"
    )
    folders = class_folders(root)
    if not folders:
        raise DataError(f"{root}: no class folder; {expected}")
    if entries := [(file, folder.name, "") for folder in folders for file in _images(folder)]:
        return [folder.name for folder in folders], entries
    inner = [(group.name, folder) for group in folders for folder in class_folders(group)]
    entries = [(file, folder.name, group) for group, folder in inner for file in _images(folder)]
    if not entries:
        raise DataError(f"{root}: no image in its class folders ({len(folders)}); {expected}")
    return sorted({folder.name for _, folder in inner}), entries


def _images(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".") and file.is_file()
    ]
