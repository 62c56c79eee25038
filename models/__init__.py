"""Models by name. Importing this package imports no torch; a model's file or library is imported when it is built.

A name is one of `registry.MODELS`, a directory with a config.json as transformers' `save_pretrained` writes it, weights
that come with Tepal with their own config.json, or "package.module:function", a custom model.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepal.models import weights
from tepal.models.registry import (
    ANYTHING,
    CHARACTERS,
    CHOICES,
    CONFIG,
    IMAGES,
    MODELS,
    SEQUENCES,
    TABLES,
    TEXTS,
    TRANSFORMERS,
    Model,
    ModelError,
    model_in,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ANYTHING", "CHARACTERS", "CHOICES", "IMAGES", "MODELS", "SEQUENCES", "TABLES", "TEXTS",
    "Model", "ModelError", "build", "find", "names",
]  # fmt: skip

NEEDS: Mapping[str, tuple[str, ...]] = {
    IMAGES: ("image_shape", "classes"),
    SEQUENCES: ("features", "outputs"),
    TABLES: ("features", "classes"),
    TEXTS: ("classes",),
    CHARACTERS: ("vocabulary",),
    CHOICES: (),
}
"""Kind of model → arguments of `build` that it requires."""


DRAWING = threading.RLock()
"""Lock on torch's random numbers, which are one sequence for all threads of a process: held while a model is built, and
while one with random layers is trained."""


def names() -> tuple[str, ...]:
    """Return the names of all registered models, sorted."""
    return tuple(sorted(MODELS))


def find(name: str) -> Model:
    """Look up a model without building it.

    Raises:
        ModelError: there is no such model; the message suggests the nearest known name.
    """
    if name in MODELS:
        return MODELS[name]
    folder = Path(name).expanduser()
    if name and (folder / CONFIG).is_file():
        return model_in(folder)
    if (shipped := weights.folder_of(name)) and (shipped / CONFIG).is_file():
        return model_in(shipped)
    if ":" in name:
        return Model(ANYTHING, name)
    if name and folder.is_dir():
        raise ModelError(f"the folder {name!r} has no {CONFIG}: save the model there with save_pretrained")
    near = get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ModelError(
        f"unknown model {name!r}: {hint}allowed are {', '.join(names())}; or give a directory with a {CONFIG}, "
        "or package.module:function for a custom model"
    )


def build(
    name: str,
    *,
    image_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    vocabulary: int | None = None,
    features: int | None = None,
    outputs: int | None = None,
    seed: int,
) -> nn.Module:
    """Build a model with weights that depend on `seed` alone; the global random state is not changed.

    Called with a batch, every model returns a tensor of logits or regression outputs (see the kinds in `registry`),
    also where its library returns another type.

    Args:
        name: see `find`.
        image_shape: (channels, height, width), for image classification only.
        classes: number of classes, for classification of images, tables and texts.
        vocabulary: number of characters, for next-character models.
        features: size of an input, or of one position of a sequence, for tables and regression.
        outputs: size of a target, for regression.
        seed: seed of the weights.

    Returns:
        The model on the CPU, in train mode.

    Raises:
        ModelError: the name is unknown; an argument is missing, or belongs to another kind of model; the model does not
            support a size; a library is not installed, or cannot be used.
    """
    import torch

    model = find(name)
    given = {
        "image_shape": image_shape,
        "classes": classes,
        "vocabulary": vocabulary,
        "features": features,
        "outputs": outputs,
    }
    options = {key: value for key, value in given.items() if value is not None}
    if model.kind != ANYTHING:
        needs = NEEDS[model.kind]
        if missing := [key for key in needs if key not in options]:
            raise ModelError(f"{name} is a model for {model.kind}: give {' and '.join(missing)}")
        if surplus := [key for key in options if key not in needs]:
            raise ModelError(f"{name} is a model for {model.kind}: leave out {' and '.join(surplus)}")
    with DRAWING, torch.random.fork_rng(devices=[]):  # models are built on the CPU: no other generator is touched
        torch.default_generator.manual_seed(seed)
        return _build(name, model, options)


def _build(name: str, model: Model, options: dict[str, Any]) -> nn.Module:
    if model.kind == ANYTHING:
        from tepal.models.own import build_own

        return build_own(name, options)
    if model.package == "tepal":
        module, _, factory = model.where.partition(":")
        built: nn.Module = getattr(import_module(module), factory)(**options)
        return built
    from tepal.models import libraries

    build_model = libraries.from_transformers if model.where == TRANSFORMERS else libraries.from_torchvision
    return build_model(name, model, **options)
