"""Checks of the arguments of problem (P1): scores, options, budgets and costs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

DISTANCES = ("hamming", "squared")


def checked_shape(array: NDArray[np.generic], name: str) -> tuple[int, int]:
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} have shape {array.shape}; it must be (clients, layers), with at least one of each")
    return array.shape[0], array.shape[1]


def checked_scores(scores: ArrayLike, name: str) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    checked_shape(array, name)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        client, layer = np.argwhere(wrong)[0]
        raise ValueError(
            f"{name}[{client}, {layer}] is {array[client, layer]} (client {client}, layer {layer}); "
            "it must be 0 or a positive, finite number"
        )
    return array


def check_options(coupling: float, distance: str) -> None:
    if not 0 <= coupling < math.inf:
        raise ValueError(f"coupling is {coupling}; it must be 0 or a positive, finite number")
    if distance not in DISTANCES:
        raise ValueError(f"distance is {distance!r}; it must be one of {', '.join(DISTANCES)}")


def checked_budgets(budgets: ArrayLike, costs: ArrayLike | None, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Budgets (n,), which are whole numbers if `costs` is None, and costs (n, L). Raises ValueError."""
    clients, layers = shape
    limits = np.asarray(budgets, dtype=np.float64)
    if limits.shape != (clients,):
        raise ValueError(f"budgets have shape {limits.shape}; it must be ({clients},), with one budget for each client")
    for client, limit in enumerate(limits.tolist()):
        if costs is None and not 1 <= limit <= layers:
            raise ValueError(f"budget {limit:g} of client {client}: it must be between 1 and {layers} layers")
        if not limit > 0:
            raise ValueError(f"budget {limit:g} of client {client}: it must be positive")
    if costs is None:
        return np.floor(limits), np.ones((clients, layers))
    prices = np.asarray(costs, dtype=np.float64)
    if prices.shape not in ((layers,), (clients, layers)):
        raise ValueError(f"costs have shape {prices.shape}; it must be ({layers},) or ({clients}, {layers})")
    wrong = prices[~((prices > 0) & np.isfinite(prices))]
    if wrong.size:
        raise ValueError(f"costs contain {wrong[0]:g}; every cost must be positive and finite")
    return limits, np.array(np.broadcast_to(prices, (clients, layers)))


def fits(prices: Floats, limit: float) -> bool:
    """Whether the sum of these costs is within the budget, exactly."""
    # fsum rounds the exact sum once, which keeps its sign: a sum that exceeds the budget is never rounded to it.
    return limit == math.inf or math.fsum((*prices.tolist(), -limit)) <= 0
