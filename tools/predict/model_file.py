"""The file of a saved model: where it is, what its metadata tells, and whether its tensors are the model's."""

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
from tepal.training.data import CharVocabulary, DataError, DatasetInfo, NumberInfo, dataset_info, number_info, text_info
from tepal.training.data.inputs import InputConfig

_BESIDE = ("model", "dataset", "image-shape", "classes", "class-names", "features", "outputs")
"""Keys of the run config that stand in the metadata beside it."""


def model_file(path: Path) -> Path:
    """The safetensors file that is meant. Raises FileNotFoundError where there is none."""
    if path.is_file() and path.name != LATEST:
        return path
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or folder; expected is a run directory, a folder of runs, or a .safetensors file"
        )
    file = find_run(path) / MODEL
    if not file.exists():
        raise FileNotFoundError(f"{file}: not there; a run writes its model when it ends")
    return file


def opened(file: Path) -> Any:
    """A safetensors file, to be read in a `with` block. Raises ValueError where it is none."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a readable safetensors file ({error}); expected is the {MODEL} of a run directory"
        ) from error


def described(metadata: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The model's name, and the run config that it comes from, what stands beside the config in the metadata in it."""
    try:
        config = json.loads(metadata.get("config", "{}"))
    except ValueError as error:
        raise ValueError(f"the run config in its metadata is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError("the run config in its metadata is not a JSON object")
    beside = {key: metadata[key] for key in _BESIDE if key in metadata}
    told = {**config, **beside}
    if not told.get("model"):
        raise ValueError(
            f"its metadata does not tell which model it is; expected is the {MODEL} of a run directory, whose metadata "
            "has model, image-shape and classes (or features and outputs)"
        )
    return str(told["model"]), told


def built_for(
    told: Mapping[str, Any], config: InputConfig
) -> tuple[DatasetInfo | NumberInfo | None, dict[str, Any]]:
    """What is known of images or numbers, if the model takes such; and what it is built with."""
    kind = config.kind
    if kind == models.CHARACTERS:
        return None, {"vocabulary": len(CharVocabulary())}
    if kind == models.CHOICES:
        return None, {}
    if kind == models.TEXTS and config.class_count:
        return None, {"classes": config.class_count}
    if kind == models.SEQUENCES and config.features and config.outputs:
        return _of_numbers(NumberInfo(config.features, config.outputs))
    if kind == models.IMAGES and config.shape and config.classes:
        return _of_images(DatasetInfo(config.shape, config.classes))
    missing = {models.IMAGES: "image-shape and classes", models.SEQUENCES: "features and outputs"}.get(kind, "classes")
    if "dataset" not in told:
        raise ValueError(f"its metadata has no {missing}, and no dataset that would tell")
    try:
        if kind == models.IMAGES:
            return _of_images(dataset_info(config))
        if kind == models.SEQUENCES:
            return _of_numbers(number_info(config))
        return None, {"classes": text_info(config).classes}
    except DataError as error:
        raise ValueError(f"its metadata has no {missing}, and its dataset cannot tell: {error}") from error


def _of_images(info: DatasetInfo) -> tuple[DatasetInfo, dict[str, Any]]:
    return info, {"image_shape": info.shape, "classes": info.classes}


def _of_numbers(info: NumberInfo) -> tuple[NumberInfo, dict[str, Any]]:
    return info, {"features": info.features, "outputs": info.outputs}


def prefixes_of(names: Iterable[str]) -> tuple[str, ...]:
    """What comes before the tensor names of each member: "" for a single model, else mode/0/, mode/1/, …"""
    of_member = {name: OF_MODE.fullmatch(name) for name in sorted(names)}
    modes = sorted({int(match[1]) for match in of_member.values() if match})
    if not modes:
        return ("",)
    for name, match in of_member.items():
        if not match:
            raise ValueError(
                f"has a tensor {name!r} beside those of an ensemble, whose names begin with mode/<number>/"
            )
    for expected, mode in enumerate(modes):
        if mode != expected:
            raise ValueError(f"part of the ensemble is missing: it has mode {modes[-1]}, but no mode {expected}")
    return tuple(f"mode/{mode}/" for mode in modes)


def check_fit(
    shapes: Mapping[str, tuple[int, ...]], prefixes: Sequence[str], model: nn.Module, model_name: str
) -> None:
    """Raise ValueError for the first tensor that is missing, has another shape, or is too many."""
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
