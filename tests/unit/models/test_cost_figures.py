"""The papers' cost figures, from the blocks of the models that they name."""

from __future__ import annotations

import pytest
import torch
from families import hf

from tepal.models.blocks import find_blocks
from tepal.strategies.fedfrozen import cost_ratio

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
VISION = {**BASE, "image_size": 224, "patch_size": 32}

# FedFrozen (arXiv 2605.06446), communication relative to FedAvg with 2 warm-up rounds of 10.
PRINTED = {
    "ViT-B/32": (hf("ViTModel", "ViTConfig", **VISION), 0.8712),
    "T5-small": (hf("T5Model", "T5Config", d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8), 0.8752),
    "BART-base": (
        hf("BartModel", "BartConfig", d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
           decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072), 0.8780,
    ),
    "ELECTRA-base": (hf("ElectraModel", "ElectraConfig", embedding_size=768, **BASE), 0.8959),
    "BERT-base": (hf("BertModel", "BertConfig", **BASE), 0.8964),
}  # fmt: skip


@pytest.mark.parametrize("model", PRINTED)
def test_the_value_block_costs_what_fedfrozen_prints(model):
    build, printed = PRINTED[model]
    with torch.device("meta"):
        made = build()
    layout, blocks = find_blocks(made).layout, find_blocks(made)
    trained = {entry.name for entry in layout.entries if entry.raw in dict(made.named_parameters())}
    unique = sum(layout.by_name[name].size for name in trained)
    assert unique == sum(parameter.numel() for parameter in made.parameters())
    frozen = sum(layout.by_name[name].size for name in blocks.query_key)
    # The two warm-up rounds move everything, the eight others all but query and key.
    assert (2 * unique + 8 * (unique - frozen)) / (10 * unique) == pytest.approx(printed, abs=5e-5)


@pytest.mark.parametrize(
    ("model", "both_ways"),
    [("ViT-B/32", 0.87926), ("T5-small", 0.88302), ("BART-base", 0.88563), ("ELECTRA-base", 0.90237),
     ("BERT-base", 0.90290)],
)  # fmt: skip
def test_cost_ratio_is_the_papers_table(model, both_ways):
    build, printed = PRINTED[model]
    with torch.device("meta"):
        made = build()
    assert cost_ratio(made, 2, 10) == pytest.approx(printed, abs=5e-5)
    assert cost_ratio(made, 2, 10, downlink=True) == pytest.approx(both_ways, abs=5e-6)


@pytest.mark.parametrize(("budget", "printed"), [(1, 0.0852), (2, 0.1659)])
def test_layers_and_head_of_clip_cost_what_selective_fine_tuning_uploads(budget, printed):
    with torch.device("meta"):
        clip = hf("CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=512, **VISION)()
    blocks = find_blocks(clip)
    uploaded = [*(name for layer in blocks.layers[:budget] for name in layer), *blocks.head]
    assert blocks.layout.nbytes(uploaded) / blocks.layout.nbytes() == pytest.approx(printed, abs=5e-5)
