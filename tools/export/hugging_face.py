"""A saved model as a folder that transformers loads: config, weights, tokenizer or image processor, model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tepal import models
from tepal.models.libraries import AUTO_CLASSES, import_transformers
from tepal.models.pretrained import quiet
from tepal.tools.export.delivered import Delivered, ExportError, largest_difference
from tepal.tools.export.example_inputs import example_inputs, length_of
from tepal.tools.export.model_card import model_card
from tepal.training.data import DatasetInfo, normalise
from tepal.training.data.inputs import tokens_of
from tepal.training.data.normalisation import statistics
from tepal.training.data.tokens import PADDING

CARD, PROCESSOR = "README.md", "preprocessor_config.json"
_BILINEAR = 2  # number of Pillow's filter, as transformers writes it
_EXAMPLES = 8


@dataclass(frozen=True)
class HuggingFaceFolder:
    """An exported folder. `loads_with` is the class of transformers that loads it, `difference` the largest difference
    of its outputs from the run's model."""

    path: Path
    loads_with: str
    difference: float


def export_folder(delivered: Delivered, folder: Path) -> HuggingFaceFolder:
    """Write a folder that `from_pretrained` of transformers loads, and compare the outputs of what it loads.

    Args:
        delivered: a single model of transformers.
        folder: does not exist yet, or is empty; the folder that it is in exists.

    Raises:
        ExportError: the model is an ensemble or not one of transformers; the folder cannot be used; the model that
            transformers loads from it differs.
        OSError: it cannot be written.
    """
    if not folder.absolute().parent.is_dir():
        raise ExportError(f"--output {folder}: the folder {folder.absolute().parent} does not exist")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ExportError(f"--output {folder}: exists and is not an empty folder: remove it, or name another one")
    if folder.resolve() == Path.cwd().resolve():  # replaced, it would no longer be that of the user's shell
        raise ExportError(f"--output {folder}: is the current folder: name it from the folder above, or name a new one")
    loads_with, own = _class_of(delivered)
    delivered.model(next(iter(delivered.predictor.states())))
    _configure(delivered, own.config)
    with _new_folder(folder) as partial:
        with quiet():
            own.save_pretrained(partial)
            config = delivered.predictor.config
            if config.kind in (models.TEXTS, models.CHOICES):
                tokens_of(config).save(partial, length_of(config))
            processor = _write_processor(delivered, partial)
            difference = _difference_of_loaded(delivered, partial, loads_with, own)
        card = model_card(delivered, type(own).__name__, loads_with, folder.name, has_processor=processor)
        (partial / CARD).write_text(card, encoding="utf-8")
        mode = (partial / CARD).stat().st_mode & 0o777
        for file in partial.iterdir():  # safetensors makes files that only their owner may read
            file.chmod(mode)
    return HuggingFaceFolder(folder, loads_with, difference)


def _class_of(delivered: Delivered) -> tuple[str, Any]:
    """Return the name of the class that loads the model, and the model of transformers. Raises ExportError."""
    predictor = delivered.predictor
    name, kind = delivered.facts["model"], predictor.config.kind
    own = _of_transformers(predictor.model)
    if own is None or kind not in AUTO_CLASSES:
        raise ExportError(
            f"model={name!r} is not a model of transformers ({type(predictor.model).__name__}), so that no class of "
            "transformers could load the folder: use --to onnx"
        )
    if predictor.members > 1:
        raise ExportError(
            f"{predictor.file}: is an ensemble of {predictor.members} models, and a folder of transformers has one: "
            "use --to onnx, which writes one file that returns the mean of their probabilities"
        )
    return AUTO_CLASSES[kind], own


def _of_transformers(model: nn.Module) -> Any | None:
    """Return the model if its class is one of transformers, or the only module in a custom model if that is."""
    try:
        library = import_transformers("an export to a Hugging Face folder")
    except models.ModelError:
        return None  # without transformers no model is one of its classes
    candidates = [model, *(children if len(children := list(model.children())) == 1 else ())]
    for own in candidates:
        if (
            isinstance(own, library.PreTrainedModel)
            and type(own).__module__.startswith("transformers.")
            and len(own.state_dict()) == len(model.state_dict())
        ):
            return own
    return None


