"""Small networks for experiments whose papers name none, or one that is too large for a small machine.

A run config names them by their path, such as `tepal.tools.reproduce.networks:lenet`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tepal.models.char_lstm import CharLSTM
from tepal.models.libraries import import_transformers
from tepal.models.tiny_vit import TinyViT

LENET = f"{__name__}:lenet"
VIT = f"{__name__}:vit"
LSTM = f"{__name__}:lstm"
VOCABULARY = 2000
"""Tokens of the small text model; more of them would take most of its training time."""


def lenet(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """LeNet-5's layers (LeCun et al. 1998) with ReLU and max pooling: images of at least 16x16 → logits."""
    channels, height, width = image_shape
    pixels = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    if min(height, width) < 16:
        raise ValueError(f"image_shape={image_shape}: two 5x5 convolutions and poolings need at least 16x16 pixels")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * pixels, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


def vit(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Six layers of width 64 over patches of 8x8 pixels: 314,186 parameters for images of
    3x32x32 and 10 classes.
    """
    return TinyViT(image_shape, classes, depth=6, patch=8)


def lstm(vocabulary: int) -> nn.Module:
    """`char-lstm` with half its width."""
    return CharLSTM(vocabulary, width=128)


def write_text_model(folder: Path, texts: Iterable[str], sizes: Mapping[str, Any]) -> None:
    """Write a directory that a run config can name as its `model`: a word-piece tokenizer and a config.json.

    Args:
        folder: the directory.
        texts: what the tokenizer is trained on.
        sizes: entries of config.json; by default a BERT of at most 64 tokens.
    """
    import tokenizers

    trained = tokenizers.BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    tokenizer = import_transformers(folder.name).PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    bert = {"model_type": "bert", "max_position_embeddings": 64}
    config = {**bert, "vocab_size": VOCABULARY, "pad_token_id": 0, **sizes}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
