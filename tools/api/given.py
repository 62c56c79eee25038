"""Models and data that exist as Python objects, as a run config names them: modules by a name, data as files.

A model is kept in this process as a function `model_…` of this module. Data is written once to a folder, under a name
made of its content, so that the run can be repeated and resumed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tepal.host.files import replacing
from tepal.host.toml import Value
from tepal.models import IMAGES, SEQUENCES, TABLES, TEXTS, ModelError

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Inputs and labels (or targets), with one row for each example."""

_PREFIX = "model_"
_EXPECTED = (
    "a name, a path, (inputs, labels), a torch Dataset of such pairs, a dataset of Hugging Face, or a list with the "
    "data of each client"
)
# Columns of a dataset of Hugging Face that are used unless the key is given.
_COLUMNS = {
    "image-column": ("image", "img", "pixels"),
    "text-column": ("text", "sentence", "content"),
    "label-column": ("label", "labels", "fine_label", "class"),
}


def model_name(model: str | Path | nn.Module | Callable[..., nn.Module]) -> str:
    """Return the value of the run config's key `model`: a name or folder as it is, an object by a new name.

    Raises TypeError for another object.
    """
    if isinstance(model, str | Path):
        return str(model)
    if isinstance(model, nn.Module):
        kept = copy.deepcopy(model).cpu()  # the original may be trained meanwhile

        def factory() -> nn.Module:
            return copy.deepcopy(kept)
    elif callable(model):
        factory = model
    else:
        raise TypeError(
            f"model is {type(model).__name__}, expected a name, a folder with a config.json, a torch module, or a "
            "function that returns one"
        )
    name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"  # no other process has an object of this name
    setattr(sys.modules[__name__], name, factory)
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Any:
    """Return what stands for a model of another process: a function that says so."""
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing() -> nn.Module:
        raise ModelError(
            "the model was an object of another Python process, and its run has its weights alone: build one like it, "
            "and load run.weights with load_state_dict"
        )

    return missing


def data_settings(data: Any, folder: Path) -> tuple[dict[str, Value], int | None]:
    """Return keys of the run config for data, and the number of clients if the data determines it.

    Of arrays and texts they include `task`, for a model that is an object.

    Args:
        data: a name or path; (inputs, labels) of arrays, tensors, or texts and whole numbers; a torch Dataset of
            such pairs; a dataset of Hugging Face; or a list of pairs or torch Datasets, one for each client.
        folder: folder to which objects are written.

    Raises:
        TypeError: for another object.
        ValueError: inputs and labels have different lengths, clients have inputs of different shapes, or the columns of
            a stream are not known.
    """
    if isinstance(data, str | Path):
        return {"dataset": str(data)}, None
    if hasattr(data, "to_parquet") and hasattr(data, "column_names"):
        return _hugging_face(data, folder), None
    if not isinstance(data, list):
        return _written(*_arrays(data), None, folder), None
    if not data:
        raise ValueError("data is an empty list, expected the data of each client")
    clients = [_arrays(one) for one in data]
    shapes = sorted({inputs.shape[1:] for inputs, _ in clients})
    if len(shapes) > 1:
        raise ValueError(f"data: inputs of clients have the shapes {' and '.join(map(str, shapes))}: use one shape")
    width = len(str(len(clients)))  # the partition of the k-th group, sorted by name, is client k
    names = [f"client-{number:0{width}}" for number in range(len(clients))]
    groups = np.repeat(names, [len(labels) for _, labels in clients])
    inputs, labels = (np.concatenate([client[column] for client in clients]) for column in (0, 1))
    return {**_written(inputs, labels, groups, folder), "partitioner": "natural"}, len(clients)


