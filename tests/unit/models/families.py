"""One tiny real model for each family, with what its configuration says, written down by hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tepal.models.char_lstm import CharLSTM
from tepal.models.cnn import CNN
from tepal.models.resnet20 import ResNet20
from tepal.models.tiny_vit import TinyViT


@dataclass(frozen=True)
class Family:
    """A model's builder and inputs; its number of attention modules and layers; |query_key| in elements."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    attentions: int
    layers: int
    query_key: int
    embedding: str  # an entry that is embedding
    head: str = ""  # an entry that is head


def hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        made = getattr(transformers, config)(**options)
        return getattr(transformers, model)(made)

    return build


def library(module: str, factory: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        pytest.importorskip(module.split(".")[0], reason=f"{module} is not installed")
        return getattr(importlib.import_module(module), factory)(**options)

    return build


def tokens(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": torch.arange(2 * 5).reshape(2, 5) % 7 + 3, **more}


def decoder_tokens() -> dict[str, Any]:
    return {**tokens()(), "decoder_input_ids": torch.arange(2 * 4).reshape(2, 4) % 5 + 3}


def pixels(name: str = "pixel_values", size: int = 8, channels: int = 3) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))}


def projection(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


VIT = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
TEXT = {"vocab_size": 19, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16}
SMALL_TEXT = {**TEXT, "max_position_embeddings": 16, "pad_token_id": 0}
CLIP_TEXT = {**SMALL_TEXT, "num_hidden_layers": 1, "eos_token_id": 2, "bos_token_id": 1}
BART = {
    "vocab_size": 19, "d_model": 12, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16,
}  # fmt: skip
T5 = {"vocab_size": 19, "d_model": 12, "d_kv": 5, "num_heads": 3, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 3}
GPT2 = {"vocab_size": 19, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2}
LLAMA = {**SMALL_TEXT, "num_hidden_layers": 2, "num_key_value_heads": 1, "num_attention_heads": 3}


class TorchEncoder(nn.Module):
    """torch.nn's own transformer with a head, as one writes it from the tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.table(input_ids)).mean(1))


class TorchConvEncoder(nn.Module):
    """Convolutions with batch norm before a transformer, and a batch norm before the head: statistics and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Sequential(nn.Conv2d(3, 12, 4, stride=4, bias=False), nn.BatchNorm2d(12))
        layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.patch_embedding(images).flatten(2).mT).mean(1))


