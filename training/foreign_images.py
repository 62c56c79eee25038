"""Images of no class, made from a data set's own images, to measure whether a classifier is uncertain about them.

    letters   capital letters in several sizes and places
    noise     images with their pixels in random order: the same histogram, no structure
    covered   images with one half replaced by the background

They are computed from images as the model takes them. Each set is the same whether images are normalised before or
after, because a normalisation is linear in each channel.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.splits import seed_sequence

if TYPE_CHECKING:
    from PIL.Image import Image

Images = NDArray[np.float32]
"""Images (n, channels, height, width)."""

MOST = 200
"""Images in a set: so many letters, and at most so many of the others."""
LETTERS = "ACEFHJKLMNPRTUVWXY"
"""Without those that look like digits: B, D, G, I, O, Q, S and Z."""
SETS = ("letters", "noise", "covered")

_FINE = 64  # pixels of a letter's canvas, at least: smaller images are drawn large and reduced
_HEIGHTS = (0.6, 0.95)  # of a letter, relative to the image


def foreign_images(images: Images, seed: int) -> dict[str, Images]:
    """Return a set of images for each name of `SETS`.

    Args:
        images: the data set's images, at least one; up to `MOST` of them are drawn and used.
        seed: of all random numbers.
    """
    rng = np.random.default_rng(seed_sequence(seed, "foreign images"))
    chosen = images[np.sort(rng.permutation(len(images))[:MOST])]
    background, ink = _levels(chosen)
    return {
        "letters": _letters(background, ink, chosen.shape[2:], rng),
        "noise": _noise(chosen, rng),
        "covered": _covered(chosen, background),
    }


def _levels(images: Images) -> tuple[Images, Images]:
    """Return the background (1, channels, 1, 1), and what is drawn on it.

    The background is the median of the images' border. Letters have the largest value of each channel, or the smallest
    if that is farther away: white on the black ground of digits, black on white paper.
    """
    border = np.concatenate([*(images[:, :, edge] for edge in (0, -1)), *(images[..., edge] for edge in (0, -1))], 2)
    background = np.median(border, axis=(0, 2)).astype(np.float32).reshape(1, -1, 1, 1)
    least, most = (of(images, axis=(0, 2, 3), keepdims=True) for of in (np.min, np.max))
    return background, most if (most - background).sum() >= (background - least).sum() else least


def _letters(background: Images, ink: Images, size: tuple[int, ...], rng: np.random.Generator) -> Images:
    masks = np.stack([_mask(LETTERS[k % len(LETTERS)], size, rng) for k in range(MOST)])[:, None]
    drawn = background * (1 - masks) + ink * masks
    return np.clip(drawn, np.minimum(background, ink), np.maximum(background, ink)).astype(np.float32)


def _mask(letter: str, size: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return (height, width), from 0 for the background to 1 for the letter, which is at a random place."""
    from PIL import Image

    height, width = size
    scale = -(-_FINE // min(size))
    canvas = np.zeros((height * scale, width * scale), np.float32)
    glyph = _glyph(letter, 2 * max(canvas.shape))
    high = rng.uniform(*_HEIGHTS) * canvas.shape[0]
    wide = min(high * glyph.width / glyph.height, 0.9 * canvas.shape[1])
    shape = max(round(wide), 1), max(round(high), 1)
    drawn = np.asarray(glyph.resize(shape, Image.Resampling.BOX), np.float32) / 255
    top, left = (int(rng.integers(0, room - taken + 1)) for room, taken in zip(canvas.shape, drawn.shape, strict=True))
    canvas[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    mask: NDArray[np.float32] = canvas.reshape(height, scale, width, scale).mean(axis=(1, 3))
    return mask


@cache
def _glyph(letter: str, size: int) -> Image:
    """Draw a letter with Pillow's own font, white on black, without a margin."""
    from PIL import Image, ImageDraw, ImageFont

    try:
        font: Any = ImageFont.load_default(size)
    except (TypeError, ImportError):  # Pillow before 10.1, or without FreeType, has a font of one size
        font = ImageFont.load_default()
    left, top, right, bottom = font.getbbox(letter)
    drawn = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(drawn).text((1 - left, 1 - top), letter, fill=255, font=font)
    return drawn.crop(drawn.getbbox())


def _noise(images: Images, rng: np.random.Generator) -> Images:
    count, channels, height, width = images.shape
    pixels = images.reshape(count, channels, height * width)
    orders = (rng.permutation(height * width) for _ in range(count))
    return np.stack([image[:, order] for image, order in zip(pixels, orders, strict=True)]).reshape(images.shape)


def _covered(images: Images, background: Images) -> Images:
    """Cover the left, right, upper and lower half in turn; of an odd number of pixels the larger half."""
    covered = images.copy()
    height, width = images.shape[2:]
    high, wide = (height + 1) // 2, (width + 1) // 2
    halves = (
        (slice(None), slice(0, wide)), (slice(None), slice(width - wide, None)),
        (slice(0, high), slice(None)), (slice(height - high, None), slice(None)),
    )  # fmt: skip
    for k, (rows, columns) in enumerate(halves):
        covered[k :: len(halves), :, rows, columns] = background
    return covered
