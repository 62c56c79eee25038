"""Linear attention, the model of FedFrozen's simulation (arXiv 2605.06446, appendix B).

    O = φ(H W_Q) φ(H W_K)ᵀ H W_V,    φ(x) = sigmoid(x) / √dk

With W_Q and W_K fixed the output is linear in W_V, so the frozen phase is a ridge regression.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LinearAttention(nn.Module):
    """(batch, tokens, width) → (batch, tokens, value_size); with `mean` over the tokens, (batch, value_size).

    The matrices have the paper's shapes, W_Q and W_K: (width, key_size), W_V: (width, value_size), have no biases, and
    are drawn from N(0, 1/width). With `mean` an input may also be a single token, (batch, width).
    """

    def __init__(self, width: int = 64, key_size: int = 32, value_size: int = 32, *, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.query = nn.Parameter(torch.randn(width, key_size) / math.sqrt(width))
        self.key = nn.Parameter(torch.randn(width, key_size) / math.sqrt(width))
        self.value = nn.Parameter(torch.randn(width, value_size) / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mean and tokens.ndim == 2:
            tokens = tokens[:, None]  # otherwise the examples of a batch would attend to each other
        outputs = self.attention(tokens) @ (tokens @ self.value)
        return outputs.mean(dim=-2) if self.mean else outputs

    def attention(self, tokens: Tensor) -> Tensor:
        """Return the attention map φ(H W_Q) φ(H W_K)ᵀ: (batch, tokens, tokens)."""
        root = math.sqrt(self.query.shape[1])
        queries = torch.sigmoid(tokens @ self.query) / root
        keys = torch.sigmoid(tokens @ self.key) / root
        return queries @ keys.transpose(-2, -1)


def regressor(features: int, outputs: int) -> LinearAttention:
    """Return a model (batch, length, features) or (batch, features) → (batch, outputs)."""
    return LinearAttention(features, value_size=outputs, mean=True)
