"""Partitions of a dataset among clients, by flwr-datasets; drawn again until all conditions are met."""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr
from functools import lru_cache
from io import StringIO

import numpy as np
from numpy.typing import NDArray

from tepal.host.imports import import_when_used, uncollected
from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import AnySource, Indices, Numbers
from tepal.training.data.splits import seed_sequence, shares

# Number of seeds that are tried until a partition has the minimum size and every class. With each of them Flower's
# Dirichlet partitioner draws up to eleven times, the pathological one once.
ATTEMPTS = {"iid": 1, "dirichlet": 20, "pathological": 100, "natural": 20}

BY_LABEL = ("dirichlet", "pathological")
"""Partitioners that divide by class."""


@lru_cache(maxsize=16)
def divide(source: AnySource, config: DataConfig, clients: int) -> tuple[Indices, ...]:
    """Return every client's indices into `source.train`.

    They are disjoint, and together all that are neither held out nor the server's. Raises DataError if there is no
    partition that meets the conditions.
    """
    _, _, pool = shares(source, config)
    labels = _labels(source, config)[pool]
    _check_possible(source, config, clients, labels)
    groups = _groups(source, config, clients, pool) if config.partitioner == "natural" else []
    attempts = 1 if len(groups) == clients else ATTEMPTS[config.partitioner]
    failure = ""
    for attempt in range(attempts):
        seed = int(seed_sequence(config.seed, "partition", attempt).generate_state(1)[0])
        parts, failure = deal(groups, config, clients, seed) if groups else draw(labels, config, clients, seed)
        if not failure:
            return tuple(pool[part] for part in parts)
    key, cure = {
        "dirichlet": (
            f"dirichlet-alpha={config.dirichlet_alpha:g}, ",
            "raise dirichlet-alpha, lower min-partition-size, use fewer clients or a larger dataset",
        ),
        "pathological": (
            f"classes-per-client={config.classes_per_client}, ",
            "change classes-per-client, lower min-partition-size, or use more clients (with at least as many as "
            "there are classes, every class is used)",
        ),
        "natural": ("", "lower min-partition-size, or use fewer clients, so that each has more groups"),
    }.get(config.partitioner, ("", ""))
    raise DataError(
        f"{source.origin}: no {config.partitioner} partition of {len(labels):,} examples over {clients} clients "
        f"({key}min-partition-size={config.min_partition_size}) was found with "
        f"{attempts} seed{'s' * (attempts > 1)}; with the last one, {failure}: {cure}"
    )


def import_partitioners() -> None:
    """Import flwr-datasets, for half a second. Raises ImportError if it is not installed."""
    # What it draws with takes as long to import as the rest.
    import_when_used("flwr_datasets.visualization")
    with uncollected():
        import datasets  # noqa: F401
        import flwr_datasets.partitioner  # noqa: F401


def _check_possible(source: AnySource, config: DataConfig, clients: int, labels: NDArray[np.int64]) -> None:
    """Raise DataError if no draw can meet the conditions, or a package is missing."""
    try:
        import_partitioners()
    except ImportError as error:
        raise DataError(
            f'dividing a dataset among clients needs flwr-datasets ({error}): pip install "tepal[simulation]"'
        ) from error
    needed = clients * config.min_partition_size
    if needed > len(labels):
        raise DataError(
            f"{source.origin}: {clients} clients with min-partition-size={config.min_partition_size} need {needed:,} "
            f"examples, but {len(labels):,} are available: lower min-partition-size or the number of clients, "
            "or use a larger dataset"
        )
    if config.partitioner != "pathological":
        return
    present = len(np.unique(labels))
    each = config.classes_per_client
    if each > present:
        raise DataError(
            f"{source.origin}: classes-per-client={each}, but there are {present} classes: set 1 to {present}"
        )
    if clients * each < present:
        raise DataError(
            f"{source.origin}: {clients} clients with classes-per-client={each} cannot hold all {present} "
            f"classes: set classes-per-client to at least {-(-present // clients)}, or use at least "
            f"{-(-present // each)} clients"
        )


