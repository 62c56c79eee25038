"""What an answer may contain, in numbers: the limits of the protocol, and the functions that apply them.

Everything that a client says passes here before it is merged, logged or written. What exceeds a limit refuses the
answer, and no other. Text is cut and made visible (`visible`), since it is written to logs, terminals and pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepal.exchange.layout import Layout, Names
from tepal.host.text import LONGEST_NAME, visible

MOST_EXAMPLES = 10**15
"""Largest weight of a reply: for larger ones float64 cannot represent every number of examples of a round."""
LARGEST_METRIC = 1e100
"""Largest magnitude of a metric: sums over all clients of its square, times a weight, are still finite. A metric that
is larger counts as one that is not finite."""
SHARES = ("accuracy", "macro-f1")
"""Metrics with these names, or that end with "-" and one of them, are shares from 0 to 1. One that is not counts as one
that is not finite."""
MOST_METRICS = 200
"""Metrics of one answer."""
MOST_METRIC_NAMES = 1000
"""Names of metrics in one run."""
MOST_PARTS = 5000
"""Parts in one client's cache that the server remembers: a cache has one for each block of each tree."""
MOST_NUMBERS = 100_000
"""Numbers in all lists of one answer: a list has one number for each class, or for each layer."""
MOST_NOTES, LONGEST_NOTE = 3, 300
"""Notes of a client that are kept of a round, however often it answers, and the characters of each."""
HEADER_BYTES, HEADER_BYTES_PER_ENTRY = 1_000_000, 1000
"""Longest header, decompressed, for a model with that many entries."""
MOST_KEYS = 10_000
"""Missing parts of a header."""
REPLY_BYTES = 32_000_000
"""Bytes of a whole reply, in addition to those of its trees and its header: for metrics, and records of the app."""

_SHARES = tuple(f"-{name}" for name in SHARES)


class BadReply(ValueError):
    """A client's answer that must not be merged. The text has the reason, cut and made visible."""

    def __init__(self, reason: object) -> None:
        super().__init__(visible(reason))


def reply_bytes(layout: Layout, trees: int) -> int:
    """The most bytes of a reply with so many trees of the model: twice theirs, as encoded values may be larger.

    At least one tree is counted: a client without the exchange's mod may return one that was not requested.
    """
    header = HEADER_BYTES + HEADER_BYTES_PER_ENTRY * len(layout.entries)
    return 2 * max(trees, 1) * layout.nbytes() + header + REPLY_BYTES


def notes_of(notes: Names) -> Names:
    """The first notes of an answer, cut and made visible; if there are more, a last one says how many."""
    kept = tuple(visible(note, LONGEST_NOTE) for note in notes[:MOST_NOTES])
    return (*kept, f"and {len(notes) - MOST_NOTES} more notes") if len(notes) > MOST_NOTES else kept


def metrics_of(
    records: Mapping[str, Mapping[str, Any]], covered: Names
) -> tuple[dict[str, float], dict[str, tuple[float, ...]], Names]:
    """An answer's metrics: numbers, lists, and the names of those that are not finite, which are left out.

    A number beyond ±`LARGEST_METRIC`, or one of `SHARES` that is not from 0 to 1, counts as not finite.

    Args:
        records: name → MetricRecord.
        covered: names of the records that the checksum covers. A metric in one of them replaces one of the same name in
            another record.

    Raises:
        BadReply: more than `MOST_METRICS` records or metrics, or more than `MOST_NUMBERS` numbers in their lists.
    """
    if len(records) > MOST_METRICS:
        raise BadReply(f"it has {len(records)} records of metrics; at most {MOST_METRICS} are allowed")
    if (count := sum(len(record) for record in records.values())) > MOST_METRICS:
        raise BadReply(f"it has {count} metrics; at most {MOST_METRICS} are allowed")
    checked = set(covered)
    numbers: dict[str, float] = {}
    lists: dict[str, tuple[float, ...]] = {}
    not_finite: list[str] = []
    left = MOST_NUMBERS
    for _, record in sorted(records.items(), key=lambda item: item[0] in checked):
        for raw, value in record.items():
            name = visible(raw, LONGEST_NAME)
            if isinstance(value, int | float) and _possible(name, value):
                numbers[name] = value
                continue
            if isinstance(value, list):
                left -= len(value)
                if left < 0:
                    raise BadReply(f"its lists of metrics have more than {MOST_NUMBERS} numbers")
                if all(_representable(one) for one in value):
                    lists[name] = tuple(float(one) for one in value)
                    continue
            not_finite.append(name)
    return numbers, lists, tuple(not_finite)


def _possible(name: str, value: float) -> bool:
    if name in SHARES or name.endswith(_SHARES):
        return 0 <= value <= 1  # false for NaN
    return _representable(value)


def _representable(value: float) -> bool:
    return -LARGEST_METRIC <= value <= LARGEST_METRIC  # false for NaN


def examples_of(metrics: Mapping[str, float], weighted_by: str) -> int:
    """The weight of a reply. Raises BadReply for one that is not a whole number from 1 to `MOST_EXAMPLES`."""
    examples = metrics.get(weighted_by)
    if examples is None:
        raise BadReply(f"its metrics have no finite number {weighted_by!r}, which is its weight")
    if examples < 1 or not is_count(examples):
        raise BadReply(
            f"its metrics have {weighted_by}={examples:g}; a weight is a whole number from 1 to {MOST_EXAMPLES:.0e}"
        )
    return int(examples)


def is_count(value: float) -> bool:
    """Whether a number can be a number of examples: it is whole, and from 0 to `MOST_EXAMPLES`."""
    return 0 <= value <= MOST_EXAMPLES and value == int(value)
