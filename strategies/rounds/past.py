"""The look at a merged state before it counts, and the way back to the state before it.

A hostile reply may be within all bounds and still make a model that clients cannot train: then most of them fail in the
round after the merge. The run returns to the state before it, and goes on without a part of the clients of that merge
(`suspects.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np

from tepal.exchange.bounds import BadReply
from tepal.exchange.norms import squared_norms
from tepal.strategies.rounds.norms import FEWEST, LARGEST

_ROLLBACKS = 3
"""How often in a row a run returns to an earlier state, or has a round without a merge that counts: if more of them
lead nowhere, the cause is another one."""
_CHANGES = 5  # earlier merges beside which the change of one is looked at


class Past:
    """What a run remembers of its last merges.

    Args:
        saved: for a round that has a checkpoint, what loads its state, or None if that is damaged; for others None.
    """

    def __init__(self, saved: Callable[[int], Callable[[], Any | None] | None] = lambda _: None) -> None:
        self._saved = saved
        self._before: Callable[[], Any | None] | None = None
        self._round, self._round_before = 0, 0  # after which the present state was saved, and the one before the merge
        self._left = _ROLLBACKS
        self._merges = 0  # since the run last returned
        self._changes: list[float] = []
        self.most_failed = False
        """Whether most clients failed in the round of the last merge."""

    def problem(self, before: Any, after: Any) -> str:
        """Why a merged state must not count; "" if it may.

        Its floating-point arrays must be finite, and their change from the state before at most `LARGEST` times the
        median change of the last merges. Arrays that the merge has not changed are the same objects, and not read.
        """
        old = dict(arrays_of(before))
        changed = {path: array for path, array in arrays_of(after) if old.get(path) is not array}
        starts = {path: old[path] for path, array in changed.items() if path in old and old[path].shape == array.shape}
        try:
            change = math.sqrt(sum(squared_norms(changed, starts).values()))
        except BadReply:
            return "it has values that are NaN or infinite"
        usual = median(self._changes) if len(self._changes) >= FEWEST else 0.0
        if usual > 0 and change > LARGEST * usual:
            return f"it changes the model {change / usual:.3g} times as much as the last rounds did"
        self._changes = [*self._changes, change][-_CHANGES:]
        return ""

    def merged(self, before: Any, round: int) -> None:
        """Enter that the merge of a round counts; `before` is the state that it started from."""
        self._before = lambda: before
        self._round, self._round_before = round, self._round
        self._merges += 1
        if self._merges > 1:  # from the one before, clients could train
            self._left = _ROLLBACKS

    @property
    def can_return(self) -> bool:
        """Whether there is a state before the last merge, and the run has not gone back too often."""
        return self._before is not None and self._left > 0

    def skip(self, round: int) -> bool:
        """Enter that a round has no merge that counts. Returns whether the run may go on."""
        self._round = round
        self._left -= 1
        return self._left > 0

    def roll_back(self) -> Any | None:
        """The state before the last merge, once; None unless the run `can_return`."""
        if self._before is None or self._left <= 0:
            return None
        self._left -= 1
        self._merges = 0
        self._round = self._round_before
        load, self._before = self._before, None
        return load()

    def to_facts(self) -> dict[str, Any]:
        """What a checkpoint has of it. `before`: the round of the state before the last merge; -1 if there is none."""
        before = self._round_before if self._before is not None else -1
        return {
            "round": self._round, "before": before, "left": self._left, "merges": self._merges,
            "changes": list(self._changes), "most_failed": self.most_failed,
        }  # fmt: skip

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts.

        The run can return if the state before the last merge is in a checkpoint. That of the round before may be one to
        which it must not return: the state that was undone in the checkpoint's round.
        """
        self._round, self._round_before = facts.get("round", 0), facts.get("before", -1)
        self._before = self._saved(self._round_before)
        self._left, self._merges = facts.get("left", _ROLLBACKS), facts.get("merges", 0)
        self._changes = list(facts.get("changes", []))
        self.most_failed = facts.get("most_failed", False)


def arrays_of(value: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """(path, array) of the arrays in a method's state: in dataclasses, dicts, lists and tuples, in any nesting."""
    if isinstance(value, np.ndarray):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from arrays_of(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from arrays_of(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from arrays_of(inner, f"{path}[{number}]")
