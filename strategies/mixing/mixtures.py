"""Mixtures of models, in memory or by blocks of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tepal.strategies.mixing.columns import (
    Models,
    as_models,
    checked_counted,
    checked_rows,
    chunks_of,
    dtype_of,
    in_order,
    wide,
)
from tepal.strategies.mixing.gram import update_gram
from tepal.strategies.mixing.weights import check_alpha, check_quantile, cosine, mixing_weights, threshold


def mix(
    models: Models | np.ndarray, quantile: float, *, alpha: float = 1.0, counted: int | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Mix the models of all clients in memory (eq. 4). For models that are larger than memory see `mix_rows`.

    Args:
        models: W, (n, P) floating-point.
        quantile: p, see `threshold`.
        alpha: α, see `mixing_weights`.
        counted: the number of parameters, which are compared (see `gram_rows`); the whole rows are mixed.

    Returns:
        U, (n, P) in the models' dtype; S, (n, n) float64; δ.

    Raises:
        ValueError: an argument out of range, or models that are not 2-D, have no rows or are not floating-point.
    """
    models = as_models(models)
    n, width = models.shape
    check_quantile(quantile)
    check_alpha(alpha)
    similarity = _similarity(models, counted, None)
    delta = threshold(similarity, quantile)
    weights = mixing_weights(similarity, delta, alpha=alpha)
    mixed = np.empty((n, width), dtype_of(models))
    start = 0
    for part in _mixed_blocks(models, weights, None):
        mixed[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return mixed, similarity, delta


def mix_rows(
    models: Models | np.ndarray,
    rows: Iterable[int],
    quantile: float,
    *,
    similarity: np.ndarray | None = None,
    alpha: float = 1.0,
    counted: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Mix the models of some clients, a chunk of parameters at a time (eq. 4).

    The chunks of the parameters are in order and, within a chunk, the rows are in the order given: the chunks of one
    row, concatenated, are its mixed model. A model that is mixed with no other is returned bit for bit. A chunk is
    computed for all rows before that of the first row is returned, so the caller may overwrite the models with it,
    provided that `similarity` was computed before.

    Args:
        models: (n, P).
        rows: indices of the clients, each in 0 … n−1.
        quantile: p, see `threshold`.
        similarity: S, (n, n), from `update_gram` and `cosine`; by default it is computed from all models.
        alpha: α, see `mixing_weights`.
        counted: the number of parameters, which are compared (see `gram_rows`); the whole rows are mixed.
        chunk: parameters at a time, up to 2·(n + len(rows))·chunk numbers in memory for each core; default: blocks of
            about 16 MB.

    Returns:
        Iterator of (row, chunk); a chunk is 1-D, in the models' dtype, and may be modified. It is a view, which keeps
        the chunk of all rows in memory.

    Raises:
        ValueError: at the call: an argument out of range, models that are not 2-D, have no rows or are not
            floating-point, a similarity of another shape than (n, n).
    """
    models = as_models(models)
    n, width = models.shape
    chosen = checked_rows(rows, n)
    check_quantile(quantile)
    check_alpha(alpha)
    checked_counted(counted, width)
    if similarity is None:
        similarity = _similarity(models, counted, chunk)
    elif similarity.shape != (n, n):
        raise ValueError(f"similarity has the shape {similarity.shape}; for {n} models it must be ({n}, {n})")
    weights = mixing_weights(similarity, threshold(similarity, quantile), chosen, alpha=alpha)
    return ((int(chosen[k]), part) for k, part in weighted_rows(models, weights, chunk=chunk))


def weighted_rows(
    models: Models | np.ndarray, weights: np.ndarray, *, chunk: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Weighted means of all models, a chunk of parameters at a time.

    Order and chunks are those of `mix_rows`. The mean of a single model is that model, bit for bit.

    Args:
        models: (n, P).
        weights: (m, n), at least 0; each row sums to 1.
        chunk: as in `mix_rows`.

    Returns:
        Iterator of (k, chunk), for the k-th row of `weights`.

    Raises:
        ValueError: at the call: models that are not 2-D, have no rows or are not floating-point; weights of another
            shape, below 0, or that do not sum to 1.
    """
    models = as_models(models)
    n = models.shape[0]
    if weights.ndim != 2 or weights.shape[1] != n:
        raise ValueError(f"weights have the shape {weights.shape}; for {n} models it must be (…, {n})")
    sums = weights.sum(axis=1)
    if not ((weights >= 0).all() and np.allclose(sums, 1, rtol=0, atol=1e-6)):
        raise ValueError(f"weights must be at least 0 and sum to 1; the least is {weights.min()}, the sums are {sums}")
    return ((k, part) for block in _mixed_blocks(models, weights, chunk) for k, part in enumerate(block))


def _similarity(models: Models, counted: int | None, chunk: int | None) -> np.ndarray:
    everything = range(models.shape[0])
    return cosine(update_gram(np.zeros((0, 0)), models, everything, counted=counted, chunk=chunk))


def _mixed_blocks(models: Models, weights: np.ndarray, chunk: int | None) -> Iterator[np.ndarray]:
    """weights @ models by blocks of columns, (len(weights), at most chunk) each. Raises ValueError at the call."""
    n, width = models.shape
    dtype = dtype_of(models)
    narrow = weights.astype(np.result_type(dtype, np.float32))
    takes = narrow > 0
    alone = takes.sum(axis=1) == 1
    # Models without weight are omitted from the product: 0 times a NaN or infinity of a diverged model is NaN.
    used = np.flatnonzero(takes[~alone].any(axis=0))
    factors = narrow[~alone][:, used]
    only = takes[alone].argmax(axis=1)

    def mixture(start: int, stop: int) -> np.ndarray:
        block = models.block(start, stop)
        mixed = np.empty((len(weights), stop - start), dtype)
        mixed[alone] = block[only]
        if used.size:
            mixed[~alone] = factors @ wide(block if used.size == n else block[used])
        return mixed

    return in_order(mixture, chunks_of(models, width if len(weights) else 0, chunk))
