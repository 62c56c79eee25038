"""Images for `tepal predict`: files, folders and .npz files, as a model takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from tepal.training.data import (
    IMAGE_SUFFIXES,
    DataError,
    DatasetInfo,
    ImageArrays,
    checked_arrays,
    npz_examples,
    read_image,
)

NPZ = ".npz"


@dataclass(frozen=True, eq=False)
class Images:
    """Some examples, and the (file, index) of each; labels are zeros where none are known."""

    origins: list[tuple[Path, int | None]]
    arrays: ImageArrays
    labelled: bool


def expanded_images(files: Sequence[Path]) -> list[Path]:
    """Files with what they are checked by name, folders replaced by the images below them."""
    found: list[Path] = []
    for given in files:
        file = Path(given).expanduser()
        if file.is_dir():
            inside = [
                image
                for image in sorted(file.rglob("*"))
                if image.suffix.lower() in IMAGE_SUFFIXES
                and image.is_file()
                and not any(part.startswith(".") for part in image.relative_to(file).parts)
            ]
            if not inside:
                raise ValueError(f"{file}: no image in this folder or below it; read are {', '.join(IMAGE_SUFFIXES)}")
            found += inside
        elif not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        elif file.suffix.lower() in (NPZ, *IMAGE_SUFFIXES):
            found.append(file)
        else:
            raise ValueError(f"{file}: not an image or .npz file; read are {', '.join((*IMAGE_SUFFIXES, NPZ))}")
    return found


def image_arrays(files: Sequence[Path], info: DatasetInfo, at_once: int) -> Iterator[Images]:
    """The images of `expanded_images`, up to `at_once` of them together."""
    for is_npz, group in groupby(files, lambda file: file.suffix.lower() == NPZ):
        if is_npz:
            for file in group:
                yield from _npz_batches(file, info, at_once)
        else:
            yield from _image_batches(list(group), info, at_once)


def _image_batches(files: Sequence[Path], info: DatasetInfo, at_once: int) -> Iterator[Images]:
    if info.shape[0] not in (1, 3):
        raise DataError(
            f"{files[0]}: image files are read with 1 (grey) or 3 (colour) channels, and the model needs "
            f"{info.shape[0]}: give it arrays in a .npz file"
        )
    for start in range(0, len(files), at_once):
        part = files[start : start + at_once]
        images = np.stack([read_image(file, info.shape) for file in part])
        arrays = ImageArrays(images, np.zeros(len(part), np.int64))
        yield Images([(file, None) for file in part], arrays, labelled=False)


def _npz_batches(file: Path, info: DatasetInfo, at_once: int) -> Iterator[Images]:
    arrays, labelled = _read_npz(file, info)
    for start in range(0, len(arrays.labels), at_once):
        part = ImageArrays(arrays.images[start : start + at_once], arrays.labels[start : start + at_once])
        yield Images([(file, start + index) for index in range(len(part.labels))], part, labelled)


def _read_npz(file: Path, info: DatasetInfo) -> tuple[ImageArrays, bool]:
    """The file's images with their labels, and whether it has labels."""
    images, labels, names = npz_examples(file, "images")
    known = np.zeros(images.shape[0] if images.ndim else 1, np.int64) if labels is None else labels
    return checked_arrays(images, known, f"{file}: {names}", info.shape, info.classes), labels is not None