def _configure(delivered: Delivered, config: Any) -> None:
    """Set what is not part of training: the names of the classes, and the cache of a language model."""
    config.name_or_path = ""
    if delivered.predictor.config.kind == models.CHOICES:
        config.use_cache = True
        return
    names: Sequence[str] = delivered.predictor.config.names
    if len(names) != config.num_labels:  # transformers' own: those of the initial weights are of other classes
        names = [f"LABEL_{number}" for number in range(config.num_labels)]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}


# --- images --------------------------------------------------------------------------------------------------------


def _write_processor(delivered: Delivered, folder: Path) -> bool:
    """Write an image processor if it makes the same inputs from an RGB image as `tepal predict`; return whether."""
    info, by = delivered.predictor.info, delivered.predictor.config.normalise
    if not isinstance(info, DatasetInfo) or info.shape[0] != 3:
        return False  # a processor of transformers does not convert colour images to grey
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": info.shape[1], "width": info.shape[2]},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(by),
    }
    if by:
        mean, std = (list(one) * (3 if len(one) == 1 else 1) for one in statistics(by))
        settings |= {"image_mean": mean, "image_std": std}
    file = folder / PROCESSOR
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if _prepares_alike(folder, info, by):
        return True
    file.unlink()
    return False


def _prepares_alike(folder: Path, info: DatasetInfo, by: str) -> bool:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (*info.shape[1:], 3), dtype=np.uint8)
    expected = normalise((pixels.transpose(2, 0, 1)[None] / np.float32(255)).astype(np.float32), by)
    library = import_transformers("an image processor")
    processor = library.AutoImageProcessor.from_pretrained(folder)
    found = processor(Image.fromarray(pixels), return_tensors="np")["pixel_values"]
    return np.shape(found) == expected.shape and bool(np.allclose(found, expected, atol=1e-5))


# --- check ---------------------------------------------------------------------------------------------------------


def _difference_of_loaded(delivered: Delivered, folder: Path, loads_with: str, own: Any) -> float:
    """Load the folder as a user does, and return the largest difference of its outputs. Raises ExportError."""
    library = import_transformers("the check of an export")
    try:
        loaded, report = getattr(library, loads_with).from_pretrained(folder, output_loading_info=True)
    except (ValueError, OSError, RuntimeError) as error:
        raise ExportError(
            f"{loads_with} of transformers {library.__version__} cannot load the exported {type(own).__name__} "
            f"({error}): use --to onnx"
        ) from error
    for what, keys in report.items():
        if keys:
            raise ExportError(f"{loads_with} does not load the exported {type(own).__name__}: {what} {sorted(keys)}")
    inputs = example_inputs(delivered, _EXAMPLES, seed=1)
    with torch.no_grad():
        if delivered.predictor.config.kind == models.CHOICES:
            ids, roles = inputs.flatten(0, 1).unbind(1)
            call = {"input_ids": ids, "attention_mask": (roles != PADDING).long()}
            expected: Tensor = delivered.predictor.model(**call)
        else:
            expected = delivered.task.outputs(delivered.predictor.model, inputs)
            call = _call(delivered, inputs)
        found = loaded.eval()(**call).logits
    difference, allowed = largest_difference(expected, found)
    if difference > allowed:
        raise ExportError(
            f"the exported {type(own).__name__} differs from the run's model: its outputs for random inputs differ by "
            f"up to {difference:.1e}, and {allowed:.1e} is allowed; use --to onnx"
        )
    return difference


def _call(delivered: Delivered, inputs: Tensor) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for inputs of images or texts, as its processor returns them."""
    if delivered.predictor.config.kind == models.IMAGES:
        return {"pixel_values": inputs}
    return {"input_ids": inputs, "attention_mask": (inputs != tokens_of(delivered.predictor.config).padding).long()}


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder`, and rename it to that at the end; after an exception it is removed."""
    partial = folder.with_name(f".writing-{os.urandom(8).hex()}")
    partial.mkdir()
    try:
        yield partial
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
