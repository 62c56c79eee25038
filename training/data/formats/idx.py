"""idx files of MNIST and related data sets: a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, and t10k-…

The files may be compressed (.gz), and their names may have a dot instead of the hyphen before "idx". EMNIST's names
begin with emnist-<part>-; its images are transposed in the files, and the labels of emnist-letters count from 1; both
are corrected here. The format: two zero bytes, the type of numbers (8: unsigned
bytes), the number of dimensions, each dimension as four big-endian bytes, then the numbers.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import Arrays, checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.formats.files import opened

_NAME = re.compile(
    r"(?P<family>emnist-[a-z]+-)?(?P<part>train|t10k|test)-(?P<what>images|labels)[-.]idx\d-ubyte(\.gz)?"
)
_UNSIGNED_BYTES = 8


def is_idx(names: set[str]) -> bool:
    """Return whether a folder with these files has idx files."""
    return any(map(_NAME.fullmatch, names))


def read_idx(folder: Path, reading: Reading) -> Source[ImageArrays]:
    """Read training images and, if they exist, test images. Raises DataError, also for a truncated file."""
    files: dict[tuple[str, str, str], Path] = {}
    for file in sorted(folder.iterdir(), reverse=True):  # a plain file takes precedence over its .gz
        if (found := _NAME.fullmatch(file.name)) and file.is_file():  # Kaggle also has folders of these names
            part = "train" if found["part"] == "train" else "test"
            files[found["family"] or "", part, found["what"]] = file
    families = sorted({family for family, _, _ in files})
    if len(families) > 1:
        raise DataError(
            f"{folder}: has several data sets ({', '.join(family.strip('-') or 'MNIST' for family in families)}): put "
            "the files of each into a folder of its own"
        )
    family = families[0]
    arrays: dict[str, Arrays] = {}
    for part in ("train", "test"):
        images, labels = (files.get((family, part, what)) for what in ("images", "labels"))
        if images and labels:
            arrays[part] = (*_pair(images, labels, family), None)
        elif images or labels or part == "train":
            other = images or labels
            raise DataError(
                f"{folder}: the {part} {'labels' if images else 'images'} are missing"
                + (f" for {other.name}" if other else ", and so are its labels")
                + f": add {family}{part}-images-idx3-ubyte and {family}{part}-labels-idx1-ubyte, or .gz"
            )
    return checked_source(arrays, str(folder), reading)


def _pair(images: Path, labels: Path, family: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    pixels, numbers = _array(images, 3), _array(labels, 1)
    if family:
        pixels = pixels.transpose(0, 2, 1)
    if family == "emnist-letters-":
        if len(numbers) and numbers.min() < 1:
            raise DataError(f"{labels}: label 0, but labels of emnist-letters count from 1: use the original file")
        numbers = numbers - 1
    return pixels, numbers


def _array(file: Path, dimensions: int) -> NDArray[np.uint8]:
    with opened(file) as content:
        data = content.read()
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES or data[3] != dimensions:
        raise DataError(
            f"{file}: not an idx file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)} (it begins "
            f"with {data[:4].hex(' ') or 'nothing'}, expected 00 00 08 0{dimensions}): copy it again"
        )
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, min(start, len(data)), 4))
    if len(data) != start + math.prod(shape):
        raise DataError(
            f"{file}: {len(data):,} bytes, but its header gives {start + math.prod(shape):,} "
            f"({' x '.join(map(str, shape))}): it is truncated or damaged, copy it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
