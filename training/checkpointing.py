"""Gradient checkpointing: a layer's activations are computed again in the backward pass instead of being kept.

Memory for activations then grows with the widest layer and the number of layers, not with all that they compute, for
about one more forward pass (Chen et al. 2016, arXiv:1604.06174). Gradients are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

from torch import nn
from torch.utils.checkpoint import checkpoint

from tepal.models.blocks import find_blocks


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Within it, forward passes keep of every layer of the model its inputs alone.

    Parameters must be in the backward pass what they were in the forward pass. Raises ValueError for a model without
    layers.
    """
    modules = layer_modules(model)
    if not modules:
        raise ValueError(
            f"gradient-checkpointing needs a model with layers, and {type(model).__name__} has none: leave it off"
        )
    # A decoder's cache of keys and values would be written to twice.
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    for module in modules:
        # On the instance, before the class's: what else the module is stays as it is.
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
        for config in caching:
            config.use_cache = True


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """The module of each layer, from input to output: the lowest one that has all of its entries."""
    blocks = find_blocks(model)
    raw_of = {entry.name: entry.raw for entry in blocks.layout.entries}
    paths = []
    for layer in blocks.layers:
        owners = [raw_of[name].split(".")[:-1] for name in layer]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
        paths.append(".".join(parts[0] for parts in common))
    return [model.get_submodule(path) for path in paths if path]
