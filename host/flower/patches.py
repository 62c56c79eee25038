"""Which Flower the warm node knows, and what of it both ends of the SuperNode's Runtime API share.

`supernode.py` and `worker.py` rely on names of Flower that are not public. They are written for one version, and
refuse another, where unchanged `flower-supernode` works as ever.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

T = TypeVar("T")

FLOWER = "1.39.0"
"""The version that this folder and `tepal.server_app.grid` were written for and are tested with."""

SERVER_APP_RAISED = "ServerApp raised an exception"
"""What Flower logs before the traceback of a ServerApp that failed."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two looks for an object that was announced and has not arrived (Flower: 1 to 10)."""


class OtherFlower(RuntimeError):
    """The installed Flower is not the one that the warm node was written for."""


def require_flower(installed: str | None = None) -> None:
    """Raise `OtherFlower`, with what to do, unless the installed Flower is the one known here."""
    installed = installed or version("flwr")
    if installed != FLOWER:
        raise OtherFlower(
            f"tepal node is written for flwr {FLOWER}, and flwr {installed} is installed. Install flwr=={FLOWER}, or "
            "start Flower's own `flower-supernode`, which needs nothing of Tepal: it works alike, slower"
        )


def change(module: str, name: str, changed: Callable[[Any], Any]) -> None:
    """Let a module of Flower use `changed(what it used before)` under that name.

    Raises `OtherFlower` if the module has no such name.
    """
    try:
        found = importlib.import_module(module)
        before = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise OtherFlower(f"flwr {version('flwr')} has no {module}.{name}, which Tepal changes in {FLOWER}") from error
    setattr(found, name, changed(before))


def quick(pull: Callable[..., T]) -> Callable[..., T]:
    """A function of Flower that pulls objects, which looks for one that has not arrived again soon, and goes on."""
    return partial(pull, initial_backoff=SHORTEST_PAUSE, backoff_cap=LONGEST_PAUSE, max_tries_per_object=None)
