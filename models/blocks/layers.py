"""The lists of transformer blocks in a model, and the proof of how many blocks and attention modules they have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tepal.exchange.layout import Names
from tepal.models.blocks.errors import BlocksError, few, name_of
from tepal.models.blocks.modules import below, children_of, integer, nearest, side_of, upwards


@dataclass(frozen=True)
class Stack:
    """A list of transformer blocks: the module that holds them, and its children's paths."""

    path: str
    children: Names


def stacks_of(model: nn.Module, paths: Sequence[str]) -> list[Stack]:
    """The lists of blocks that the attention modules at `paths` lie in; encoders before decoders."""
    found: dict[str, Stack] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        lists = [up for up in upwards(path)[1:] if _is_list_of_alike(modules[up])]
        # A list of bare attention modules is a part of a block, unless nothing encloses it.
        whole = [up for up in lists if not all(child in paths for child in children_of(modules, up))] or lists
        if whole:
            found[whole[0]] = Stack(whole[0], children_of(modules, whole[0]))
    return sorted(found.values(), key=lambda stack: side_of(stack.path) == "decoder")


def _is_list_of_alike(module: nn.Module) -> bool:
    """Blocks are of one class; the sub-layers of one block (T5 lists those too) are not."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module.children()}) == 1


def prove_counts(model: nn.Module, stacks: Sequence[Stack], paths: Sequence[str]) -> None:
    """As many blocks as the configuration says, and in each as many attention modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for stack in stacks:
        layers, key = _declared_layers(modules, stack.path)
        per_layer = _declared_attentions(nearest(modules, stack.path, "config"), side_of(stack.path))
        counts = [sum(below(path, child) for path in paths) for child in stack.children]
        expected = [per_layer or max(counts)] * (layers or len(counts))
        if counts != expected:
            says = f"its configuration says {key}={layers}" if layers else "every block should have the same number"
            raise BlocksError(
                f"{name_of(model)}: found {sum(counts)} attention modules in the {len(counts)} blocks of "
                f"{stack.path or 'the model'} ({', '.join(map(str, counts))}), expected {sum(expected)}: {says}, "
                f"with {expected[0]} in each; for a model that mixes kinds of blocks, name its parts: "
                "find_blocks(model, query_key=[patterns], layers=[patterns])"
            )
    layers, key = _declared_layers(modules, "")
    if paths and layers and not stacks:
        raise BlocksError(
            f"{name_of(model)}: its configuration says {key}={layers}, but no list of blocks holds the "
            f"{len(paths)} attention modules found ({few(paths)})"
        )


def _declared_layers(modules: Mapping[str, nn.Module], path: str) -> tuple[int, str]:
    """The number of blocks that the nearest configuration gives the stack at `path`, and the key that says so."""
    side = side_of(path)
    depths, stage = getattr(nearest(modules, path, "config"), "depths", None), re.findall(r"\.(\d+)\.", path)
    if depths and stage:  # Swin: a stack for each stage
        return int(depths[int(stage[-1])]), f"depths[{stage[-1]}]"
    keys = [f"{side}_layers", f"num_{side}_layers"] if side else []
    keys += ["num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"]
    for up in upwards(path):
        for told in (getattr(modules[up], "config", None), modules[up]):
            if key := next((key for key in keys if integer(told, key)), ""):
                return integer(told, key), key
    return 0, ""


def _declared_attentions(config: Any, side: str) -> int:
    """Attention modules in each block: 1, and 1 more where it attends to an encoder's output; 0 when nothing says."""
    if config is None:
        return 0
    # BART and T5 say it by being a decoder, BERT and GPT-2 by add_cross_attention.
    keys = ["add_cross_attention"] + (["is_encoder_decoder", "is_decoder"] if side == "decoder" else [])
    return 2 if any(getattr(config, key, False) for key in keys) else 1
