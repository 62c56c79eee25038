"""Which round's model a run delivered, and why it ended, as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepal.records.columns import UNKNOWN, score_text


def ending(summary: Mapping[str, Any]) -> str:
    """Return a sentence without its full stop; "" for a run that delivered its last model and was not to end early.

    Args:
        summary: the content of `summary.json`.
    """
    by = summary.get("best_by")
    if not by:
        return ""
    last, delivered, best = summary.get("rounds"), summary.get("delivered_round"), summary.get("best_round")
    is_best = f"the best by {by} ({score_text(summary.get('best_score'))})"
    other = "no round was scored" if best is None else f"{is_best} is that of round {best}"
    if best is None or delivered != best:
        kind = "the last" if delivered == last else "the best that could be kept"
        said = f"Model of round {_or_unknown(delivered)}, {kind}; {other}"
    else:
        said = f"Model of round {best}, {is_best}"
    early = summary.get("ended_early")
    return f"{said}; the run ended at round {_or_unknown(last)}" + (f" after {early}" if early else "")


def _or_unknown(value: Any) -> str:
    return UNKNOWN if value is None else str(value)
