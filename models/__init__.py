"""Models by name. Importing this package imports no torch; a model's file is imported when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

IMAGES = "image-classification"  # (batch, channels, height, width) → (batch, classes)
SEQUENCES = "sequence-regression"  # (batch, tokens, width) → (batch, tokens, value size)


class ModelError(ValueError):
    """A model that is not known, or not for this kind of data."""


@dataclass(frozen=True)
class Model:
    """What a model is for (`IMAGES` or `SEQUENCES`), and where it is: "module:class"."""

    kind: str
    where: str


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "cnn": Model(IMAGES, "tepal.models.cnn:CNN"),
        "linear-attention": Model(SEQUENCES, "tepal.models.linear_attention:LinearAttention"),
        "tiny-vit": Model(IMAGES, "tepal.models.tiny_vit:TinyViT"),
    }
)


def names() -> tuple[str, ...]:
    """The known models, sorted."""
    return tuple(sorted(MODELS))


def find(name: str) -> Model:
    """The registered model. Raises ModelError, with the nearest known name, when there is none."""
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ModelError(f"unknown model {name!r}: {hint}known are {', '.join(names())}")
    return MODELS[name]


def build(
    name: str, *, image_shape: tuple[int, int, int] | None = None, classes: int | None = None, seed: int
) -> nn.Module:
    """A new model, its weights drawn from `seed` alone; the global random state is left as it was.

    `image_shape` = (channels, height, width) and `classes` belong to image classification, and only there.
    Raises ModelError for an unknown name, and when they are missing or given to a model of another kind.
    """
    import torch

    model = find(name)
    module, _, factory = model.where.partition(":")
    options: dict[str, Any] = {}
    if model.kind == IMAGES:
        if image_shape is None or classes is None:
            raise ModelError(f"{name} classifies images: it needs image_shape=(channels, height, width) and classes")
        options = {"image_shape": image_shape, "classes": classes}
    elif image_shape is not None or classes is not None:
        raise ModelError(f"{name} is a model for {model.kind}: it takes no images (image_shape, classes)")
    with torch.random.fork_rng(devices=[]):  # models are built on the CPU: no other generator is touched
        torch.default_generator.manual_seed(seed)
        built: nn.Module = getattr(import_module(module), factory)(**options)
    return built
