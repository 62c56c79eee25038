"""What a client learns from: data sets, how they are divided among clients, and each client's own train/test split.

    DataConfig  --->  dataset_info(config)            the server builds its model from it
                --->  held_out(config)                the server scores the global model on it
                --->  load_client(config, node, ...)  one client's examples

A client's examples come from its own `data-path` (a deployment), or are one partition of a named dataset (a
simulation). Partitions are made by flwr-datasets. Everything is numpy, images are float32 in 0..1 and channel-first;
training turns them into tensors. All randomness derives from (`seed`, purpose, client), so that every process computes
the same partition and the same split.

A `.npz` file holds images and labels under one of these pairs of names (the first pair found is read):

    images, labels            all examples
    x, y                      all examples
    images_train, labels_train  (and images_test, labels_test)
    x_train, y_train            (and x_test, y_test)
    train_images, train_labels  (and test_images, test_labels)

Images are N x H x W, N x C x H x W or N x H x W x C, either integers 0..255 (scaled to 0..1) or floats 0..1; labels
are N integers from 0 on. Where the file brings a test pair, that is the test set: the server's if the file is the run's
`dataset` (`held-out-fraction` does not apply), the client's own if it is a client's `data-path` (`test-fraction` does
not apply). An image folder is `root/<class name>/<image file>`; a class's label is its position among the sorted class
names.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

Shape = tuple[int, int, int]
Indices = NDArray[np.int64]

DIGITS = "digits"
LOCAL = "local"
DIGITS_SHAPE: Shape = (1, 8, 8)
DIGITS_CLASSES = 10

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
NPZ_PAIRS = (
    ("images", "labels"),
    ("x", "y"),
    ("images_train", "labels_train"),
    ("x_train", "y_train"),
    ("train_images", "train_labels"),
)

# How many seeds are tried until a partition meets the minimum and uses every class. For each of them Flower's
# Dirichlet partitioner draws up to eleven times; the pathological one draws once.
ATTEMPTS = {"iid": 1, "dirichlet": 20, "pathological": 100}


class DataError(ValueError):
    """Data that cannot be used: what is wrong, where (client, file, key), what is allowed and what to do."""


# The run config


class DataConfig(BaseModel):
    """The run config's keys about data. In the run config they are written with hyphens (`dirichlet-alpha`)."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True, extra="ignore", frozen=True
    )

    dataset: str = Field(
        default=DIGITS,
        min_length=1,
        description='"digits" (ships with scikit-learn: 1,797 images of 8x8), a path to a .npz file or to an image '
        'folder (root/<class name>/*.png), or "local": every client reads its own data-path (from its node config)',
    )
    partitioner: Literal["iid", "dirichlet", "pathological"] = Field(
        default="dirichlet",
        description='how a named dataset is divided among clients: "iid" (at random, equal sizes), "dirichlet" (each '
        'class divided by a draw from a Dirichlet distribution), "pathological" (few classes a client)',
    )
    dirichlet_alpha: float = Field(
        default=0.5,
        gt=0,
        allow_inf_nan=False,
        description="concentration of the dirichlet partitioner: the smaller, the more the clients differ",
    )
    min_partition_size: int = Field(
        default=10, ge=1, description="fewest examples a client may get; partitions are drawn again until it is reached"
    )
    classes_per_client: int = Field(
        default=2, ge=1, description="classes at each client under the pathological partitioner"
    )
    test_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="share of each client's examples that is its own test split"
    )
    held_out_fraction: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="share of a named dataset that no client gets and on which the server scores the global model "
        "(0: none; not applied to a .npz file that has a test set of its own)",
    )
    image_shape: str = Field(
        default="",
        description='shape of an image as "CxHxW" (channels, height, width), e.g. "1x8x8"; an image folder is resized '
        'to it; "": as in the dataset (required for dataset="local")',
    )
    classes: int = Field(
        default=0, ge=0, description='number of classes; 0: as in the dataset (required for dataset="local")'
    )
    seed: int = Field(default=42, ge=0, description="seed of the held-out set, the partition and the train/test splits")

    @field_validator("image_shape")
    @classmethod
    def _is_shape(cls, text: str) -> str:
        text = text.strip().lower()
        if text and not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*){2}", text):
            raise ValueError('allowed is "CxHxW" with three whole numbers from 1 on, e.g. "1x8x8", or ""')
        return text

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> DataConfig:
        """Read the data keys of a run config; keys that are not about data are left alone.

        Raises:
            DataError: a value is out of range; the message has the key, the value and what is allowed.
        """
        try:
            return cls.model_validate(dict(run_config))
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg'].removeprefix('Value error, ')}"
                for one in error.errors()
            ]
            raise DataError("run config: " + "; ".join(lines)) from error

    @property
    def shape(self) -> Shape | None:
        """`image_shape` as (channels, height, width), None if it is left to the dataset."""
        if not self.image_shape:
            return None
        channels, height, width = (int(size) for size in self.image_shape.split("x"))
        return channels, height, width


