"""Models by name. Importing this package imports no torch; a model's file or library is imported when it is built.

A name is one of `registry.MODELS`, a directory with a config.json as transformers' `save_pretrained` leaves it, or
"package.module:function", a model of one's own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepal.models.registry import (
    ANYTHING,
    CHARACTERS,
    CHOICES,
    CONFIG,
    IMAGES,
    MODELS,
    SEQUENCES,
    TEXTS,
    TRANSFORMERS,
    Model,
    ModelError,
    described,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ANYTHING", "CHARACTERS", "CHOICES", "IMAGES", "MODELS", "SEQUENCES", "TEXTS",
    "Model", "ModelError", "build", "find", "names",
]  # fmt: skip

NEEDS: Mapping[str, tuple[str, ...]] = {
    IMAGES: ("image_shape", "classes"),
    SEQUENCES: ("features", "outputs"),
    TEXTS: ("classes",),
    CHARACTERS: ("vocabulary",),
    CHOICES: (),
}
"""What must be given to build a model of this kind."""


DRAWING = threading.RLock()
"""Held by who draws torch's random numbers, which are one sequence for all threads of a process: who builds a model,
and who trains one that draws."""


def names() -> tuple[str, ...]:
    """The models that have a name, sorted."""
    return tuple(sorted(MODELS))


def find(name: str) -> Model:
    """What is known of a model without building it. Raises ModelError, with the nearest known name, for none."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name).expanduser()
    if name and (folder / CONFIG).is_file():
        return described(folder)
    if ":" in name:
        return Model(ANYTHING, name)
    near = get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ModelError(
        f"unknown model {name!r}: {hint}known are {', '.join(names())}; or name a directory that holds a {CONFIG}, or "
        "package.module:function of your own"
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
    """A new model, its weights drawn from `seed` alone; the global random state is left as it was.

    Called with a batch, it returns logits, or the numbers of a regression (see the kinds in `registry`), whatever its
    library makes of them.

    Args:
        name: see `find`.
        image_shape: (channels, height, width), for image classification, and only there.
        classes: for image and sequence classification.
        vocabulary: number of characters, for next-character models.
        features: numbers of an input (of one place in a sequence), for a regression.
        outputs: numbers of a target, for a regression.
        seed: of the weights.

    Raises:
        ModelError: an unknown name; an argument that is missing, or given to a model of another kind; a size that the
            model cannot have; a library that is not installed, or cannot be used.
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
            raise ModelError(f"{name} does {model.kind}: it needs {' and '.join(missing)}")
        if surplus := [key for key in options if key not in needs]:
            raise ModelError(f"{name} does {model.kind}: it takes no {' and no '.join(surplus)}")
    with DRAWING, torch.random.fork_rng(devices=[]):  # models are built on the CPU: no other generator is touched
        torch.default_generator.manual_seed(seed)
        return _built(name, model, options)


def _built(name: str, model: Model, options: dict[str, Any]) -> nn.Module:
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
