"""What a run's model is made of, by keys of the run config: server and clients may both make it. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tepal.host.toml import parts_of, separated

_BLOCKS = "blocks."


def sources_of(pretrained: str) -> tuple[str, ...]:
    """The sources of the key `pretrained`: one, one for each mode of an ensemble, or none."""
    whole = pretrained.strip()
    if whole and os.path.exists(os.path.expanduser(whole)):  # a path may have a comma; a list may be too long for one
        return (whole,)
    return separated(whole)


def seed_of_mode(seed: int, mode: int) -> int:
    """The seed of the initial weights of an ensemble's mode, by the run's own."""
    return int(np.random.SeedSequence([seed, mode]).generate_state(1)[0]) if mode else seed


PATTERNS = "tepal_block_patterns"
"""The attribute of a client's model with what `patterns_of` returns of its run, for those who look for its blocks."""


def patterns_of(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `find_blocks` that a run config sets: `blocks.query-key`, `blocks.layers` and others."""
    given = {key: str(value).strip() for key, value in run_config.items() if key.startswith(_BLOCKS)}
    values = {key.removeprefix(_BLOCKS).replace("-", "_"): value for key, value in given.items() if value}
    return {key: value if key == "layers" else parts_of(value) for key, value in values.items()}
