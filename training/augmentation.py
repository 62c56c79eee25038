"""Random crops and mirror images, drawn anew whenever an image is used in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """How images are changed in training.

    Args:
        crop: Pixels of zeros that are added at each side before a random crop to the image's size; 0: no crop.
        flip: Whether half of the images are mirrored, left to right.
    """

    crop: int = 0
    flip: bool = False

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Return changed images (n, C, H, W); what is drawn depends on the generator alone, not on the device.

        With crop=0 and flip=False inputs of any shape are returned as they are, and nothing is drawn.
        """
        if not (self.crop or self.flip):
            return images
        count, _, height, width = images.shape
        rows, columns = np.arange(height)[None].repeat(count, 0), np.arange(width)[None].repeat(count, 0)
        if self.flip:
            columns = np.where(rng.random((count, 1)) < 0.5, columns[:, ::-1], columns)
        if self.crop:
            images = F.pad(images, (self.crop,) * 4)
            rows = rows + rng.integers(0, 2 * self.crop + 1, (count, 1))
            columns = columns + rng.integers(0, 2 * self.crop + 1, (count, 1))
        device = images.device
        each = torch.arange(count, device=device)[:, None, None]
        at = torch.from_numpy(rows).to(device)[:, :, None], torch.from_numpy(columns).to(device)[:, None, :]
        return images[each, :, at[0], at[1]].permute(0, 3, 1, 2)


NONE = Augmentation()
"""Leaves images, and inputs of any other kind, as they are."""
