"""Saved run configs of earlier versions, in which some keys had another meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_of_now(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved run config with the keys of this version, so that the run goes on with the same settings.

    `selective.coupling` was λ itself, which is now `selective.absolute-coupling`.
    """
    found = dict(kept)
    if "selective.coupling" in found and "selective.absolute-coupling" not in found:
        found["selective.absolute-coupling"] = found["selective.coupling"]
        found["selective.coupling"] = 0.0  # as then, if λ is 0
    return found
