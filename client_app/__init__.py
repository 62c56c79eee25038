"""The client's side: what an app calls (`apply_plan`), and this project's own ClientApp.

`app.py` is loaded by Flower by its file and is imported by nothing else.
"""

from typing import TYPE_CHECKING, Any

# Flower's simulation imports ServerApp and ClientApp in two threads. `import tepal.x` does not wait for a `tepal` that
# the other thread is still importing, and misses the path that it adds; `import tepal` does wait.
import tepal  # noqa: F401

if TYPE_CHECKING:
    from tepal.training.freezing import AppliedPlan, apply_plan

__all__ = ["AppliedPlan", "apply_plan"]


def __getattr__(name: str) -> Any:
    # Not imported before it is asked for: torch takes seconds, and who checks a config needs none of it.
    if name in __all__:
        from tepal.training import freezing

        return getattr(freezing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
