"""The current round: its number, settings, report, and remaining time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flwr.app import ConfigRecord

from tepal.strategies.rounds.report import RoundReport


@dataclass
class Round:
    """What the exchanges of one round have in common."""

    number: int
    rounds: int
    config: ConfigRecord
    timeout: float
    report: RoundReport
    started: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    """When (`time.monotonic`) the attempt's exchanges must have ended; they share the time until then."""
    phases_left: int = 0
    scorers: list[str] | None = None
    """The cohort that scores the model, once it is drawn."""

    def share(self) -> float:
        """Seconds for the next exchange: a silent client in an early phase must not use up the time of later phases."""
        if not self.phases_left:  # an evaluation
            return self.timeout
        seconds = max(self.deadline - time.monotonic(), 0.0) / self.phases_left
        self.phases_left -= 1
        return seconds
