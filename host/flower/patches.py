"""The Flower version that this folder supports, and how its functions are replaced.

`supernode.py` and `worker.py` use private names of Flower. They are written for one version and refuse others, with
which Flower's own `flower-supernode` still works.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

T = TypeVar("T")

FLOWER = "1.39.0"
"""The only version that this folder and `tepal.server_app.http_grid` support."""

KILLED = "its process was killed by signal"
"""How the reason begins why a run failed whose process was killed; the signal's number follows."""
SERVER_APP_RAISED = "ServerApp raised an exception"
"""What Flower logs before the traceback of a ServerApp that failed."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two requests for an object that was announced and has not arrived (Flower: 1 to 10)."""


class UnsupportedFlowerVersion(RuntimeError):
    """The installed version of Flower is not the one that the warm node supports."""


def require_flower(installed: str | None = None) -> None:
    """Raise `UnsupportedFlowerVersion`, with what to do, unless the installed Flower is the supported one."""
    installed = installed or version("flwr")
    if installed != FLOWER:
        raise UnsupportedFlowerVersion(
            f"tepal node supports flwr {FLOWER}, and flwr {installed} is installed. Install flwr=={FLOWER}, or start "
            "Flower's own `flower-supernode` instead: it gives the same results, slower"
        )


def change(module: str, name: str, changed: Callable[[Any], Any]) -> None:
    """Replace the attribute `name` of a module of Flower by `changed(attribute)`.

    Raises `UnsupportedFlowerVersion` if the module has no such attribute.
    """
    try:
        found = importlib.import_module(module)
        before = getattr(found, name)
    except (ImportError, AttributeError) as error:
        installed = version("flwr")
        raise UnsupportedFlowerVersion(
            f"flwr {installed} has no {module}.{name}, which Tepal changes in {FLOWER}: install flwr=={FLOWER}"
        ) from error
    setattr(found, name, changed(before))


def quick(pull: Callable[..., T]) -> Callable[..., T]:
    """Return Flower's function that pulls objects, with shorter pauses and no limit of attempts."""
    return partial(pull, initial_backoff=SHORTEST_PAUSE, backoff_cap=LONGEST_PAUSE, max_tries_per_object=None)
