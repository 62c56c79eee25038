"""The recipes of the weights that come with Tepal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepal.tools.pretrain.loop import Schedule


@dataclass(frozen=True)
class ImageRecipe:
    """How an image model's weights are made.

    Args:
        model: Name of the model.
        data: Known data set on which it is trained: <data>.npz or a folder <data>.
        schedule: Epochs and learning rates.
        seed: Seed of the initial weights and of training.
        terms: Terms of the data set.
        normalised_by: `normalise` of the run config; runs that start from the weights set the same.
        reduced: Whether images of 28x28 pixels are reduced to 8x8.
        crop, flip: See `Augmentation`.
        smoothing: See `images.Classification`.
        probe: Data set of a linear probe of the features; "" for none.
    """

    model: str
    data: str
    schedule: Schedule
    seed: int
    terms: str
    normalised_by: str = ""
    reduced: bool = False
    crop: int = 0
    flip: bool = False
    smoothing: float = 0.0
    probe: str = ""

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The data sets that it reads."""
        return (self.data, self.probe) if self.probe else (self.data,)


@dataclass(frozen=True)
class TextRecipe:
    """How a text encoder's weights and its tokenizer are made.

    Args:
        data: Known data sets whose training texts it is trained on: <name>.jsonl.xz, .jsonl or .parquet, or a folder.
        schedule: Epochs and learning rates.
        seed: Seed of the initial weights and of training.
        terms: Terms of the data sets.
        config: The encoder's config.json.
        probe: The one of the data sets whose labels a linear probe of the features predicts.
    """

    data: tuple[str, ...]
    schedule: Schedule
    seed: int
    terms: str
    config: Mapping[str, Any]
    probe: str

    @property
    def length(self) -> int:
        """The largest number of tokens of a text."""
        return int(self.config["max_position_embeddings"])

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return int(self.config["vocab_size"])


Recipe = ImageRecipe | TextRecipe


def _digits(seed: int) -> ImageRecipe:
    return ImageRecipe(
        model="tiny-vit",
        data="mnist",
        schedule=Schedule(epochs=15, learning_rate=2e-3),
        seed=seed,
        terms="MNIST: CC BY-SA 3.0, cite LeCun et al. 1998",
        reduced=True,
        crop=1,
    )


_COMPACT_BERT = {
    "model_type": "bert",
    "vocab_size": 8000,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}

RECIPES: Mapping[str, Recipe] = {
    "compact-bert-news": TextRecipe(
        data=("20newsgroups", "shakespeare", "arc-easy", "arc-challenge", "openbookqa"),
        schedule=Schedule(epochs=12, batch_size=64, learning_rate=1e-3),
        seed=0,
        terms="20 Newsgroups: research use; Shakespeare: public domain; ARC: CC BY-SA 4.0; OpenBookQA: Apache-2.0",
        config=_COMPACT_BERT,
        probe="20newsgroups",
    ),
    "compact-vit-c100": ImageRecipe(
        model="compact-vit",
        data="cifar-100",
        schedule=Schedule(epochs=28, learning_rate=2e-3),
        seed=0,
        terms="CIFAR-100: no formal licence; cite Krizhevsky 2009",
        normalised_by="cifar-100",
        crop=4,
        flip=True,
        probe="cifar-10",
    ),
    "tiny-vit-digits": _digits(0),
    "tiny-vit-digits-2": _digits(1),
    "tiny-vit-digits-3": _digits(2),
}
"""Name of the weights → how they are made."""
