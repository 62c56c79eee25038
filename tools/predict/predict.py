"""`tepal predict`: what a saved model, or the ensemble of all models in one file, says of images, texts or numbers.

    predictor = load_predictor(Path("runs/latest"))
    rows = predictor.predict_files([Path("scan.png"), Path("more/"), Path("test.npz")])
    write_csv(rows, Path("predictions.csv"))

A model file is safetensors. One model's tensors have their state_dict names there; of an ensemble, the tensors of its
k-th model are named `mode/<k>/<state_dict name>`, k = 0..K-1. The metadata tells what to build: `model`, and
`image-shape` ("1x8x8") and `classes`, or of a regression `features` and `outputs`; where these are missing, the run
config in `config` tells them, else the dataset that it names. The run config also says which columns of a table have
the texts or numbers, and by which tokenizer and at which length texts become tokens. `class-names` are the classes'
names, where they have names.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tepal import models
from tepal.exchange.modes import OF_MODE
from tepal.records.run_directory import LATEST, MODEL, find_run
from tepal.server_app.catalogue import CATALOGUE
from tepal.tools.predict.numbers import NumberPrediction, numbers_table, read, write_numbers
from tepal.tools.predict.texts import Batch, expanded_texts, text_batches
from tepal.training.config import TrainingConfig
from tepal.training.data import (
    IMAGE_SUFFIXES,
    CharVocabulary,
    DataError,
    DatasetInfo,
    ImageArrays,
    NumberInfo,
    check_normalise,
    checked_arrays,
    dataset_info,
    normalise,
    npz_examples,
    number_info,
    read_image,
    text_info,
)
from tepal.training.data.inputs import InputConfig, tokens_of
from tepal.training.loop import device_of
from tepal.training.prediction import Predictions, predict
from tepal.training.tasks import TASKS

NPZ = ".npz"
SHOWN = 20  # rows of the table in the terminal

_AT_ONCE = 512  # examples in memory as floats; each member's weights are read once for as many
_BESIDE = ("model", "dataset", "image-shape", "classes", "class-names", "features", "outputs")
"""Keys of the run config that stand in the metadata beside it."""
_COLUMNS = ("file", "index", "label", "class_name", "probability", "entropy", "disagreement", "true_label")


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one example.

    file, index: where the example is; the index counts from 0 in a .npz file, the rows of a table and the lines of
        plain text, and is None for an image file.
    label: the class number with the highest mean probability; `probability` is that.
    entropy: of the mean probabilities, in nats.
    disagreement: share of the members whose own label is another one.
    true_label: as the .npz file or the table has it, else None.
    class_name: the class's, the character, or the choice's text; "" where it has no name.
    """

    file: Path
    index: int | None
    label: int
    probability: float
    entropy: float
    disagreement: float
    true_label: int | None = None
    class_name: str = ""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model that was read and checked. `prefixes` come before the tensor names of its members in `file`."""

    file: Path
    model: nn.Module
    info: DatasetInfo | NumberInfo | None
    """Of images or numbers; None for a model of texts."""
    config: InputConfig
    """What the run config says of what the model takes."""
    training: TrainingConfig
    """What fits in a pass of the model."""
    prefixes: tuple[str, ...]
    caution: str = ""
    """What to know before its predictions are used; "" for nothing."""

    @property
    def members(self) -> int:
        return len(self.prefixes)

    def predict_files(
        self, files: Sequence[Path], on_progress: Callable[[int], object] = lambda done: None
    ) -> list[Prediction] | list[NumberPrediction]:
        """Predict images, texts or numbers, as the model takes them, in the order of `files`.

        Args:
            files: image files, folders (all images below them, sorted by path), and .npz files: their test images
                where they have a test set, else all, with labels or without. Image files are made grey or coloured
                and resized to what the model needs; arrays must have its shape. Texts: see `text_batches`. Numbers:
                .npz files and tables.
            on_progress: called with the number of examples that are done.

        Raises:
            OSError: a file is not there, or cannot be opened.
            ValueError: a file is not what the model takes; the text names it, and what the model needs. Also where the
                model's outputs are not finite.
        """
        if isinstance(self.info, NumberInfo):
            return self._numbers(files, self.info, on_progress)
        rows: list[Prediction] = []
        for batch in self._batches(files):
            said = self._said(batch.values)
            labels = said.labels
            probabilities = said.outputs.gather(1, labels[:, None])[:, 0]
            numbers = (column.tolist() for column in (labels, probabilities, said.entropy, said.dissent))
            true_labels = [None] * len(labels) if batch.labels is None else batch.labels.tolist()
            rows += [
                Prediction(file, index, label, probability, entropy, dissent, true_label, batch.name(place, label))
                for place, ((file, index), label, probability, entropy, dissent, true_label) in enumerate(
                    zip(batch.origins, *numbers, true_labels, strict=True)
                )
            ]
            on_progress(len(rows))
        return rows

    def _numbers(
        self, files: Sequence[Path], info: NumberInfo, on_progress: Callable[[int], object]
    ) -> list[NumberPrediction]:
        rows: list[NumberPrediction] = []
        for examples in read(files, info, self.config):
            said = self._said(examples.inputs)
            assert said.variance is not None
            targets = [None] * len(said.outputs) if examples.targets is None else map(tuple, examples.targets.tolist())
            numbers = zip(said.outputs.tolist(), said.variance.sqrt().tolist(), targets, strict=True)
            rows += [
                NumberPrediction(examples.file, index, tuple(outputs), tuple(deviations), known)
                for index, (outputs, deviations, known) in enumerate(numbers)
            ]
            on_progress(len(rows))
        return rows

    def _said(self, inputs: NDArray[Any]) -> Predictions:
        """Raises ValueError for what is no number."""
        device, task = next(self.model.parameters()).device, TASKS[self.config.kind]
        said = predict(self.model, self._states(), torch.from_numpy(inputs).to(device), self.training, task)
        if not said.outputs.isfinite().all():
            raise ValueError(f"{self.file}: the model's outputs are NaN or infinite; its training has diverged")
        return said

    def _batches(self, files: Sequence[Path]) -> Iterator[Batch]:
        if not isinstance(self.info, DatasetInfo):
            names = CharVocabulary().characters if self.config.kind == models.CHARACTERS else self.config.names
            yield from text_batches(expanded_texts(files), self.config, names, _AT_ONCE)
            return
        for batch in _image_arrays(_expanded(files), self.info):
            examples = batch.arrays.take(np.arange(len(batch.origins)))
            values = normalise(examples.images, self.config.normalise)
            yield Batch(batch.origins, values, examples.labels if batch.labelled else None, self.config.names)

    def _states(self) -> Iterator[dict[str, Tensor]]:
        """One member's tensors after the other's, read when they are wanted."""
        with _opened(self.file) as content:
            for prefix in self.prefixes:
                yield {name: content.get_tensor(prefix + name) for name in self.model.state_dict()}


# The model


def load_predictor(path: Path) -> Predictor:
    """Read and check a saved model.

    Args:
        path: a run directory, a folder of runs (then the latest), or a safetensors file.

    Raises:
        OSError: there is no model at `path`.
        ValueError: the file is not a model, does not tell which, or its tensors are not those of that model; the text
            names the file and what is wrong.
    """
    file = _model_file(Path(path).expanduser())
    with _opened(file) as content:
        metadata = content.metadata() or {}
        names = content.keys()
        shapes = {name: tuple(content.get_slice(name).get_shape()) for name in names}
    try:
        name, told = _described(metadata)
        config, training = InputConfig.from_run_config(told), TrainingConfig.of({**told, "autocast": "no"})
        info, sizes = _built_for(told, config)
        model = models.build(name, **sizes, seed=0)
        prefixes = _prefixes(shapes)
        expected = told.get("fedensemble.modes") if told.get("strategy") == "fedensemble" else len(prefixes)
        if len(prefixes) != expected:
            raise ValueError(f"part of the ensemble is missing: it has {len(prefixes)} of its {expected} modes")
        _check_fit(shapes, prefixes, model, name)
        if isinstance(info, DatasetInfo):
            check_normalise(config.normalise, info.shape[0])
        elif config.kind in (models.TEXTS, models.CHOICES):
            tokens_of(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    strategy = CATALOGUE.get(str(told.get("strategy")))
    caution = ""
    if strategy and strategy.result and "run" in metadata:
        caution = f"this is {strategy.result}; each client's own is where its node's model-path says"
    return Predictor(file, model.to(device_of(None)), info, config, training, prefixes, caution)


def _model_file(path: Path) -> Path:
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


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a readable safetensors file ({error}); expected is the {MODEL} of a run directory"
        ) from error


def _described(metadata: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
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


def _built_for(
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


def _prefixes(names: Iterable[str]) -> tuple[str, ...]:
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


def _check_fit(
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


# The images


@dataclass(frozen=True, eq=False)
class _Images:
    """Up to `_AT_ONCE` examples, and the (file, index) of each; labels are zeros where none are known."""

    origins: list[tuple[Path, int | None]]
    arrays: ImageArrays
    labelled: bool


def _expanded(files: Sequence[Path]) -> list[Path]:
    """Files with what they are checked by name, folders replaced by the images below them."""
    found: list[Path] = []
    for given in files:
        file = Path(given).expanduser()
        if file.is_dir():
            inside = [
                image
                for image in sorted(file.rglob("*"))
                if image.suffix.lower() in IMAGE_SUFFIXES
                and image.is_file()
                and not any(part.startswith(".") for part in image.relative_to(file).parts)
            ]
            if not inside:
                raise ValueError(f"{file}: no image in this folder or below it; read are {', '.join(IMAGE_SUFFIXES)}")
            found += inside
        elif not file.exists():
            raise FileNotFoundError(f"{file}: no such file or folder")
        elif file.suffix.lower() in (NPZ, *IMAGE_SUFFIXES):
            found.append(file)
        else:
            raise ValueError(f"{file}: not an image or .npz file; read are {', '.join((*IMAGE_SUFFIXES, NPZ))}")
    return found


def _image_arrays(files: Sequence[Path], info: DatasetInfo) -> Iterator[_Images]:
    for is_npz, group in groupby(files, lambda file: file.suffix.lower() == NPZ):
        if is_npz:
            for file in group:
                yield from _npz_batches(file, info)
        else:
            yield from _image_batches(list(group), info)


def _image_batches(files: Sequence[Path], info: DatasetInfo) -> Iterator[_Images]:
    if info.shape[0] not in (1, 3):
        raise DataError(
            f"{files[0]}: image files are read with 1 (grey) or 3 (colour) channels, and the model needs "
            f"{info.shape[0]}: give it arrays in a .npz file"
        )
    for start in range(0, len(files), _AT_ONCE):
        part = files[start : start + _AT_ONCE]
        images = np.stack([read_image(file, info.shape) for file in part])
        arrays = ImageArrays(images, np.zeros(len(part), np.int64))
        yield _Images([(file, None) for file in part], arrays, labelled=False)


def _npz_batches(file: Path, info: DatasetInfo) -> Iterator[_Images]:
    arrays, labelled = _read_npz(file, info)
    for start in range(0, len(arrays.labels), _AT_ONCE):
        part = ImageArrays(arrays.images[start : start + _AT_ONCE], arrays.labels[start : start + _AT_ONCE])
        yield _Images([(file, start + index) for index in range(len(part.labels))], part, labelled)


def _read_npz(file: Path, info: DatasetInfo) -> tuple[ImageArrays, bool]:
    """The file's images with their labels, and whether it has labels."""
    images, labels, names = npz_examples(file, "images")
    known = np.zeros(images.shape[0] if images.ndim else 1, np.int64) if labels is None else labels
    return checked_arrays(images, known, f"{file}: {names}", info.shape, info.classes), labels is not None


