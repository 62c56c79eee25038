"""The registered models, each with the configuration its library needs to build it. No model library is imported here.

To add a model of transformers, copy the keys of its config.json on the hub that differ from the defaults of the
library's configuration, and vocab_size, pad_token_id and max_position_embeddings, with which a tokenizer and
text-length are compared. To add one of torchvision, add the arguments that set its size. The image size and the number
of classes are given when a model is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGES = "image-classification"  # (batch, channels, height, width) → (batch, classes)
SEQUENCES = "sequence-regression"  # numbers (batch, length, features) or (batch, features) → (batch, outputs)
TABLES = "table-classification"  # numbers (batch, features) → (batch, classes)
TEXTS = "sequence-classification"  # token ids (batch, tokens) → (batch, classes)
CHARACTERS = "next-character"  # character ids (batch, characters) → (batch, vocabulary), of the next character
CHOICES = "multiple-choice"  # token ids (batch, tokens) → (batch, tokens, vocabulary): a causal language model
ANYTHING = "anything"  # a custom model: its function decides

TRANSFORMERS = "transformers"
CONFIG = "config.json"


class ModelError(ValueError):
    """Raised for a model that is unknown, cannot be built here, or does not fit its data or pretrained weights."""


@dataclass(frozen=True)
class Model:
    """The kind of a model, and how it is built.

    kind: one of the constants above.
    where: "module:callable", or `TRANSFORMERS` for a model that transformers builds from a configuration.
    config: arguments of the callable, or the content of a config.json.
    """

    kind: str
    where: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The package that must be installed: "tepal", "torchvision", "transformers", or a custom model's."""
        return self.where.partition(":")[0].partition(".")[0]


def _torchvision(function: str) -> Model:
    return Model(IMAGES, f"torchvision.models:{function}")


def _vision_transformer(patch: int, *, width: int, heads: int) -> Model:
    """Return a ViT whose MLP is four times as wide as its tokens (Dosovitskiy et al. 2021, table 1)."""
    size = {"patch_size": patch, "hidden_dim": width, "mlp_dim": 4 * width, "num_heads": heads, "num_layers": 12}
    return Model(IMAGES, "torchvision.models:VisionTransformer", size)


def _transformers(kind: str, model_type: str, **config: Any) -> Model:
    return Model(kind, TRANSFORMERS, {"model_type": model_type, **config})


def _sizes(width: int, heads: int, mlp: int, blocks: int = 12) -> dict[str, int]:
    """Return an encoder's sizes under the names that most configurations use."""
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "num_hidden_layers": blocks,
    }


_BERT = {"vocab_size": 30522, "max_position_embeddings": 512, "pad_token_id": 0}
_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}

MODELS: Mapping[str, Model] = {
    "char-lstm": Model(CHARACTERS, "tepal.models.char_lstm:CharLSTM"),
    "char-transformer": Model(CHARACTERS, "tepal.models.char_transformer:CharTransformer"),
    "cnn": Model(IMAGES, "tepal.models.cnn:CNN"),
    "compact-vit": Model(IMAGES, "tepal.models.compact_vit:CompactViT"),
    "ft-transformer": Model(TABLES, "tepal.models.ft_transformer:FTTransformer"),
    "linear-attention": Model(SEQUENCES, "tepal.models.linear_attention:regressor"),
    "mlp": Model(TABLES, "tepal.models.mlp:MLP"),
    "resnet-20": Model(IMAGES, "tepal.models.resnet20:ResNet20"),
    "tiny-vit": Model(IMAGES, "tepal.models.tiny_vit:TinyViT"),
    # torchvision
    "mobilenet-v2": _torchvision("mobilenet_v2"),
    "resnet-18": _torchvision("resnet18"),
    "resnet-50": _torchvision("resnet50"),
    "shufflenet-v2": _torchvision("shufflenet_v2_x1_0"),
    "vit-b-16": _vision_transformer(16, width=768, heads=12),
    "vit-b-32": _vision_transformer(32, width=768, heads=12),
    "vit-small-16": _vision_transformer(16, width=384, heads=6),
    # transformers, images
    "facebook/deit-small-patch16-224": _transformers(IMAGES, "vit", **_sizes(384, 6, 1536)),
    "google/vit-base-patch16-224": _transformers(IMAGES, "vit"),
    "microsoft/swin-tiny-patch4-window7-224": _transformers(IMAGES, "swin"),
    "openai/clip-vit-base-patch32": _transformers(IMAGES, "clip"),
    # transformers, texts
    "bert-base-uncased": _transformers(TEXTS, "bert", **_BERT),
    "distilbert-base-uncased": _transformers(TEXTS, "distilbert", **_BERT),
    "facebook/bart-base": _transformers(
        TEXTS,
        "bart",
        vocab_size=50265,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        attention_dropout=0.1,
        activation_dropout=0.1,
        max_position_embeddings=1024,
        pad_token_id=1,
    ),
    "google/electra-small-discriminator": _transformers(TEXTS, "electra", **_BERT),
    "roberta-base": _transformers(TEXTS, "roberta", vocab_size=50265, **_ROBERTA),
    "t5-small": _transformers(TEXTS, "t5", vocab_size=32128, pad_token_id=0, decoder_start_token_id=0),
    "xlm-roberta-base": _transformers(TEXTS, "xlm-roberta", vocab_size=250002, **_ROBERTA),
    # transformers, multiple choice
    "Qwen/Qwen2.5-0.5B": _transformers(
        CHOICES,
        "qwen2",
        vocab_size=151936,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151643,
        **_sizes(896, 14, 4864, blocks=24),
    ),
    "meta-llama/Llama-3.2-1B": _transformers(
        CHOICES,
        "llama",
        vocab_size=128256,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_ROPE,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
        **_sizes(2048, 32, 8192, blocks=16),
    ),
}

# Ending of an architecture's class name in transformers → kind of model.
_KIND_BY_ENDING = {
    "ForImageClassification": IMAGES,
    "ForSequenceClassification": TEXTS,
    "ForCausalLM": CHOICES,
    "LMHeadModel": CHOICES,
}


def model_in(folder: Path) -> Model:
    """Return the model that a directory's config.json describes.

    Its kind follows from `architectures`; if they name a base model, or one with another head, it is the kind of the
    registered models of its family.

    Raises:
        ModelError: the file is not a configuration of transformers, or its kind cannot be derived.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}): copy it again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{file}: has no model_type; give a directory written by save_pretrained of transformers")
    architectures = [str(name) for name in config.get("architectures") or ()]
    family = {model.config.get("model_type"): model.kind for model in MODELS.values()}
    kinds = [kind for name in architectures for ending, kind in _KIND_BY_ENDING.items() if name.endswith(ending)]
    kind = next(iter(kinds), family.get(config["model_type"]))
    if kind is None:
        raise ModelError(
            f"{file}: architectures={architectures} and model_type={config['model_type']!r} do not determine the "
            f"kind of model; name an architecture that ends in one of {', '.join(_KIND_BY_ENDING)}"
        )
    return Model(kind, TRANSFORMERS, config)
