"""Images and labels, or numbers and their classes or targets, in a .npz file.

The file has one pair of arrays of `NPZ_PAIRS` (the first pair found is used). It may have a test set: under the same
names with "test" for "train", or as `images_test` or `test_images` of `images`. Images are N x H x W, N x C x H x W or
N x H x W x C, either integers 0..255 (scaled to 0..1) or floats 0..1; labels are N integers from 0 on. Large
uncompressed images of one byte for each value stay on disk, and are read as they are needed.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import ImageArrays, LabelledNumbers, Numbers, Source
from tepal.training.data.formats.numbers import checked_labelled, checked_numbers
from tepal.training.data.labels import labels_of, names_a_number
from tepal.training.data.stored import stored_array

NPZ_PAIRS = (
    ("images", "labels"),
    ("x", "y"),
    ("images_train", "labels_train"),
    ("x_train", "y_train"),
    ("train_images", "train_labels"),
)
GROUP_NAMES = ("group", "groups", "writer")


def read_npz(path: Path, reading: Reading) -> Source[ImageArrays] | Source[Numbers] | Source[LabelledNumbers]:
    """Read the first pair of `NPZ_PAIRS` in the file, its test set, and groups (see `group-column`).

    Raises DataError.
    """
    what = f"inputs and {'classes' if reading.labelled else 'targets'}" if reading.numbers else "images and labels"
    with open_npz(path) as archive:
        train = next((pair for pair in NPZ_PAIRS if set(pair) <= set(archive.files)), None)
        if train is None:
            raise DataError(
                f"{path}: has no pair of arrays for {what}; it has {listed(archive.files)}; name one of "
                f"these pairs: {'; '.join(' and '.join(pair) for pair in NPZ_PAIRS)}"
            )
        pairs = [train]
        for test in _tests_of(train, archive.files):
            found = set(test) & set(archive.files)
            if not found:
                continue
            if len(found) == 1:
                missing = (set(test) - found).pop()
                raise DataError(f"{path}: has {found.pop()} but no {missing}: add or remove one")
            pairs.append(test)
            break
        arrays = {
            " and ".join(pair): (
                npz_array(archive, pair[0], path) if reading.numbers else _images(archive, pair[0], path),
                npz_array(archive, pair[1], path),
                _groups(archive, "train" if "train" in pair[0] else "", path, reading) if pair == train else None,
            )
            for pair in pairs
        }
    if reading.labelled:
        labelled = {part: (inputs, labels_in(own, path), groups) for part, (inputs, own, groups) in arrays.items()}
        return checked_labelled(labelled, str(path), reading)
    if reading.numbers:
        return checked_numbers(arrays, str(path), reading)
    for part, (images, own, groups) in arrays.items():
        if own.dtype.kind in "iu" and own.size == len(own) and names_a_number(reading):
            labels, _ = labels_of(labels_in(own, path), reading, f"{path}: {part}")
            arrays[part] = images, labels, groups
    return checked_source(arrays, str(path), reading)


def _tests_of(train: tuple[str, str], files: Sequence[str]) -> list[tuple[str, str]]:
    """Return the possible names of the test set of a pair; none if it is of all examples, beside a training set."""
    inputs, labels = train
    if "train" in inputs:
        return [(inputs.replace("train", "test"), labels.replace("train", "test"))]
    if {f"{inputs}_train", f"train_{inputs}"} & set(files):
        return []
    return [(f"{inputs}_test", f"{labels}_test"), (f"test_{inputs}", f"test_{labels}")]


def labels_in(array: NDArray[Any], path: Path) -> list[Any]:
    """Return the classes of numbers, one for each, from an array of whole numbers or names. Raises DataError."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iufU":
        raise DataError(
            f"{path}: classes are {array.dtype} of shape {array.shape}; give one whole number or name for each input"
        )
    return list(array.tolist())


def npz_examples(path: Path, what: str) -> tuple[NDArray[Any], NDArray[Any] | None, str]:
    """Read examples to predict: the test set if there is one, else the training set.

    Args:
        path: the file.
        what: kind of the inputs, for messages.

    Returns:
        Inputs, labels or targets (None if there are none), and the names of the arrays.

    Raises:
        DataError: the file cannot be read, or has no inputs.
    """
    with open_npz(path) as archive:
        pairs = [pair for train in NPZ_PAIRS for pair in (*_tests_of(train, archive.files), train)]
        pair = next((pair for pair in pairs if pair[0] in archive.files), None)
        if pair is None:
            raise DataError(
                f"{path}: has no array of {what}; it has {listed(archive.files)}; name one of these: "
                f"{', '.join(dict.fromkeys(inputs for inputs, _ in pairs))}"
            )
        labels = npz_array(archive, pair[1], path) if pair[1] in archive.files else None
        names = " and ".join(pair if labels is not None else pair[:1])
        return npz_array(archive, pair[0], path), labels, names


def _groups(archive: np.lib.npyio.NpzFile, part: str, path: Path, reading: Reading) -> NDArray[Any] | None:
    """Return the groups of a part ("train", or "" for all): by `group-column`, or else by a common name. DataError."""
    names = [reading.group_column] if reading.group_column else list(GROUP_NAMES)
    possible = [form for name in names for form in ((f"{name}_{part}", f"{part}_{name}", name) if part else (name,))]
    found = next((name for name in possible if name in archive.files), None)
    if found is None and reading.group_column:
        raise DataError(
            f"{path}: has no array {' or '.join(possible)} (group-column={reading.group_column!r}); it has "
            f"{listed(archive.files)}"
        )
    return None if found is None else npz_array(archive, found, path)


def open_npz(path: Path) -> np.lib.npyio.NpzFile:
    """Open a .npz file; the caller closes it. Raises DataError."""
    try:
        archive = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz file ({error}); write it with numpy.savez") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: one array, not a .npz file with images and labels; write it with numpy.savez")
    return archive


def listed(names: list[str]) -> str:
    """Return the names of arrays as text."""
    return ", ".join(sorted(names)) or "no array"


def _images(archive: np.lib.npyio.NpzFile, key: str, path: Path) -> NDArray[Any]:
    """Return an array of images, which stays on disk if it is large and can. Raises DataError."""
    try:
        stored = stored_array(path, archive.zip, key) if archive.zip else None
    except (OSError, KeyError, ValueError, struct.error, zipfile.BadZipFile):
        stored = None  # the error is found again, and reported, as the array is read
    return npz_array(archive, key, path) if stored is None else cast(NDArray[Any], stored)


def npz_array(archive: np.lib.npyio.NpzFile, key: str, path: Path) -> NDArray[Any]:
    """Return an array of a .npz file. Raises DataError."""
    try:
        array = archive[key]
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        hint = (
            "arrays of Python objects are not read, because reading them can run code; save numbers instead"
            if "Object arrays" in str(error)
            else "the file is damaged; copy or write it again"
        )
        raise DataError(f"{path}: array {key} cannot be read ({error}): {hint}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: {key} is not an array; write the file with numpy.savez")
    return array
