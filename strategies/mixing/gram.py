"""Dot products of models, read by blocks of columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tepal.strategies.mixing.columns import Models, as_models, checked_counted, checked_rows, chunks_of, in_order, wide


def gram_rows(
    models: Models | np.ndarray, rows: Iterable[int], *, counted: int | None = None, chunk: int | None = None
) -> np.ndarray:
    """Dot products of some models with all models.

    Products of float16 and float32 models are float32 within a chunk of parameters, and summed in float64 over chunks;
    float64 models are multiplied in float64. Numbers beyond about ±1e18 have squares that overflow in float32, and
    `cosine` then treats the model as diverged.

    Args:
        models: (n, P).
        rows: indices of the models, each in 0 … n−1.
        counted: the number of parameters, which come first in a row and are compared; default: P. The numbers after
            them are buffers, such as the statistics of BatchNorm: they are mixed like parameters, but not compared.
        chunk: parameters at a time, n·chunk numbers in memory for each core; default: blocks of about 16 MB.

    Returns:
        (len(rows), n) float64.

    Raises:
        ValueError: models that are not 2-D, have no rows or are not floating-point; a row, `counted` or `chunk` out
            of range.
    """
    models = as_models(models)
    n, width = models.shape
    chosen = checked_rows(rows, n)
    counted = checked_counted(counted, width)
    gram = np.zeros((len(chosen), n))
    if not len(chosen):
        return gram

    def products(start: int, stop: int) -> np.ndarray:
        block = wide(models.block(start, stop))
        with np.errstate(over="ignore", invalid="ignore"):  # `cosine` detects diverged models
            of_chunk: np.ndarray = block @ block[chosen].T
        return of_chunk

    for of_chunk in in_order(products, chunks_of(models, counted, chunk)):
        with np.errstate(over="ignore", invalid="ignore"):
            gram += of_chunk.T
    return gram


def update_gram(
    gram: np.ndarray,
    models: Models | np.ndarray,
    changed: Iterable[int],
    *,
    counted: int | None = None,
    chunk: int | None = None,
) -> np.ndarray:
    """Dot products of all models, of which only those of changed models are computed.

    Args:
        gram: (m, m), of the first m models before the change, m ≤ n; at first (0, 0). It is not modified.
        models: (n, P).
        changed: indices of the models that changed, including all new ones, m … n−1.
        counted, chunk: see `gram_rows`.

    Returns:
        (n, n) float64, exactly symmetric if `gram` is.

    Raises:
        ValueError: as `gram_rows`; a `gram` that is not square or has more rows than there are models; a new row that
            is not in `changed`.
    """
    models = as_models(models)
    n = models.shape[0]
    rows = np.unique(checked_rows(changed, n))
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] > n:
        raise ValueError(f"gram has the shape {gram.shape}; it must be square, with at most {n} rows, one a model")
    m = gram.shape[0]
    missing = np.setdiff1d(np.arange(m, n), rows)
    if missing.size:
        raise ValueError(f"row {missing[0]} is new (gram has {m} rows) and must be among the changed rows")
    products = gram_rows(models, rows, counted=counted, chunk=chunk)
    # Matrix products may round x·y and y·x differently.
    products[:, rows] = (products[:, rows] + products[:, rows].T) / 2
    updated = np.zeros((n, n))
    updated[:m, :m] = gram
    updated[rows] = products
    updated[:, rows] = products.T
    return updated
