"""Models mixed by how much they point the same way: the mathematics of FedACS (arXiv:2312.15148), over arrays alone.

Client i has the model w_i, a row of numbers. Before a round every client's next model is a mean of the models that
are most like its own:

    s_ij = cos(w_i, w_j)
    δ    = p-quantile of all n² elements of S, the diagonal included
    u_i  = Σ_{j: s_ij > δ} s_ij·w_j / Σ_{j: s_ij > δ} s_ij                                         (eq. 4)

Beyond the paper: a client's own model always takes part, so that no sum is empty (s_ii > δ fails where δ = 1, as with
models that are all equal); a negative similarity weighs 0; and `alpha` below 1 goes only part of the way from w_i to
u_i.

Every function takes the models as an array (n, P) or as anything that hands out blocks of columns (`Models`), so that
n models may lie in a file and be larger than memory. In memory are then a few blocks of columns of all models for each
core, and n² numbers. The order of the work is: `update_gram` for the clients that have reported, `cosine`, `mix_rows`.
"""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

_BLOCK = 1 << 24  # bytes: a block of this size is large enough for the matrix product and small beside any model
_WORKERS = 8  # blocks in work at a time, on as many cores
_CHUNK = 1 << 10, 1 << 16  # parameters: fewer make many short reads, more add up too much in float32


class Models(Protocol):
    """n models of P floating-point numbers, a row each."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, P)"""
        ...

    def block(self, start: int, stop: int) -> np.ndarray:
        """Columns start … stop−1 of all models, (n, stop − start). Several threads ask at once."""
        ...


def gram_rows(
    models: Models | np.ndarray, rows: Iterable[int], *, counted: int | None = None, chunk: int | None = None
) -> np.ndarray:
    """Dot products of some models with all models.

    Products of float16 and float32 models are float32 within a chunk of parameters and are added up in float64 over
    chunks; wider models are multiplied as what they are. Squares must stay within range: numbers beyond ±1e18 or so
    overflow in float32, and `cosine` takes such a model for a diverged one.

    Args:
        models: (n, P).
        rows: which models, each in 0 … n−1.
        counted: how many of the first parameters enter the products; default: all. What comes after them are buffers,
            such as the statistics of BatchNorm: mixed like parameters, but not compared.
        chunk: parameters at a time, n·chunk numbers in memory for each core; default: blocks of about 16 MB.

    Returns:
        (len(rows), n) float64.

    Raises:
        ValueError: models that are not 2-D, have no rows or are not floating-point; a row, `counted` or `chunk` out
            of range.
    """
    models = _as_models(models)
    n, width = models.shape
    chosen = _rows(rows, n)
    counted = _counted(counted, width)
    gram = np.zeros((len(chosen), n))
    if not len(chosen):
        return gram

    def products(start: int, stop: int) -> np.ndarray:
        block = _wide(models.block(start, stop))
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged model is for `cosine` to tell
            of_chunk: np.ndarray = block @ block[chosen].T
        return of_chunk

    for of_chunk in _in_order(products, _chunks(models, counted, chunk)):
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
    """The dot products of all models, computed anew only for those that changed.

    Args:
        gram: (m, m), of the first m models before the change, m ≤ n; it is left as it is. (0, 0) to begin with.
        models: (n, P).
        changed: the rows that are not what they were, among them all of the new ones m … n−1.
        counted, chunk: see `gram_rows`.

    Returns:
        (n, n) float64, exactly symmetric if `gram` is.

    Raises:
        ValueError: as `gram_rows`; a `gram` that is not square or has more rows than there are models; a new row that
            is not in `changed`.
    """
    models = _as_models(models)
    n = models.shape[0]
    rows = np.unique(_rows(changed, n))
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] > n:
        raise ValueError(f"gram has the shape {gram.shape}; it must be square, with at most {n} rows: one a model")
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


