"""The lists of transformer blocks in a model, and the check of their numbers of blocks and attention modules."""

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
    """A list of transformer blocks: the path of the list, and the paths of its blocks."""

    path: str
    children: Names


def stacks_of(model: nn.Module, paths: Sequence[str]) -> list[Stack]:
    """Return the lists of blocks with the attention modules at `paths`; encoders before decoders."""
    found: dict[str, Stack] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        lists = [up for up in upwards(path)[1:] if _is_block_list(modules[up])]
        # A list of attention modules alone is part of a block, unless no other list encloses it.
        whole = [up for up in lists if not all(child in paths for child in children_of(modules, up))] or lists
        if whole:
            found[whole[0]] = Stack(whole[0], children_of(modules, whole[0]))
    return sorted(found.values(), key=lambda stack: side_of(stack.path) == "decoder")


def _is_block_list(module: nn.Module) -> bool:
    """Return whether all children have one class, unlike the sub-layers of one block, which T5 lists too."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module.children()}) == 1


def check_counts(model: nn.Module, stacks: Sequence[Stack], paths: Sequence[str]) -> None:
    """Raise BlocksError if the configuration gives other numbers of blocks, or of attention modules per block."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for stack in stacks:
        layers, key = _declared_layers(modules, stack.path)
        per_layer = _declared_attentions(nearest(modules, stack.path, "config"), side_of(stack.path))
        counts = [sum(below(path, child) for path in paths) for child in stack.children]
        expected = [per_layer or max(counts)] * (layers or len(counts))
        if counts != expected:
            says = f"its configuration says {key}={layers}" if layers else "every block must have the same number"
            raise BlocksError(
                f"{name_of(model)}: found {sum(counts)} attention modules in the {len(counts)} blocks of "
                f"{stack.path or 'the model'} ({', '.join(map(str, counts))}), expected {sum(expected)}: {says}, "
                f"with {expected[0]} in each; for a model with several kinds of blocks, name its entries: "
                "find_blocks(model, query_key=[patterns], layers=[patterns])"
            )
    layers, key = _declared_layers(modules, "")
    if paths and layers and not stacks:
        raise BlocksError(
            f"{name_of(model)}: its configuration says {key}={layers}, but no list of blocks has the {len(paths)} "
            f"attention modules found ({few(paths)}): name the layers, find_blocks(model, layers=[patterns])"
        )


def _declared_layers(modules: Mapping[str, nn.Module], path: str) -> tuple[int, str]:
    """Return the number of blocks that the nearest configuration gives the stack at `path`, and its key, or (0, "")."""
    side = side_of(path)
    depths, stage = getattr(nearest(modules, path, "config"), "depths", None), re.findall(r"\.(\d+)\.", path)
    if depths and stage:  # Swin: a stack for each stage
        return int(depths[int(stage[-1])]), f"depths[{stage[-1]}]"
    keys = [f"{side}_layers", f"num_{side}_layers"] if side else []
    keys += ["num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"]
    for up in upwards(path):
        for source in (getattr(modules[up], "config", None), modules[up]):
            if key := next((key for key in keys if integer(source, key)), ""):
                return integer(source, key), key
    return 0, ""


def _declared_attentions(config: Any, side: str) -> int:
    """Return the attention modules per block: 2 with cross-attention, else 1; 0 without a configuration."""
    if config is None:
        return 0
    # Cross-attention: in BART and T5 every decoder has it, in BERT and GPT-2 add_cross_attention sets it.
    keys = ["add_cross_attention"] + (["is_encoder_decoder", "is_decoder"] if side == "decoder" else [])
    return 2 if any(getattr(config, key, False) for key in keys) else 1