def _labels(source: AnySource, config: DataConfig) -> NDArray[np.int64]:
    """Return the labels to divide by; zeros for partitioners that do not use labels. Raises DataError."""
    labels = None if isinstance(source.train, Numbers) else source.train.labels
    if labels is not None:
        return labels
    if config.partitioner in BY_LABEL:
        what = "targets are numbers" if isinstance(source.train, Numbers) else "running text has none"
        raise DataError(
            f"{source.origin}: the {config.partitioner} partitioner divides by labels, and {what}: set partitioner to "
            "natural (by groups) or iid"
        )
    return np.zeros(len(source.train), np.int64)


def _groups(source: AnySource, config: DataConfig, clients: int, pool: Indices) -> list[Indices]:
    """Return each group's positions in `pool`, in the order of the groups' names. Raises DataError."""
    from datasets import Dataset
    from flwr_datasets.partitioner import NaturalIdPartitioner

    if source.train.groups is None:
        raise DataError(
            f"{source.origin}: the natural partitioner divides by groups (writers, sites, domains), but this data "
            "has none: set group-column, or choose another partitioner"
        )
    partitioner = NaturalIdPartitioner("group")
    partitioner.dataset = Dataset.from_dict({"group": source.train.groups[pool], "position": np.arange(len(pool))})
    if partitioner.num_partitions < clients:
        raise DataError(
            f"{source.origin}: {clients} clients, but the data has only "
            f"{partitioner.num_partitions} groups, which are not divided: use at most as many clients as groups, "
            "or another partitioner"
        )
    with redirect_stderr(StringIO()):  # a progress bar
        return [
            np.asarray(partitioner.load_partition(group)["position"][:], dtype=np.int64)
            for group in range(partitioner.num_partitions)
        ]


def deal(groups: list[Indices], config: DataConfig, clients: int, seed: int) -> tuple[list[Indices], str]:
    """Assign whole groups to clients in rotation, shuffled by `seed`; with equal numbers, client i has group i.

    Returns:
        Each client's positions, and the condition that they violate, in words ("" for none).
    """
    dealt = len(groups) > clients
    order = np.random.default_rng(seed).permutation(len(groups)) if dealt else np.arange(len(groups))
    parts = [np.concatenate([groups[group] for group in order[client::clients]]) for client in range(clients)]
    smallest = min(map(len, parts))
    return parts, f"a client had {smallest} examples" if smallest < config.min_partition_size else ""


def draw(labels: NDArray[np.int64], config: DataConfig, clients: int, seed: int) -> tuple[list[Indices], str]:
    """Draw one partition by flwr-datasets.

    Returns:
        Each client's positions in `labels`, and the condition that they violate, in words ("" for none).
    """
    from datasets import Dataset
    from flwr_datasets import partitioner as flower

    if config.partitioner == "iid":
        partitioner = flower.IidPartitioner(clients)
    elif config.partitioner == "dirichlet":
        partitioner = flower.DirichletPartitioner(
            clients, "label", config.dirichlet_alpha, config.min_partition_size, self_balancing=False, seed=seed
        )
    else:
        # "first-deterministic" gives client i class i first, so that no class is left out once clients >= classes.
        partitioner = flower.PathologicalPartitioner(
            clients, "label", config.classes_per_client, class_assignment_mode="first-deterministic", seed=seed
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one per repeated draw
        partitioner.dataset = Dataset.from_dict({"label": labels, "position": np.arange(len(labels))})
        try:
            parts = [
                np.asarray(partitioner.load_partition(client).with_format("numpy")["position"][:], dtype=np.int64)
                for client in range(clients)
            ]
        except ValueError as error:
            # The Dirichlet partitioner fails after eleven draws, with a message that lacks the numbers.
            return [], "a client had too few examples" if config.partitioner == "dirichlet" else str(error)
    positions = np.concatenate(parts)
    unused = np.setdiff1d(labels, labels[positions])
    smallest = min(map(len, parts))
    if len(unused):
        return parts, f"no client had class {', '.join(map(str, unused))}"
    if smallest < config.min_partition_size:
        return parts, f"a client had {smallest} examples"
    if (np.bincount(positions, minlength=len(labels)) != 1).any():
        return parts, "not every example was at exactly one client"
    return parts, ""
