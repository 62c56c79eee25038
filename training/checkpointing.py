"""Gradient checkpointing: a layer's activations are recomputed in the backward pass instead of being stored.

Activations then take the memory of the largest layer plus the inputs of all layers, at the cost of about one more
forward pass (Chen et al. 2016, arXiv:1604.06174). Gradients do not change, and running statistics are updated once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import takewhile

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from tepal.models.blocks import find_blocks
from tepal.models.initial import PATTERNS


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Return a context in which forward passes store only the inputs of each layer of the model.

    Parameters must not change between forward and backward pass.

    Raises:
        ValueError: the model has no layers.
    """
    modules = layer_modules(model)
    if not modules:
        raise ValueError(
            f"gradient-checkpointing needs a model with layers, and {type(model).__name__} has none: set it to false"
        )
    # The second forward pass would write to a decoder's cache of keys and values again.
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    for module in modules:
        # An instance attribute takes precedence over the class's method.
        contexts = partial(_first_and_again, module)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
        for config in caching:
            config.use_cache = True


def _first_and_again(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer's forward pass and of its recomputation."""
    return nullcontext(), statistics_kept(module)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Return a context in which forward passes do not change the running statistics of norms."""
    norms = [each for each in module.modules() if isinstance(each, _NormBase) and each.track_running_stats]
    momentums = [norm.momentum for norm in norms]  # None: a norm with cumulative averages
    counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    counted = [(count, count.clone()) for count in counts]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momentums, strict=True):
            norm.momentum = momentum
        for count, before in counted:
            count.copy_(before)


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """Return the module of each layer, from input to output: the deepest one with all of the layer's entries."""
    blocks = find_blocks(model, **getattr(model, PATTERNS, {}))
    raw_of = {entry.name: entry.raw for entry in blocks.layout.entries}
    paths = []
    for layer in blocks.layers:
        owners = [raw_of[name].split(".")[:-1] for name in layer]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
        paths.append(".".join(parts[0] for parts in common))
    return [model.get_submodule(path) for path in paths if path]
