"""The blocks of a model: found by family or named by patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tepal.exchange.layout import Layout, Names
from tepal.models.blocks.attention import find_attentions
from tepal.models.blocks.errors import BlocksError, few, name_of
from tepal.models.blocks.layers import prove_counts, stacks_of
from tepal.models.blocks.layout import layout_with, matching
from tepal.models.blocks.parts import numbered, parts_of
from tepal.models.blocks.projections import prove_shapes, refuse_leftovers, roles_of, value_weights


@dataclass(frozen=True)
class Blocks:
    """The parts of a model, as names of entries (see `tepal.exchange.layout`), each in the order of the layout.

    `query_key` and `value` are complete and disjoint: `value` is everything that is not in `query_key`, so norms of
    queries and keys (Qwen3, timm's qk_norm) and relative position biases (T5) too: they are not projections.
    `bias_k` of `nn.MultiheadAttention`, a learned key, counts with the keys. `value_projection`, a part of `value`, is
    the weights (no biases) of the value projections: what FedFrozen's ridge term is about.

    `layers`, `embedding`, `head` and `rest` are complete and disjoint too. Layers go from input to output, the
    encoder's before the decoder's; side by side (CLIP's text and vision towers) in the order of the `state_dict`.
    Embedding is patch, token and position embeddings, with their norm and projection, and class and mask tokens. What
    the last layer's output goes through before the head (final norm, pooler) is rest, in every family but CLIP, where
    the final norm and the projection are head. A head tied to the embedding is embedding.

    `buffers` are the entries that no gradient trains: BatchNorm's statistics and counters, and the like.
    """

    model: str
    layout: Layout
    query_key: Names
    value: Names
    value_projection: Names
    layers: tuple[Names, ...]
    embedding: Names
    head: Names
    buffers: Names
    attentions: int

    @property
    def rest(self) -> Names:
        """Entries in neither a layer nor embedding nor head."""
        taken = {*self.embedding, *self.head, *(name for layer in self.layers for name in layer)}
        return tuple(name for name in self.layout.names if name not in taken)


def find_blocks(
    model: nn.Module,
    *,
    query_key: Sequence[str] | None = None,
    value_projection: Sequence[str] = (),
    layers: Sequence[str] | str | None = None,
    embedding: Sequence[str] | None = None,
    head: Sequence[str] | None = None,
) -> Blocks:
    """The blocks of a model, found by family and proved against its configuration.

    Where no family fits, name them: `query_key` and `value_projection` are glob patterns over entry names, and so are
    `embedding` and `head`; `layers` is one pattern a layer, from input to output ("encoder.3.*"), or a text with one
    `*` that stands for the layer's number ("encoder.*"). Given patterns replace the search and its proof. A model
    without attention has an empty `query_key`; its layers are its stages.

    Raises BlocksError, naming the model, what was found and what was expected: when the number of attention modules
    or the shape of a projection differs from the configuration, when something that looks like a query or key
    projection fits no family, and when a pattern matches nothing.
    """
    attentions = find_attentions(model)
    layout = layout_with(model, attentions)
    if query_key is None:
        if value_projection:
            raise BlocksError(f"{name_of(model)}: value_projection is given without query_key; give both or neither")
        roles = roles_of(model, layout, attentions)
        chosen = {name for name, role in roles.items() if role in "qk"}
        values = value_weights(layout, attentions, roles)
        refuse_leftovers(model, layout, attentions, roles)
        prove_shapes(model, layout, attentions)
        paths = [attention.path for attention in attentions]
    else:
        chosen = matching(model, layout, query_key)
        values = matching(model, layout, value_projection)
        if both := sorted(chosen & values):
            raise BlocksError(f"{name_of(model)}: {few(both)} are in both query_key and value_projection")
        paths = [layout.by_name[name].raw for name in layout.names if name in chosen]
    stacks = stacks_of(model, paths)
    if query_key is None:
        prove_counts(model, stacks, paths)
    named = (numbered(model, layout, layers) if isinstance(layers, str) else layers, embedding, head)
    found_layers, found_embedding, found_head = parts_of(model, layout, stacks, *named)
    return Blocks(
        model=name_of(model),
        layout=layout,
        query_key=_in_order(layout, chosen),
        value=_in_order(layout, set(layout.names) - chosen),
        value_projection=_in_order(layout, values),
        layers=tuple(_in_order(layout, layer) for layer in found_layers),
        embedding=_in_order(layout, found_embedding),
        head=_in_order(layout, found_head),
        buffers=_in_order(layout, _buffers(model, layout)),
        attentions=len(attentions) if query_key is None else 0,
    )


def _buffers(model: nn.Module, layout: Layout) -> set[str]:
    named = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {entry.name for entry in layout.entries if entry.raw in named}


def _in_order(layout: Layout, names: set[str]) -> Names:
    return tuple(name for name in layout.names if name in names)