def cosine(gram: np.ndarray) -> np.ndarray:
    """S, the cosine similarity of all pairs of models (s_ij of eq. 4).

    A model without a direction, which is one of zeros only or one that diverged (its norm is not finite), has
    similarity 0 to all others: it is mixed into nobody's model, and nobody's into it.

    Args:
        gram: (n, n), dot products of all pairs.

    Returns:
        (n, n) float64 in [−1, 1], exactly symmetric, with a diagonal of exactly 1.

    Raises:
        ValueError: `gram` is not square or is empty.
    """
    _check_square(gram, "gram")
    squares = np.diagonal(gram)
    directed = np.isfinite(squares) & (squares > 0)
    norms = np.sqrt(np.where(directed, squares, 1.0))
    with np.errstate(invalid="ignore"):
        similarity: np.ndarray = (gram + gram.T) / 2 / np.outer(norms, norms)
    similarity[~np.isfinite(similarity)] = 0.0
    similarity[~directed] = 0.0
    similarity[:, ~directed] = 0.0
    np.clip(similarity, -1.0, 1.0, out=similarity)
    np.fill_diagonal(similarity, 1.0)
    return similarity


def threshold(similarity: np.ndarray, quantile: float) -> float:
    """δ of eq. 4: the p-quantile, with linear interpolation, of all n² similarities as they are, negative ones too.

    Args:
        similarity: (n, n), from `cosine`.
        quantile: p, between 0 and 1, both excluded. From 1 − 1/n on every client keeps its own model.

    Raises:
        ValueError: a quantile out of range; similarities that are not square, empty or not finite.
    """
    _check_similarity(similarity)
    _check_quantile(quantile)
    return float(np.quantile(similarity, quantile, method="linear"))


def mixing_weights(
    similarity: np.ndarray, threshold: float, rows: Iterable[int] | None = None, *, alpha: float = 1.0
) -> np.ndarray:
    """How much of each model goes into the next model of some clients (the fraction in eq. 4).

    Client i weighs its own model with s_ii = 1 and every other model j with max(s_ij, 0) if s_ij > δ, else with 0; the
    weights are divided by their sum. With `alpha`, they are then (1 − α)·e_i + α·weights.

    Args:
        similarity: (n, n), from `cosine`.
        threshold: δ.
        rows: the clients; default: all.
        alpha: α, above 0 and at most 1; 1 is eq. 4.

    Returns:
        (len(rows), n) float64, at least 0; each row sums to 1.

    Raises:
        ValueError: alpha or a row out of range; similarities that are not square, empty or not finite.
    """
    _check_similarity(similarity)
    _check_alpha(alpha)
    n = len(similarity)
    chosen = _rows(range(n) if rows is None else rows, n)
    own = np.arange(len(chosen)), chosen
    weights: np.ndarray = similarity[chosen].astype(np.float64)
    weights[~(weights > threshold) | (weights < 0)] = 0.0
    weights[own] = 1.0
    weights *= alpha / weights.sum(axis=1, keepdims=True)
    weights[own] += 1.0 - alpha
    return weights


