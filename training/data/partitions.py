"""Partitions of a dataset among clients; drawn again until all conditions are met.

They are those of flwr-datasets, index by index: the same random numbers, drawn in the same order. They are computed
with arrays, so that a hundred thousand clients take a second, and not minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import AnySource, Indices, Numbers
from tepal.training.data.splits import seed_sequence, shares

# Number of seeds that are tried until a partition has the minimum size and every class. With each of them the Dirichlet
# partitioner draws up to `_DRAWS` times, the pathological one once.
ATTEMPTS = {"iid": 1, "dirichlet": 20, "pathological": 100, "natural": 20}

BY_LABEL = ("dirichlet", "pathological")
"""Partitioners that divide by class."""

_DRAWS = 11


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
    def by_owner(positions: Indices, owners: Indices, clients: int) -> Parts:
        """The positions of each client, in their order; `owners` has the client of each position."""
        return Parts(positions[np.argsort(owners, kind="stable")], np.bincount(owners, minlength=clients))


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


def _check_possible(source: AnySource, config: DataConfig, clients: int, labels: NDArray[np.int64]) -> None:
    """Raise DataError if no draw can meet the conditions."""
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
    if source.train.groups is None:
        raise DataError(
            f"{source.origin}: the natural partitioner divides by groups (writers, sites, domains), but this data "
            "has none: set group-column, or choose another partitioner"
        )
    names, group_of = np.unique(source.train.groups[pool], return_inverse=True)
    if len(names) < clients:
        raise DataError(
            f"{source.origin}: {clients} clients, but the data has only "
            f"{len(names)} groups, which are not divided: use at most as many clients as groups, "
            "or another partitioner"
        )
    return Parts.by_owner(np.arange(len(pool)), group_of, len(names))


def deal(groups: Parts, config: DataConfig, clients: int, seed: int) -> tuple[Parts, str]:
    """Assign whole groups to clients in rotation, shuffled by `seed`; with equal numbers, client i has group i.

    Returns:
        Each client's positions, and the condition that they violate, in words ("" for none).
    """
    dealt = len(groups) > clients
    order = np.random.default_rng(seed).permutation(len(groups)) if dealt else np.arange(len(groups))
    client_of = np.arange(len(order)) % clients
    in_turn = order[np.argsort(client_of, kind="stable")]  # the first client's groups, then the second's, …
    place = np.empty(len(groups), np.int64)
    place[in_turn] = np.arange(len(groups))
    positions = groups.indices[np.argsort(np.repeat(place, groups.sizes), kind="stable")]
    sizes = np.zeros(clients, np.int64)
    np.add.at(sizes, client_of, groups.sizes[order])
    smallest = int(sizes.min())
    return Parts(positions, sizes), f"a client had {smallest} examples" if smallest < config.min_partition_size else ""


def draw(labels: NDArray[np.int64], config: DataConfig, clients: int, seed: int) -> tuple[Parts, str]:
    """Draw one partition.

    Returns:
        Each client's positions in `labels`, and the condition that they violate, in words ("" for none).
    """
    rng = np.random.default_rng(seed)
    if config.partitioner == "iid":
        parts = Parts(np.arange(len(labels)), _even(len(labels), clients))
    elif config.partitioner == "dirichlet":
        for _ in range(_DRAWS):
            parts = _dirichlet(labels, config.dirichlet_alpha, clients, rng)
            if parts.sizes.min() >= config.min_partition_size:
                break
        else:
            return parts, "a client had too few examples"
        _shuffle(parts, rng)
    else:
        classes = np.unique(labels)
        held = _classes_held(len(classes), config.classes_per_client, clients, rng)
        needed, present = held.sum(0), np.bincount(np.searchsorted(classes, labels))
        if (lacking := np.flatnonzero(needed > present)).size:
            first = lacking[0]
            return Parts(labels[:0], np.zeros(clients, np.int64)), (
                f"class {classes[first]} was drawn by {needed[first]} clients and has {present[first]} examples"
            )
        parts = _pathological(labels, classes, held)
        _shuffle(parts, rng)
    times = np.bincount(parts.indices, minlength=len(labels))
    whole = bool((times == 1).all())
    if not whole and len(unused := np.setdiff1d(labels[times == 0], labels[times > 0])):
        return parts, f"no client had class {', '.join(map(str, unused))}"
    if (smallest := int(parts.sizes.min())) < config.min_partition_size:
        return parts, f"a client had {smallest} examples"
    return parts, "" if whole else "not every example was at exactly one client"


def _even(count: int, parts: int) -> NDArray[np.int64]:
    """The sizes of parts of `count` that differ by one at most, the larger ones first."""
    return np.full(parts, count // parts) + (np.arange(parts) < count % parts)


def _dirichlet(labels: NDArray[np.int64], alpha: float, clients: int, rng: np.random.Generator) -> Parts:
    """Divide each class in proportions of a symmetric Dirichlet distribution."""
    positions, owners = [], []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        shares_of = rng.dirichlet(np.full(clients, alpha))
        ends = (np.cumsum(shares_of) * len(of_class)).astype(np.int64)[:-1]
        positions.append(of_class)
        owners.append(np.repeat(np.arange(clients), np.diff(ends, prepend=0, append=len(of_class))))
    return Parts.by_owner(np.concatenate(positions), np.concatenate(owners), clients)


def _classes_held(count: int, each: int, clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which of `count` classes each client has (clients, classes): client i has class i, and further random ones.

    So no class is left out if there are as many clients as classes.
    """
    held = np.zeros((clients, count), bool)
    held[np.arange(clients), np.arange(clients) % count] = True
    if each > 1:
        for row in held:
            left = each - 1
            while left:
                drawn = rng.integers(0, count)
                left -= not row[drawn]
                row[drawn] = True
    return held


def _pathological(labels: NDArray[np.int64], classes: NDArray[np.int64], held: NDArray[np.bool_]) -> Parts:
    """Divide each class evenly among the clients that have it."""
    positions, owners = [], []
    for label, holders in zip(classes, held.T, strict=True):
        if holders.any():
            of_class, having = np.flatnonzero(labels == label), np.flatnonzero(holders)
            positions.append(of_class)
            owners.append(np.repeat(having, _even(len(of_class), len(having))))
    return Parts.by_owner(np.concatenate(positions), np.concatenate(owners), len(held))


def _shuffle(parts: Parts, rng: np.random.Generator) -> None:
    """Shuffle each client's positions."""
    for part in parts:
        rng.shuffle(part)
