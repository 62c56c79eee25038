"""Models of torchvision and transformers, built from their configurations without a download.

They take a batch and return logits, as all models do. For transformers a forward hook extracts the logits, so that the
class, the entries and `save_pretrained` remain the library's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tepal.models.registry import CHOICES, CONFIG, IMAGES, TEXTS, Model, ModelError

AUTO_CLASSES = {
    IMAGES: "AutoModelForImageClassification",
    TEXTS: "AutoModelForSequenceClassification",
    CHOICES: "AutoModelForCausalLM",
}
"""Kind of model → the class of transformers that builds and loads it."""

_FILE_KEYS = ("dtype", "torch_dtype", "quantization_config")  # how weights were saved; models train in float32


def from_torchvision(name: str, model: Model, *, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build a model of torchvision with its original stem, for colour images. Raises ModelError."""
    options: dict[str, Any] = dict(model.config)
    if image_shape[0] != 3:
        raise ModelError(
            f"{name} takes images of 3 channels, and these have {image_shape[0]}: choose another model, or use "
            "colour images"
        )
    if "patch_size" in options:
        options["image_size"] = _image_side(name, image_shape, options["patch_size"])
    _import_torchvision(name)
    module, _, factory = model.where.partition(":")
    built: nn.Module = getattr(import_module(module), factory)(num_classes=classes, **options)
    return built


def from_transformers(
    name: str, model: Model, *, image_shape: tuple[int, int, int] | None = None, classes: int | None = None
) -> nn.Module:
    """Build a model of transformers, in float32. Raises ModelError.

    A text classifier that is called without an `attention_mask` masks padding tokens by itself.
    """
    library = import_transformers(name)
    settings = {key: deepcopy(value) for key, value in model.config.items() if key not in _FILE_KEYS}
    try:
        config = type(library.AutoConfig.for_model(settings["model_type"])).from_dict(settings)
        if model.kind == TEXTS and getattr(config, "pad_token_id", None) is None:
            raise ModelError(
                f"{name}: its {CONFIG} has no pad_token_id, without which padding is not masked: set it to the number "
                "of the tokenizer's padding token"
            )
        if image_shape is not None:
            _set_image(name, getattr(config, "vision_config", config), image_shape)
        if classes is not None:
            config.num_labels = classes
        if model.kind == CHOICES:
            config.use_cache = False  # the cache is for generation, and costs memory in training
        config.name_or_path = name
        built: nn.Module = getattr(library, AUTO_CLASSES[model.kind]).from_config(config)
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{name}: transformers {library.__version__} cannot build it ({error}): correct its {CONFIG}"
        ) from error
    built.register_forward_hook(_logits)
    if model.kind == TEXTS:
        built.register_forward_pre_hook(_mask_padding, with_kwargs=True)
    return built.train()


def _set_image(name: str, config: Any, image_shape: tuple[int, int, int]) -> None:
    if getattr(config, "image_size", None):
        patch = getattr(config, "patch_size", 1)
        config.image_size = _image_side(name, image_shape, patch)
        if window := getattr(config, "window_size", 0):  # Swin: each stage after the first halves the sides
            smallest = patch * 2 ** (len(config.depths) - 1) * window
            if config.image_size < smallest:
                raise ModelError(
                    f"{name} takes images of at least {smallest} x {smallest} pixels, because its windows of {window} "
                    f"x {window} must fit into the last stage, and these have {image_shape[1]} x {image_shape[2]}: set "
                    "a larger image-shape"
                )
    if hasattr(config, "num_channels"):
        config.num_channels = image_shape[0]


def _image_side(name: str, image_shape: tuple[int, int, int], patch: Any) -> int:
    """Return the side of a square image that divides into patches. Raises ModelError."""
    _, height, width = image_shape
    size = patch if isinstance(patch, int) else int(patch[0])
    if height != width or height % size:
        side = size * max(1, round(height / size))
        raise ModelError(
            f"{name} takes square images that divide into patches of {size} x {size} pixels, and these have {height} x "
            f"{width}: choose an image-shape such as {image_shape[0]}x{side}x{side}, or another model"
        )
    return height


def _logits(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output if isinstance(output, Tensor) else output.logits


def _mask_padding(
    module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    padding = getattr(module.config, "pad_token_id", None)
    tokens = inputs[0] if inputs else options.get("input_ids")
    if padding is None or tokens is None or len(inputs) > 1 or "attention_mask" in options:
        return None
    return inputs, {**options, "attention_mask": (tokens != padding).long()}


# --- the libraries -------------------------------------------------------------------------------------------------


def _import_torchvision(name: str) -> ModuleType:
    try:
        return import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        try:
            version = metadata.version("torchvision")
        except metadata.PackageNotFoundError:
            raise ModelError(
                f"{name} needs torchvision, which is not installed: pip install 'tepal[vision]'"
            ) from error
        raise ModelError(
            f"{name} needs torchvision, and {version} does not load with torch {metadata.version('torch')} ({error}): "
            "install both again, from one index, so that their builds match"
        ) from error


def import_transformers(name: str) -> ModuleType:
    """Import transformers, for the model `name`. Raises ModelError if it is not installed, or cannot be used."""
    try:
        _import_torchvision(name)
        usable = True
    except ModelError:  # transformers would use an installed torchvision that does not load
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        usable = False
    try:
        library = import_module("transformers")
        found = import_module("transformers.utils.import_utils")
    except ImportError as error:
        raise ModelError(
            f"{name} needs transformers, which cannot be used ({error}): pip install 'tepal[text]'"
        ) from error
    if not usable:  # transformers caches whether torchvision is available
        for check in ("is_torchvision_available", "is_torchvision_v2_available"):
            getattr(getattr(found, check, None), "cache_clear", lambda: None)()
    return library
