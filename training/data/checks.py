"""Checks of images and labels from files of all formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError, Reading, Shape
from tepal.training.data.examples import ImageArrays, Source
from tepal.training.data.formats.images import resized
from tepal.training.data.stored import StoredArray

_FEW, _FOR_EACH = 256, 10
"""Numbered classes that images or texts may have, however few; and beyond, for each of them. A site may have examples
of some of a run's classes."""

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]
"""Images, labels and groups (None for no groups), as in a file."""


def checked_source(
    arrays: Mapping[str, Arrays], origin: str, reading: Reading, *, classes: int = 0, names: tuple[str, ...] = ()
) -> Source[ImageArrays]:
    """Check the training set and, if there is one, the test set.

    Args:
        arrays: name of a part for messages → its arrays; the training set first.
        origin: description of the source, for messages.
        reading: the run's settings, with shape and classes.
        classes: number of classes known from other information than the labels, if the run has none.
        names: the class names, if there are any.

    Raises:
        DataError: see `checked_arrays`; or the parts have different shapes.
    """
    limit = reading.classes or classes
    parts = [
        checked_arrays(
            images, labels, f"{origin}: {part}" if part else origin, reading.shape, limit, reading.resize, groups
        )
        for part, (images, labels, groups) in arrays.items()
    ]
    train, test = parts[0], parts[1] if len(parts) > 1 else None
    if test is not None and test.images.shape[1:] != train.images.shape[1:]:
        raise DataError(
            f"{origin}: train images are {written(train.images.shape[1:])}, test images "
            f"{written(test.images.shape[1:])}: resize one of them"
        )
    found = 1 + max(int(part.labels.max()) for part in parts)
    if not limit:
        check_numbers(found, [part.labels for part in parts], origin)
    return Source(train, test, limit or found, origin, names)


def checked_arrays(
    images: NDArray[Any],
    labels: NDArray[Any],
    where: str,
    shape: Shape | None,
    classes: int,
    resize: bool = False,
    groups: NDArray[Any] | None = None,
) -> ImageArrays:
    """Return channel-first images (a view if possible), uint8 or float32 in 0..1, int64 labels, and groups as text.

    Images that stay on disk (`StoredArray`) stay there, unless they must be converted.

    With `resize`, images of another size or another number of channels are converted to `shape`.
    Raises DataError for invalid arrays; its message begins with `where`.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; give one whole number for each image"
        )
    if images.ndim not in (3, 4):
        raise DataError(
            f"{where}: images have shape {images.shape}; allowed are (n, H, W), (n, C, H, W) and (n, H, W, C)"
        )
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images):,} images but {len(labels):,} labels: give one label for each image")
    if images.size == 0:
        raise DataError(f"{where}: no examples (images have shape {images.shape}): give at least one")
    check_labels(labels, classes, where)
    if groups is not None:
        groups = checked_groups(groups, len(labels), where)
    return ImageArrays(_channel_first(_scalable(images, where), shape, where, resize), labels.astype(np.int64), groups)


def check_labels(labels: NDArray[Any], classes: int, where: str) -> None:
    """Raise DataError for a label outside 0 … classes - 1 (`classes` 0: any number from 0 on)."""
    limit = classes or np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(wrong):
        raise DataError(
            f"{where}: label {labels[wrong[0]]} (example {wrong[0]}; {len(wrong):,} in all) is out of range: "
            "allowed are "
            + (f"0 to {classes - 1}, since the run has {classes} classes" if classes else "whole numbers from 0 on")
        )


def check_numbers(classes: int, labels: Sequence[NDArray[Any]], where: str) -> None:
    """Raise DataError for numbered labels of images or texts that are probably ids."""
    check_count(classes, labels, where, most=max(_FEW, _FOR_EACH * sum(map(len, labels))))


def check_count(classes: int, labels: Sequence[NDArray[Any]], where: str, *, most: int) -> None:
    """Raise DataError for more than so many classes: the labels of all parts are then rather ids or measurements."""
    count = sum(map(len, labels))
    if classes > most:
        different = len(np.unique(np.concatenate(labels)))
        raise DataError(
            f"{where}: {different:,} different values up to class {classes - 1:,} in {count:,} rows, which are hardly "
            "classes: set label-column to the column of the classes, or write classes as names; if these are "
            "classes, set classes"
        )


def checked_groups(groups: NDArray[Any], count: int, where: str) -> NDArray[np.str_]:
    """Return one group for each of `count` examples, as text. Raises DataError."""
    if groups.shape != (count,) or groups.dtype.kind not in "iuUS":
        raise DataError(
            f"{where}: groups are {groups.dtype} of shape {groups.shape}; give one number or name for each of "
            f"{count:,} examples"
        )
    return groups.astype(np.str_)


def _scalable(images: NDArray[Any], where: str) -> NDArray[Any]:
    """Return uint8 for integers 0..255, float32 for floats 0..1. Raises DataError for other values."""
    if isinstance(images, StoredArray):
        return images
    if images.dtype.kind == "f":
        finite = np.isfinite(images)
        if not finite.all():
            first = np.argwhere(~finite)[0][0]
            raise DataError(f"{where}: image {first} has a value that is NaN or infinite: repair or remove it")
        if images.min() < 0 or images.max() > 1:
            raise DataError(
                f"{where}: images are floats from {images.min():g} to {images.max():g}; floats must lie in 0..1: "
                "rescale them, or save 0..255 as uint8"
            )
        return images.astype(np.float32, copy=False)
    if images.dtype.kind not in "iu":
        raise DataError(f"{where}: images are {images.dtype}; allowed are integers 0..255 and floats 0..1")
    if images.dtype != np.uint8 and (images.min() < 0 or images.max() > 255):
        raise DataError(
            f"{where}: images are integers from {images.min()} to {images.max()}; integers must lie in 0..255: "
            "rescale them, or save them as floats 0..1"
        )
    return images.astype(np.uint8, copy=False)


def _channel_first(images: NDArray[Any], shape: Shape | None, where: str, resize: bool) -> NDArray[Any]:
    """Return images (n, C, H, W). The run's shape determines the channel axis; without it, the one of size 1 or 3."""
    layouts = [images, _with_channels(images, "last")] if images.ndim == 4 else [_with_channels(images, "none")]
    possible = " or ".join(written(layout.shape[1:]) for layout in layouts) + " (CxHxW)"
    for layout in layouts:
        if layout.shape[1:] == shape:
            return layout
    if shape and not resize:
        raise DataError(
            f"{where}: images are {possible}, but the run's are {written(shape)} (set by image-shape, or else by its "
            "dataset): resize them, or set image-shape"
        )
    fitting = [layout for layout in layouts if layout.shape[1] in (1, 3)]
    if shape and shape[0] not in (1, 3):
        fitting = [layout for layout in layouts if layout.shape[1] == shape[0]]
        if not fitting:
            raise DataError(f"{where}: images are {possible}, but the run's are {written(shape)}: correct image-shape")
    if len(fitting) != 1:
        raise DataError(
            f"{where}: images of shape {images.shape}: the channel axis is ambiguous, {possible}: "
            "set image-shape to the right one"
        )
    return resized(np.asarray(fitting[0]), shape) if shape else fitting[0]


def _with_channels(images: NDArray[Any], where: str) -> NDArray[Any]:
    """Return channel-first images of those whose channels are "last", or that have "none"."""
    if isinstance(images, StoredArray):
        return cast(NDArray[Any], images.with_channels(where))
    return np.moveaxis(images, -1, 1) if where == "last" else images[:, None]


def written(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as "3x32x32"."""
    return "x".join(map(str, shape))
