"""A compact vision transformer with a convolutional stem (Hassani et al. 2021, arXiv:2104.05704) for small images."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tepal.models.tiny_vit import TransformerBlock


class CompactViT(nn.Module):
    """Images (batch, channels, height, width) → logits (batch, classes).

    Three 3x3 convolutions, of which two halve the image's sides, make the tokens: 64 of an image of 32x32 pixels.
    Pre-norm blocks follow, whose MLPs are twice as wide as the tokens, and the classifier gets the mean of the tokens.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (3, 32, 32),
        classes: int = 10,
        *,
        width: int = 96,
        depth: int = 5,
        heads: int = 4,
    ) -> None:
        super().__init__()
        channels, height, across = image_shape
        if height % 4 or across % 4:
            raise ValueError(f"image_shape={image_shape}: the stem divides both sides by 4: use a multiple")
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width // 3, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width // 3, 2 * width // 3, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width // 3, width, 3, stride=2, padding=1),
        )
        self.position_embedding = nn.Parameter(torch.randn(1, (height // 4) * (across // 4), width) * 0.02)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads, expansion=2) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).mT + self.position_embedding
        for block in self.blocks:
            tokens = block(tokens)
        return cast(Tensor, self.head(self.norm(tokens).mean(dim=1)))
