"""The round that goes on: its number, settings, report, and the time that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flwr.app import ConfigRecord

from tepal.strategies.rounds.report import RoundReport


@dataclass
class Round:
    """What all exchanges of one round share."""

    number: int
    rounds: int
    config: ConfigRecord
    timeout: float
    report: RoundReport
    started: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    """Of the attempt's exchanges that are left; each gets its share of the time until then."""
    phases_left: int = 0

    def share(self) -> float:
        """Seconds for the next exchange: a silent client in an early phase must not take the time of the others."""
        if not self.phases_left:  # an evaluation
            return self.timeout
        seconds = max(self.deadline - time.monotonic(), 0.0) / self.phases_left
        self.phases_left -= 1
        return seconds
