"""Linear attention, the model of FedFrozen's simulation (arXiv 2605.06446, appendix B).

    O = φ(H W_Q) φ(H W_K)ᵀ H W_V,    φ(x) = sigmoid(x) / √dk

With W_Q and W_K fixed the output is linear in W_V, which is what makes the frozen phase a ridge regression.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LinearAttention(nn.Module):
    """(batch, tokens, width) → (batch, tokens, value_size).

    The matrices lie as in the paper, W_Q and W_K: (width, key_size), W_V: (width, value_size), without biases, drawn
    from N(0, 1/width).
    """

    def __init__(self, width: int = 64, key_size: int = 32, value_size: int = 32) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width, key_size) / math.sqrt(width))
        self.key = nn.Parameter(torch.randn(width, key_size) / math.sqrt(width))
        self.value = nn.Parameter(torch.randn(width, value_size) / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens) @ (tokens @ self.value)

    def attention(self, tokens: Tensor) -> Tensor:
        """The attention map φ(H W_Q) φ(H W_K)ᵀ: (batch, tokens, tokens)."""
        root = math.sqrt(self.query.shape[1])
        queries = torch.sigmoid(tokens @ self.query) / root
        keys = torch.sigmoid(tokens @ self.key) / root
        return queries @ keys.transpose(-2, -1)
