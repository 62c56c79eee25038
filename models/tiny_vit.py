"""A small vision transformer (Dosovitskiy et al. 2021, pre-norm, class token) for images of 8x8 to 32x32 pixels."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TinyViT(nn.Module):
    """Images (batch, channels, height, width) → logits (batch, classes).

    `patch` defaults to the largest of 4, 2 and 1 that gives at least 16 patches: 2 for 8x8, 4 for 28x28 and 32x32.
    `fused=True` stacks query, key and value in one `qkv` projection: the same function with the same initial weights.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        classes: int = 10,
        *,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        patch: int | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        channels, height, across = image_shape
        patch = patch or default_patch(height, across)
        if height % patch or across % patch:
            raise ValueError(
                f"image_shape={image_shape} does not divide into patches of {patch} x {patch} pixels: use a multiple"
            )
        if width % heads:
            raise ValueError(f"width={width} does not divide into {heads} heads: use a multiple")
        self.depth = depth
        self.patch_embedding = nn.Conv2d(channels, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position_embedding = nn.Parameter(torch.randn(1, 1 + (height // patch) * (across // patch), width) * 0.02)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads, fused=fused) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(images.shape[0], -1, -1), patches], dim=1) + self.position_embedding
        for block in self.blocks:
            tokens = block(tokens)
        return cast(Tensor, self.head(self.norm(tokens[:, 0])))


class TransformerBlock(nn.Module):
    """(batch, tokens, width) → the same: attention, then a GELU MLP, each with pre-norm and a skip connection.

    The hidden layer of the MLP is `expansion` times as wide as the tokens.
    """

    def __init__(self, width: int, heads: int, *, expansion: int = 4, fused: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, fused=fused)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return cast(Tensor, tokens + self.mlp(self.mlp_norm(tokens)))


class SelfAttention(nn.Module):
    """Multi-head self-attention: (batch, tokens, width) → the same."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused = heads, width // heads, fused
        query, key, value = (nn.Linear(width, width) for _ in range(3))
        if fused:
            self.qkv = nn.utils.skip_init(nn.Linear, width, 3 * width, device=query.weight.device)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self.qkv.weight.copy_(torch.cat([query.weight, key.weight, value.weight]))
                self.qkv.bias.copy_(torch.cat([query.bias, key.bias, value.bias]))
        else:
            self.query, self.key, self.value = query, key, value
        self.projection = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.fused:
            projected = self.qkv(tokens).chunk(3, dim=-1)
        else:
            projected = (self.query(tokens), self.key(tokens), self.value(tokens))
        by_head = [part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in projected]
        mixed = F.scaled_dot_product_attention(*by_head)  # (batch, heads, tokens, head_dim)
        return cast(Tensor, self.projection(mixed.transpose(1, 2).flatten(2)))


def default_patch(height: int, width: int) -> int:
    """Return the largest of 4, 2 and 1 pixels that divides the image into at least 16 patches; 1 if none does."""
    for patch in (4, 2):
        if height % patch == 0 and width % patch == 0 and (height // patch) * (width // patch) >= 16:
            return patch
    return 1