class TorchCrossAttention(nn.Module):
    """nn.MultiheadAttention with keys and values of other sizes than queries, and with a learned key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 12)
        self.attention = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, add_bias_kv=True, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.embed(x), x, x[..., :5], need_weights=False)[0]


square = projection(12, 12)
FAMILIES = {
    "tiny-vit": Family(
        lambda: TinyViT((3, 8, 8), width=12, heads=3), pixels("images"), 2, 2, 4 * square, "cls_token", "head.bias"
    ),
    "tiny-vit fused": Family(
        lambda: TinyViT((3, 8, 8), width=12, heads=3, fused=True),
        pixels("images"), 2, 2, 4 * square, "position_embedding", "head.weight",
    ),
    "nn.TransformerEncoder": Family(TorchEncoder, tokens(), 2, 2, 4 * square, "table.weight", "out.weight"),
    "nn.TransformerEncoder after batch norm": Family(
        TorchConvEncoder, pixels("images"), 2, 2, 4 * square, "patch_embedding.1.num_batches_tracked", "head.0.weight"
    ),
    "nn.MultiheadAttention kdim": Family(
        TorchCrossAttention,
        lambda: {"x": torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1))},
        1, 1, projection(12, 12) + projection(7, 12) + 12, "embed.weight",
    ),
    "torchvision": Family(
        library("torchvision.models", "VisionTransformer", image_size=8, patch_size=4, num_layers=2, num_heads=3,
                hidden_dim=12, mlp_dim=16, num_classes=4),
        pixels("x"), 2, 2, 4 * square, "conv_proj.weight", "heads.head.weight",
    ),
    "timm": Family(
        library("timm.models", "VisionTransformer", img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=3,
                num_classes=4),
        pixels("x"), 2, 2, 4 * square, "patch_embed.proj.weight", "head.weight",
    ),
    "timm qk_norm": Family(
        library("timm.models", "VisionTransformer", img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=3,
                num_classes=4, qk_norm=True, qkv_bias=False),
        pixels("x"), 2, 2, 4 * projection(12, 12, bias=False), "pos_embed", "head.weight",
    ),
    "timm with biases of their own": Family(
        library("timm.models.beit", "Beit", img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=3,
                num_classes=4),
        pixels("x"), 2, 2, 2 * (2 * 144 + 12), "cls_token", "head.weight",
    ),
    "ViT": Family(
        hf("ViTForImageClassification", "ViTConfig", num_hidden_layers=2, **VIT),
        pixels(), 2, 2, 4 * square, "vit.embeddings.cls_token", "classifier.weight",
    ),
    "BERT": Family(
        hf("BertModel", "BertConfig", num_hidden_layers=2, **SMALL_TEXT),
        tokens(), 2, 2, 4 * square, "embeddings.LayerNorm.weight",
    ),
    "BERT for masked words": Family(
        hf("BertForMaskedLM", "BertConfig", num_hidden_layers=2, **SMALL_TEXT),
        tokens(), 2, 2, 4 * square,
        "bert.embeddings.word_embeddings.weight", "cls.predictions.transform.dense.weight",
    ),
    "BERT decoder": Family(
        hf("BertModel", "BertConfig", num_hidden_layers=2, is_decoder=True, add_cross_attention=True, **SMALL_TEXT),
        tokens(encoder_hidden_states=torch.ones(2, 3, 12)), 4, 2, 8 * square, "embeddings.LayerNorm.weight",
    ),
    "RoBERTa": Family(
        hf("RobertaForSequenceClassification", "RobertaConfig", num_hidden_layers=2, **SMALL_TEXT),
        tokens(), 2, 2, 4 * square, "roberta.embeddings.word_embeddings.weight", "classifier.dense.weight",
    ),
    "XLM-R": Family(
        hf("XLMRobertaForSequenceClassification", "XLMRobertaConfig", num_hidden_layers=2, **SMALL_TEXT),
        tokens(), 2, 2, 4 * square, "roberta.embeddings.word_embeddings.weight", "classifier.out_proj.bias",
    ),
    "ELECTRA": Family(
        hf("ElectraForSequenceClassification", "ElectraConfig", num_hidden_layers=2, embedding_size=4, **SMALL_TEXT),
        tokens(), 2, 2, 4 * square, "electra.embeddings_project.weight", "classifier.out_proj.weight",
    ),
    "DistilBERT": Family(
        hf("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=19, dim=12, n_layers=2, n_heads=3,
           hidden_dim=16, max_position_embeddings=16),
        tokens(), 2, 2, 4 * square, "distilbert.embeddings.word_embeddings.weight", "pre_classifier.weight",
    ),
    "CLIP vision": Family(
        hf("CLIPVisionModelWithProjection", "CLIPVisionConfig", num_hidden_layers=2, projection_dim=6, **VIT),
        pixels(), 2, 2, 4 * square, "vision_model.pre_layrnorm.weight", "visual_projection.weight",
    ),
    "CLIP": Family(
        hf("CLIPModel", "CLIPConfig", projection_dim=6, text_config=CLIP_TEXT,
           vision_config={**VIT, "num_hidden_layers": 2}),
        lambda: {**tokens()(), **pixels()()}, 3, 3, 6 * square,
        "text_model.embeddings.token_embedding.weight", "text_model.final_layer_norm.weight",
    ),
    "CLIP for images": Family(
        hf("CLIPForImageClassification", "CLIPConfig", vision_config={**VIT, "num_hidden_layers": 2}),
        pixels(), 2, 2, 4 * square, "vision_model.embeddings.class_embedding", "vision_model.post_layernorm.weight",
    ),
    "T5": Family(
        hf("T5ForConditionalGeneration", "T5Config", **T5),
        decoder_tokens, 2 + 6, 5, 8 * 2 * projection(12, 15, bias=False), "shared.weight",
    ),
    "T5 encoder": Family(
        hf("T5EncoderModel", "T5Config", **T5), tokens(), 2, 2, 4 * projection(12, 15, bias=False), "shared.weight"
    ),
    "BART": Family(
        hf("BartForConditionalGeneration", "BartConfig", **BART),
        decoder_tokens, 2 + 6, 5, 8 * 2 * square, "model.shared.weight", "final_logits_bias",
    ),
    "BART decoder": Family(
        hf("BartForCausalLM", "BartConfig", **BART),
        tokens(encoder_hidden_states=torch.ones(2, 3, 12), use_cache=False),
        6, 3, 6 * 2 * square, "model.decoder.layernorm_embedding.weight",
    ),
    "GPT-2": Family(
        hf("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens(), 2, 2, 4 * square, "transformer.wte.weight"
    ),
    "GPT-2 with cross-attention": Family(
        hf("GPT2Model", "GPT2Config", add_cross_attention=True, **GPT2),
        tokens(encoder_hidden_states=torch.ones(2, 3, 12)), 4, 2, 8 * square, "wpe.weight",
    ),
    "LLaMA": Family(
        hf("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        tokens(), 2, 2, 2 * (12 * 12 + 12 * 4), "model.embed_tokens.weight", "lm_head.weight",
    ),
    "Mistral": Family(
        hf("MistralForCausalLM", "MistralConfig", **LLAMA),
        tokens(), 2, 2, 2 * (12 * 12 + 12 * 4), "model.embed_tokens.weight", "lm_head.weight",
    ),
    "Qwen2": Family(
        hf("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
        tokens(), 2, 2, 2 * (projection(12, 12) + projection(12, 4)), "model.embed_tokens.weight", "lm_head.weight",
    ),
    "Qwen3": Family(
        hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=6, **LLAMA),
        tokens(), 2, 2, 2 * (12 * 18 + 12 * 6), "model.embed_tokens.weight", "lm_head.weight",
    ),
}  # fmt: skip

WITHOUT_ATTENTION = {
    "CNN": Family(lambda: CNN((3, 8, 8), 4), pixels("images"), 0, 3, 0, "", "head.weight"),
    "ResNet-20": Family(lambda: ResNet20((3, 8, 8), 4), pixels("images"), 0, 3, 0, "", "head.weight"),
    "LSTM": Family(
        lambda: CharLSTM(19, embedding=4, width=12),
        lambda: {"characters": tokens()()["input_ids"]}, 0, 2, 0, "embedding.weight", "head.weight",
    ),
}  # fmt: skip


MODELS = {**FAMILIES, **WITHOUT_ATTENTION}


def built(name: str, seed: int = 0) -> nn.Module:
    """The family's model, with random weights and biases everywhere (a zero bias hides what it does)."""
    torch.manual_seed(seed)
    model = MODELS[name].build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
