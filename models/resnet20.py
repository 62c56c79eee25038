"""ResNet-20 for CIFAR (He et al. 2016, arXiv:1512.03385, section 4.2): 269,722 parameters with 10 classes."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


class ResNet20(nn.Module):
    """Images (batch, channels, height, width) → logits (batch, classes).

    A 3x3 convolution, three stages of three blocks with 16, 32 and 64 channels, and global average pooling. The
    second and third stage halve the image's sides.
    """

    def __init__(self, image_shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(image_shape[0], 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        # The layers of selective layer fine-tuning.
        self.stages = nn.ModuleList(
            nn.Sequential(ResidualBlock(before, width), *(ResidualBlock(width, width) for _ in range(2)))
            for before, width in ((16, 16), (16, 32), (32, 64))
        )
        self.head = nn.Linear(64, classes)
        for module in self.modules():  # He et al. 2015, arXiv:1502.01852, as in the paper
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        maps = F.relu(self.norm(self.stem(images)))
        for stage in self.stages:
            maps = stage(maps)
        return cast(Tensor, self.head(maps.mean(dim=(2, 3))))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut without parameters (the paper's option A).

    If the channels increase, the sides are halved: the shortcut takes every second pixel, and pads channels with zeros.
    """

    def __init__(self, channels: int, new_channels: int) -> None:
        super().__init__()
        self.added, self.stride = new_channels - channels, 2 if new_channels > channels else 1
        self.conv1 = nn.Conv2d(channels, new_channels, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(new_channels)
        self.conv2 = nn.Conv2d(new_channels, new_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(new_channels)

    def forward(self, maps: Tensor) -> Tensor:
        shortcut = F.pad(maps[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        maps = F.relu(self.norm1(self.conv1(maps)))
        return F.relu(self.norm2(self.conv2(maps)) + shortcut)