def _arrays(data: Any) -> Arrays:
    """Return inputs and labels of a pair, or of all items of a torch Dataset."""
    if isinstance(data, tuple) and len(data) == 2:
        inputs, labels = map(_array, data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | Sequence):
        items = [data[number] for number in range(len(data))]
        if not items:
            raise ValueError(f"data: {type(data).__name__} has no items")
        if wrong := next((item for item in items if not isinstance(item, tuple | list) or len(item) != 2), None):
            raise TypeError(
                f"data: an item of {type(data).__name__} is {type(wrong).__name__}, expected an input and a label"
            )
        inputs, labels = (np.stack([_array(item[place]) for item in items]) for place in (0, 1))
    else:
        raise TypeError(f"data is {type(data).__name__}, expected {_EXPECTED}")
    if inputs.ndim == 0 or labels.ndim == 0 or len(inputs) != len(labels):
        counts = [len(part) if part.ndim else "no list of" for part in (inputs, labels)]
        raise ValueError(f"data: {counts[0]} inputs and {counts[1]} labels: give one label for each input")
    # An integer is a pixel of 0 to 255 as an input.
    inputs = inputs.astype(np.float32) if inputs.dtype == bool else inputs
    return inputs, labels.astype(np.int64) if labels.dtype == bool else labels


def _array(value: Any) -> NDArray[Any]:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype == object and all(isinstance(each, str) for each in array.flat):  # as of a column of pandas
        return array.astype(np.str_)
    return array


def _written(inputs: NDArray[Any], labels: NDArray[Any], groups: NDArray[Any] | None, folder: Path) -> dict[str, Value]:
    """Write texts as JSON lines, arrays as .npz, unless the same data is there; return the keys for it."""
    arrays = {"x": inputs, "y": labels, **({} if groups is None else {"groups": groups})}
    digest = hashlib.blake2b(digest_size=12)
    for name, array in arrays.items():
        digest.update(f"{name}/{array.dtype}/{array.shape}/".encode())
        digest.update(array.tobytes())
    texts = inputs.dtype.kind in "UO"
    task = {"task": _task(inputs, labels)}
    file = folder / f"{digest.hexdigest()}{'.jsonl' if texts else '.npz'}"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            if texts:
                rows = zip(*(array.tolist() for array in arrays.values()), strict=True)
                named = ({"text": text, "label": label, "group": "".join(group)} for text, label, *group in rows)
                partial.write_text("".join(json.dumps(row) + "\n" for row in named), encoding="utf-8")
            else:
                with partial.open("wb") as stream:
                    np.savez(stream, **arrays)  # type: ignore[arg-type]
    if texts:
        columns = {"text-column": "text", **({} if groups is None else {"group-column": "group"})}
        return {"dataset": str(file), **columns, **task}
    return {"dataset": str(file), **task}


def _task(inputs: NDArray[Any], labels: NDArray[Any]) -> str:
    """Return the task of a model that has none of its own."""
    if inputs.dtype.kind in "UO":
        return TEXTS
    if labels.dtype.kind == "f":
        return SEQUENCES
    return TABLES if inputs.ndim == 2 else IMAGES


def _hugging_face(data: Any, folder: Path) -> dict[str, Value]:
    """Write a dataset of Hugging Face as parquet; columns are found by their usual names.

    Raises ValueError for a stream whose columns are not known.
    """
    names = data.column_names
    if names is None:
        raise ValueError(
            f"data: the columns of this {type(data).__name__} are not known before it is read: give its features where "
            "it is made, or give datasets.Dataset.from_list(list(data))"
        )
    found = {key: name for key, usual in _COLUMNS.items() if (name := next((n for n in usual if n in names), ""))}
    if "image-column" in found:
        found.pop("text-column", None)
    folder.mkdir(parents=True, exist_ok=True)
    return {"dataset": str(_parquet(data, folder)), **found}


def _parquet(data: Any, folder: Path) -> Path:
    """Return the file with this dataset of Hugging Face, which is written unless it is there."""
    if fingerprint := getattr(data, "_fingerprint", None):
        file = folder / f"{fingerprint}.parquet"
        if not file.exists():
            with replacing(file) as partial:
                data.to_parquet(str(partial))
        return file
    with TemporaryDirectory(prefix=".writing-", dir=folder) as beside:  # a stream: its content names it
        written = Path(beside) / "data.parquet"
        data.to_parquet(str(written))
        with written.open("rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=12)).hexdigest()
        file = folder / f"{digest}.parquet"
        if not file.exists():  # a new time of it would be a change for runs that read it
            written.replace(file)
    return file


def takes_seed(model: str | Path | nn.Module | Callable[..., nn.Module]) -> bool:
    """Whether the weights of a model depend on the run's seed: not those of a module."""
    return not isinstance(model, nn.Module)
