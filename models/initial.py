"""What a run's initial weights come from: pretrained weights, or a seed. Server and clients may both make them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def sources_of(pretrained: str) -> tuple[str, ...]:
    """The sources of the key `pretrained`: one, one for each mode of an ensemble, or none."""
    whole = pretrained.strip()
    if whole and Path(whole).expanduser().exists():  # a path may have a comma
        return (whole,)
    return tuple(source.strip() for source in whole.split(",")) if whole else ()


def seed_of_mode(seed: int, mode: int) -> int:
    """The seed of the initial weights of an ensemble's mode, by the run's own."""
    return int(np.random.SeedSequence([seed, mode]).generate_state(1)[0]) if mode else seed
