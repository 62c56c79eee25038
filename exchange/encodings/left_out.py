"""The measured share of the squared norm that an encoding leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from tepal.exchange.encodings.steps import dot


class LeftOut:
    """Sums over arrays that were encoded together.

    `scaled`: what is sent is scaled up for what is left out (`Wire.unbiased`). What is left out is then the distance
    to the multiple of it that is nearest, ‖v‖² − ⟨v, c⟩² / ‖c‖². If nothing is scaled, this is nearly ‖v − c‖².
    """

    def __init__(self, *, scaled: bool = False) -> None:
        self._scaled = scaled
        self._whole = self._rest = self._both = 0.0

    def add(self, value: np.ndarray, rest: np.ndarray) -> None:
        """Add an array, and its difference from what is decoded of it."""
        flat, left = value.reshape(-1), rest.reshape(-1)
        with np.errstate(over="ignore"):  # then the share is not known
            self._whole += dot(flat, flat)
            self._rest += dot(left, left)
            self._both += dot(flat, left) if self._scaled else 0.0

    @property
    def whole(self) -> float:
        """The squared norm of the arrays, ‖v‖²."""
        return self._whole

    @property
    def rest(self) -> float:
        """What is left out of it, ‖v − c‖²."""
        if not self._scaled:
            return self._rest
        product, sent = self._whole - self._both, self._whole - 2 * self._both + self._rest  # ⟨v, c⟩ and ‖c‖²
        return self._whole - product**2 / sent if sent > 0 else self._whole


def share_left_out(of: Iterable[LeftOut]) -> float | None:
    """The share of the squared norm of all arrays together that is left out, 0 to 1.

    None if all are 0, or if a norm overflows.
    """
    found = [*of]
    rest, whole = math.fsum(one.rest for one in found), math.fsum(one.whole for one in found)
    return min(max(rest / whole, 0.0), 1.0) if whole > 0 and math.isfinite(whole + rest) else None
