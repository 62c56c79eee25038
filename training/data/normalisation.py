"""Images brought to mean 0 and standard deviation 1 of a data set, once, when examples become tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataError
from tepal.training.data.known import KNOWN, Channels


def statistics(by: str) -> tuple[Channels, Channels]:
    """Mean and standard deviation of each channel (or one for all) that a value of `normalise` names.

    Raises DataError for what is neither a data set with known ones nor numbers as "mean/std".
    """
    if (known := KNOWN.get(by.strip())) and known.mean:
        return known.mean, known.std
    try:
        mean, std = (tuple(float(number) for number in part.split(",")) for part in by.split("/"))
    except ValueError as error:
        names = ", ".join(name for name, one in KNOWN.items() if one.mean)
        raise DataError(
            f"normalise={by!r}: known are {names}; or give numbers as mean/std, with commas between channels, for "
            'example "0.5/0.25" or "0.49,0.48,0.45/0.25,0.24,0.26"; or "" for none'
        ) from error
    if len(mean) != len(std) or not np.isfinite([mean, std]).all() or min(std) <= 0:
        raise DataError(
            f"normalise={by!r}: needs as many means as standard deviations, finite, and standard deviations above 0"
        )
    return mean, std


def check_normalise(by: str, channels: int) -> None:
    """Raise DataError where `normalise` cannot be applied to images of as many channels."""
    if by and (numbers := len(statistics(by)[0])) not in (1, channels):
        raise DataError(
            f"normalise={by!r} has {numbers} channels, but images have {channels}: give one number for all channels, "
            "or one for each"
        )


def normalise(images: NDArray[np.float32], by: str) -> NDArray[np.float32]:
    """Normalise images (n, C, H, W) in place, and return them; "" leaves them as they are. Raises DataError."""
    if not by:
        return images
    check_normalise(by, images.shape[1])
    mean, std = (np.array(one, np.float32).reshape(1, -1, 1, 1) for one in statistics(by))
    images -= mean
    images /= std
    return images
