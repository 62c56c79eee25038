"""What `models.blocks` refuses, what one may declare, and the corner cases of entries."""

from __future__ import annotations

import pytest
import torch
from families import BART, LLAMA, SMALL_TEXT, TorchEncoder, hf, library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tepal.models.blocks import BlocksError, canonical_state, find_blocks, layout_of
from tepal.models.tiny_vit import TinyViT

# --- fused projections -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(heads=st.integers(1, 4), size=st.integers(1, 5), depth=st.integers(1, 3), fused=st.booleans())
def test_query_key_is_two_square_projections_a_block_at_any_size(heads, size, depth, fused):
    width = heads * size
    model = TinyViT((1, 8, 8), 3, width=width, depth=depth, heads=heads, fused=fused)
    blocks = find_blocks(model)
    assert sum(blocks.layout.by_name[name].size for name in blocks.query_key) == depth * 2 * (width * width + width)
    assert len(blocks.layers) == blocks.attentions == depth
    assert blocks.layout.nbytes() == 4 * sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 4),
    kdim=st.none() | st.integers(1, 9),
    vdim=st.none() | st.integers(1, 9),
    bias=st.booleans(),
    bias_kv=st.booleans(),
)
def test_torch_attention_is_split_whatever_its_options(heads, size, kdim, vdim, bias, bias_kv):
    e = heads * size
    blocks = find_blocks(nn.MultiheadAttention(e, heads, bias=bias, kdim=kdim, vdim=vdim, add_bias_kv=bias_kv))
    expected = e * e + e * (kdim or e) + (2 * e if bias else 0) + (e if bias_kv else 0)
    assert sum(blocks.layout.by_name[name].size for name in blocks.query_key) == expected
    (values,) = blocks.value_projection
    assert blocks.layout.by_name[values].shape == (e, vdim or e)


def test_fused_entries_are_views_that_load_the_model():
    attention = nn.MultiheadAttention(4, 2)
    state = canonical_state(attention)
    state["in_proj_weight:k"].fill_(7)
    state["in_proj_bias:v"].fill_(5)
    rows = attention.in_proj_weight.detach()
    assert bool((rows[4:8] == 7).all()) and not bool((rows[:4] == 7).any()) and not bool((rows[8:] == 7).any())
    assert attention.in_proj_bias.tolist() == [0] * 8 + [5] * 4
    assert not state["in_proj_weight:k"].requires_grad


def test_gpt2_query_is_what_its_own_forward_computes():
    gpt2 = hf("GPT2Model", "GPT2Config", n_embd=12, n_layer=1, n_head=3, vocab_size=19)()
    state, hidden = canonical_state(gpt2), torch.randn(2, 5, 12)
    fused = gpt2.h[0].attn.c_attn(hidden)
    for role, part in zip("qkv", fused.split(12, dim=-1), strict=True):
        ours = hidden @ state[f"h.0.attn.c_attn.weight:{role}"] + state[f"h.0.attn.c_attn.bias:{role}"]
        torch.testing.assert_close(ours, part)


def test_a_fused_and_a_split_model_of_one_seed_are_the_same_function():
    def make(fused: bool) -> TinyViT:
        torch.manual_seed(3)
        return TinyViT((1, 8, 8), 4, fused=fused)

    images = torch.randn(2, 1, 8, 8)
    fused, split = make(True), make(False)
    torch.testing.assert_close(fused(images), split(images))
    roles = {"q": "query", "k": "key", "v": "value"}
    for name, tensor in canonical_state(fused).items():
        raw, _, role = name.partition(":")
        assert torch.equal(tensor, canonical_state(split)[raw.replace("qkv", roles[role]) if role else name]), name


class Grouped(nn.Module):
    def __init__(self, rows: int, declared: dict[str, int]) -> None:
        super().__init__()
        vars(self).update(declared)
        self.qkv = nn.Linear(64, rows)


