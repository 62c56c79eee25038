"""A small transformer for next-character prediction, the task of `char-lstm`."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from tepal.models.tiny_vit import TransformerBlock


class CharTransformer(nn.Module):
    """Character ids (batch, characters), 0 … vocabulary - 1 → logits (batch, vocabulary) of the next character."""

    def __init__(self, vocabulary: int, *, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads, fused=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        states = self.embedding(characters)
        # Counted from the end, so that the last character has the same position in windows of any length.
        states = states + positions(*states.shape[1:]).flip(0).to(states)
        for block in self.blocks:
            states = block(states)
        return cast(Tensor, self.head(self.norm(states[:, -1])))


def positions(length: int, width: int) -> Tensor:
    """Return sinusoidal positions 0 … length - 1, (length, width), scaled by 0.02 (Vaswani et al. 2017, §3.5)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return 0.02 * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
