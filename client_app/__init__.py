"""The client's side: what an app calls (`apply_plan`), and this project's own ClientApp.

`app.py` is loaded by Flower by its file and is imported by nothing else.
"""

# Flower's simulation imports ServerApp and ClientApp in two threads. `import tepal.x` does not wait for a `tepal` that
# the other thread is still importing, and misses the path that it adds; `import tepal` does wait.
import tepal  # noqa: F401
from tepal.client_app.freezing import AppliedPlan, apply_plan

__all__ = ["AppliedPlan", "apply_plan"]
