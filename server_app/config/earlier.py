"""Saved run configs of earlier versions: keys that they lack, or that had another meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_THEN = {
    "fedacs.follow-rate": False, "fedacs.newcomers": "initial", "fedamp.newcomers": "initial",
    "fedamp.unit": "absolute",
}  # fmt: skip
"""Keys that runs of earlier versions did not save, and what those versions did, which is not the default."""


def as_of_now(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved run config with the keys of this version, so that the run goes on with the same settings."""
    found = {**_THEN, **kept}
    if "selective.coupling" in kept and "selective.absolute-coupling" not in kept:
        # It was λ itself. 0: as then, if λ is 0.
        found |= {"selective.absolute-coupling": kept["selective.coupling"], "selective.coupling": 0.0}
    return found
