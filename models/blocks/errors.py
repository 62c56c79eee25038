"""BlocksError, and how its messages name a model and shorten a list."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class BlocksError(ValueError):
    """Raised when blocks of a model cannot be identified, or differ from what its configuration says."""


def name_of(model: nn.Module) -> str:
    """Return the class name, with the model's name in its configuration."""
    config = getattr(model, "config", None)
    label = getattr(config, "name_or_path", "") or getattr(config, "model_type", "")
    return f"{type(model).__name__} ({label})" if label else type(model).__name__


def few(names: Sequence[str]) -> str:
    """Return up to four names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
