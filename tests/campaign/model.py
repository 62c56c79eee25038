"""The campaign's model: a small transformer beside one linear layer, by which digits are learned in a few rounds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tepal.models.tiny_vit import TinyViT

MODEL = f"{__name__}:model"
"""Its name in a run config."""


class Model(TinyViT):
    """A transformer of two layers and a linear layer over the pixels; the logits are the sum of theirs."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(image_shape, classes, depth=2, patch=4)
        self.direct = nn.Linear(torch.Size(image_shape).numel(), classes)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.direct(images.flatten(1))


def model(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The model for images of this shape."""
    return Model(image_shape, classes)
