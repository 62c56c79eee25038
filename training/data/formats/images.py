"""Images, decoded and brought to one shape: (channels, height, width), uint8 or float32 in 0..1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError, Shape

log = getLogger("flwr")

T = TypeVar("T")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")

_NAMED = 5  # unreadable images that a message names
_GREY = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601), as Pillow has them


def read_image(file: Path | BytesIO, shape: Shape | None, name: str = "") -> NDArray[np.uint8]:
    """One image as (C, H, W), uint8: converted and resized to `shape`, else 1 channel if it is grey, 3 if not.

    Raises DataError for what is no image of 8 bits a channel; its text begins with `name`, by default the file's.
    """
    name = name or str(file)
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{name}: reading images needs Pillow ({error}): pip install pillow") from error
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"{name}: more than 8 bits a channel (mode {image.mode}), which would be cut off: convert the "
                    "images to 8 bits, or save them as floats 0..1 in a .npz file"
                )
            channels = shape[0] if shape else 1 if image.mode in ("1", "L", "LA", "La") else 3
            pixels = image.convert("L" if channels == 1 else "RGB")
            if shape:
                pixels = pixels.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
            return np.asarray(pixels).reshape(pixels.height, pixels.width, channels).transpose(2, 0, 1)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise DataError(f"{name}: not a readable image ({error}): remove or replace it") from error


def read_images(
    items: Sequence[T], read: Callable[[T], NDArray[np.uint8]], where: str, shape: Shape | None, unreadable: float
) -> tuple[NDArray[np.uint8], list[int]]:
    """Read each item; the images (n, C, H, W), and the positions of those that could be read.

    Args:
        items: at least one.
        read: an item's image, (C, H, W). Raises DataError that names it.
        where: the file or folder that they are of, for messages.
        shape: what `read` resizes to, if it does. Grey and coloured images together become coloured without it.
        unreadable: share of the items that may be unreadable; at least one may, but for a share of 0.

    Raises:
        DataError: more are unreadable (the first ones are named), none is readable, or their sizes differ.
    """
    if shape is not None and shape[0] not in (1, 3):
        raise DataError(
            f"{where}: image files are read with 1 (grey) or 3 (colour) channels, image-shape has {shape[0]}"
        )
    allowed = max(1, int(unreadable * len(items))) if unreadable else 0
    images: list[NDArray[np.uint8]] = []
    positions: list[int] = []
    failures: list[str] = []
    for position, item in enumerate(items):
        try:
            images.append(read(item))
            positions.append(position)
        except DataError as error:
            failures.append(str(error))
            if len(failures) > max(allowed, _NAMED):
                break  # it will be refused: the rest need not be read
    if len(failures) > allowed or not images:
        at_least = "at least " if len(images) + len(failures) < len(items) else ""
        raise DataError(
            f"{where}: {at_least}{len(failures)} of {len(items):,} images cannot be read, and {allowed} may be left "
            f"out (unreadable-images={unreadable:g}): {'; '.join(failures[:_NAMED])}"
        )
    for failure in failures:
        log.warning("An image is left out: %s", failure)
    for position, image in zip(positions, images, strict=True):
        if image.shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{where}: {_called(items[position])}: {image.shape[2]}x{image.shape[1]} pixels, but "
                f"{_called(items[positions[0]])} has {images[0].shape[2]}x{images[0].shape[1]}: set image-shape, and "
                "all images are resized to it"
            )
    channels = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images]), positions


def _called(item: object) -> str:
    """A file by its path; a row of a table by its number."""
    return str(item[0] if isinstance(item, tuple) else item)


def resized(images: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """Images (n, C, H, W), uint8 or float32, brought to `shape`: grey to colour or back, then bilinear to the size."""
    if images.shape[1] == 3 and shape[0] == 1:
        grey = np.einsum("nchw,c->nhw", images, np.array(_GREY, np.float32), dtype=np.float32)[:, None]
        images = np.rint(grey).astype(np.uint8) if images.dtype == np.uint8 else grey.clip(0, 1)
    if images.shape[2:] != shape[1:]:
        from PIL import Image

        def plane(pixels: NDArray[Any]) -> NDArray[Any]:
            whole = Image.fromarray(np.ascontiguousarray(pixels))
            return np.asarray(whole.resize((shape[2], shape[1]), Image.Resampling.BILINEAR))

        new = np.empty((*images.shape[:2], *shape[1:]), images.dtype)
        for number, image in enumerate(images):
            for channel, pixels in enumerate(image):
                new[number, channel] = plane(pixels)
        images = new
    return np.broadcast_to(images, (len(images), *shape)) if len(images[0]) != shape[0] else images
