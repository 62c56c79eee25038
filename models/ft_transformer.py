"""The FT-Transformer of Gorishniy et al. 2021 (arXiv:2106.11959) for the numbers of a table, in a small size.

Every feature is a token: its value times a weight vector of the feature, plus a bias vector of the feature. A class
token is added; transformer blocks follow. Unlike in the paper, there is no dropout, the MLPs are GELU, and the first
block has its normalisation layer.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from tepal.models.tiny_vit import TransformerBlock


class FTTransformer(nn.Module):
    """Numbers (batch, features) → logits (batch, classes)."""

    def __init__(
        self, features: int, classes: int, *, width: int = 32, depth: int = 2, heads: int = 4, expansion: int = 2
    ) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.feature_weight = nn.Parameter(torch.empty(features, width).uniform_(-bound, bound))
        self.feature_bias = nn.Parameter(torch.empty(features, width).uniform_(-bound, bound))
        self.cls_token = nn.Parameter(torch.empty(1, 1, width).uniform_(-bound, bound))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, expansion=expansion) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, numbers: Tensor) -> Tensor:
        of_features = numbers[..., None] * self.feature_weight + self.feature_bias
        tokens = torch.cat([self.cls_token.expand(numbers.shape[0], -1, -1), of_features], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return cast(Tensor, self.head(self.norm(tokens[:, 0])))
