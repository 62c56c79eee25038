"""The records of a message's content by their kind, in a way that lets the content be freed.

Flower's `content.array_records`, `metric_records` and `config_records` return a dict that refers to the content and to
itself. Whoever reads one keeps the content, with all its arrays, until Python's garbage collector runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

R = TypeVar("R")


def records_of(content: Mapping[str, Any], kind: type[R]) -> dict[str, R]:
    """Name → record, of the records in a message's content that are of this kind."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}
