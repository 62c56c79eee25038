"""How long a side that polls waits before its first request."""

from __future__ import annotations

from collections import deque

_SHARE = 1 / 2
_REMEMBERED = 4
_LONGEST = 0.25


class FirstPause:
    """The pause before the first request: half of the shortest of the last four waits, and at most .25 s.

    What comes in even intervals, as in a run with short rounds, is not asked for in the first half of them.
    """

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)

    def waited(self, seconds: float) -> None:
        """Remember how long what was asked for took to come."""
        self._waits.append(seconds)

    @property
    def seconds(self) -> float:
        """0 before anything came."""
        return min(_SHARE * min(self._waits), _LONGEST) if self._waits else 0.0
