"""Similarity of models, its threshold, and the weights of the mixtures (eq. 4), computed from dot products."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tepal.strategies.mixing.columns import checked_rows


def cosine(gram: np.ndarray) -> np.ndarray:
    """Cosine similarity S of all pairs of models (s_ij of eq. 4).

    A model that is all zeros, or that diverged (its norm is not finite), has no direction and similarity 0 to all
    others: it is not mixed with any other model.

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
    """Threshold δ of eq. 4: the p-quantile, with linear interpolation, of all n² similarities, including negative ones.

    Args:
        similarity: (n, n), from `cosine`.
        quantile: p, above 0 and below 1. From 1 − 1/n on every client keeps its own model.

    Raises:
        ValueError: a quantile out of range; similarities that are not square, empty or not finite.
    """
    _check_similarity(similarity)
    check_quantile(quantile)
    return float(np.quantile(similarity, quantile, method="linear"))


def mixing_weights(
    similarity: np.ndarray, threshold: float, rows: Iterable[int] | None = None, *, alpha: float = 1.0
) -> np.ndarray:
    """Weights of all models in the mixtures of some clients (the fraction in eq. 4).

    In the mixture of client i, its own model has the weight s_ii = 1, and every other model j the weight max(s_ij, 0)
    if s_ij > δ, else 0; the weights are divided by their sum. With `alpha` they are then (1 − α)·e_i + α·weights.

    Args:
        similarity: (n, n), from `cosine`.
        threshold: δ.
        rows: indices of the clients; default: all.
        alpha: α, above 0 and at most 1; 1 is eq. 4.

    Returns:
        (len(rows), n) float64, at least 0; each row sums to 1.

    Raises:
        ValueError: alpha or a row out of range; similarities that are not square, empty or not finite.
    """
    _check_similarity(similarity)
    check_alpha(alpha)
    n = len(similarity)
    chosen = checked_rows(range(n) if rows is None else rows, n)
    own = np.arange(len(chosen)), chosen
    weights: np.ndarray = similarity[chosen].astype(np.float64)
    weights[~(weights > threshold) | (weights < 0)] = 0.0
    weights[own] = 1.0
    weights *= alpha / weights.sum(axis=1, keepdims=True)
    weights[own] += 1.0 - alpha
    return weights


def check_quantile(quantile: float) -> None:
    if not 0 < quantile < 1:
        raise ValueError(f"quantile is {quantile}; it must be above 0 and below 1")


def check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1")


def _check_square(array: np.ndarray, name: str) -> None:
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ValueError(f"{name} has the shape {array.shape}; it must be square and have at least one row")


def _check_similarity(similarity: np.ndarray) -> None:
    _check_square(similarity, "similarity")
    if not np.isfinite(similarity).all():
        raise ValueError("similarity has an element that is not finite; all must be in [−1, 1], as from `cosine`")
