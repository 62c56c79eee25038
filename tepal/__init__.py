"""Tepal: Flower strategies that move only the parts of a model that a round needs.

This folder holds the import name only. In a wheel the packages (`tepal.models`, `tepal.exchange`, ...) lie
beside this file; in a checkout, and in a Flower app bundle made from one, they are the folders above it.
"""

from os import path as _path

# First of all, and quickly: a thread that imports `tepal.x` while another is still here sees the path as it is now.
_here = _path.dirname(_path.abspath(__file__))
if not _path.isdir(_path.join(_here, "exchange")):
    __path__.append(_path.dirname(_here))

__version__ = "0.1.0"
