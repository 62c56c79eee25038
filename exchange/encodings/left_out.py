"""How much of what was encoded did not arrive: its share of the squared norm, measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from tepal.exchange.encodings.codec import chunks


class LeftOut:
    """Sums over arrays that were encoded together.

    `scaled`: what is sent is scaled up for what is left out (`Wire.unbiased`). What is left out is then the distance
    to the multiple of it that is nearest, ‖v‖² − ⟨v, c⟩² / ‖c‖²: without the scale nearly ‖v − c‖².
    """

    def __init__(self, *, scaled: bool = False) -> None:
        self._scaled = scaled
        self._whole = self._rest = self._product = self._sent = 0.0

    def add(self, value: np.ndarray, rest: np.ndarray) -> None:
        """Add an array, and its difference from what is decoded of it."""
        flat, left = value.reshape(-1), rest.reshape(-1)
        for part in chunks(flat.size):
            v, r = flat[part].astype(np.float64), left[part].astype(np.float64)
            self._whole += float(np.vdot(v, v))
            self._rest += float(np.vdot(r, r))
            if self._scaled:
                self._product += float(np.vdot(v, np.subtract(v, r, out=r)))
                self._sent += float(np.vdot(r, r))

    @property
    def whole(self) -> float:
        """The squared norm of the arrays, ‖v‖²."""
        return self._whole

    @property
    def rest(self) -> float:
        """What is left out of it, ‖v − c‖²."""
        if not self._scaled:
            return self._rest
        return self._whole - self._product**2 / self._sent if self._sent else self._whole


def share_left_out(of: Iterable[LeftOut]) -> float | None:
    """The share of the squared norm of all arrays together that is left out, 0 to 1; None if all of them are 0."""
    found = [*of]
    rest, whole = math.fsum(one.rest for one in found), math.fsum(one.whole for one in found)
    return min(max(rest / whole, 0.0), 1.0) if whole > 0 and math.isfinite(whole + rest) else None
