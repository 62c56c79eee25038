"""What local training minimises, by the name that the server's plan gives: one file an objective.

An objective leaves in the work's model what the server is to get, and hands in what the client keeps for itself. A file
of this folder needs no other line: its objective is found by its class.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tepal.client_app.objectives.work import Objective, Outcome, Work

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

OBJECTIVES: dict[str, Objective] = {each.name: each() for each in Objective.__subclasses__()}
"""By the name in a plan. An app may add its own."""


def find(name: str) -> Objective:
    """The objective that a plan names. Raises ValueError for one that this app does not know."""
    if name not in OBJECTIVES:
        known = ", ".join(sorted(filter(None, OBJECTIVES)))
        raise ValueError(f"the server asks for local training by {name!r}, and this client's app knows {known}")
    return OBJECTIVES[name]


__all__ = ["OBJECTIVES", "Objective", "Outcome", "Work", "find"]
