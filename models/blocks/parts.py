"""The entries of layers, embedding and head."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from tepal.exchange.layout import Layout
from tepal.models.blocks.errors import BlocksError, few, name_of
from tepal.models.blocks.layers import Stack
from tepal.models.blocks.layout import entries_below, matching
from tepal.models.blocks.modules import below, class_names, is_a, join

_EMBEDDING = re.compile(r".*embed.*|.*_tokens?|shared|wte|wpe|conv_proj|pre_layrnorm|norm_pre")
_HEAD = re.compile(
    r"head|heads|head_dist|classifier|pre_classifier|classification_head|score|fc|cls|lm_head|generator_lm_head|"
    r"qa_outputs|final_logits_bias|(discriminator|generator)_predictions|vocab_(transform|layer_norm|projector)"
)
# Classes whose final norm and projection are part of the head (arXiv 2408.15600, CLIP) → patterns of these.
_HEAD_OF_CLASS = {
    "CLIPVisionModel": ("*post_layernorm.*",),
    "CLIPTextModel": ("*final_layer_norm.*",),
    "CLIPVisionTransformer": ("post_layernorm.*",),  # in transformers 4
    "CLIPTextTransformer": ("final_layer_norm.*",),
    "CLIPVisionModelWithProjection": ("visual_projection.*",),
    "CLIPTextModelWithProjection": ("text_projection.*",),
    "CLIPModel": ("visual_projection.*", "text_projection.*", "logit_scale"),
}
# Stages of a network without attention: the first pattern that matches names of its modules is used.
_STAGES = (r"stages\.[^.]+", r"layer\d+", r"stage\d+", r"features\.[^.]+", r"blocks\.[^.]+")


def parts_of(
    model: nn.Module,
    layout: Layout,
    stacks: Sequence[Stack],
    layers: Sequence[str] | None,
    embedding: Sequence[str] | None,
    head: Sequence[str] | None,
) -> tuple[list[set[str]], set[str], set[str]]:
    """Return layers, embedding and head: disjoint sets of entry names. Given patterns take precedence over the search.

    Raises BlocksError for patterns that match nothing, or the same entries.
    """
    free = set(layout.names)
    of_embedding = set() if embedding is None else _claim(free, matching(model, layout, embedding))
    of_head = set() if head is None else _claim(free, matching(model, layout, head))
    if layers is not None:
        found = [_claim(free, matching(model, layout, [pattern])) for pattern in layers]
        if not all(found):
            raise BlocksError(
                f"{name_of(model)}: two patterns of layers={list(layers)} match the same entries: leave one out"
            )
    else:
        paths = [child for stack in stacks for child in stack.children] or _named_stages(model)
        found = [_claim(free, entries_below(layout, path)) for path in paths]
    if embedding is None:
        of_embedding = _claim(free, _embedding(model, layout))
    if head is None:
        of_head = _claim(free, _head(model, layout, free))
    if not found:
        found = [_claim(free, stage) for stage in _children_as_stages(model, layout, free)]
    return [layer for layer in found if layer], of_embedding, of_head


def numbered(model: nn.Module, layout: Layout, pattern: str) -> list[str]:
    """Return one pattern per layer, from a pattern with `*` in the place of the layer's number. Raises BlocksError."""
    before, star, after = pattern.partition("*")
    if not star or "*" in after:
        raise BlocksError(f"layers={pattern!r}: write exactly one * for the layer's number, as in 'encoder.*'")
    layer = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}\.")
    numbers = {int(match[1]) for name in layout.names if (match := layer.match(name))}
    if not numbers:
        raise BlocksError(
            f"{name_of(model)}: no entry has a number in the place of * in layers={pattern!r}; entries are "
            f"{few(layout.names)}"
        )
    return [f"{before}{number}{after}.*" for number in sorted(numbers)]


def _named_stages(model: nn.Module) -> list[str]:
    for pattern in _STAGES:
        paths: list[str] = []
        for path, _ in model.named_modules():
            if re.fullmatch(rf"(.+\.)?{pattern}", path) and not any(below(path, other) for other in paths):
                paths.append(path)
        if paths:
            return paths
    return []


def _children_as_stages(model: nn.Module, layout: Layout, free: set[str]) -> list[set[str]]:
    """Return the children as stages: each one with a weight matrix or kernel, with the norms after it."""
    trunk, module = _trunk(model)
    stages: list[set[str]] = []
    for child, _ in module.named_children():
        entries = entries_below(layout, join(trunk, child)) & free
        if stages and not any(len(layout.by_name[name].shape) > 1 for name in entries):
            stages[-1] |= entries
        else:
            stages.append(entries)
    return [stage for stage in stages if stage] or [set(free)]


def _trunk(model: nn.Module) -> tuple[str, nn.Module]:
    """Return path and module of the first module with parameters of its own or several children."""
    path, module = "", model
    while not module._parameters and len(module._modules) == 1:
        (name, child), *_ = module.named_children()
        path, module = join(path, name), child
    return path, module


def _embedding(model: nn.Module, layout: Layout) -> set[str]:
    tables = {path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Embedding)}
    found = set()
    for tensor in layout.raw:
        module = tensor.name.rpartition(".")[0]
        if module in tables or any(_EMBEDDING.fullmatch(part) for part in tensor.name.split(".")):
            # By any of its names: a head that is tied to the embedding is part of the embedding.
            found |= {entry.name for entry in layout.entries_of[tensor.same_as or tensor.name]}
    return found


def _head(model: nn.Module, layout: Layout, free: set[str]) -> set[str]:
    found = {name for name in free if _is_head_name(name)}
    for path, module in model.named_modules():
        for name in class_names(module) & _HEAD_OF_CLASS.keys():
            found |= matching(model, layout, [join(path, pattern) for pattern in _HEAD_OF_CLASS[name]])
    if found:
        return found
    trunk, module = _trunk(model)
    holders = [(name, child) for name, child in module.named_children() if list(child.parameters())]
    if not holders or holders[-1][0] == "pooler" or not is_a(holders[-1][1], "Linear"):
        return set()
    return entries_below(layout, join(trunk, holders[-1][0]))


def _is_head_name(name: str) -> bool:
    """Return whether a name is a head's. Names within a list of modules are not: a gate in a block may be `fc`."""
    parts = name.split(":")[0].split(".")
    at = next((n for n, part in enumerate(parts) if _HEAD.fullmatch(part)), len(parts))
    return at < len(parts) and not any(part.isdigit() for part in parts[:at])


def _claim(free: set[str], names: set[str]) -> set[str]:
    """Remove `names` from `free`, and return those that were in it."""
    taken = free & names
    free -= taken
    return taken
