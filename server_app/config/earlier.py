"""Saved run configs of earlier versions, in which some keys had another meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_of_now(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved run config with the keys of this version, so that the run goes on with the same settings.

    `selective.coupling` was λ itself, which is now `selective.absolute-coupling`. With FedACS and FedAMP, clients that
    joined later started from the initial model. FedACS's α was the same in all rounds.
    """
    found = dict(kept)
    if "selective.coupling" in found and "selective.absolute-coupling" not in found:
        found["selective.absolute-coupling"] = found["selective.coupling"]
        found["selective.coupling"] = 0.0  # as then, if λ is 0
    for name in ("fedacs", "fedamp"):
        if any(key.startswith(f"{name}.") for key in found):
            found.setdefault(f"{name}.newcomers", "initial")
    if "fedacs.alpha" in found:
        found.setdefault("fedacs.follow-rate", False)
    return found
