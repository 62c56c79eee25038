"""Objectives of local training, one file for each, found by the name in the server's plan.

An objective trains the work's model, which is returned to the server, and returns the client's personal state. The
objectives of all files in this folder are found by their class.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tepal.client_app.objectives.work import Objective, Outcome, Work

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

OBJECTIVES: dict[str, Objective] = {each.name: each() for each in Objective.__subclasses__()}
"""Name in a plan → objective. An app may add its own."""


def find(name: str) -> Objective:
    """The objective with this name in a plan. Raises ValueError if this app does not have it."""
    if name not in OBJECTIVES:
        known = ", ".join(sorted(filter(None, OBJECTIVES)))
        raise ValueError(f"the server's plan has the objective {name!r}; this client's app has {known}")
    return OBJECTIVES[name]


__all__ = ["OBJECTIVES", "Objective", "Outcome", "Work", "find"]