# What callers get


@dataclass(frozen=True, eq=False)
class Examples:
    """Images (n, C, H, W), float32 in 0..1, and their labels (n,), int64. Arrays are the caller's own to change."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DatasetInfo:
    """What a model must know about the data: an image's shape (channels, height, width) and the number of classes."""

    shape: Shape
    classes: int


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's examples. `name` is the client's, `origin` says in words where its examples come from."""

    train: Examples
    test: Examples
    shape: Shape
    classes: int
    name: str
    origin: str


def dataset_info(config: DataConfig) -> DatasetInfo:
    """The shape of an image and the number of classes, for building the model on the server.

    Raises:
        DataError: the dataset cannot be read, or it is "local" and `image-shape` or `classes` is not set.
    """
    if config.dataset == LOCAL:
        unset = [key for key, value in (("image-shape", config.shape), ("classes", config.classes)) if not value]
        if config.shape is None or unset:
            raise DataError(
                f'dataset="{LOCAL}": the server sees no data, so the run config must say what the clients have: set '
                f'{" and ".join(unset)} (for example image-shape="1x28x28" and classes=10)'
            )
        return DatasetInfo(config.shape, config.classes)
    source = _named_source(config)
    return DatasetInfo(source.shape, source.classes)


def held_out(config: DataConfig) -> Examples | None:
    """The server's test set: a named dataset's own, else `held-out-fraction` of it, drawn by `seed`.

    None for dataset="local" (the server has no data) and for `held-out-fraction`=0.

    Raises:
        DataError: the dataset cannot be read.
    """
    if config.dataset == LOCAL:
        return None
    source = _named_source(config)
    if source.test is not None:
        return source.test.take(np.arange(len(source.test.labels)))
    kept, _ = _hold_out(source, config.held_out_fraction, config.seed)
    return source.train.take(kept) if len(kept) else None


def load_client(config: DataConfig, node_config: Mapping[str, Any], *, client: str) -> ClientData:
    """One client's train and test examples.

    Args:
        config: the run's data keys.
        node_config: the node's own. `data-path` (a .npz file or an image folder) wins; else `partition-id` and
            `num-partitions` (set by Flower's simulation) choose a part of the run's named dataset.
        client: the client's name. The train/test split derives from it and from `seed`, so it must be the same in every
            run: a registered name, or in a simulation one made from the partition id. (Flower's node ids are not: an
            example that was trained on would be tested on after a restart.)

    Raises:
        DataError: what is wrong with this client's data, and what to do about it.
    """
    path = node_config.get("data-path")
    if path:
        known = _known_info(config)
        source = _path_source(str(path), *known)
        train, test, origin = np.arange(len(source.train.labels)), source.test, source.origin
    else:
        partition, partitions = _partition_of(config, node_config)
        source = _named_source(config)
        train, test = _partition(source, _Scheme.of(config, partitions))[partition], None
        origin = f"{source.origin}, partition {partition} of {partitions}"
    if test is None:
        own_train, own_test = _split(train, config.test_fraction, config.seed, client)
        parts = source.train.take(own_train), source.train.take(own_test)
    else:
        parts = source.train.take(train), test.take(np.arange(len(test.labels)))
    return ClientData(*parts, shape=source.shape, classes=source.classes, name=client, origin=origin)


def _known_info(config: DataConfig) -> tuple[Shape | None, int]:
    """What a client knows of the run's shape (else None) and classes (else 0) without the server's data."""
    if config.dataset == DIGITS:
        return config.shape or DIGITS_SHAPE, config.classes or DIGITS_CLASSES
    return config.shape, config.classes


def _partition_of(config: DataConfig, node_config: Mapping[str, Any]) -> tuple[int, int]:
    """The node's (partition-id, num-partitions), checked."""
    if config.dataset == LOCAL:
        raise DataError(
            f'dataset="{LOCAL}" needs data-path in the node config: start the node with '
            "--node-config 'data-path=\"/path/to/data.npz\"' (a .npz file or an image folder)"
        )
    keys = ("partition-id", "num-partitions")
    missing = [key for key in keys if key not in node_config]
    if missing:
        raise DataError(
            f"the node config has no {' and no '.join(missing)}, and no data-path: start the node with "
            "--node-config 'data-path=\"/path/to/data.npz\"' for its own data, or with "
            f"--node-config 'partition-id=0 num-partitions=10' for a part of dataset={config.dataset!r}"
        )
    partition, partitions = (node_config[key] for key in keys)
    for key, value in zip(keys, (partition, partitions), strict=True):
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"node config: {key}={value!r} is not a whole number")
    if not 0 <= partition < partitions:
        raise DataError(
            f"node config: partition-id={partition} with num-partitions={partitions}: "
            "partition-id counts from 0 and must be smaller than num-partitions"
        )
    return partition, partitions


