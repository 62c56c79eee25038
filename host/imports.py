"""Imports that are put off."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_USES = ("__path__", "__all__", "__version__")
"""Names with underscores that show that a module is used; the others are looked at in all modules, as by `inspect`."""


def import_when_used(name: str) -> None:
    """Put off the import of a module that others import and perhaps do not use.

    They get a stand-in, which imports the module when they first use something of it. Nothing is put off for a module
    that was imported before, or is not installed.
    """
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
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
