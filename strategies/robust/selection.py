"""Robust means by the distances between clients: Krum and the geometric median."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tepal.strategies.robust.coordinates import dropped_of, means_of, median_of
from tepal.strategies.robust.gram import gram_of, groups_of, weighted
from tepal.strategies.robust.store import PartStore, StoredMean

_TIE = 1e-9  # scores that differ by less, relative to the larger, are equal but for rounding
_NU = 1e-6  # ν of the smoothed Weiszfeld algorithm, relative to the weighted median distance
_ITERATIONS = 1000  # on the (n, n) dot products alone, so that many cost little
_SAME = 1e-14  # squared distance, relative to the squared norms, of parts that are equal but for rounding
_CONVERGED = 1e-12  # change of the weights, in all, after which they are final


class _ByDistances(StoredMean):
    """Base class of the means of this module. Subclasses define `weights_of`."""

    @abstractmethod
    def weights_of(self, store: PartStore, names: list[str], clients: tuple[int, ...]) -> np.ndarray:
        """Weights (n,) of the clients that sent these floating-point entries, at least 0, with a positive sum."""

    def _compute(self, store: PartStore) -> dict[str, np.ndarray]:
        # Weights that are chosen by distances say nothing about entries that do not enter these.
        is_float = {name: entry.dtype.kind == "f" for name, entry in store.entries.items()}
        result = means_of(store, [name for name in is_float if not is_float[name]], median_of)
        for clients, names in groups_of(store, [name for name in is_float if is_float[name]]).items():
            result |= weighted(store, names, self.weights_of(store, names, clients))
        return {name: result[name] for name in store.entries}


class Krum(_ByDistances):
    """Multi-Krum: the weighted mean of the clients that are nearest to their neighbours.

    Of n clients, f = floor(share·n) are assumed to be hostile. The score of a client is the sum of the squared
    distances to its n − f − 2 nearest others (at least 1); the `keep` clients with the lowest scores are averaged, with
    their weights. Fewer than 3 clients are all averaged. Of equal scores, the larger weight is preferred, then the
    smaller digest of the parts, so that the result does not depend on the order of the parts.

    If clients sent different entries, the entries are grouped by the set of clients that sent them, and Krum chooses
    in each group on its own; if all sent the same, there is one group, which is the method of the paper. Integer
    entries have the median of the clients that sent them, and bool entries the majority; they do not enter the
    distances.

    Source: Blanchard et al. 2017, arXiv:1703.02757.

    Args:
        share: largest share of hostile clients, in [0, 0.5).
        keep: how many clients are averaged; 0: n − f; 1: Krum itself.
        folder: of the file with the parts; None: the folder for temporary files.
    """

    def __init__(self, share: float, keep: int = 0, folder: Path | None = None) -> None:
        super().__init__(folder)
        self._share, self._keep = share, keep

    def weights_of(self, store: PartStore, names: list[str], clients: tuple[int, ...]) -> np.ndarray:
        n, weights = len(clients), np.array([store.weights[client] for client in clients])
        f = dropped_of(self._share, n)
        keep = min(self._keep or n - f, n)
        if n < 3 or keep == n:
            return weights
        scores = krum_scores(gram_of(store, names), f)
        chosen = best(scores, keep, lambda row: (-weights[row], _digest(store, names, row)))
        kept = np.zeros(n)
        kept[chosen] = weights[chosen]
        return kept


class GeometricMedian(_ByDistances):
    """Weighted geometric median: the point with the least weighted sum of distances to the clients' parts (RFA).

    Computed with the smoothed Weiszfeld algorithm; if the median is one of the parts, it is exactly that part. The
    iterates are weighted means of the parts, so that all iterations need the dot products of the parts alone.

    If clients sent different entries, the entries are grouped by the set of clients that sent them, and each group has
    its own median; if all sent the same, there is one group, which is the method of the paper. Integer entries have the
    median of the clients that sent them, and bool entries the majority; they do not enter the distances.

    Source: Pillutla et al. 2019, arXiv:1912.13445, algorithm 2.

    Args:
        folder: of the file with the parts; None: the folder for temporary files.
    """

    def weights_of(self, store: PartStore, names: list[str], clients: tuple[int, ...]) -> np.ndarray:
        weights = np.array([store.weights[client] for client in clients])
        return weiszfeld(gram_of(store, names), weights)


def squared_distances(gram: np.ndarray) -> np.ndarray:
    """Squared distances (n, n) of all pairs, from dot products. Infinite where the products are not finite."""
    squares = np.diagonal(gram)
    with np.errstate(over="ignore", invalid="ignore"):
        distances: np.ndarray = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0)
    distances[~np.isfinite(distances)] = np.inf
    np.fill_diagonal(distances, 0.0)
    return distances


def krum_scores(gram: np.ndarray, f: int) -> np.ndarray:
    """Krum's scores (n,): sums of squared distances to the n − f − 2 nearest others, at least 1.

    Args:
        gram: (n, n), n ≥ 2, from `gram_of`.
        f: number of clients that are assumed to be hostile.
    """
    n = len(gram)
    distances = squared_distances(gram)
    np.fill_diagonal(distances, np.inf)
    distances.sort(axis=1)
    scores: np.ndarray = distances[:, : max(n - f - 2, 1)].sum(axis=1)
    return scores


def best(scores: np.ndarray, keep: int, preferred: Callable[[int], Any]) -> list[int]:
    """Rows of the `keep` lowest scores. Of equal ones, those with the smallest key `preferred(row)`."""
    order = np.argsort(scores, kind="stable")
    last = scores[order[keep - 1]]
    near = _TIE * last if np.isfinite(last) else 0.0
    clear = [int(row) for row in order if scores[row] < last - near]
    tied = [int(row) for row in order if last - near <= scores[row] <= last + near]
    if len(clear) + len(tied) > keep:
        tied.sort(key=preferred)
    return clear + tied[: keep - len(clear)]


def weiszfeld(gram: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weights of the parts in their geometric median.

    Args:
        gram: (n, n), from `gram_of`.
        weights: (n,) of the clients, above 0.

    Returns:
        (n,) float64, at least 0, with the sum 1. Parts whose dot products are not finite have the weight 0; if no part
        has finite ones, the clients' weights.
    """
    finite = np.isfinite(np.diagonal(gram))
    alpha = weights / weights.sum()
    if not finite.any():
        return np.asarray(alpha)
    gram, alpha = gram[np.ix_(finite, finite)], alpha[finite]
    alpha = alpha / alpha.sum()
    squares = np.diagonal(gram)
    # The start is near the origin, which a far part cannot move, and not the mean, which one moves as far as it likes.
    scale = _middle(np.sqrt(np.maximum(squares, 0.0)), alpha)
    at_a_part = _at_a_part(gram, alpha)
    shares = alpha if at_a_part is None else at_a_part
    if scale > 0 and at_a_part is None:
        nu = _NU * scale
        shares = alpha / np.maximum(np.sqrt(np.maximum(squares, 0.0)), scale)
        shares /= shares.sum()
        for _ in range(_ITERATIONS):
            along = gram @ shares
            distances = np.sqrt(np.maximum(squares - 2 * along + shares @ along, 0.0))
            following = alpha / np.maximum(distances, nu)
            following /= following.sum()
            change = float(np.abs(following - shares).sum())
            shares = following
            if change < _CONVERGED:
                break
    found = np.zeros(len(weights))
    found[finite] = shares
    return found


