"""Partitions of a dataset among clients, by flwr-datasets; drawn again until all conditions are met."""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO

import numpy as np
from numpy.typing import NDArray

from tepal.training.data.config import DataConfig, DataError
from tepal.training.data.examples import AnySource, Indices, Numbers
from tepal.training.data.splits import hold_out, keep_at_server, seed_sequence

# Number of seeds that are tried until a partition has the minimum size and every class. With each of them Flower's
# Dirichlet partitioner draws up to eleven times, the pathological one once.
ATTEMPTS = {"iid": 1, "dirichlet": 20, "pathological": 100, "natural": 20}

BY_LABEL = ("dirichlet", "pathological")
"""Partitioners that divide by class."""


@dataclass(frozen=True)
class Scheme:
    """All settings that determine a partition of a dataset."""

    clients: int
    partitioner: str
    alpha: float
    minimum: int
    classes_per_client: int
    held_out_fraction: float
    server_share: float
    seed: int

    @classmethod
    def of(cls, config: DataConfig, clients: int) -> Scheme:
        """Return the run config's scheme for a number of clients."""
        return cls(
            clients,
            config.partitioner,
            config.dirichlet_alpha,
            config.min_partition_size,
            config.classes_per_client,
            config.held_out_fraction,
            config.server_share,
            config.seed,
        )


@lru_cache(maxsize=16)
def divide(source: AnySource, scheme: Scheme) -> tuple[Indices, ...]:
    """Return every client's indices into `source.train`.

    They are disjoint, and together all that are neither held out nor the server's. Raises DataError if there is no
    partition that meets the conditions.
    """
    _, training = hold_out(source, scheme.held_out_fraction, scheme.seed)
    _, pool = keep_at_server(training, scheme.server_share)
    labels = _labels(source, scheme)[pool]
    _check_possible(source, scheme, labels)
    groups = _groups(source, scheme, pool) if scheme.partitioner == "natural" else []
    attempts = 1 if len(groups) == scheme.clients else ATTEMPTS[scheme.partitioner]
    failure = ""
    for attempt in range(attempts):
        seed = int(seed_sequence(scheme.seed, "partition", attempt).generate_state(1)[0])
        parts, failure = deal(groups, scheme, seed) if groups else draw(labels, scheme, seed)
        if not failure:
            return tuple(pool[part] for part in parts)
    keys = {
        "dirichlet": f"dirichlet-alpha={scheme.alpha:g}, ",
        "pathological": f"classes-per-client={scheme.classes_per_client}, ",
    }
    cures = {
        "dirichlet": "raise dirichlet-alpha, lower min-partition-size, use fewer clients or a larger dataset",
        "pathological": "change classes-per-client, lower min-partition-size, or use more clients (with at least as "
        "many clients as classes, every class is used)",
        "natural": "lower min-partition-size, or use fewer clients, so that each has more groups",
    }
    raise DataError(
        f"{source.origin}: no {scheme.partitioner} partition of {len(labels):,} examples over {scheme.clients} clients "
        f"({keys.get(scheme.partitioner, '')}min-partition-size={scheme.minimum}) was found with "
        f"{attempts} seed{'s' * (attempts > 1)}; with the last one, {failure}: {cures.get(scheme.partitioner, '')}"
    )


def _check_possible(source: AnySource, scheme: Scheme, labels: NDArray[np.int64]) -> None:
    """Raise DataError if no draw can meet the conditions, or a package is missing."""
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
            f"examples, but {len(labels):,} are available: lower min-partition-size or the number of clients, "
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


def _labels(source: AnySource, scheme: Scheme) -> NDArray[np.int64]:
    """Return the labels to divide by; zeros for partitioners that do not use labels. Raises DataError."""
    labels = None if isinstance(source.train, Numbers) else source.train.labels
    if labels is not None:
        return labels
    if scheme.partitioner in BY_LABEL:
        what = "targets are numbers" if isinstance(source.train, Numbers) else "running text has none"
        raise DataError(
            f"{source.origin}: the {scheme.partitioner} partitioner divides by labels, and {what}: set partitioner to "
            "natural (by groups) or iid"
        )
    return np.zeros(len(source.train), np.int64)


def _groups(source: AnySource, scheme: Scheme, pool: Indices) -> list[Indices]:
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
    if partitioner.num_partitions < scheme.clients:
        raise DataError(
            f"{source.origin}: {scheme.clients} clients, but the data has only "
            f"{partitioner.num_partitions} groups, which are not divided: use at most as many clients as groups, "
            "or another partitioner"
        )
    with redirect_stderr(StringIO()):  # a progress bar
        return [
            np.asarray(partitioner.load_partition(group)["position"][:], dtype=np.int64)
            for group in range(partitioner.num_partitions)
        ]


def deal(groups: list[Indices], scheme: Scheme, seed: int) -> tuple[list[Indices], str]:
    """Assign whole groups to clients in rotation, shuffled by `seed`; with equal numbers, client i has group i.

    Returns:
        Each client's positions, and the condition that they violate, in words ("" for none).
    """
    dealt = len(groups) > scheme.clients
    order = np.random.default_rng(seed).permutation(len(groups)) if dealt else np.arange(len(groups))
    parts = [
        np.concatenate([groups[group] for group in order[client :: scheme.clients]]) for client in range(scheme.clients)
    ]
    smallest = min(map(len, parts))
    return parts, f"a client had {smallest} examples" if smallest < scheme.minimum else ""


def draw(labels: NDArray[np.int64], scheme: Scheme, seed: int) -> tuple[list[Indices], str]:
    """Draw one partition by flwr-datasets.

    Returns:
        Each client's positions in `labels`, and the condition that they violate, in words ("" for none).
    """
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
        warnings.simplefilter("ignore")  # one per repeated draw
        partitioner.dataset = Dataset.from_dict({"label": labels, "position": np.arange(len(labels))})
        try:
            parts = [
                np.asarray(partitioner.load_partition(client).with_format("numpy")["position"][:], dtype=np.int64)
                for client in range(scheme.clients)
            ]
        except ValueError as error:
            # The Dirichlet partitioner fails after eleven draws, with a message that lacks the numbers.
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
