"""The error for an invalid run config."""

from __future__ import annotations


class ConfigError(ValueError):
    """Raised for an invalid run config; the message names every wrong key, its value, and what is allowed."""
