"""A small transformer for the next character: what `char-lstm` is for, with attention."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from tepal.models.tiny_vit import Block


class CharTransformer(nn.Module):
    """Character numbers (batch, characters), 0 … vocabulary - 1 → logits (batch, vocabulary) of the next character."""

    def __init__(self, vocabulary: int, *, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([Block(width, heads, fused=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        states = self.embedding(characters)
        # Counted from the end, where the next character is: it looks alike in windows of any length.
        states = states + positions(*states.shape[1:]).flip(0).to(states)
        for block in self.blocks:
            states = block(states)
        return cast(Tensor, self.head(self.norm(states[:, -1])))


def positions(length: int, width: int) -> Tensor:
    """Sines and cosines of 0 … length - 1 (Vaswani et al. 2017, §3.5), (length, width), of the embedding's size."""
    rates = torch.exp(-math.log(10_000) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return 0.02 * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