# Randomness


def _seed_sequence(*words: object) -> np.random.SeedSequence:
    """A seed that depends on the words alone; Python's own hash() differs between processes."""
    text = "\x1f".join(map(str, words))
    return np.random.SeedSequence(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


def _permutation(count: int, *words: object) -> Indices:
    return np.random.default_rng(_seed_sequence(*words)).permutation(count)


def _split(indices: Indices, test_fraction: float, seed: int, client: str) -> tuple[Indices, Indices]:
    """(train, test): both non-empty, a function of (indices, fraction, seed, client's name)."""
    count = len(indices)
    if count < 2:
        raise DataError(
            f"{count} example{'s' * (count != 1)} cannot be split into a train and a test part: at least 2 are needed; "
            "add examples, or raise min-partition-size"
        )
    shuffled = indices[_permutation(count, seed, "train/test", client)]
    tests = min(max(round(count * test_fraction), 1), count - 1)
    return shuffled[tests:], shuffled[:tests]


def _hold_out(source: _Source, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """(the server's, the clients'): indices into `source.train`, both in random order.

    The order matters for the clients' part: files are often sorted, and the iid partitioner cuts without shuffling.
    """
    count = len(source.train.labels)
    shuffled = _permutation(count, seed, "held out")
    kept = max(round(count * fraction), 1) if fraction and source.test is None else 0
    return shuffled[:kept], shuffled[kept:]


# Partitions


@dataclass(frozen=True)
class _Scheme:
    """All that a partition of a dataset depends on."""

    clients: int
    partitioner: str
    alpha: float
    minimum: int
    classes_per_client: int
    held_out_fraction: float
    seed: int

    @classmethod
    def of(cls, config: DataConfig, clients: int) -> _Scheme:
        return cls(
            clients,
            config.partitioner,
            config.dirichlet_alpha,
            config.min_partition_size,
            config.classes_per_client,
            config.held_out_fraction,
            config.seed,
        )


@lru_cache(maxsize=16)
def _partition(source: _Source, scheme: _Scheme) -> tuple[Indices, ...]:
    """Every client's indices into `source.train`: disjoint, together all that is not held out."""
    _, pool = _hold_out(source, scheme.held_out_fraction, scheme.seed)
    labels = source.train.labels[pool]
    _check_possible(source, scheme, labels)
    failure = ""
    for attempt in range(ATTEMPTS[scheme.partitioner]):
        seed = int(_seed_sequence(scheme.seed, "partition", attempt).generate_state(1)[0])
        parts, failure = _draw(labels, scheme, seed)
        if not failure:
            return tuple(pool[part] for part in parts)
    keys = {
        "dirichlet": f"dirichlet-alpha={scheme.alpha:g}, ",
        "pathological": f"classes-per-client={scheme.classes_per_client}, ",
    }
    cures = {
        "dirichlet": "raise dirichlet-alpha, lower min-partition-size, use fewer clients or a larger dataset",
        "pathological": "change classes-per-client, lower min-partition-size, or use more clients (with as many as "
        "there are classes, none is left out)",
    }
    raise DataError(
        f"{source.origin}: no {scheme.partitioner} partition of {len(labels):,} examples over {scheme.clients} clients "
        f"({keys.get(scheme.partitioner, '')}min-partition-size={scheme.minimum}) was found with "
        f"{ATTEMPTS[scheme.partitioner]} seeds; with the last one, {failure}: {cures.get(scheme.partitioner, '')}"
    )


def _check_possible(source: _Source, scheme: _Scheme, labels: NDArray[np.int64]) -> None:
    """What no draw could reach, or needs what is not installed, is said at once."""
    try:
        import datasets  # noqa: F401
        import flwr_datasets.partitioner  # noqa: F401
    except ImportError as error:
        raise DataError(
            f'dividing a dataset among clients needs flwr-datasets ({error}): pip install "tepal[simulation]"'
        ) from error
    needed = scheme.clients * scheme.minimum
    if needed > len(labels):
        raise DataError(
            f"{source.origin}: {scheme.clients} clients with min-partition-size={scheme.minimum} need {needed:,} "
            f"examples, but the clients' part has {len(labels):,}: lower min-partition-size or the number of clients, "
            "or use a larger dataset"
        )
    if scheme.partitioner != "pathological":
        return
    present = len(np.unique(labels))
    each = scheme.classes_per_client
    if each > present:
        raise DataError(
            f"{source.origin}: classes-per-client={each}, but there are {present} classes: set 1 to {present}"
        )
    if scheme.clients * each < present:
        raise DataError(
            f"{source.origin}: {scheme.clients} clients with classes-per-client={each} cannot hold all {present} "
            f"classes: set classes-per-client to at least {-(-present // scheme.clients)}, or use at least "
            f"{-(-present // each)} clients"
        )


def _draw(labels: NDArray[np.int64], scheme: _Scheme, seed: int) -> tuple[list[Indices], str]:
    """One partition by flwr-datasets: each client's positions in `labels`, and what is wrong with it ("": nothing)."""
    from datasets import Dataset
    from flwr_datasets import partitioner as flower

    if scheme.partitioner == "iid":
        partitioner = flower.IidPartitioner(scheme.clients)
    elif scheme.partitioner == "dirichlet":
        partitioner = flower.DirichletPartitioner(
            scheme.clients, "label", scheme.alpha, scheme.minimum, self_balancing=False, seed=seed
        )
    else:
        # "first-deterministic" gives client i class i first, so that no class is left out once clients >= classes.
        partitioner = flower.PathologicalPartitioner(
            scheme.clients, "label", scheme.classes_per_client, class_assignment_mode="first-deterministic", seed=seed
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each draw that is repeated
        partitioner.dataset = Dataset.from_dict({"label": labels, "position": np.arange(len(labels))})
        try:
            parts = [
                np.asarray(partitioner.load_partition(client).with_format("numpy")["position"][:], dtype=np.int64)
                for client in range(scheme.clients)
            ]
        except ValueError as error:
            # The Dirichlet partitioner gives up after eleven draws, and says so without the numbers.
            return [], "a client had too few examples" if scheme.partitioner == "dirichlet" else str(error)
    positions = np.concatenate(parts)
    unused = np.setdiff1d(labels, labels[positions])
    smallest = min(map(len, parts))
    if len(unused):
        return parts, f"no client had class {', '.join(map(str, unused))}"
    if smallest < scheme.minimum:
        return parts, f"a client had {smallest} examples"
    if (np.bincount(positions, minlength=len(labels)) != 1).any():
        return parts, "not every example was at exactly one client"
    return parts, ""


# Reading


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Examples as they are kept in memory: images (n, C, H, W), uint8 (a quarter of the size) or float32 in 0..1."""

    images: NDArray[Any]
    labels: NDArray[np.int64]

    def take(self, indices: Indices) -> Examples:
        images = self.images[indices].astype(np.float32, order="C", copy=False)
        if self.images.dtype == np.uint8:
            images /= 255
        return Examples(images, self.labels[indices])


@dataclass(frozen=True, eq=False)
class _Source:
    """A dataset that was read and checked. Hashed by identity, so that partitions can be cached by it."""

    train: ImageArrays
    test: ImageArrays | None
    classes: int
    origin: str

    @property
    def shape(self) -> Shape:
        _, channels, height, width = self.train.images.shape
        return channels, height, width


def _named_source(config: DataConfig) -> _Source:
    """The run's dataset: a known name, else a path."""
    if config.dataset == DIGITS:
        return _load_digits(config.shape, config.classes)
    if not Path(config.dataset).expanduser().exists() and not re.search(r"[/\\]|\.npz$", config.dataset):
        near = difflib.get_close_matches(config.dataset.lower(), (DIGITS, LOCAL), n=1)
        raise DataError(
            f"dataset={config.dataset!r} is not known{f' (did you mean {near[0]!r}?)' if near else ''}: allowed are "
            f'"{DIGITS}", "{LOCAL}" (every client reads its own data-path), a path to a .npz file, or a path to an '
            "image folder (root/<class name>/*.png)"
        )
    return _path_source(config.dataset, config.shape, config.classes)


def _path_source(text: str, shape: Shape | None, classes: int) -> _Source:
    """Read a .npz file or an image folder; `shape` and `classes` as the run has them (None, 0: as in the data)."""
    path = Path(text).expanduser().absolute()
    try:
        stamp: list[object] = [path.stat().st_mtime_ns, path.stat().st_size]
        if path.is_dir():
            stamp += [(folder.name, folder.stat().st_mtime_ns) for folder in _class_folders(path)]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file or folder (a .npz file or an image folder is expected)") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return _load_path(path, tuple(stamp), shape, classes)


@lru_cache(maxsize=16)
def _load_path(path: Path, stamp: tuple[object, ...], shape: Shape | None, classes: int) -> _Source:
    """Kept for the process; `stamp` (times and size) is part of the key, so that a changed file is read anew."""
    return _read_folder(path, shape, classes) if path.is_dir() else _read_npz(path, shape, classes)


@lru_cache(maxsize=16)
def _load_digits(shape: Shape | None, classes: int) -> _Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f'dataset="{DIGITS}" comes with scikit-learn, which is missing ({error}): pip install scikit-learn'
        ) from error
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    return _checked_source({"": (images, digits.target)}, f'dataset="{DIGITS}"', shape, classes)


def _read_npz(path: Path, shape: Shape | None, classes: int) -> _Source:
    with open_npz(path) as archive:
        train = next((pair for pair in NPZ_PAIRS if set(pair) <= set(archive.files)), None)
        if train is None:
            raise DataError(
                f"{path}: has no pair of arrays for images and labels; it has {listed(archive.files)}, and one of "
                f"these pairs is needed: {'; '.join(' and '.join(pair) for pair in NPZ_PAIRS)}"
            )
        pairs = [train]
        test = (train[0].replace("train", "test"), train[1].replace("train", "test"))
        found = set(test) & set(archive.files)
        if test != train and found:
            if len(found) == 1:
                missing = (set(test) - found).pop()
                raise DataError(f"{path}: has {found.pop()} but no {missing}: a test set needs both, add or remove one")
            pairs.append(test)
        arrays = {
            " and ".join(pair): (npz_array(archive, pair[0], path), npz_array(archive, pair[1], path)) for pair in pairs
        }
    return _checked_source(arrays, str(path), shape, classes)


def open_npz(path: Path) -> np.lib.npyio.NpzFile:
    """A .npz file, to be closed. Raises DataError."""
    try:
        archive = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz file ({error}); write it with numpy.savez") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: one array, not a .npz file with images and labels; write it with numpy.savez")
    return archive


def listed(names: list[str]) -> str:
    return ", ".join(sorted(names)) or "no array"


def npz_array(archive: np.lib.npyio.NpzFile, key: str, path: Path) -> NDArray[Any]:
    try:
        array = archive[key]
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        hint = (
            "arrays of Python objects are not read, since reading them can run code; save numbers instead"
            if "Object arrays" in str(error)
            else "the file is damaged; copy or write it again"
        )
        raise DataError(f"{path}: array {key} cannot be read ({error}): {hint}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: {key} is not an array; write the file with numpy.savez")
    return array


def _class_folders(root: Path) -> list[Path]:
    return sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))


