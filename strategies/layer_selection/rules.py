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


def choose(
    selection: str,
    scores: ArrayLike,
    budgets: ArrayLike,
    *,
    coupling: float = 0.0,
    distance: str = "hamming",
    costs: ArrayLike | None = None,
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

    Returns:
        (n, L) bool.

    Raises:
        ValueError: an unknown selection, or as `select_layers`.
    """
    if selection not in SELECTIONS:
        raise ValueError(f"selection is {selection!r}; it must be one of {', '.join(SELECTIONS)}")
    if selection == "gradient":
        norms = _limited(checked_scores(scores, "scores"))
        return select_layers(norms, budgets, coupling, distance=distance, costs=costs)
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
            mask[layer] = True
            if not fits(price[mask], limit):
                mask[layer] = False
                break
    return masks


def _limited(scores: Floats) -> Floats:
    """Scores (n, L), those of each client scaled down to the largest score that counts, if they exceed it."""
    largest = scores.max(axis=1)
    above = largest[largest > 0]  # clients without gradients do not say what is usual
    if len(above) < _FEWEST:
        return scores
    most = MOST_TIMES * float(np.median(above))
    return np.where(largest[:, None] > most, scores * (most / np.maximum(largest, most))[:, None], scores)