@pytest.mark.parametrize("more", [{"num_heads": 4}, {"n_head": 4}, {"num_heads": 4, "head_dim": 16}])
@pytest.mark.parametrize("shared", ["num_kv_heads", "n_kv_heads", "num_key_value_heads"])
def test_fewer_heads_of_keys_and_values_have_fewer_rows(more, shared):
    layout = layout_of(Grouped(96, {**more, shared: 1}))
    assert [entry.shape for entry in layout.entries[:3]] == [(64, 64), (16, 64), (16, 64)]
    assert [entry.shape for entry in layout.entries[3:]] == [(64,), (16,), (16,)]


@pytest.mark.parametrize("declared", [{}, {"num_heads": 4}, {"num_heads": 4, "num_kv_heads": 4}, {"num_kv_heads": 1}])
def test_a_fused_projection_is_thirds_if_its_module_does_not_say_otherwise(declared):
    assert {entry.shape[0] for entry in layout_of(Grouped(192, declared)).entries} == {64}


@pytest.mark.parametrize(("rows", "size"), [(97, {}), (96, {"head_dim": 32})])
def test_rows_that_do_not_fit_the_heads_are_refused(rows, size):
    with pytest.raises(BlocksError, match=r"in 9[67] rows.* 4 heads and 1 for .*num_heads, num_kv_heads and"):
        layout_of(Grouped(rows, {"num_heads": 4, "num_kv_heads": 1, **size}))


# --- shared tensors --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)
        self.table = nn.Embedding(5, 3)
        self.table.weight = self.head.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_tensor_is_one_entry_and_embedding_even_where_the_head_comes_first(device):
    with torch.device(device):
        blocks = find_blocks(Tied())
    assert blocks.layout.names == ("head.weight", "head.bias")
    assert [(raw.name, raw.same_as) for raw in blocks.layout.raw][-1] == ("table.weight", "head.weight")
    assert blocks.embedding == ("head.weight",) and blocks.head == ("head.bias",)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_on_one_storage_are_apart_unless_they_are_the_same(device):
    flat = torch.zeros(6, device=device)
    model = nn.Module()
    model.register_buffer("low", flat[:3])
    model.register_buffer("high", flat[3:])
    model.register_buffer("again", flat[:3])
    assert layout_of(model).names == ("low", "high")
    model.register_buffer("across", flat[2:4])
    with pytest.raises(BlocksError, match=r"low and across overlap|across and high overlap"):
        layout_of(model)


def test_entries_keep_integer_and_half_precision_types():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(torch.bfloat16)
    dtypes = {entry.name: entry.dtype for entry in layout_of(model).entries}
    assert dtypes["0.weight"] == "bfloat16" and dtypes["1.num_batches_tracked"] == "int64"


def test_colliding_names_are_refused():
    class Colliding(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_parameter("in_proj_weight:q", nn.Parameter(torch.zeros(2)))

    with pytest.raises(BlocksError, match="ends in ':q', ':k' or ':v'"):
        layout_of(Colliding())


# --- refusals --------------------------------------------------------------------------------------------------------


def bert(**options):
    return hf("BertModel", "BertConfig", num_hidden_layers=3, **SMALL_TEXT, **options)()


def test_fewer_blocks_than_configured_are_refused():
    model = bert()
    del model.encoder.layer[1]
    with pytest.raises(BlocksError, match=r"BertModel \(bert\): found 2 .* expected 3: .*num_hidden_layers=3"):
        find_blocks(model)


def test_a_block_without_its_attention_is_refused():
    model = TorchEncoder()
    model.encoder.layers[1].self_attn = nn.Identity()
    with pytest.raises(BlocksError, match=r"TorchEncoder: found 1 .*encoder.layers \(1, 0\), expected 2"):
        find_blocks(model)


def test_a_decoder_without_its_cross_attention_is_refused():
    model = hf("BartModel", "BartConfig", **BART)()
    for layer in model.decoder.layers:
        layer.encoder_attn = nn.Identity()
    with pytest.raises(BlocksError, match=r"found 3 .*decoder.layers \(1, 1, 1\), expected 6: .*decoder_layers=3"):
        find_blocks(model)


def test_a_projection_of_another_size_than_configured_is_refused():
    model = hf("LlamaModel", "LlamaConfig", **LLAMA)()
    model.layers[1].self_attn.k_proj = nn.Linear(12, 12, bias=False)
    with pytest.raises(BlocksError, match=r"layers.1.self_attn.k_proj.weight has 12 output features, expected 4"):
        find_blocks(model)


def test_a_query_that_reads_another_size_than_configured_is_refused():
    model = bert()
    model.encoder.layer[0].attention.self.query = nn.Linear(16, 12)
    with pytest.raises(BlocksError, match=r"query.weight has 16 input features, expected 12"):
        find_blocks(model)


def test_configured_layers_that_lie_in_no_list_are_refused():
    model = bert()
    model.encoder.layer = nn.ModuleDict({"only": model.encoder.layer[0]})
    with pytest.raises(BlocksError, match=r"says num_hidden_layers=3, but no list .*\(encoder.layer.only.attention"):
        find_blocks(model)


def test_a_query_projection_that_holds_a_gate_as_well_is_refused():
    model = bert()
    model.encoder.layer[1].attention.self.query = nn.Linear(12, 24)
    with pytest.raises(BlocksError, match=r"layer.1.*query.weight has 24 output features, expected 12"):
        find_blocks(model)


def test_a_fused_projection_that_does_not_divide_is_refused():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 13)

    with pytest.raises(BlocksError, match=r"Attention: qkv.weight has q, k, v in 13 rows; expected a multiple of 3"):
        layout_of(Attention())