def _read_folder(root: Path, shape: Shape | None, classes: int) -> _Source:
    expected = f"expected are images as root/<class name>/<file>, with {', '.join(IMAGE_SUFFIXES)}"
    folders = _class_folders(root)
    if not folders:
        raise DataError(f"{root}: no class folder; {expected}")
    if classes and len(folders) != classes:
        raise DataError(
            f"{root}: {len(folders)} class folders ({', '.join(folder.name for folder in folders[:20])}), but the run "
            f"has {classes} classes; labels are positions among the sorted folder names, so every client needs the "
            "same class folders (a class without images: an empty folder)"
        )
    files = [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    ]
    if not files:
        raise DataError(f"{root}: no image in its class folders ({len(folders)}); {expected}")
    if shape is not None and shape[0] not in (1, 3):
        raise DataError(
            f"{root}: image folders are read with 1 (grey) or 3 (colour) channels, image-shape has {shape[0]}"
        )
    images = [read_image(file, shape) for file, _ in files]
    for image, (file, _) in zip(images, files, strict=True):
        if image.shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{file}: {image.shape[2]}x{image.shape[1]} pixels, but {files[0][0]} has "
                f"{images[0].shape[2]}x{images[0].shape[1]}: set image-shape, and all images are resized to it"
            )
    channels = max(len(image) for image in images)
    stacked = np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images])
    labels = np.array([label for _, label in files])
    return _checked_source({"": (stacked, labels)}, str(root), shape or stacked.shape[1:], classes or len(folders))


