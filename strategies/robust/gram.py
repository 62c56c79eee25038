"""Dot products of the parts that clients sent, and weighted means of these parts, in one pass over the file each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from tepal.exchange.threads import in_threads
from tepal.strategies.aggregate import as_dtype
from tepal.strategies.robust.store import PartStore, Piece

_WIDTH = 1 << 14  # columns that are multiplied together


def groups_of(store: PartStore, names: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
    """Clients → those of these entries that exactly these clients sent."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        groups.setdefault(tuple(store.entries[name].clients), []).append(name)
    return groups


def gram_of(store: PartStore, names: Sequence[str]) -> np.ndarray:
    """Dot products of the clients' differences from an origin, over entries that the same clients sent.

    Distances between clients do not depend on the origin, but their rounding errors grow with its own distance from
    them. In every piece it is the client with the median norm: while fewer than half of the clients are hostile, its
    norm there is at most that of an honest client, so that no part, however large, costs the others their digits.

    Args:
        store: the parts.
        names: floating-point entries that the same n clients sent.

    Returns:
        (n, n) float64, symmetric. Not finite for parts whose squares overflow.
    """
    n = len(store.entries[names[0]].clients)

    def products(piece: Piece) -> np.ndarray:
        block, gram = store.read(piece), np.zeros((n, n))
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, block.shape[1], _WIDTH):
                values = block[:, at : at + _WIDTH].astype(np.float64)
                norms = np.einsum("ij,ij->i", values, values)
                values -= values[np.argsort(norms, kind="stable")[(n - 1) // 2]].copy()
                gram += values @ values.T
        return gram

    total = np.zeros((n, n))
    with threadpool_limits(1, "blas"):  # each thread multiplies its own pieces
        for gram in in_threads(products, store.pieces(names), store.nbytes(names)):
            with np.errstate(over="ignore", invalid="ignore"):
                total += gram
    return (total + total.T) / 2


def weighted(store: PartStore, names: Sequence[str], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Weighted mean of entries that the same clients sent.

    Args:
        store: the parts.
        names: the entries.
        weights: (n,), at least 0, with a positive sum. Clients with the weight 0 are not read.

    Returns:
        Entry name → mean, in the dtype of the entry.
    """
    used = np.flatnonzero(weights > 0).tolist()
    shares = weights[used] / weights[used].sum()
    result = {name: np.empty(store.entries[name].shape, store.entries[name].dtype) for name in names}

    def work(piece: Piece) -> None:
        name, start, stop = piece
        block = store.read(piece, used)
        out = result[name].reshape(-1)[start:stop]
        for at in range(0, stop - start, _WIDTH):
            # The mean of the differences from one part: equal values stay as they are. It is the part with the most
            # weight, which differences from a part far away would cost its digits.
            values = block[:, at : at + _WIDTH].astype(np.float64)
            most = values[shares.argmax()].copy()
            with np.errstate(over="ignore", invalid="ignore"):
                mean = most + shares @ (values - most)
            if not np.isfinite(mean).all():  # differences of the largest float64 numbers
                mean = shares @ values
            out[at : at + _WIDTH] = as_dtype(mean, block.dtype)

    with threadpool_limits(1, "blas"):
        in_threads(work, store.pieces(names), store.nbytes(names))
    return result
