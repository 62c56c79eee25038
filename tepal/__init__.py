"""Tepal: Flower strategies that move only the parts of a model that a round needs.

In a wheel the packages (`tepal.models`, `tepal.exchange`, ...) lie in this folder. In a checkout they are links to the
folders above it, so that editors and type checkers find them. A Flower app bundle has no links: there this file adds
the folder above to the package's path.
"""

from os import path as _path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepal.tools.api import Compared, Run, compare, load, simulate

__all__ = ["Compared", "Run", "compare", "load", "simulate"]

# First of all, and quickly: a thread that imports `tepal.x` while another is still here sees the path as it is now.
_here = _path.dirname(_path.abspath(__file__))
if not _path.isdir(_path.join(_here, "exchange")):
    __path__.append(_path.dirname(_here))

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Imported on demand: most of what imports `tepal` needs none of it, and an app bundle does not have it.
    if name in __all__:
        from tepal.tools import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