def read_image(file: Path, shape: Shape | None) -> NDArray[np.uint8]:
    """One image as (C, H, W), uint8: converted and resized to `shape`, else 1 channel if it is grey, 3 if not."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{file}: reading images needs Pillow ({error}): pip install pillow") from error
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"{file}: more than 8 bits a channel (mode {image.mode}), which would be cut off: convert the "
                    "images to 8 bits, or save them as floats 0..1 in a .npz file"
                )
            channels = shape[0] if shape else 1 if image.mode in ("1", "L", "LA", "La") else 3
            pixels = image.convert("L" if channels == 1 else "RGB")
            if shape:
                pixels = pixels.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
            return np.asarray(pixels).reshape(pixels.height, pixels.width, channels).transpose(2, 0, 1)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise DataError(f"{file}: not a readable image ({error}): remove or replace it") from error


# Checking


def _checked_source(
    arrays: dict[str, tuple[NDArray[Any], NDArray[Any]]], origin: str, shape: Shape | None, classes: int
) -> _Source:
    """Check the train pair and, if there is one, the test pair (in this order), keyed by the names of their arrays."""
    parts = [
        checked_arrays(images, labels, f"{origin}: {names}" if names else origin, shape, classes)
        for names, (images, labels) in arrays.items()
    ]
    train, test = parts[0], parts[1] if len(parts) > 1 else None
    if test is not None and test.images.shape[1:] != train.images.shape[1:]:
        raise DataError(
            f"{origin}: train images are {_written(train.images.shape[1:])}, test images "
            f"{_written(test.images.shape[1:])}: they must have one shape"
        )
    return _Source(train, test, classes or 1 + max(int(part.labels.max()) for part in parts), origin)


def checked_arrays(
    images: NDArray[Any], labels: NDArray[Any], where: str, shape: Shape | None, classes: int
) -> ImageArrays:
    """Channel-first images (a view where possible), as uint8 or float32 in 0..1, and int64 labels; else a DataError."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; one whole number for each image is needed"
        )
    if images.ndim not in (3, 4):
        raise DataError(
            f"{where}: images have shape {images.shape}; allowed are (n, H, W), (n, C, H, W) and (n, H, W, C)"
        )
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images):,} images but {len(labels):,} labels; each image needs one label")
    if images.size == 0:
        raise DataError(f"{where}: no examples (images have shape {images.shape}); at least one is needed")
    limit = classes or np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(wrong):
        raise DataError(
            f"{where}: label {labels[wrong[0]]} (example {wrong[0]}; {len(wrong):,} in all) is out of range: "
            "allowed are "
            + (f"0 to {classes - 1}, since the run has {classes} classes" if classes else "whole numbers from 0 on")
        )
    return ImageArrays(_channel_first(_scalable(images, where), shape, where), labels.astype(np.int64))


