"""Blocks of every family, on real models, against their configurations and against what the models really compute."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from families import FAMILIES, built
from torch import nn

from tepal.models.blocks import canonical_state, find_blocks, layout_of

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_every_element_of_the_state_dict_is_in_exactly_one_entry(family):
    model = built(family)
    state = model.state_dict()
    with torch.no_grad():
        for tensor in canonical_state(model).values():
            tensor.copy_(torch.zeros_like(tensor))
        for tensor in canonical_state(model).values():
            tensor.add_(1)
    for name, tensor in state.items():
        assert bool((tensor == 1).all()), name


@every_family
def test_blocks_are_complete_and_disjoint(family):
    blocks = find_blocks(built(family))
    names = blocks.layout.names
    assert Counter(blocks.query_key + blocks.value) == Counter(names)
    layers = [name for layer in blocks.layers for name in layer]
    assert Counter([*layers, *blocks.embedding, *blocks.head, *blocks.rest]) == Counter(names)
    assert set(blocks.value_projection) <= set(blocks.value)


@every_family
def test_counts_and_sizes_are_those_of_the_configuration(family):
    expected = FAMILIES[family]
    blocks = find_blocks(built(family))
    assert blocks.attentions == expected.attentions
    assert len(blocks.layers) == expected.layers
    assert sum(blocks.layout.by_name[name].size for name in blocks.query_key) == expected.query_key
    assert len(blocks.value_projection) == expected.attentions
    assert expected.embedding in blocks.embedding
    assert (expected.head in blocks.head) if expected.head else not blocks.head


@every_family
def test_layers_are_alike_and_hold_every_projection(family):
    blocks = find_blocks(built(family))
    inside = {name for layer in blocks.layers for name in layer}
    assert inside.issuperset((*blocks.query_key, *blocks.value_projection))
    assert not inside & set(blocks.embedding + blocks.head + blocks.rest)


@every_family
def test_a_model_on_the_meta_device_has_the_same_layout(family):
    with torch.device("meta"):  # not model.to("meta"), which unties what is tied
        there = FAMILIES[family].build()
    assert layout_of(there) == layout_of(built(family))


@every_family
def test_layout_splits_and_joins_a_raw_state_dict(family):
    model = built(family)
    raw = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    layout = layout_of(model)
    entries = layout.split(raw)
    for name, tensor in canonical_state(model).items():
        assert (entries[name] == tensor.numpy()).all(), name
    joined = layout.join(entries)
    assert list(joined) == list(raw)
    for name, array in joined.items():
        assert (array == raw[name]).all(), name


@every_family
def test_attention_itself_tells_query_and_key_from_value(family, monkeypatch):
    """What each attention call is given proves every entry's role, whatever the entry is called.

    Changing one entry changes the inputs (q, k, v) of some attention calls. In the first call that changes, a query
    or key projection changes q or k and leaves v, a value projection changes v alone, and anything else (a norm, an
    MLP, an embedding) changes v too, or no call at all. Two exceptions: norms of queries and keys; and what lies before
    a cross-attention changes q alone, since k and v come from elsewhere (another number of tokens tells it).
    """
    model, inputs = built(family), FAMILIES[family].inputs()
    calls: list[tuple[torch.Tensor, ...]] = []
    original = nn.functional.scaled_dot_product_attention

    def record(query, key, value, *args, **kwargs):
        calls.append((query.clone(), key.clone(), value.clone()))
        return original(query, key, value, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)

    def run() -> list[tuple[torch.Tensor, ...]]:
        calls.clear()
        with torch.no_grad():
            model(**inputs)
        return list(calls)

    def first_change() -> tuple[str, bool]:
        """Which of q, k, v, and whether the call is a cross-attention."""
        for old, new in zip(before, run(), strict=True):
            if change := "".join(r for r, a, b in zip("qkv", old, new, strict=True) if not torch.equal(a, b)):
                return change, old[0].shape[-2] != old[1].shape[-2]
        return "", False

    blocks = find_blocks(model)
    before = run()
    if not before:
        pytest.skip("this release of its library computes attention without scaled_dot_product_attention")
    assert len(before) == blocks.attentions
    for name, entry in canonical_state(model).items():
        if not entry.is_floating_point():
            continue
        saved = entry.clone()
        with torch.no_grad():
            entry.add_(torch.randn(entry.shape, generator=torch.Generator().manual_seed(2)))
        change, cross = first_change()
        with torch.no_grad():
            entry.copy_(saved)
        if name in blocks.query_key:
            assert change in ("q", "k"), name
        elif name in blocks.value_projection:
            assert change == "v", name
        elif "q_norm" not in name and "k_norm" not in name:
            assert change == "" or "v" in change or (cross and change == "q"), name
    assert first_change() == ("", False)  # everything was put back
