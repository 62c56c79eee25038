"""Loading of the server's and the clients' examples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from tepal.training.data.config import DATASET, DIGITS, EVERY, LOCAL, DataConfig, DataError
from tepal.training.data.examples import (
    AnySource,
    ClientData,
    DatasetInfo,
    ImageArrays,
    Indices,
    Kind,
    LabelledNumbers,
    NumberInfo,
    Numbers,
    Source,
    TableInfo,
    TextInfo,
    Texts,
)
from tepal.training.data.formats.named import PLAIN, read_to_predict
from tepal.training.data.hub import HUB
from tepal.training.data.known import KNOWN, reading_of
from tepal.training.data.labels import remark_own_names
from tepal.training.data.normalisation import check_normalise, written_statistics
from tepal.training.data.partitions import divide
from tepal.training.data.sources import named_source, path_source, reading_for, stamp
from tepal.training.data.splits import shares, split

log = getLogger("flwr")

_IMAGES: Any = ImageArrays  # the default kind of examples

_first_counts: dict[tuple[str, str, DataConfig], int] = {}
"""(path, client, settings) → examples of its own when this process first divided them; -1: said that they changed."""


def dataset_info(config: DataConfig) -> DatasetInfo:
    """Return the shape of an image and the number of classes, for building the model on the server.

    Raises:
        DataError: the dataset cannot be read; it is "local" and `image-shape` or `classes` is not set; or `normalise`
            does not fit the images.
    """
    if config.dataset == LOCAL:
        unset = [key for key, value in (("image-shape", config.shape), ("classes", config.class_count)) if not value]
        if config.shape is None or unset:
            raise DataError(
                f'dataset="{LOCAL}": the server has no data, so the run config must give the sizes: set '
                f'{" and ".join(unset)} (for example image-shape="1x28x28" and classes=10)'
            )
        info = DatasetInfo(config.shape, config.class_count)
    else:
        source = _named(config, ImageArrays)
        info = DatasetInfo(source.train.shape, source.classes)
    check_normalise(config.normalise, info.shape[0])
    return info


def held_out(config: DataConfig, kind: type[Kind] = _IMAGES) -> Kind | None:
    """Return the server's test set: a named dataset's own, or else `held-out-fraction` of it, drawn by `seed`.

    None for dataset="local" (the server has no data) and for `held-out-fraction`=0.

    Raises:
        DataError: the dataset cannot be read, or has no examples of this kind.
    """
    return None if config.dataset == LOCAL else _held_out(_named(config, kind), config)


def holds_out(config: DataConfig, kind: type[Kind]) -> bool:
    """Return whether `held_out` returns a test set, without taking its examples. Raises DataError."""
    return config.dataset != LOCAL and (_named(config, kind).test is not None or config.held_out_fraction > 0)


def unlabelled(config: DataConfig, kind: type[Kind] = _IMAGES) -> Kind | None:
    """Return the server's unlabelled examples: `server-share` of the training examples.

    They are drawn by `seed` from the examples that are not held out, and no client has them. None for dataset="local"
    (the server has no data) and for `server-share`=0.

    Raises:
        DataError: the dataset cannot be read, or has no examples of this kind.
    """
    if config.dataset == LOCAL or not config.server_share:
        return None
    source = _named(config, kind)
    _, kept, _ = shares(source, config)
    return source.train.take(kept)


def load_client(
    config: DataConfig, node_config: Mapping[str, Any], *, client: str, kind: type[Kind] = _IMAGES, stamped: str = ""
) -> ClientData[Kind]:
    """Return one client's train and test examples.

    Args:
        config: the run's data keys.
        node_config: the node's config. `data-path` (a file or folder in any of the formats) takes precedence; otherwise
            `partition-id` and `num-partitions` (set by Flower's simulation) select a part of the run's named dataset.
        client: the client's name. The train/test split derives from it and from `seed`, so it must be the same in every
            run: a registered name, or in a simulation one derived from the partition id. Flower's node ids change at a
            restart, and training examples would become test examples: the split of files at `data-path` omits them.
        kind: `ImageArrays`, `Texts`, `Numbers` or `LabelledNumbers`: what the model needs.
        stamped: `dataset_stamp` of the run's dataset as it must be; "": as it is now. Files at `data-path` are read as
            they are.

    Raises:
        DataError: this client's data cannot be found, read or used, or the run's dataset was changed since `stamped`.
    """
    found, train, test, origin = _client_source(config, node_config, client, kind, stamped)
    source = _of_kind(found, kind)
    tests = source.train.take(test) if test is not None else _held_out(source, config)
    assert tests is not None, "the source has a test set if there are no indices for tests"
    return ClientData(
        source.train.take(train), tests, source.classes, source.class_names, client, origin, source.next_characters
    )


def load_client_texts(config: DataConfig, node_config: Mapping[str, Any], *, client: str) -> ClientData[Texts]:
    """As `load_client`, for texts."""
    return load_client(config, node_config, client=client, kind=Texts)


def load_client_numbers(config: DataConfig, node_config: Mapping[str, Any], *, client: str) -> ClientData[Numbers]:
    """As `load_client`, for numbers."""
    return load_client(config, node_config, client=client, kind=Numbers)


def text_info(config: DataConfig) -> TextInfo:
    """Return the number of classes of texts, and their names, for building the model on the server.

    Raises:
        DataError: the dataset cannot be read or has no texts, or it is "local" and the run config has no sizes.
    """
    if config.dataset == LOCAL:
        if config.label_column and not config.class_count:
            raise DataError(
                f'dataset="{LOCAL}": the server has no data, so the run config must give the sizes: set '
                'classes or class-names, or label-column="" for running text'
            )
        return TextInfo(config.class_count if config.label_column else 0, config.names)
    source = _named(config, Texts)
    return TextInfo(source.classes, source.class_names)


def class_names(config: DataConfig, kind: type = ImageArrays) -> tuple[str, ...]:
    """Return the names of the run's classes in the order of their labels; empty if they are not known.

    Raises DataError if the dataset cannot be read.
    """
    names = reading_of(config).class_names
    return names if names or config.dataset == LOCAL else named_source(config, kind).class_names


def texts_to_predict(config: DataConfig, path: Path) -> tuple[Texts, bool]:
    """Read texts to predict from a table, with the run's columns; returns them and whether they have labels.

    Raises DataError.
    """
    known = KNOWN.get(config.dataset)
    return read_to_predict(path, reading_of(config), known.tables or PLAIN if known else PLAIN)


def number_info(config: DataConfig) -> NumberInfo:
    """Return the sizes of inputs and targets, for building the model on the server.

    Raises:
        DataError: the dataset cannot be read or has no numbers, or it is "local" and the run config has no sizes.
    """
    if config.dataset == LOCAL:
        info = NumberInfo(config.feature_count, config.output_count)
        if not (info.features and info.outputs):
            raise DataError(
                f'dataset="{LOCAL}": the server has no data, so the run config must give the sizes: set '
                "features and outputs (for example features=12 and outputs=1), or for tables feature-columns and "
                "label-column"
            )
    else:
        info = _named(config, Numbers).train.info
    _check_numbers(config, info.features)
    return info


def table_info(config: DataConfig) -> TableInfo:
    """Return the number of features and of classes, for building a model that classifies numbers on the server.

    Raises:
        DataError: the dataset cannot be read or has no numbers, it is "local" and the run config has no sizes, or
            `normalise` does not fit the features.
    """
    if config.dataset == LOCAL:
        info = TableInfo(config.feature_count, config.class_count)
        if not (info.features and info.classes):
            raise DataError(
                f'dataset="{LOCAL}": the server has no data, so the run config must give the sizes: set '
                "feature-columns (for arrays: features) and class-names (for numbered classes: classes)"
            )
    else:
        source = _named(config, LabelledNumbers)
        info = TableInfo(source.train.features, source.classes)
    _check_numbers(config, info.features)
    return info


def _check_numbers(config: DataConfig, features: int) -> None:
    """Raise DataError if `normalise` does not fit, or the server cannot see what the run config leaves to the data."""
    if config.dataset == LOCAL:
        if config.feature_columns == EVERY:
            raise DataError(
                f'feature-columns="{EVERY}" and dataset="{LOCAL}": the server cannot see whether all clients have the '
                "same columns: name them, separated by commas"
            )
        if config.normalise == DATASET:
            raise DataError(
                f'normalise="{DATASET}" and dataset="{LOCAL}": the server has no data: give the features\' means and '
                'standard deviations, as "mean,mean,…/std,std,…"'
            )
    if config.normalise != DATASET:
        check_normalise(config.normalise, features, "features")


def by_dataset(config: DataConfig, kind: type[Numbers] | type[LabelledNumbers]) -> dict[str, str]:
    """Return the keys that the run config leaves to the dataset, with their values: what is sent to clients.

    `feature-columns` is the names of all columns for "*". `normalise` is for "dataset" the statistics of each feature
    over the training examples that the server does not keep. Raises DataError.
    """
    found: dict[str, str] = {}
    if config.dataset == LOCAL or (config.feature_columns != EVERY and config.normalise != DATASET):
        return found
    source: Source[Any] = _of_kind(named_source(config, kind), kind)  # type: ignore[type-var]
    if config.feature_columns == EVERY and source.columns:
        found["feature-columns"] = ",".join(source.columns)
    if config.normalise == DATASET:
        _, _, clients = shares(source, config)
        found["normalise"] = written_statistics(source.train.inputs[clients])
    return found


def check_partition(config: DataConfig, clients: int, kind: type = ImageArrays) -> None:
    """Check that the run's dataset, with examples of a kind, can be divided among a number of clients.

    Raises DataError if it cannot.
    """
    if config.dataset != LOCAL:
        divide(named_source(config, kind), config, clients)


_NEEDED: Mapping[type, tuple[str, str]] = {
    ImageArrays: ("images", "choose other data or a text model"),
    Texts: ("texts", "choose other data or an image model, or, for a table, set text-column"),
    Numbers: ("numbers", "choose a .npz file or a table (feature-columns), or another model"),
    LabelledNumbers: ("numbers", "choose a .npz file or a table (feature-columns), or another model"),
}
"""Kind of examples → its name, and what to do if a dataset has none."""


def _named(config: DataConfig, kind: type[Kind]) -> Source[Kind]:
    return _of_kind(named_source(config, kind), kind)


def _of_kind(source: AnySource, kind: type[Kind]) -> Source[Kind]:
    """Return the source. Raises DataError if its examples are of another kind."""
    if not isinstance(source.train, kind):
        (found, _), (needed, cure) = _NEEDED[type(source.train)], _NEEDED[kind]
        raise DataError(f"{source.origin}: has {found}, but the model needs {needed}: {cure}")
    return source


def _held_out(source: Source[Kind], config: DataConfig) -> Kind | None:
    if source.test is not None:
        return source.test.take(np.arange(len(source.test)))
    kept, _, _ = shares(source, config)
    return source.train.take(kept) if len(kept) else None


def dataset_stamp(config: DataConfig) -> str:
    """Return a digest that changes with the files of the run's dataset.

    It is "" for a dataset that is not a path, and if the files cannot be read.
    """
    path = config.dataset_path if config.dataset in KNOWN else config.dataset
    if not path or path in (LOCAL, DIGITS) or path.startswith(HUB):
        return ""
    try:
        return stamp(Path(path).expanduser().absolute())
    except OSError:
        return ""


def own_stamp(node_config: Mapping[str, Any]) -> str:
    """Return a digest that changes with the files at a node's `data-path`.

    It is "" without `data-path`, and if the files cannot be read now, for example because a disk is not mounted.
    """
    path = node_config.get("data-path")
    try:
        return stamp(Path(str(path)).expanduser().absolute()) if path else ""
    except OSError:
        return ""


def _client_source(
    config: DataConfig, node_config: Mapping[str, Any], client: str, kind: type, stamped: str
) -> tuple[AnySource, Indices, Indices | None, str]:
    """Return a client's source, its indices for training and for tests, and a description of its origin.

    Indices for tests are None if the source has a test set.
    """
    if path := node_config.get("data-path"):
        try:
            reading = reading_for(config, kind)
            own = path_source(str(path), reading)
            if not reading.class_names:
                remark_own_names(own.origin, own.class_names)
            indices = np.arange(len(own.train))
            if own.test is not None:
                return own, indices, None, own.origin
            train, test = _split(indices, config, _lasting(client), own.origin)
            _remark_another_split((str(path), client, config), len(indices), own.origin)
            return own, train, test, own.origin
        except DataError as error:
            raise DataError(f"client {client}: {error}") from error
    partition, partitions = _partition_of(config, node_config)
    named = named_source(config, kind, stamped)
    origin = f"{named.origin}, partition {partition} of {partitions}"
    return named, *_split(divide(named, config, partitions)[partition], config, client, origin), origin


def _lasting(client: str) -> str:
    """Return a client's name without node ids: `site@7` has lost the key of `site`, and `node-7` has no name."""
    name = re.sub(r"(@[0-9]+)+\Z", "", client)
    return "node" if re.fullmatch(r"node-[0-9]+", name) else name


def _remark_another_split(key: tuple[str, str, DataConfig], count: int, origin: str) -> None:
    """Warn once if a client has another number of examples of its own than before: its split is another one."""
    before = _first_counts.setdefault(key, count)
    if before not in (count, -1):
        _first_counts[key] = -1
        log.warning(
            "Client %s: %s has %d examples, and had %d before, so that its test examples are drawn anew: some of the "
            "earlier ones may now be trained on. Where data grows, give a test set (folders train and test, or "
            "split-column).",
            key[1], origin, count, before,
        )  # fmt: skip


def _split(indices: Indices, config: DataConfig, client: str, origin: str) -> tuple[Indices, Indices]:
    try:
        return split(indices, config.test_fraction, config.seed, client)
    except DataError as error:
        raise DataError(f"{origin}: {error}") from error


def _partition_of(config: DataConfig, node_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the node's (partition-id, num-partitions). Raises DataError if they are missing or invalid."""
    if config.dataset == LOCAL:
        raise DataError(
            f'dataset="{LOCAL}" needs data-path in the node config: start the node with '
            "--node-config 'data-path=\"/path/to/data.npz\"' (a .npz file, an image folder, or another format of "
            "docs/data.md)"
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
            raise DataError(f"node config: {key}={value!r} is not a whole number: set both as whole numbers")
    if not 0 <= partition < partitions:
        raise DataError(
            f"node config: partition-id={partition} with num-partitions={partitions}: "
            "partition-id counts from 0 and must be smaller than num-partitions"
        )
    return partition, partitions