class Unknown(nn.Module):
    """Attention with names that no family has."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))


@pytest.mark.parametrize(
    "name",
    ["to_q", "Wq", "W_K", "query_proj", "query_key_value", "qk", "c_attn", "to_kv", "q_a_proj", "key_layer", "qkvs",
     "key_global", "layout_query", "w2e_query"],
)  # fmt: skip
def test_what_looks_like_query_or_key_but_fits_no_family_is_refused(name):
    with pytest.raises(BlocksError, match=rf"attn.{name}.weight.* fit no known family; declare it .*query_key="):
        find_blocks(nn.ModuleDict({"attn": Unknown(name), "head": nn.Linear(4, 2)}))


def test_longformers_global_projections_are_query_and_key_and_lilts_of_the_layout_are_refused():
    text = {**SMALL_TEXT, "num_hidden_layers": 2}
    model = hf("LongformerForSequenceClassification", "LongformerConfig", attention_window=4, **text)()
    blocks = find_blocks(model)
    projections = {f"{role}{of}.{part}" for role in ("query", "key") for of in ("", "_global")
                   for part in ("weight", "bias")}  # fmt: skip
    attention = "longformer.encoder.layer.{}.attention.self.{}"
    assert set(blocks.query_key) == {attention.format(layer, name) for layer in (0, 1) for name in projections}
    assert {attention.format(layer, "value_global.weight") for layer in (0, 1)} <= set(blocks.value)
    lilt = hf("LiltForSequenceClassification", "LiltConfig", **{**text, "hidden_size": 24}, channel_shrink_ratio=2)()
    with pytest.raises(BlocksError, match=r"self\.layout_query\.weight.* look like query or key projections"):
        find_blocks(lilt)


def test_attention_by_class_name_only_is_refused_beside_attention_that_is_known():
    class OddAttention(Unknown):
        pass

    model = nn.Sequential(nn.MultiheadAttention(4, 2), OddAttention("first", "second"))
    with pytest.raises(BlocksError, match=r"1 \(OddAttention\) looks like attention"):
        find_blocks(model)


@pytest.mark.parametrize("attribute", ["head_first", "key_dim"])
def test_a_projection_fused_head_by_head_is_not_taken_for_timms(attribute):
    model = Unknown("proj")
    model.qkv = nn.Linear(4, 12)
    setattr(model, attribute, 1)
    with pytest.raises(BlocksError, match=r"qkv\.weight"):
        find_blocks(model)


def test_an_adapter_on_a_fused_projection_is_refused_and_on_a_plain_one_taken_along():
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 12)
            self.lora_A = nn.Linear(12, 2, bias=False)

    model = TinyViT((1, 8, 8), width=12)
    model.blocks[0].attention.query = Adapted()
    assert "blocks.0.attention.query.lora_A.weight" in find_blocks(model).query_key
    fused = TinyViT((1, 8, 8), width=12, fused=True)
    fused.blocks[0].attention.qkv.lora_A = nn.Linear(12, 2)
    with pytest.raises(BlocksError, match="expected only weight and bias"):
        find_blocks(fused)


def test_a_tensor_that_is_both_key_and_value_is_refused():
    model = TinyViT((1, 8, 8), width=12)
    model.blocks[0].attention.value = model.blocks[0].attention.key
    with pytest.raises(BlocksError, match="both a value projection and a query or key"):
        find_blocks(model)


# --- declarations ----------------------------------------------------------------------------------------------------


def test_a_class_can_declare_its_projections():
    class Mine(nn.Module):
        tepal_projections = {"Wq": "q", "wkv": "kv"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.Wq, self.wkv = nn.Linear(4, 4), nn.Linear(4, 8)

    blocks = find_blocks(nn.Sequential(Mine(), Mine()))
    fused = ("wkv.weight:k", "wkv.weight:v", "wkv.bias:k", "wkv.bias:v")
    assert blocks.layers[1] == tuple(f"1.{name}" for name in ("Wq.weight", "Wq.bias", *fused))
    assert blocks.value_projection == ("0.wkv.weight:v", "1.wkv.weight:v")
    Mine.tepal_projections = {"wq": "q"}
    with pytest.raises(BlocksError, match="tepal_projections names wq, which the module lacks"):
        find_blocks(Mine())


def test_patterns_name_what_no_family_knows():
    model = nn.ModuleDict({"a": Unknown("to_q", "to_k", "to_v"), "b": Unknown("to_q", "to_k", "to_v")})
    blocks = find_blocks(
        model, query_key=["*.to_[qk].*"], value_projection=["*.to_v.weight"], layers=["a.*", "b.to_q.*"]
    )
    assert len(blocks.query_key) == 8 and len(blocks.value) == 4
    assert blocks.value_projection == ("a.to_v.weight", "b.to_v.weight")
    assert [len(layer) for layer in blocks.layers] == [6, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_key": ["*.nothing"]}, r"no entry matches '\*.nothing'"),
        ({"query_key": ["*.to_q.*"], "value_projection": ["*"]}, "are in both"),
        ({"value_projection": ["*.to_v.*"]}, "without query_key"),
        ({"query_key": ["*.to_q.*"], "layers": ["a.*", "a.to_q.*"]}, "match the same entries"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(options, message):
    model = nn.ModuleDict({"a": Unknown("to_q", "to_v") if "query_key" in options else Unknown("to_v")})
    with pytest.raises(BlocksError, match=message):
        find_blocks(model, **options)


# --- layers ----------------------------------------------------------------------------------------------------------


def test_the_encoders_layers_come_before_the_decoders_whatever_was_registered_first():
    torch_model = nn.Transformer(4, 2, 2, 1, dim_feedforward=4, batch_first=True)
    swapped = nn.ModuleDict({"decoder": torch_model.decoder, "encoder": torch_model.encoder})
    layers = find_blocks(swapped).layers
    assert [".".join(layer[0].split(".")[:3]) for layer in layers] == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
    ]


def test_several_attentions_listed_within_a_block_are_one_layer_and_listed_alone_are_layers():
    def pair() -> nn.ModuleList:
        return nn.ModuleList([nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)])

    blocks = nn.ModuleList([nn.ModuleDict({"attentions": pair(), "mlp": nn.Linear(4, 4)}) for _ in range(3)])
    assert [len(layer) for layer in find_blocks(blocks).layers] == [2 * 8 + 2] * 3
    assert [len(layer) for layer in find_blocks(nn.ModuleDict({"all": pair(), "head": nn.Linear(4, 2)})).layers] == [
        8,
        8,
    ]


# --- networks without attention --------------------------------------------------------------------------------------


def test_a_plain_network_has_its_parameterised_children_as_stages():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 4)
    )
    blocks = find_blocks(model)
    assert blocks.query_key == () and blocks.attentions == 0 and blocks.value == blocks.layout.names
    assert [{name.split(".")[0] for name in layer} for layer in blocks.layers] == [{"0", "1"}, {"3"}]
    assert blocks.head == ("5.weight", "5.bias")


@pytest.mark.parametrize(
    ("build", "stages"),
    [
        (library("torchvision.models", "resnet18", weights=None), 4),
        (library("timm", "create_model", model_name="resnet10t", pretrained=False), 4),
        (library("timm", "create_model", model_name="convnext_atto", pretrained=False), 4),
        (library("torchvision.models", "vgg11", weights=None), 8),
    ],
    ids=["ResNet-18", "timm ResNet", "ConvNeXt", "VGG-11"],
)
def test_convolutional_networks_have_their_stages(build, stages):
    with torch.device("meta"):
        blocks = find_blocks(build())
    assert blocks.query_key == () and len(blocks.layers) == stages
    assert blocks.head and all(blocks.layers)


def test_a_gate_called_fc_within_a_block_is_no_head_and_neither_is_a_pooler():
    gated = nn.ModuleDict({"conv": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
    model = nn.ModuleDict({"body": nn.ModuleList([gated]), "pooler": nn.Linear(2, 2)})
    assert find_blocks(model).head == ()
    model["fc"] = nn.Linear(2, 2)
    assert find_blocks(model).head == ("fc.weight", "fc.bias")


def test_a_single_matrix_is_one_layer():
    assert find_blocks(nn.Linear(2, 2)).layers == (("weight", "bias"),)


def test_a_state_space_model_is_no_attention():
    blocks = find_blocks(nn.Sequential(Unknown("in_proj", "out_proj"), Unknown("in_proj", "out_proj")))
    assert blocks.query_key == () and len(blocks.layers) == 2


# --- named by patterns ------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Attention by names that no family has, in blocks that are no list."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(4, 6)
        for number in (0, 2, 10):
            self.add_module(f"block{number}", nn.ModuleDict({key: nn.Linear(6, 6) for key in ("ask", "tell", "mean")}))
        self.norm = nn.LayerNorm(6)
        self.verdict = nn.Linear(6, 2)


def test_layers_embedding_and_head_are_what_patterns_say():
    blocks = find_blocks(
        Odd(), query_key=["*.ask.*", "*.tell.*"], layers="block*", embedding=["patches.*"], head=["norm.*", "verdict.*"]
    )
    assert [{name.split(".")[0] for name in layer} for layer in blocks.layers] == [{"block0"}, {"block2"}, {"block10"}]
    assert all(len(layer) == 6 for layer in blocks.layers) and len(blocks.query_key) == 3 * 2 * 2
    assert blocks.embedding == ("patches.weight", "patches.bias") and len(blocks.head) == 4 and blocks.rest == ()


def test_what_is_named_goes_before_what_is_found_and_the_rest_is_found_as_ever():
    model = TinyViT((1, 8, 8))
    found, named = find_blocks(model), find_blocks(model, head=["norm.*", "head.*", "blocks.1.mlp.*"])
    assert set(named.head) == set(found.head) | {"norm.weight", "norm.bias"} | {
        name for name in found.layers[1] if ".mlp." in name
    }
    assert named.layers[0] == found.layers[0] and not set(named.layers[1]) & set(named.head)
    assert (named.query_key, named.embedding, named.attentions) == (found.query_key, found.embedding, found.attentions)
    assert find_blocks(model, layers="blocks.*").layers == found.layers
    fused = TinyViT((1, 8, 8), fused=True)
    assert find_blocks(fused, layers="blocks.*") == find_blocks(fused)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"layers": "stage*"}, r"no entry has a number in the place of \* in layers=.stage\*.; entries are patches"),
        ({"layers": "block2"}, r"layers='block2': write exactly one \*"),
        ({"layers": "*.*"}, r"write exactly one \*"),
        ({"embedding": ["tokens.*"]}, r"no entry matches 'tokens\.\*'; entries are patches.weight, .* and 20 more"),
        ({"head": ["block2.*"], "layers": "block*"}, "two patterns of layers=.* match the same entries"),
    ],
)
def test_patterns_that_match_nothing_are_refused(named, said):
    with pytest.raises(BlocksError, match=said):
        find_blocks(Odd(), **named)
