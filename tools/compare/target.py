"""The target of a comparison, as it is given: a score, or a final score with a margin, such as `fedavg-0.005`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from tepal.records.columns import is_number

BASELINE = "baseline"
"""In place of a name: the baseline of each section; of strategies that are compared, fedavg."""

_FINAL = re.compile(r"([A-Za-z0-9_-]{1,64}?)([+-][0-9]{0,10}\.?[0-9]{1,10})")
EXPECTED = (
    "expected a score of at least 0, such as 0.9, or a final score with a margin, such as fedavg-0.005: the name of a "
    f"strategy or variant, or {BASELINE!r}, and what is added or subtracted, written without an exponent"
)


@dataclass(frozen=True)
class FinalScore:
    """The final score of a strategy or variant, with each seed its own, plus a margin.

    Args:
        of: Its name, or BASELINE.
        margin: What is added to it; negative for less.
    """

    of: str
    margin: float

    @property
    def hint(self) -> str:
        """A sentence on a margin such as 1e-3, whose 1e is taken as the end of the name; "" for other ones."""
        exponent = re.search(r"[0-9]e$", self.of, re.IGNORECASE)
        return " A margin is written without an exponent: 0.001, not 1e-3." if exponent else ""


def target_value(given: Any) -> float | str:
    """A target as `comparison.json` keeps it: a score, or the text of a final score.

    Raises ValueError, with what is expected, for any other value.
    """
    score = given
    if isinstance(given, str):
        try:
            score = float(given)  # first: -0.5 and 1e-3 are numbers, too
        except ValueError:
            if final_score(given):
                return given
    if not is_number(score) or not math.isfinite(score) or score < 0:
        raise ValueError(EXPECTED)
    return abs(float(score))  # tables would write -0 with its sign


def final_score(target: float | str | None) -> FinalScore | None:
    """The final score that a target is relative to; None for a score."""
    found = _FINAL.fullmatch(target) if isinstance(target, str) else None
    return FinalScore(found[1], float(found[2])) if found else None