def mix(
    models: Models | np.ndarray, quantile: float, *, alpha: float = 1.0, counted: int | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """The next models of all clients, in memory (eq. 4). For models that are larger than memory see `mix_rows`.

    Args:
        models: W, (n, P) floating-point.
        quantile: p, see `threshold`.
        alpha: α, see `mixing_weights`.
        counted: how many of the first parameters are compared, see `gram_rows`; all are mixed.

    Returns:
        U, (n, P) in the models' dtype; S, (n, n) float64; δ.

    Raises:
        ValueError: an argument out of range, or models that are not 2-D, have no rows or are not floating-point.
    """
    models = _as_models(models)
    n, width = models.shape
    _check_quantile(quantile)
    _check_alpha(alpha)
    similarity = _similarity(models, counted, None)
    delta = threshold(similarity, quantile)
    weights = mixing_weights(similarity, delta, alpha=alpha)
    mixed = np.empty((n, width), _dtype(models))
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
    """The next models of some clients, a chunk of parameters at a time (eq. 4).

    Chunks of the parameters come in order and, within a chunk, the rows in the order given: the chunks of one row, one
    after the other, are its mixed model. What is mixed with nothing comes out bit by bit as it is stored. A chunk of
    all rows is computed before its first row is handed out, so a caller may write it over the models themselves if
    `similarity` is what it was before.

    Args:
        models: (n, P).
        rows: whose models, each in 0 … n−1.
        quantile: p, see `threshold`.
        similarity: S, (n, n), if it is known, as from `update_gram` and `cosine`; by default it is computed, from all
            models.
        alpha: α, see `mixing_weights`.
        counted: how many of the first parameters are compared, see `gram_rows`; all are mixed.
        chunk: parameters at a time, up to 2·(n + len(rows))·chunk numbers in memory for each core; default: blocks of
            about 16 MB.

    Returns:
        An iterator of (row, chunk); a chunk is 1-D, in the models' dtype, and the caller's to keep or change. Keeping
        one holds the memory of the whole block.

    Raises:
        ValueError: at the call: an argument out of range, models that are not 2-D, have no rows or are not
            floating-point, a similarity of another shape than (n, n).
    """
    models = _as_models(models)
    n, width = models.shape
    chosen = _rows(rows, n)
    _check_quantile(quantile)
    _check_alpha(alpha)
    _counted(counted, width)
    _chunk(models, chunk)
    if similarity is None:
        similarity = _similarity(models, counted, chunk)
    elif similarity.shape != (n, n):
        raise ValueError(f"similarity has the shape {similarity.shape}; {n} models need ({n}, {n})")
    weights = mixing_weights(similarity, threshold(similarity, quantile), chosen, alpha=alpha)
    return ((int(chosen[k]), part) for k, part in weighted_rows(models, weights, chunk=chunk))


def weighted_rows(
    models: Models | np.ndarray, weights: np.ndarray, *, chunk: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Weighted means of all models, a chunk of parameters at a time, whatever the weights come from.

    Order and chunks are those of `mix_rows`, and so is this: a mean of one model alone is that model, bit by bit.

    Args:
        models: (n, P).
        weights: (m, n), at least 0; each row sums to 1.
        chunk: as in `mix_rows`.

    Returns:
        An iterator of (k, chunk): of the k-th row of `weights`.

    Raises:
        ValueError: at the call: models that are not 2-D, have no rows or are not floating-point; weights of another
            shape, below 0, or that do not sum to 1.
    """
    models = _as_models(models)
    n = models.shape[0]
    if weights.ndim != 2 or weights.shape[1] != n:
        raise ValueError(f"weights have the shape {weights.shape}; those of {n} models are (…, {n})")
    sums = weights.sum(axis=1)
    if not ((weights >= 0).all() and np.allclose(sums, 1, rtol=0, atol=1e-6)):
        raise ValueError(f"weights must be at least 0 and sum to 1; the least is {weights.min()}, the sums are {sums}")
    _chunk(models, chunk)
    return ((k, part) for block in _mixed_blocks(models, weights, chunk) for k, part in enumerate(block))


def _similarity(models: Models, counted: int | None, chunk: int | None) -> np.ndarray:
    everything = range(models.shape[0])
    return cosine(update_gram(np.zeros((0, 0)), models, everything, counted=counted, chunk=chunk))


def _mixed_blocks(models: Models, weights: np.ndarray, chunk: int | None) -> Iterator[np.ndarray]:
    """weights @ models by blocks of columns, (len(weights), at most chunk) each."""
    n, width = models.shape
    dtype = _dtype(models)
    narrow = weights.astype(np.result_type(dtype, np.float32))
    takes = narrow > 0
    alone = takes.sum(axis=1) == 1
    # Models that nobody mixes are left out of the product: 0 times a NaN or an infinity of a diverged one is NaN.
    used = np.flatnonzero(takes[~alone].any(axis=0))
    factors = narrow[~alone][:, used]
    only = takes[alone].argmax(axis=1)
    if not len(weights):
        return

    def mixture(start: int, stop: int) -> np.ndarray:
        block = models.block(start, stop)
        mixed = np.empty((len(weights), stop - start), dtype)
        mixed[alone] = block[only]
        if used.size:
            mixed[~alone] = factors @ _wide(block if used.size == n else block[used])
        return mixed

    yield from _in_order(mixture, _chunks(models, width, chunk))


def _in_order(
    work: Callable[[int, int], np.ndarray], chunks: Iterable[tuple[int, int]]
) -> Iterator[np.ndarray]:
    """`work` of every chunk, in the order of the chunks, on all cores and a few chunks ahead.

    Each core has chunks of its own, and BLAS one thread: threads that share a product wait for each other at every step
    of it, many times as long as it takes where something else runs on the machine.
    """
    workers = min(os.cpu_count() or 1, _WORKERS)
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(workers, "mixing") as pool:
        ahead: deque[Future[np.ndarray]] = deque()
        for start, stop in chunks:
            ahead.append(pool.submit(work, start, stop))
            if len(ahead) > workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class _InMemory:
    """An array as `Models`."""

    def __init__(self, array: np.ndarray) -> None:
        if array.ndim != 2:
            raise ValueError(f"models have the shape {array.shape}; they must be 2-D, a row each")
        self._array = array
        self.shape: tuple[int, int] = array.shape

    def block(self, start: int, stop: int) -> np.ndarray:
        return self._array[:, start:stop]


def _as_models(models: Models | np.ndarray) -> Models:
    if isinstance(models, np.ndarray):
        models = _InMemory(models)
    if not models.shape[0]:
        raise ValueError("there are 0 models; there must be at least 1")
    if _dtype(models).kind != "f":
        raise ValueError(f"models are {_dtype(models)}; they must be floating-point, for means are")
    return models


def _dtype(models: Models) -> np.dtype:
    return models.block(0, 0).dtype


def _wide(block: np.ndarray) -> np.ndarray:
    """What products are computed in: float16 would be slow and overflow."""
    return block.astype(np.result_type(block.dtype, np.float32), copy=False)


def _chunk(models: Models, chunk: int | None) -> int:
    if chunk is None:
        fitting = _BLOCK // (models.shape[0] * _dtype(models).itemsize)
        return min(max(fitting, _CHUNK[0]), _CHUNK[1])
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 parameter")
    return chunk


def _chunks(models: Models, width: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    step = _chunk(models, chunk)
    return ((start, min(start + step, width)) for start in range(0, width, step))


def _rows(rows: Iterable[int], n: int) -> np.ndarray:
    chosen = np.array([operator.index(row) for row in rows], dtype=np.intp)
    wrong = chosen[(chosen < 0) | (chosen >= n)]
    if wrong.size:
        raise ValueError(f"row {wrong[0]} is out of range; rows of {n} models are 0 … {n - 1}")
    return chosen


def _counted(counted: int | None, width: int) -> int:
    if counted is None:
        return width
    if not 0 <= counted <= width:
        raise ValueError(f"counted is {counted}; it must be 0 … {width}, the number of parameters of a model")
    return counted


def _check_quantile(quantile: float) -> None:
    if not 0 < quantile < 1:
        raise ValueError(f"quantile is {quantile}; it must be above 0 and below 1")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1")


def _check_square(array: np.ndarray, name: str) -> None:
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ValueError(f"{name} has the shape {array.shape}; it must be square and have at least one row")


def _check_similarity(similarity: np.ndarray) -> None:
    _check_square(similarity, "similarity")
    if not np.isfinite(similarity).all():
        raise ValueError("similarity has an element that is not finite; `cosine` gives numbers in [−1, 1]")
