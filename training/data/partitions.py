"""Partitions of a dataset among clients, by flwr-datasets; drawn again until all conditions are met."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import cache, lru_cache
from io import StringIO
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from tepal.host.imports import import_when_used, uncollected
from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import AnySource, Indices, Numbers
from tepal.training.data.splits import seed_sequence, shares

if TYPE_CHECKING:
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner

# Number of seeds that are tried until a partition has the minimum size and every class. With each of them Flower's
# Dirichlet partitioner draws up to eleven times, the pathological one once.
ATTEMPTS = {"iid": 1, "dirichlet": 20, "pathological": 100, "natural": 20}

BY_LABEL = ("dirichlet", "pathological")
"""Partitioners that divide by class."""


class Parts(Sequence[Indices]):
    """Every client's indices, as views of one array: a hundred thousand small arrays would take several times as much.

    Args:
        indices: those of all clients, one client after another.
        sizes: how many of them each client has.
    """

    def __init__(self, indices: Indices, sizes: NDArray[np.int64]) -> None:
        self.indices, self.sizes = indices, sizes
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> list[Indices]: ...
    def __getitem__(self, client: int | slice) -> Indices | list[Indices]:
        if isinstance(client, slice):
            return [self[k] for k in range(len(self))[client]]
        client = range(len(self))[client]
        end = int(self._ends[client])
        return self.indices[end - int(self.sizes[client]) : end]

    def of(self, pool: Indices) -> Parts:
        """These parts of `pool`, whose positions they are."""
        return Parts(pool[self.indices], self.sizes)

    @staticmethod
    def joined(parts: Sequence[Sequence[int] | Indices]) -> Parts:
        """These parts in one array."""
        arrays = [np.asarray(part, np.int64) for part in parts]
        return Parts(np.concatenate(arrays), np.array([*map(len, arrays)]))


@lru_cache(maxsize=16)
def divide(source: AnySource, config: DataConfig, clients: int) -> Parts:
    """Return every client's indices into `source.train`.

    They are disjoint, and together all that are neither held out nor the server's. Raises DataError if there is no
    partition that meets the conditions.
    """
    _, _, pool = shares(source, config)
    labels = _labels(source, config)[pool]
    _check_possible(source, config, clients, labels)
    groups = _groups(source, clients, pool) if config.partitioner == "natural" else None
    attempts = 1 if groups is not None and len(groups) == clients else ATTEMPTS[config.partitioner]
    failure = ""
    for attempt in range(attempts):
        seed = int(seed_sequence(config.seed, "partition", attempt).generate_state(1)[0])
        parts, failure = draw(labels, config, clients, seed) if groups is None else deal(groups, config, clients, seed)
        if not failure:
            return parts.of(pool)
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


def _groups(source: AnySource, clients: int, pool: Indices) -> Parts:
    """Return each group's positions in `pool`, in the order of the groups' names. Raises DataError."""
    from flwr_datasets.partitioner import NaturalIdPartitioner

    if source.train.groups is None:
        raise DataError(
            f"{source.origin}: the natural partitioner divides by groups (writers, sites, domains), but this data "
            "has none: set group-column, or choose another partitioner"
        )
    with redirect_stderr(StringIO()):  # a progress bar
        groups = _divided(NaturalIdPartitioner("group"), group=source.train.groups[pool])
    if len(groups) < clients:
        raise DataError(
            f"{source.origin}: {clients} clients, but the data has only "
            f"{len(groups)} groups, which are not divided: use at most as many clients as groups, "
            "or another partitioner"
        )
    return groups


def deal(groups: Parts, config: DataConfig, clients: int, seed: int) -> tuple[Parts, str]:
    """Assign whole groups to clients in rotation, shuffled by `seed`; with equal numbers, client i has group i.

    Returns:
        Each client's positions, and the condition that they violate, in words ("" for none).
    """
    dealt = len(groups) > clients
    order = np.random.default_rng(seed).permutation(len(groups)) if dealt else np.arange(len(groups))
    parts = Parts.joined([
        np.concatenate([groups[group] for group in order[client::clients]]) for client in range(clients)
    ])
    smallest = int(parts.sizes.min())
    return parts, f"a client had {smallest} examples" if smallest < config.min_partition_size else ""


def draw(labels: NDArray[np.int64], config: DataConfig, clients: int, seed: int) -> tuple[Parts, str]:
    """Draw one partition by flwr-datasets.

    Returns:
        Each client's positions in `labels`, and the condition that they violate, in words ("" for none).
    """
    from flwr_datasets import partitioner as flower

    partitioner: Partitioner
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
    try:
        parts = _divided(partitioner, label=labels)
    except ValueError as error:
        # The Dirichlet partitioner fails after eleven draws, with a message that lacks the numbers.
        return Parts.joined([[]]), "a client had too few examples" if config.partitioner == "dirichlet" else str(error)
    times = np.bincount(parts.indices, minlength=len(labels))
    if len(unused := np.setdiff1d(labels[times == 0], labels[times > 0])):
        return parts, f"no client had class {', '.join(map(str, unused))}"
    if (smallest := int(parts.sizes.min())) < config.min_partition_size:
        return parts, f"a client had {smallest} examples"
    if (times != 1).any():
        return parts, "not every example was at exactly one client"
    return parts, ""


def _divided(partitioner: Partitioner, **columns: NDArray[Any]) -> Parts:
    """Return the positions in the columns' rows of all partitions. Raises ValueError if it cannot divide them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one per repeated draw
        partitioner.dataset = _positions().from_dict(columns)
        return Parts.joined([partitioner.load_partition(number) for number in range(partitioner.num_partitions)])


@cache
def _positions() -> type[Dataset]:
    """Datasets of which a selection is its rows' positions: datasets of a hundred thousand clients take minutes."""
    from datasets import Dataset

    class Positions(Dataset):
        def select(self, indices: Any, *_: Any, **__: Any) -> Any:
            return indices

    return Positions
