"""What each tracker has: the protocol, the error, and the values that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tepal.records.round_record import COLUMNS, COUNTED, RoundRecord


class TrackerError(ValueError):
    """A tracker cannot be used. The message has the reason and a remedy."""


class Tracker(Protocol):
    """Shows the rounds of one run."""

    def match(self, lines: Sequence[RoundRecord]) -> None:
        """Show exactly these rounds, as `read_metrics` returns them."""

    def write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Show further values, by round and name; none of them is shown yet."""

    def close(self, status: str) -> None:
        """Note the end of the run: FINISHED, FAILED, or KILLED by a person or a signal."""


def scalars(line: RoundRecord) -> dict[str, float]:
    """The numbers of a round by their columns in `metrics.jsonl`; of columns that list clients, how many they list."""
    values = {name: line.value(name) for name in COLUMNS if name != "round"}
    values |= {name: len(values[name]) for name in COUNTED}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
