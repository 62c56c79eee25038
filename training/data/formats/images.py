"""Decoding of images, and conversion to one shape: (channels, height, width), uint8 or float32 in 0..1."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError, Reading, Shape

log = getLogger("flwr")

T = TypeVar("T")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")

_DEEP = re.compile(r";16[BLN]")  # in Pillow's names of 16 bits per channel, which it cuts to 8; not in BMP's "BGR;16"
_NAMED = 5  # most unreadable images in a message
_GREY = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601), as in Pillow


class _Unreachable(DataError):
    """An image's file cannot be read at all. It is not left out: another process may read it, and divide other data."""


def read_image(file: Path | BytesIO, shape: Shape | None, name: str = "") -> NDArray[np.uint8]:
    """Read an image as (C, H, W), uint8, converted to `shape`, or else with 1 channel if it is grey and 3 if not.

    It is turned upright by its EXIF orientation, with which cameras say how they were held.

    Raises DataError if it is missing, cannot be read, or is not an image of 8 bits per channel; the message begins with
    `name`, by default the file's.
    """
    name = name or str(file)
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{name}: reading images needs Pillow ({error}): pip install pillow") from error
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")) or any(_DEEP.search(str(tile[3])) for tile in image.tile):
                raise DataError(
                    f"{name}: more than 8 bits per channel (mode {image.mode}), which would be truncated: convert the "
                    "images to 8 bits, or save them as floats 0..1 in a .npz file"
                )
            channels = shape[0] if shape else 1 if image.mode in ("1", "L", "LA", "La") else 3
            _turn_upright(image)
            pixels = image.convert("L" if channels == 1 else "RGB")
            if shape:
                pixels = pixels.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
            return np.asarray(pixels).reshape(pixels.height, pixels.width, channels).transpose(2, 0, 1)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many types
        # Of the system: Pillow's own have no number. A file that is missing is missing for all processes.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise _Unreachable(
                f"{name}: cannot be read: {error.strerror}: check path, permissions and disk"
            ) from error
        raise DataError(f"{name}: not a readable image ({error}): remove or replace it") from error


def _turn_upright(image: Any) -> None:
    """Turn a Pillow image in its place by its EXIF orientation. Damaged tags are no reason to leave it out."""
    from PIL import ImageOps

    image.load()  # raises what is wrong with the pixels
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # of many types: tags cannot be read, or, after it was turned, not be written again
        pass


def read_images(
    items: Sequence[T], read: Callable[[T], NDArray[np.uint8]], where: str, shape: Shape | None, unreadable: float
) -> tuple[NDArray[np.uint8], list[int]]:
    """Read each item; returns the images (n, C, H, W), and the positions of those that could be read.

    With a shape, each image is kept at its place in the result only: twice the memory would be too much for many.

    Args:
        items: at least one item.
        read: returns an item's image, (C, H, W), or raises a DataError that names it.
        where: the file or folder, for messages.
        shape: the shape to which `read` resizes; None if it does not. Grey images among coloured ones are then
            converted to colour.
        unreadable: share of the items that may be unreadable; at least one item, unless it is 0.

    Raises:
        DataError: more items are unreadable (the first ones are named), none is readable, or their sizes differ; or a
            file cannot be read.
    """
    if shape is not None and shape[0] not in (1, 3):
        raise DataError(
            f"{where}: image files are read with 1 (grey) or 3 (colour) channels, but image-shape has {shape[0]}: use "
            "arrays in a .npz file"
        )
    allowed = max(1, int(unreadable * len(items))) if unreadable else 0
    whole = None if shape is None else np.empty((len(items), *shape), np.uint8)
    images: list[NDArray[np.uint8]] = []  # without a shape
    positions: list[int] = []
    failures: list[str] = []
    for position, item in enumerate(items):
        try:
            image = read(item)
            if whole is None:
                images.append(image)
            else:
                whole[len(positions)] = image
            positions.append(position)
        except _Unreachable as error:
            raise _Unreachable(f"{where}: {error}") from error
        except DataError as error:
            failures.append(str(error))
            if len(failures) > max(allowed, _NAMED):
                break  # enough for the error below
    if len(failures) > allowed or not positions:
        at_least = "at least " if len(positions) + len(failures) < len(items) else ""
        raise DataError(
            f"{where}: {at_least}{len(failures)} of {len(items):,} images cannot be read, and {allowed} may be left "
            f"out (unreadable-images={unreadable:g}): {'; '.join(failures[:_NAMED])}"
        )
    for failure in failures:
        log.warning("Image left out: %s", failure)
    if whole is not None:
        return whole[: len(positions)], positions
    for position, image in zip(positions, images, strict=True):
        if image.shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{where}: {_item_name(items[position])}: {image.shape[2]}x{image.shape[1]} pixels, but "
                f"{_item_name(items[positions[0]])} has {images[0].shape[2]}x{images[0].shape[1]}: set image-shape to "
                "resize all images"
            )
    channels = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images]), positions


def read_listed(
    entries: Sequence[tuple[Path, int, str]], where: str, reading: Reading
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.str_]]:
    """Read image files, given with their labels and groups; returns images, labels and groups of the readable ones.

    Raises DataError as `read_images` does.
    """
    read = partial(read_image, shape=reading.shape)
    images, positions = read_images([file for file, _, _ in entries], read, where, reading.shape, reading.unreadable)
    _, labels, groups = zip(*(entries[position] for position in positions), strict=True)
    return images, np.array(labels), np.array(groups)


def _item_name(item: object) -> str:
    """Return a file's path, or the number of a table's row."""
    return str(item[0] if isinstance(item, tuple) else item)


def resized(images: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """Convert images (n, C, H, W), uint8 or float32, to `shape`: grey to colour or back, then bilinear resizing."""
    if images.shape[1] == 3 and shape[0] == 1:
        grey = np.einsum("nchw,c->nhw", images, np.array(_GREY, np.float32), dtype=np.float32)[:, None]
        images = np.rint(grey).astype(np.uint8) if images.dtype == np.uint8 else grey.clip(0, 1)
    if images.shape[2:] != shape[1:]:
        from PIL import Image

        new = np.empty((*images.shape[:2], *shape[1:]), images.dtype)
        for place in np.ndindex(images.shape[:2]):
            plane = Image.fromarray(np.ascontiguousarray(images[place]))
            new[place] = plane.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
        images = new
    return np.broadcast_to(images, (len(images), *shape)) if len(images[0]) != shape[0] else images
