"""The blocks of a model: found by family or named by patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tepal.exchange.layout import Layout, Names
from tepal.models.blocks.attention import find_attentions
from tepal.models.blocks.errors import BlocksError, few, name_of
from tepal.models.blocks.layers import check_counts, stacks_of
from tepal.models.blocks.layout import layout_with, matching
from tepal.models.blocks.parts import numbered, parts_of
from tepal.models.blocks.projections import check_complete, check_shapes, roles_of, value_weights


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, as names of entries (see `tepal.exchange.layout`), each in the order of the layout.

    `query_key` and `value` are disjoint and together complete: `value` is everything that is not in `query_key`,
    including norms of queries and keys (Qwen3, timm's qk_norm) and relative position biases (T5), which are not
    projections. `bias_k` of `nn.MultiheadAttention`, a learned key, is in `query_key`. `value_projection`, a subset of
    `value`, has the weights (without biases) of the value projections, to which FedFrozen's ridge term applies.

    `layers`, `embedding`, `head` and `rest` are disjoint and together complete, too. Layers are ordered from input to
    output, the encoder's before the decoder's; parallel towers (CLIP's text and vision) in the order of the
    `state_dict`. `embedding` has patch, token and position embeddings, with their norm and projection, and class and
    mask tokens. Modules between the last layer and the head (final norm, pooler) are `rest`, in every family except
    CLIP, whose final norm and projection are `head`. A head tied to the embedding is `embedding`.

    `buffers` are the entries without gradient, such as BatchNorm's statistics and counters.
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
        """Entries that are in no layer, and neither in the embedding nor in the head."""
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
    """Find the blocks of a model by its family, and verify them against its configuration.

    For a model of no known family, give glob patterns over entry names; they replace the search and the verification.
    A model without attention has an empty `query_key`; its layers are its stages.

    Args:
        model: any module, also on the meta device.
        query_key: patterns of the query and key projections.
        value_projection: patterns of the value projections' weights; needs `query_key`.
        layers: one pattern per layer, from input to output ("encoder.3.*"), or a text with one `*` in the place of the
            layer's number ("encoder.*").
        embedding: patterns of the embedding.
        head: patterns of the head.

    Raises:
        BlocksError: the number of attention modules or the shape of a projection differs from the configuration; an
            entry looks like a query or key projection but fits no family; or a pattern matches nothing. The message
            names the model, what was found and what was expected.
    """
    attentions = find_attentions(model)
    layout = layout_with(model, attentions)
    if query_key is None:
        if value_projection:
            raise BlocksError(f"{name_of(model)}: value_projection is given without query_key; give both or neither")
        roles = roles_of(model, layout, attentions)
        chosen = {name for name, role in roles.items() if role in "qk"}
        values = value_weights(layout, attentions, roles)
        check_complete(model, layout, attentions, roles)
        check_shapes(model, layout, attentions)
        paths = [attention.path for attention in attentions]
    else:
        chosen = matching(model, layout, query_key)
        values = matching(model, layout, value_projection)
        if both := sorted(chosen & values):
            raise BlocksError(
                f"{name_of(model)}: {few(both)} are in both query_key and value_projection: narrow a pattern"
            )
        paths = [layout.by_name[name].raw for name in layout.names if name in chosen]
    stacks = stacks_of(model, paths)
    if query_key is None:
        check_counts(model, stacks, paths)
    named = (numbered(model, layout, layers) if isinstance(layers, str) else layers, embedding, head)
    found_layers, found_embedding, found_head = parts_of(model, layout, stacks, *named)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return Blocks(
        model=name_of(model),
        layout=layout,
        query_key=_in_order(layout, chosen),
        value=_in_order(layout, set(layout.names) - chosen),
        value_projection=_in_order(layout, values),
        layers=tuple(_in_order(layout, layer) for layer in found_layers),
        embedding=_in_order(layout, found_embedding),
        head=_in_order(layout, found_head),
        buffers=tuple(entry.name for entry in layout.entries if entry.raw in buffers),
        attentions=len(attentions) if query_key is None else 0,
    )


def _in_order(layout: Layout, names: set[str]) -> Names:
    return tuple(name for name in layout.names if name in names)
