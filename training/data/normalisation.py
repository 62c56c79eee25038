"""Scaling of images and of numbers to mean 0 and standard deviation 1 by the statistics of a data set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError
from tepal.training.data.known import KNOWN, Channels

_STATISTICS = {name: (known.mean, known.std) for name, known in KNOWN.items() if known.mean} | {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
"""Mean and standard deviation by name: of data sets, and those with which CLIP's models were trained."""


def statistics(by: str) -> tuple[Channels, Channels]:
    """Return mean and standard deviation of each channel (or one for all) for a value of `normalise`.

    Raises DataError if it is neither a name with known statistics nor "mean/std".
    """
    if known := _STATISTICS.get(by.strip()):
        return known
    try:
        mean, std = (tuple(float(number) for number in part.split(",")) for part in by.split("/"))
    except ValueError as error:
        raise DataError(
            f"normalise={by!r}: choose one of {', '.join(_STATISTICS)}, or numbers as mean/std, with commas between "
            'channels, for example "0.5/0.25" or "0.49,0.48,0.45/0.25,0.24,0.26"; or "" for none'
        ) from error
    if len(mean) != len(std) or not np.isfinite([mean, std]).all() or min(std) <= 0:
        raise DataError(
            f"normalise={by!r}: give as many means as standard deviations, all finite, and standard deviations above 0"
        )
    return mean, std


def check_normalise(by: str, count: int, of: str = "channels") -> None:
    """Raise DataError if `normalise` does not fit the number of an image's channels, or `of` an input's features."""
    if by and (numbers := len(statistics(by)[0])) not in (1, count):
        what = "images" if of == "channels" else "inputs"
        raise DataError(
            f"normalise={by!r} has {numbers} values, but {what} have {count} {of}: give one value for all {of}, or one "
            "for each"
        )


def normalise(images: NDArray[np.float32], by: str) -> NDArray[np.float32]:
    """Normalise images (n, C, H, W) in place, and return them; with "" they are unchanged. Raises DataError."""
    if not by:
        return images
    check_normalise(by, images.shape[1])
    mean, std = (np.array(one, np.float32).reshape(1, -1, 1, 1) for one in statistics(by))
    images -= mean
    images /= std
    return images


def normalised_numbers(inputs: NDArray[np.float32], by: str) -> NDArray[np.float32]:
    """Return inputs (n, …, features) normalised by `by`; with "" they are unchanged. Raises DataError."""
    if not by:
        return inputs
    check_normalise(by, inputs.shape[-1], "features")
    mean, std = (np.array(one, np.float32) for one in statistics(by))
    return (inputs - mean) / std


def written_statistics(inputs: NDArray[np.float32]) -> str:
    """Return the mean and the standard deviation of each feature of inputs (n, …, features), as `normalise` takes them.

    A feature that is constant has 1 for its standard deviation.
    """
    features = inputs.reshape(-1, inputs.shape[-1]).astype(np.float64)
    means, deviations = features.mean(axis=0), features.std(axis=0)
    deviations[deviations <= 1e-7 * np.abs(means)] = 1
    return "/".join(",".join(f"{number:.8g}" for number in numbers) for numbers in (means, deviations))
