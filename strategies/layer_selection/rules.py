"""Selections of layers by all rules: (P1), each client's own scores, the layers' positions, or all layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tepal.strategies.layer_selection.checks import Floats, Mask, checked_budgets, checked_scores, checked_shape, fits
from tepal.strategies.layer_selection.select import select_layers

SELECTIONS = ("gradient", "snr", "rgn", "top", "bottom", "both", "full")

MOST_TIMES = 1000.0
"""The largest score of a client counts for at most so many times the median of the clients' largest scores."""

_FEWEST = 3  # clients with scores above 0, from which their median says what is usual


def relative_coupling(squared_norms: ArrayLike, share: float) -> float:
    """Return λ of (P1) in units of these norms: share · M / (n − 1).

    M is what is usual: the median, over the clients with any gradient, of a client's largest squared norm. A client
    that alone trains a layer differs from n − 1 others in it, which costs λ·(n − 1) = share·M. So it trains a layer
    alone if its squared norm is above that share of the usual largest one. If all norms are multiplied by a number, so
    is λ, and the masks stay.

    Args:
        squared_norms: (n, L), ≥ 0.
        share: ≥ 0.

    Returns:
        λ; 0 for a single client, and without any gradients.
    """
    norms = checked_scores(squared_norms, "squared_norms")
    largest = norms.max(axis=1)
    above = largest[largest > 0]
    return share * float(np.median(above)) / (len(norms) - 1) if len(norms) > 1 and len(above) else 0.0


def choose(
    selection: str,
    scores: ArrayLike,
    budgets: ArrayLike,
    *,
    coupling: float = 0.0,
    distance: str = "hamming",
    costs: ArrayLike | None = None,
    fill: bool = False,
) -> Mask:
    """Select the layers that each client trains, by any of `SELECTIONS`.

    Args:
        selection: "gradient": `select_layers` on the squared norms. "snr", "rgn": each client's own best scores
            within its budget. "top": layers from the output on, "bottom": from the input on, "both": bottom, top,
            bottom + 1, top − 1, …, each up to the first layer that exceeds the budget. "full": all layers, whatever
            the budget.
        scores: (n, L), ≥ 0: squared gradient norms, signal-to-noise ratios, or relative gradient norms. "top",
            "bottom", "both" and "full" use their shape only. For "gradient", a client whose largest score exceeds
            `MOST_TIMES` the median of the clients' largest scores has its scores scaled down to that: λ would
            otherwise be nothing beside them, and a single client could dissolve the coupling of the others.
        budgets, costs: as in `select_layers`; "full" ignores them.
        coupling, distance: as in `select_layers`; for "gradient" only.
        fill: for "gradient" only: what (P1) leaves of a client's budget is used for its other layers, those with the
            largest norms first, as in the paper's released code. With unit costs every client then trains R_i layers.

    Returns:
        (n, L) bool.

    Raises:
        ValueError: an unknown selection, or as `select_layers`.
    """
    if selection not in SELECTIONS:
        raise ValueError(f"selection is {selection!r}; it must be one of {', '.join(SELECTIONS)}")
    if selection == "gradient":
        norms = _limited(checked_scores(scores, "scores"))
        masks = select_layers(norms, budgets, coupling, distance=distance, costs=costs)
        return _filled(masks, norms, *checked_budgets(budgets, costs, norms.shape)) if fill else masks
    if selection in ("snr", "rgn"):
        return select_layers(scores, budgets, 0.0, costs=costs)
    shape = checked_shape(np.asarray(scores), "scores")
    if selection == "full":
        return np.ones(shape, dtype=bool)
    limits, prices = checked_budgets(budgets, costs, shape)
    layers = range(shape[1])
    inwards = [layer for pair in zip(layers, reversed(layers), strict=True) for layer in pair][: shape[1]]
    order = {"top": layers[::-1], "bottom": layers, "both": inwards}[selection]
    masks = np.zeros(shape, dtype=bool)
    for mask, limit, price in zip(masks, limits, prices, strict=True):
        for layer in order:
            if not _added(mask, layer, price, limit):
                break
    return masks


def _filled(masks: Mask, norms: Floats, limits: Floats, prices: Floats) -> Mask:
    """Masks with further layers of each client, in the order of its norms, that its budget allows."""
    filled = masks.copy()
    for mask, own, limit, price in zip(filled, norms, limits, prices, strict=True):
        for layer in np.lexsort((-np.arange(len(own)), -own)):  # of equal ones first the one nearer the output
            if not mask[layer]:
                _added(mask, int(layer), price, limit)
    return filled


def _added(mask: Mask, layer: int, price: Floats, limit: float) -> bool:
    """Add a layer to a mask, in place, if the budget allows it; return whether it does."""
    mask[layer] = True
    mask[layer] = fits(price[mask], limit)
    return bool(mask[layer])


def _limited(scores: Floats) -> Floats:
    """Scores (n, L), those of each client scaled down to the largest score that counts, if they exceed it."""
    largest = scores.max(axis=1)
    above = largest[largest > 0]  # clients without gradients do not say what is usual
    if len(above) < _FEWEST:
        return scores
    most = MOST_TIMES * float(np.median(above))
    return np.where(largest[:, None] > most, scores * (most / np.maximum(largest, most))[:, None], scores)
