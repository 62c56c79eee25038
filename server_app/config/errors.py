"""The error that is raised for a run config that cannot be run."""

from __future__ import annotations


class ConfigError(ValueError):
    """A run config that cannot be run; the text names every key that is wrong, its value, and what is allowed."""