def _scalable(images: NDArray[Any], where: str) -> NDArray[Any]:
    """uint8 for integers 0..255, float32 for floats 0..1."""
    if images.dtype.kind == "f":
        finite = np.isfinite(images)
        if not finite.all():
            first = np.argwhere(~finite)[0][0]
            raise DataError(f"{where}: image {first} has a value that is NaN or infinite: repair or remove it")
        if images.min() < 0 or images.max() > 1:
            raise DataError(
                f"{where}: images are floats from {images.min():g} to {images.max():g}; floats must lie in 0..1: "
                "rescale them, or save 0..255 as uint8"
            )
        return images.astype(np.float32, copy=False)
    if images.dtype.kind not in "iu":
        raise DataError(f"{where}: images are {images.dtype}; allowed are integers 0..255 and floats 0..1")
    if images.dtype != np.uint8 and (images.min() < 0 or images.max() > 255):
        raise DataError(
            f"{where}: images are integers from {images.min()} to {images.max()}; integers must lie in 0..255: "
            "rescale them, or save them as floats 0..1"
        )
    return images.astype(np.uint8, copy=False)


def _channel_first(images: NDArray[Any], shape: Shape | None, where: str) -> NDArray[Any]:
    """(n, C, H, W). The run's shape decides where the channels are; without it, 1 or 3 are taken for channels."""
    layouts = [images, np.moveaxis(images, -1, 1)] if images.ndim == 4 else [images[:, None]]
    possible = " or ".join(_written(layout.shape[1:]) for layout in layouts) + " (CxHxW)"
    if shape:
        for layout in layouts:
            if layout.shape[1:] == shape:
                return layout
        raise DataError(
            f"{where}: images are {possible}, but the run's are {_written(shape)} (by image-shape, else by its dataset)"
        )
    fitting = [layout for layout in layouts if layout.shape[1] in (1, 3)]
    if len(fitting) != 1:
        raise DataError(
            f"{where}: images of shape {images.shape}: where the channels are is not clear, {possible}: "
            "set image-shape to the right one"
        )
    return fitting[0]


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
