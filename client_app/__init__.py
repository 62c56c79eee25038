"""The client's side: `apply_plan` and `reply_to_probes` for other apps, and this project's own ClientApp.

Flower loads `app.py` by its file; nothing else imports it.
"""

from typing import TYPE_CHECKING, Any

# Flower's simulation imports ServerApp and ClientApp in two threads. `import tepal.x` does not wait until the other
# thread has imported `tepal`, and misses the path that it adds; `import tepal` does wait.
import tepal  # noqa: F401

if TYPE_CHECKING:
    from tepal.training.freezing import AppliedPlan, apply_plan
    from tepal.training.probing import reply_to_probes

__all__ = ["AppliedPlan", "apply_plan", "reply_to_probes"]


def __getattr__(name: str) -> Any:
    # Imported on demand: importing torch takes seconds, and checking a config does not need it.
    if name in __all__:
        from tepal.training import freezing, probing

        return getattr(probing if name == "reply_to_probes" else freezing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