def _at_a_part(gram: np.ndarray, alpha: np.ndarray) -> np.ndarray | None:
    """The shares (n,) of the part that is the geometric median; None if it is none of them, or not the only one.

    Weiszfeld's algorithm with ν above 0 does not reach a part: the others keep shares of about ν over their distances,
    which move the mean by about ν, however well the median is defined. A part x_k is the only median if its weight
    exceeds the length of the sum of the unit vectors to the others, each with its weight:
    ‖Σ_i α_i·(x_i − x_k)/‖x_i − x_k‖‖ < α_k (Vardi and Zhang 2000, doi:10.1073/pnas.97.4.1423).
    """
    squares = np.diagonal(gram)
    with np.errstate(over="ignore", invalid="ignore"):  # a part whose products overflow is not the median
        both = squares[:, None] + squares
        apart = both - 2 * gram
        same = apart <= _SAME * both  # parts that are equal but for rounding
        np.fill_diagonal(same, True)
        pulls = np.where(same, 0.0, alpha / np.sqrt(np.where(same, 1.0, apart)))  # [k, i] of x_i − x_k
        # ‖Σ_i p_ki·(x_i − x_k)‖², from the dot products of the x_i.
        totals = pulls.sum(axis=1)
        lengths = ((pulls @ gram) * pulls).sum(axis=1) - 2 * totals * (pulls * gram).sum(axis=1) + totals**2 * squares
        here = same @ alpha
        (found,) = np.nonzero(np.sqrt(np.maximum(lengths, 0.0)) < here * (1 - _TIE))
    return np.where(same[found[0]], alpha / here[found[0]], 0.0) if found.size else None


def _middle(distances: np.ndarray, alpha: np.ndarray) -> float:
    """The least distance within which half of the weight is; if it is 0, as parts are equal, the least above 0; 0 if
    all are equal."""
    order = np.argsort(distances, kind="stable")
    middle = float(distances[order[np.searchsorted(np.cumsum(alpha[order]), 0.5 * (1 - _TIE))]])
    above = distances[distances > 0]
    return middle if middle > 0 else float(above.min()) if above.size else 0.0


def _digest(store: PartStore, names: list[str], row: int) -> bytes:
    digest = hashlib.sha256()
    for piece in store.pieces(sorted(names)):
        digest.update(store.read(piece, [row]).view(np.uint8))  # type: ignore[arg-type]
    return digest.digest()
