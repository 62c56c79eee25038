"""What an answer may contain, in numbers: the limits of the protocol, and the functions that apply them.

Everything that a client says passes here before it is merged, logged or written. What exceeds a limit refuses the
answer, and no other. Text is cut and made visible (`visible`), since it is written to logs, terminals and pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.threads import CHUNK, PIECE, in_threads
from tepal.host.text import LONGEST_NAME, LONGEST_TEXT, visible

MOST_EXAMPLES = 10**15
"""Largest weight of a reply: for larger ones float64 cannot represent every number of examples of a round."""
LARGEST_METRIC = 1e100
"""Largest magnitude of a metric: sums over all clients of its square, times a weight, are still finite. A metric that
is larger counts as one that is not finite."""
MOST_METRICS = 200
"""Metrics of one answer."""
MOST_METRIC_NAMES = 1000
"""Names of metrics in one run."""
MOST_PARTS = 5000
"""Parts in one client's cache that the server remembers: a cache has one for each block of each tree."""
MOST_NUMBERS = 100_000
"""Numbers in all lists of one answer: a list has one number for each class, or for each layer."""
MOST_NOTES = 20
"""Notes of an answer that are kept."""
HEADER_BYTES, HEADER_BYTES_PER_ENTRY = 1_000_000, 1000
"""Longest header, decompressed, for a model with that many entries."""
MOST_KEYS = 10_000
"""Trees, or missing parts, of a header."""


class BadReply(ValueError):
    """A client's answer that must not be merged. The text has the reason, cut and made visible."""

    def __init__(self, reason: object) -> None:
        super().__init__(visible(reason))


def notes_of(notes: Names) -> Names:
    """The first notes of an answer, cut and made visible; if there are more, a last one says how many."""
    kept = tuple(visible(note, LONGEST_TEXT) for note in notes[:MOST_NOTES])
    return (*kept, f"and {len(notes) - MOST_NOTES} more notes") if len(notes) > MOST_NOTES else kept


def metrics_of(
    records: Mapping[str, Mapping[str, Any]], covered: Names
) -> tuple[dict[str, float], dict[str, tuple[float, ...]], Names]:
    """An answer's metrics: numbers, lists, and the names of those that are not finite, which are accepted.

    Args:
        records: name → MetricRecord.
        covered: names of the records that the checksum covers. A metric in one of them replaces one of the same name in
            another record.

    Raises:
        BadReply: more than `MOST_METRICS` metrics, or more than `MOST_NUMBERS` numbers in their lists.
    """
    if (count := sum(len(record) for record in records.values())) > MOST_METRICS:
        raise BadReply(f"it has {count} metrics; at most {MOST_METRICS} are allowed")
    numbers: dict[str, float] = {}
    lists: dict[str, tuple[float, ...]] = {}
    not_finite: list[str] = []
    left = MOST_NUMBERS
    for _, record in sorted(records.items(), key=lambda item: item[0] in covered):
        for raw, value in record.items():
            name = visible(raw, LONGEST_NAME)
            if isinstance(value, int | float) and _representable(value):
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


def _representable(value: float) -> bool:
    return -LARGEST_METRIC <= value <= LARGEST_METRIC  # false for NaN


def examples_of(metrics: Mapping[str, float], weighted_by: str) -> int:
    """The weight of a reply. Raises BadReply for one that is not a whole number from 1 to `MOST_EXAMPLES`."""
    examples = metrics.get(weighted_by)
    if examples is None:
        raise BadReply(f"its metrics have no finite number {weighted_by!r}, which is its weight")
    if not 1 <= examples <= MOST_EXAMPLES or examples != int(examples):
        raise BadReply(
            f"its metrics have {weighted_by}={examples:g}; a weight is a whole number from 1 to {MOST_EXAMPLES:.0e}"
        )
    return int(examples)


def is_count(value: float) -> bool:
    """Whether a number can be a number of examples: it is whole, and from 0 to `MOST_EXAMPLES`."""
    return 0 <= value <= MOST_EXAMPLES and value == int(value)


def squared_norms(values: Arrays, starts: Arrays | None) -> dict[str, float]:
    """Name → ‖x − s‖² of each floating-point entry x and its start s, or ‖x‖² without starts.

    One pass over the arrays, in threads. A sum that float32 cannot represent is infinite.

    Raises:
        BadReply: an entry has values that are NaN or infinite.
    """
    pieces: list[tuple[str, np.ndarray, np.ndarray | None]] = []
    for name, array in values.items():
        if array.dtype.kind not in "fc":
            continue
        x, s = array.reshape(-1), starts[name].reshape(-1) if starts is not None and name in starts else None
        for k in range(0, x.size, PIECE):
            pieces.append((name, x[k : k + PIECE], None if s is None else s[k : k + PIECE]))
    with np.errstate(over="ignore", invalid="ignore"):
        sums = in_threads(_squared, pieces, sum(x.nbytes for _, x, _ in pieces))
    norms: dict[str, float] = {}
    for (name, x, _), found in zip(pieces, sums, strict=True):
        # A sum is finite only if every value is. If that of finite values overflows, they are checked one by one.
        if not np.isfinite(found) and not np.isfinite(x).all():
            raise BadReply(f"entry {name!r} has values that are NaN or infinite")
        norms[name] = norms.get(name, 0.0) + (found if np.isfinite(found) else float("inf"))
    return norms


def _squared(piece: tuple[str, np.ndarray, np.ndarray | None]) -> float:
    _, x, s = piece
    if x.dtype == np.float16:
        x = x.astype(np.float32)
    scratch = np.empty(min(CHUNK, x.size) if s is not None else 0, x.dtype)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # of this thread
        for k in range(0, x.size, CHUNK):
            change = x[k : k + CHUNK]
            if s is not None:
                change = np.subtract(change, s[k : k + CHUNK], out=scratch[: change.size])
            total += float(np.vdot(change, change).real)
    return total
