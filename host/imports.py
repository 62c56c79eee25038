"""Imports that are put off, and imports without garbage collection."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_USES = ("__path__", "__all__", "__version__")
"""Names with underscores that show that a module is used; the others are looked at in all modules, as by `inspect`."""


def import_when_used(name: str) -> None:
    """Put off the import of a module that others import and perhaps do not use.

    They get a stand-in, which imports the module when they first use something of it. Nothing is put off for a module
    that was imported before, or is not installed. The package of a submodule is not imported here.
    """
    if name in sys.modules or (spec := _spec(name)) is None:
        return
    stand_in = ModuleType(name)
    stand_in.__spec__ = spec

    def found(attribute: str) -> Any:
        if sys.modules.get(name) is stand_in:
            if attribute.startswith("__") and attribute not in _USES:
                raise AttributeError(attribute)
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    stand_in.__dict__["__getattr__"] = found
    sys.modules[name] = stand_in


def _spec(name: str) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which imports the package of a submodule."""
    package, _, _ = name.rpartition(".")
    if not package:
        return importlib.util.find_spec(name)
    above = _spec(package)
    places = above.submodule_search_locations if above else None
    return PathFinder.find_spec(name, places) if places else None


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Imports make a million objects, none of which is garbage: to look through them again and again takes a third of the
    time of importing PyTorch and what belongs to it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
