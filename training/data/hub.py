"""Data sets of the Hugging Face hub, by flwr-datasets: fetched once, and kept where that library keeps them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tepal.training.data.config import DataError, Reading
from tepal.training.data.examples import AnySource
from tepal.training.data.formats.named import PLAIN, Tables
from tepal.training.data.formats.tables import Rows, check_columns, source_of

HUB = "hub:"
"""What a dataset of the hub begins with in the run config."""


@lru_cache(maxsize=4)
def load_hub(name: str, reading: Reading, subset: str = "", tables: Tables = PLAIN) -> AnySource:
    """The splits "train" and, where there is one, "test" of a dataset of the hub, read as tables are.

    Args:
        name: on the hub, without "hub:".
        reading: names the columns, where `tables` does not.
        subset: of it, "" for the only one.
        tables: what is known of its columns.

    Raises:
        DataError: it cannot be fetched, for example without a network (the text says which files to put where), or
            it is not what the run config says.
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
    fetched = FederatedDataset(dataset=name, partitioners={}, shuffle=False, **({"subset": subset} if subset else {}))
    for part in ("train", "test"):
        try:
            split = fetched.load_split(part)
        except Exception as error:  # the hub's own errors, and those of the network
            if parts and isinstance(error, ValueError):
                break  # there is no such split
            raise DataError(
                f"{origin}: cannot be fetched ({error}). Without a network: fetch it on another machine (hf download "
                f"--repo-type dataset {name}), put its files train-….parquet and test-….parquet into one folder, and "
                f"set {'dataset-path' if reading.name else 'dataset'} to that folder"
            ) from error
        if not parts:
            reading = tables.fitted(reading, split.column_names)
        columns = tables.needed(reading, split.column_names)
        check_columns(origin, columns, split.column_names)
        label = split.features.get(reading.label_column)
        if isinstance(label, ClassLabel):
            reading = replace(reading, classes=reading.classes or len(label.names))
        for column in columns:
            if isinstance(split.features[column], Image):
                split = split.cast_column(column, Image(decode=False))  # bytes, as in a parquet file
        parts[part] = tables.rows({column: list(split[column]) for column in columns}, reading)
    return source_of(parts, origin, Path(), reading)
