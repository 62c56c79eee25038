"""Images for `tepal predict`: files, folders and .npz files, converted to what a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from tepal.tools.predict.texts import Batch
from tepal.training.data import (
    IMAGE_SUFFIXES,
    DataError,
    DatasetInfo,
    ImageArrays,
    checked_arrays,
    normalise,
    npz_examples,
    read_image,
)
from tepal.training.data.inputs import InputConfig

_NPZ = ".npz"


def image_batches(files: Sequence[Path], info: DatasetInfo, config: InputConfig, size: int) -> Iterator[Batch]:
    """The images of files, of folders and what is below them, and of .npz files, up to `size` together.

    Raises OSError or ValueError that names the file if it does not exist, has no images, or does not fit the model.
    """
    for is_npz, group in groupby(_expanded(files), lambda file: file.suffix.lower() == _NPZ):
        same = list(group)
        for part in same if is_npz else [same[start : start + size] for start in range(0, len(same), size)]:
            origins, images, labelled = _read_npz(part, info) if isinstance(part, Path) else _read_images(part, info)
            for start in range(0, len(origins), size):
                some = images.take(np.arange(start, min(start + size, len(origins))))
                values = normalise(some.images, config.normalise)
                yield Batch(origins[start : start + size], values, some.labels if labelled else None, config.names)


def _expanded(files: Sequence[Path]) -> list[Path]:
    """The files, with folders replaced by the images below them, without hidden ones, sorted by path."""
    found: list[Path] = []
    for given in files:
        file = Path(given).expanduser()
        if file.is_dir():
            inside = [
                image for image in sorted(file.rglob("*"))
                if image.suffix.lower() in IMAGE_SUFFIXES and image.is_file()
                and not any(part.startswith(".") for part in image.relative_to(file).parts)
            ]  # fmt: skip
            if not inside:
                allowed = ", ".join(IMAGE_SUFFIXES)
                raise ValueError(f"{file}: no image in this folder or below it; allowed are {allowed}")
            found += inside
        elif not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        elif file.suffix.lower() in (_NPZ, *IMAGE_SUFFIXES):
            found.append(file)
        else:
            raise ValueError(f"{file}: not an image or .npz file; allowed are {', '.join((*IMAGE_SUFFIXES, _NPZ))}")
    return found


_Examples = tuple[list[tuple[Path, int | None]], ImageArrays, bool]  # origins, images, whether they have labels


def _read_images(files: Sequence[Path], info: DatasetInfo) -> _Examples:
    if info.shape[0] not in (1, 3):
        raise DataError(
            f"{files[0]}: image files are read with 1 (grey) or 3 (colour) channels, and the model needs "
            f"{info.shape[0]}: give it arrays in a .npz file"
        )
    images = np.stack([read_image(file, info.shape) for file in files])
    return [(file, None) for file in files], ImageArrays(images, np.zeros(len(files), np.int64)), False


def _read_npz(file: Path, info: DatasetInfo) -> _Examples:
    images, labels, names = npz_examples(file, "images")
    known = np.zeros(images.shape[0] if images.ndim else 1, np.int64) if labels is None else labels
    arrays = checked_arrays(images, known, f"{file}: {names}", info.shape, info.classes, resize=True)
    return [(file, index) for index in range(len(arrays.labels))], arrays, labels is not None
