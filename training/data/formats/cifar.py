"""The batches of CIFAR-10 and CIFAR-100 as published, in the Python version (pickles) and the binary version.

A folder with data_batch_1, …, test_batch (CIFAR-10) or train, test (CIFAR-100), in the binary version with the suffix
.bin. Labels of CIFAR-100 are the 100 fine ones. Batches may be missing. Reading a pickle can run code, so only numpy
arrays, bytes and plain containers are accepted in it.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.checks import Arrays, checked_source
from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import ImageArrays, Source

_NAME = re.compile(r"(?P<train>data_batch_\d+|train)(\.bin)?|(?P<test>test_batch|test)(\.bin)?")
_PIXELS = 3 * 32 * 32


def is_cifar(names: set[str]) -> bool:
    """Return whether a folder with these files has CIFAR's training batches."""
    return any((found := _NAME.fullmatch(name)) and found["train"] for name in names)


def read_cifar(folder: Path, reading: Reading) -> Source[ImageArrays]:
    """Read all training batches in the order of their names and, if there is one, the test batch. Raises DataError."""
    batches: dict[str, list[Path]] = {"train": [], "test": []}
    for file in sorted(folder.iterdir(), key=lambda file: (len(file.name), file.name)):
        if found := _NAME.fullmatch(file.name):
            batches["train" if found["train"] else "test"].append(file)
    if len({file.suffix for files in batches.values() for file in files}) > 1:
        raise DataError(f"{folder}: has pickled and binary (.bin) batches: put each version into a folder of its own")
    arrays: dict[str, Arrays] = {}
    for part, files in batches.items():
        if files:
            read = [_binary(file) if file.suffix else _pickled(file) for file in files]
            images, labels = (np.concatenate(column) for column in zip(*read, strict=True))
            arrays[part] = (images.reshape(-1, 3, 32, 32), labels, None)
    fine = any(file.name.startswith("train") for file in batches["train"])
    return checked_source(arrays, str(folder), reading, classes=100 if fine else 10)


def _binary(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Records of one label (CIFAR-100: the coarse one and the fine one) and 3,072 pixels, channel by channel."""
    data = np.fromfile(file, np.uint8)
    labels = 2 if file.name in ("train.bin", "test.bin") else 1
    if not data.size or data.size % (labels + _PIXELS):
        raise DataError(
            f"{file}: {data.size:,} bytes are not a multiple of a record's {labels + _PIXELS:,} bytes: it is truncated "
            "or damaged, copy it again"
        )
    records = data.reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1]


def _pickled(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with file.open("rb") as content:
        try:
            batch = _Unpickler(content, encoding="bytes").load()
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
        except Exception as error:  # a damaged pickle can raise any error
            raise DataError(
                f"{file}: not a readable pickle ({error}): it is truncated or damaged, copy it again"
            ) from error
    values: dict[str, Any] = {}
    if isinstance(batch, dict):
        values = {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in batch.items()}
    pixels, labels = values.get("data"), values.get("labels", values.get("fine_labels"))
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list | np.ndarray):
        raise DataError(
            f"{file}: has no data and labels (or fine_labels); it has {', '.join(sorted(values)) or 'no names'}: "
            "give a batch of CIFAR-10 or CIFAR-100"
        )
    if not all(isinstance(label, int | np.integer) for label in labels):
        raise DataError(f"{file}: its labels are not all whole numbers: copy it again")
    if pixels.ndim != 2 or pixels.shape[1] != _PIXELS or pixels.dtype != np.uint8 or len(pixels) != len(labels):
        raise DataError(
            f"{file}: data is {pixels.dtype} of shape {pixels.shape} with {len(labels):,} labels; expected are "
            f"unsigned bytes of shape (n, {_PIXELS:,}) and n labels"
        )
    return pixels, np.array(labels, dtype=np.int64)


class _Unpickler(pickle.Unpickler):
    """Unpickler for the types in CIFAR's batches; it rejects all others before they are called."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda kind, shape, code: np.empty(0, np.int8)  # an empty array, whose state follows
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, encoding: text.encode("latin1")
        raise DataError(
            f"has {module}.{name} in its pickle: only numpy arrays, bytes and plain containers are read, because "
            "reading objects can run code; use the original file, or save it as .npz"
        )
