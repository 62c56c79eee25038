"""Tepal: Flower strategies that move only the parts of a model that a round needs.

This folder holds the import name only. In a wheel the packages (`tepal.models`, `tepal.exchange`, ...) lie
beside this file; in a checkout, and in a Flower app bundle made from one, they are the folders above it.
"""

from pathlib import Path

__version__ = "0.1.0"

_above = Path(__file__).resolve().parent.parent
if not (Path(__file__).resolve().parent / "exchange").is_dir() and (_above / "exchange").is_dir():
    __path__.append(str(_above))
