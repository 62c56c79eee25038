"""Bytes of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from flwr.app import ArrayRecord

from tepal.exchange.manifest import PARTS, RECORD


@dataclass
class Traffic:
    """Measured bytes of messages: `payload` is the entries' values, `overhead` manifests and headers.

    `plain` are the bytes of the same entries without an encoding. `in_budget` are those of the payload that a round's
    budget limits (see `Encoding.budget`); 0 without a budget.
    """

    payload: int = 0
    overhead: int = 0
    plain: int = 0
    in_budget: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @staticmethod
    def of(content: Mapping[str, object], plain: int | None = None, in_budget: int = 0) -> Traffic:
        """Bytes that this project added to a message; an app's own records are not counted.

        Without `plain` the payload is taken as not encoded.
        """
        parts, record = content.get(PARTS), content.get(RECORD)
        arrays = parts.values() if isinstance(parts, ArrayRecord) else ()
        values = record.values() if isinstance(record, Mapping) else ()
        overhead = sum(len(value) for value in values if isinstance(value, bytes))
        payload = sum(len(array.data) for array in arrays)
        return Traffic(payload, overhead, payload if plain is None else plain, in_budget)