# The results


def accuracy(rows: Sequence[Prediction]) -> float | None:
    """Share of correct labels among the examples whose true label is known; None where there is none."""
    correct = [row.label == row.true_label for row in rows if row.true_label is not None]
    return sum(correct) / len(correct) if correct else None


def write_csv(rows: Sequence[Prediction | NumberPrediction], file: Path) -> None:
    """One line for each example under a line of column names; what is not known is empty. Raises OSError."""
    if regressed := [row for row in rows if isinstance(row, NumberPrediction)]:
        write_numbers(regressed, file)
        return
    # Not written beside and renamed: `file` may be a pipe or a device. Names of files need not be valid text.
    with Path(file).open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in rows:
            writer.writerow([getattr(row, column) for column in _COLUMNS])


def results_table(rows: Sequence[Prediction | NumberPrediction]) -> Group:
    """The first rows, how many more there are, and the accuracy where labels are known, for the terminal."""
    if regressed := [row for row in rows if isinstance(row, NumberPrediction)]:
        return numbers_table(regressed)
    images = [row for row in rows if isinstance(row, Prediction)]
    labelled = [row for row in images if row.true_label is not None]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("file", overflow="fold")
    named = any(row.class_name for row in rows)
    there = (("label", True), ("class", named), ("true", bool(labelled)))
    for heading in (*(name for name, shown in there if shown), "probability", "entropy", "disagreement"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in images[:SHOWN]:
        known = [] if not labelled else ["" if row.true_label is None else str(row.true_label)]
        numbers = (f"{value:.4f}" for value in (row.probability, row.entropy, row.disagreement))
        name = [Text(row.class_name if row.class_name.strip() else repr(row.class_name))] if named else []
        table.add_row(_origin(row), str(row.label), *name, *known, *numbers)
    lines = [f"… and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
    if labelled:
        lines.append(f"Accuracy {accuracy(labelled):.4f} on {len(labelled):,} examples with a label")
    return Group(table, *map(Text, lines))


def _origin(row: Prediction) -> Text:
    # Text, since brackets in a string would be read as markup; and names that no terminal can print lose those bytes.
    name = os.fsencode(row.file).decode("utf-8", "replace")
    return Text(name if row.index is None else f"{name}[{row.index}]")
