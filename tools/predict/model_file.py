"""The file of a saved model: its path, its metadata, and a check of its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from tepal import models
from tepal.exchange.modes import OF_MODE
from tepal.records.run_directory import LATEST, MODEL, find_run
from tepal.training.data import (
    CharVocabulary,
    DataError,
    DatasetInfo,
    NumberInfo,
    TableInfo,
    dataset_info,
    number_info,
    table_info,
    text_info,
)
from tepal.training.data.inputs import InputConfig

_IN_METADATA = (
    "model", "dataset", "image-shape", "classes", "class-names", "features", "outputs", "feature-columns", "normalise",
)  # fmt: skip
"""Keys of the run config that the metadata repeats, and that have precedence there."""


def model_file(path: Path) -> Path:
    """The safetensors file at a path, or of the run there. Raises FileNotFoundError if there is none."""
    if path.is_file() and path.name != LATEST:
        return path
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or folder; expected is a run directory, a folder of runs, or a .safetensors file"
        )
    file = find_run(path) / MODEL
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file; a run writes its model when it ends")
    return file


def opened(file: Path) -> Any:
    """Open a safetensors file, to be read in a `with` block. Raises ValueError if it is not one."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a readable safetensors file ({error}); expected is the {MODEL} of a run directory"
        ) from error


def described(metadata: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The model's name and the run config from a file's metadata. Raises ValueError if the model is not named."""
    try:
        config = json.loads(metadata.get("config", "{}"))
    except ValueError as error:
        raise ValueError(f"the run config in its metadata is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError("the run config in its metadata is not a JSON object")
    config |= {key: metadata[key] for key in _IN_METADATA if key in metadata}
    if not config.get("model"):
        raise ValueError(
            f"its metadata does not name the model; expected is the {MODEL} of a run directory, whose metadata has "
            "model, image-shape and classes (or features and outputs)"
        )
    return str(config["model"]), config


def sizes_of(
    run_config: Mapping[str, Any], config: InputConfig
) -> tuple[DatasetInfo | NumberInfo | TableInfo | None, dict[str, Any]]:
    """The sizes of a model of images or numbers (None for texts), and the arguments that the model is built with."""
    kind = config.kind
    if kind == models.CHARACTERS:
        return None, {"vocabulary": len(CharVocabulary())}
    if kind == models.CHOICES:
        return None, {}
    if kind == models.IMAGES:
        keys, known = "image-shape and classes", bool(config.shape and config.classes)
    elif kind == models.SEQUENCES:
        keys, known = "features and outputs", bool(config.features and config.outputs)
    elif kind == models.TABLES:
        keys, known = "features and classes", bool(config.feature_count and config.class_count)
    else:
        keys, known = "classes", bool(config.class_count)
    if not known and "dataset" not in run_config:
        raise ValueError(f"its metadata has no {keys}, and no dataset to read them from")
    try:
        if kind == models.IMAGES:
            images = DatasetInfo(config.shape, config.classes) if config.shape and known else dataset_info(config)
            return images, {"image_shape": images.shape, "classes": images.classes}
        if kind == models.SEQUENCES:
            numbers = NumberInfo(config.features, config.outputs) if known else number_info(config)
            return numbers, {"features": numbers.features, "outputs": numbers.outputs}
        if kind == models.TABLES:
            table = TableInfo(config.feature_count, config.class_count) if known else table_info(config)
            return table, {"features": table.features, "classes": table.classes}
        return None, {"classes": config.class_count or text_info(config).classes}
    except DataError as error:
        raise ValueError(f"its metadata has no {keys}, and its dataset cannot be read: {error}") from error


def prefixes_of(names: Iterable[str]) -> tuple[str, ...]:
    """The prefix of each member's tensor names: "" for a single model, else mode/0/, mode/1/, …"""
    of_member = {name: OF_MODE.fullmatch(name) for name in sorted(names)}
    modes = sorted({int(match[1]) for match in of_member.values() if match})
    if not modes:
        return ("",)
    for name, match in of_member.items():
        if not match:
            raise ValueError(
                f"has a tensor {name!r} in addition to those of an ensemble, whose names begin with mode/<number>/"
            )
    for expected, mode in enumerate(modes):
        if mode != expected:
            raise ValueError(f"part of the ensemble is missing: it has mode {modes[-1]}, but no mode {expected}")
    return tuple(f"mode/{mode}/" for mode in modes)


def check_fit(
    shapes: Mapping[str, tuple[int, ...]], prefixes: Sequence[str], model: nn.Module, model_name: str
) -> None:
    """Raise ValueError for the first tensor that is missing, has another shape, or is not one of the model's."""
    expected = {
        prefix + name: tuple(tensor.shape) for prefix in prefixes for name, tensor in model.state_dict().items()
    }
    needs = f"the model {model_name!r} needs"
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(f"has no tensor {name!r}; {needs} it with shape {shape}")
        if shapes[name] != shape:
            raise ValueError(f"tensor {name!r} has shape {shapes[name]}; {needs} {shape}")
    for name in sorted(shapes.keys() - expected):
        raise ValueError(f"has a tensor {name!r} that the model {model_name!r} does not have")
