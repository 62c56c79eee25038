"""Squared norms of what a client returned, entry by entry: measured in one pass, or estimated from a part of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

from tepal.exchange.bounds import BadReply
from tepal.exchange.layout import Arrays
from tepal.exchange.threads import CHUNK, PIECE, in_threads

SAMPLED = 1 / 16
"""Share of the values of a large entry from which its norm is estimated."""

_DRAWN = 1 << 15  # values in a piece that is drawn
_random = random.SystemRandom()

_Piece = tuple[str, np.ndarray, np.ndarray | None]
"""Name of an entry, and a piece of its values and of its start, both flat."""


def squared_norms(values: Arrays, starts: Arrays | None) -> dict[str, float]:
    """Name → ‖x − s‖² of each floating-point entry x and its start s, or ‖x‖² without starts.

    One pass over the arrays, in threads. A sum that float32 cannot represent is infinite.

    Raises:
        BadReply: an entry has values that are NaN or infinite.
    """
    pieces = [piece for name in _floating(values) for piece in _pieces(name, values, starts, PIECE)]
    norms: dict[str, float] = {}
    for (name, x, _), found in zip(pieces, _squares(pieces), strict=True):
        # A sum is finite only if every value is. If that of finite values overflows, they are checked one by one.
        if not np.isfinite(found) and not np.isfinite(x).all():
            raise BadReply(f"entry {name!r} has values that are NaN or infinite")
        norms[name] = norms.get(name, 0.0) + (found if np.isfinite(found) else float("inf"))
    return norms


def estimated_norms(values: Arrays, starts: Arrays) -> dict[str, float]:
    """Name → an estimate of ‖x − s‖² of each floating-point entry x and its start s.

    Of a large entry, `SAMPLED` of its values are read, in pieces that are drawn by the system's random numbers after
    the reply came, so that no client knows them. A small one is read as a whole.

    Args:
        values: finite arrays.
        starts: the values that they started from, of the same shapes.
    """
    drawn: list[_Piece] = []
    factors: dict[str, float] = {}  # name → values of an entry for each one that is read
    for name in _floating(values):
        pieces = _pieces(name, values, starts, _DRAWN)
        chosen = _random.sample(pieces, math.ceil(SAMPLED * len(pieces)))
        read = sum(x.size for _, x, _ in chosen)
        factors[name] = values[name].size / read if read else 1.0
        drawn += chosen
    norms = dict.fromkeys(factors, 0.0)
    for (name, _, _), found in zip(drawn, _squares(drawn), strict=True):
        norms[name] += factors[name] * (found if np.isfinite(found) else float("inf"))
    return norms


def integer_norms(values: Arrays, starts: Arrays) -> dict[str, float]:
    """Name → ‖x − s‖² of each integer or bool entry x, and its start s (0 without a start)."""
    norms = {}
    for name, array in values.items():
        if array.dtype.kind in "biu":
            change = array.astype(np.float64)
            if name in starts:
                change -= starts[name]
            norms[name] = float(np.vdot(change, change))
    return norms


def _floating(values: Arrays) -> Iterator[str]:
    return (name for name, array in values.items() if array.dtype.kind in "fc")


def _pieces(name: str, values: Arrays, starts: Arrays | None, size: int) -> list[_Piece]:
    x = values[name].reshape(-1)
    s = starts[name].reshape(-1) if starts is not None and name in starts else None
    return [(name, x[k : k + size], None if s is None else s[k : k + size]) for k in range(0, x.size, size)]


def _squares(pieces: list[_Piece]) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        return in_threads(_squared, pieces, sum(x.nbytes for _, x, _ in pieces))


def _squared(piece: _Piece) -> float:
    _, x, s = piece
    if x.dtype == np.float16:
        x = x.astype(np.float32)
    scratch = np.empty(min(CHUNK, x.size) if s is not None else 0, x.dtype)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # of this thread
        for k in range(0, x.size, CHUNK):
            change = x[k : k + CHUNK]
            if s is not None:
                change = np.subtract(change, s[k : k + CHUNK], out=scratch[: change.size])
            total += float(np.vdot(change, change).real)
    return total
