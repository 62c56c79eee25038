"""The character model of LEAF's Shakespeare (Caldas et al. 2018, arXiv:1812.01097): embedding, two LSTMs, logits."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class CharLSTM(nn.Module):
    """Character ids (batch, characters), 0 … vocabulary - 1 → logits (batch, vocabulary) of the next character."""

    def __init__(self, vocabulary: int, *, embedding: int = 8, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        # The layers of selective layer fine-tuning.
        self.stages = nn.ModuleList(nn.LSTM(inputs, width, batch_first=True) for inputs in (embedding, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        states = self.embedding(characters)
        for stage in self.stages:
            states, _ = stage(states)
        return cast(Tensor, self.head(states[:, -1]))
