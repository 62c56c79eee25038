"""A multilayer perceptron for the numbers of a table."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class MLP(nn.Module):
    """Numbers (batch, features) → logits (batch, classes): hidden layers of `width` ReLU units, and a linear head."""

    def __init__(self, features: int, classes: int, *, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        # The layers of selective layer fine-tuning.
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(width if layer else features, width), nn.ReLU()) for layer in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, numbers: Tensor) -> Tensor:
        for stage in self.stages:
            numbers = stage(numbers)
        return cast(Tensor, self.head(numbers))
