"""Squared norms of what a client returned, entry by entry: measured in one pass, or estimated from a part of it."""

from __future__ import annotations

import math
import random

import numpy as np

from tepal.exchange.bounds import BadReply
from tepal.exchange.layout import Arrays
from tepal.exchange.threads import CHUNK, PIECE, in_threads

SAMPLED = 1 / 64
"""Share of the values of a large entry from which its norm is estimated."""
SMALL = 1 << 13
"""Values up to which an entry is not large; pieces that are drawn of larger ones have as many."""

_random = random.SystemRandom()
_WIDER = {np.dtype(np.float16): np.dtype(np.float32)}  # in which squares do not overflow


def squared_norms(values: Arrays, starts: Arrays | None) -> dict[str, float]:
    """Name → ‖x − s‖² of each floating-point entry x and its start s, or ‖x‖² without starts.

    One pass over the arrays, in threads. A sum that float32 cannot represent is infinite.

    Raises:
        BadReply: an entry has values that are NaN or infinite.
    """
    pieces: list[tuple[str, np.ndarray, np.ndarray | None]] = []
    for name, array in values.items():
        if array.dtype.kind not in "fc":
            continue
        x, s = array.reshape(-1), starts[name].reshape(-1) if starts is not None and name in starts else None
        for k in range(0, x.size, PIECE):
            pieces.append((name, x[k : k + PIECE], None if s is None else s[k : k + PIECE]))
    sums = in_threads(_squared, pieces, sum(x.nbytes for _, x, _ in pieces))
    norms: dict[str, float] = {}
    for (name, x, _), found in zip(pieces, sums, strict=True):
        # A sum is finite only if every value is. If that of finite values overflows, they are checked one by one.
        if not np.isfinite(found) and not np.isfinite(x).all():
            raise BadReply(f"entry {name!r} has values that are NaN or infinite")
        norms[name] = norms.get(name, 0.0) + (found if np.isfinite(found) else float("inf"))
    return norms


def estimated_norms(values: Arrays, starts: Arrays) -> dict[str, float]:
    """Name → an estimate of ‖x − s‖² of each floating-point entry x and its start s.

    Of a large entry, a share `SAMPLED` of the values is read, in pieces that are drawn by the system's random numbers
    after the reply came, so that no client knows them. One of up to `SMALL` values is read as a whole.

    Args:
        values: finite arrays.
        starts: the values that they started from, of the same shapes.
    """
    norms = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in values.items():
            if array.dtype.kind not in "fc":
                continue
            x, s = array.reshape(-1), starts[name].reshape(-1)
            count = -(-x.size // SMALL)
            found, read = 0.0, 0
            for k in _random.sample(range(count), math.ceil(SAMPLED * count)) if count > 1 else range(count):
                part = x[k * SMALL : (k + 1) * SMALL]
                change = np.subtract(part, s[k * SMALL : (k + 1) * SMALL], dtype=_WIDER.get(part.dtype, part.dtype))
                found += float(np.vdot(change, change).real)
                read += part.size
            norms[name] = found * (x.size / max(read, 1)) if math.isfinite(found) else math.inf
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


def _squared(piece: tuple[str, np.ndarray, np.ndarray | None]) -> float:
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
