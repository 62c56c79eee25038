"""Data sets of the Hugging Face hub, downloaded once into the cache of flwr-datasets."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import AnySource
from tepal.training.data.formats.columns import check_columns, with_every_column
from tepal.training.data.formats.named import PLAIN, Tables
from tepal.training.data.formats.tables import Rows, source_of
from tepal.training.data.labels import names_of_numbers

HUB = "hub:"
"""Prefix of a dataset of the hub in the run config."""


@lru_cache(maxsize=4)
def load_hub(
    name: str, reading: Reading, subset: str = "", tables: Tables = PLAIN, named: bool = True
) -> AnySource:
    """Read the splits "train" and, if there is one, "test" of a dataset of the hub, as tables.

    Args:
        name: name on the hub, without "hub:".
        reading: names the columns that `tables` does not name.
        subset: configuration of the dataset; "" for the only one.
        tables: its known columns.
        named: whether the source gets the names that the hub has of the classes. Where other files of this data set
            have names, too, these may be spelled otherwise.

    Raises:
        DataError: it cannot be downloaded, for example without a network (the message says which files to put where),
            or it does not have the columns or classes of the run config.
    """
    try:
        from datasets import ClassLabel, Image
        from flwr_datasets import FederatedDataset
    except ImportError as error:
        raise DataError(
            f'a dataset of the hub needs flwr-datasets ({error}): pip install "tepal[simulation]"'
        ) from error
    origin = f'dataset="{reading.name or HUB + name}"'
    parts: dict[str, Rows] = {}
    names: tuple[str, ...] = ()
    dataset = FederatedDataset(dataset=name, partitioners={}, shuffle=False, **({"subset": subset} if subset else {}))
    for part in ("train", "test"):
        try:
            split = dataset.load_split(part)
        except Exception as error:  # the hub's own errors, and those of the network
            if parts and isinstance(error, ValueError):
                break  # the split does not exist
            raise DataError(
                f"{origin}: cannot be downloaded ({error}). Without a network: download it on another machine (hf "
                f"download --repo-type dataset {name}), put its files train-….parquet and test-….parquet into one "
                f"folder, and set {'dataset-path' if reading.name else 'dataset'} to that folder"
            ) from error
        if not parts:
            reading = with_every_column(tables.fitted(reading, split.column_names), split.column_names, origin)
        columns = tables.needed(reading, split.column_names)
        check_columns(origin, columns, split.column_names)
        label = split.features.get(reading.label_column)
        if isinstance(label, ClassLabel):
            reading = replace(reading, classes=reading.classes or len(label.names))
            names = names or names_of_numbers(label.names)
        for column in columns:
            if isinstance(split.features[column], Image):
                split = split.cast_column(column, Image(decode=False))  # bytes, as in a parquet file
        parts[part] = tables.rows({column: list(split[column]) for column in columns}, reading)
    source = source_of(parts, origin, Path(), reading)
    # Not in `reading`: the labels here are numbers. A client's own data with these names is to be numbered alike.
    known = reading.class_names or source.class_names
    return replace(source, class_names=names) if named and not known and len(names) == source.classes else source
