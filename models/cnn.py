"""The two-layer CNN that the FedAvg paper trains on MNIST (McMahan et al. 2017, section 3; 1,663,370 parameters)."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class CNN(nn.Module):
    """Images (batch, channels, height, width) of at least 4x4 → logits (batch, classes).

    Two 5x5 convolutions of 32 and 64 channels, padded to keep the size and each followed by 2x2 max pooling, then 512
    hidden units. The image size changes only the number of inputs of the hidden layer.
    """

    def __init__(self, image_shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = image_shape
        if min(height, width) < 4:
            raise ValueError(f"image_shape={image_shape}: two 2x2 poolings need at least 4x4 pixels: use larger images")
        pixels = (height // 4) * (width // 4)
        # The layers of selective layer fine-tuning.
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
                nn.Sequential(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
                nn.Sequential(nn.Flatten(), nn.Linear(64 * pixels, 512), nn.ReLU()),
            ]
        )
        self.head = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return cast(Tensor, self.head(images))
