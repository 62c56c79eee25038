"""The client's side: what an app calls (`apply_plan`), and this project's own ClientApp.

`app.py` is loaded by Flower by its file and is imported by nothing else.
"""

from tepal.client_app.freezing import AppliedPlan, apply_plan

__all__ = ["AppliedPlan", "apply_plan"]
