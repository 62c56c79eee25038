"""The norms of clients' updates, beside the running median over clients and rounds.

The update of a client is what it returned less what it was sent. Its expected norm is √(Σ_b m_b²), where m_b is the
running median of the norms of block b, over the blocks that it returned: so clients that return different layers can be
compared. The **ratio** of an update is its norm over the expected one.

Norms are measured as replies are read. That reads the sent values once more, so a run that only refuses (`LARGEST`)
measures `SAMPLE` clients of a round, drawn at random, and of the others the norms of the values themselves: by the
triangle inequality the values' norm exceeds that of the sent values by no more than the norm of the update.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from tepal.exchange.layout import Names
from tepal.exchange.plan import Plan, Reply, Tree
from tepal.exchange.threads import CHUNK, PIECE, in_threads

LARGEST = 1000.0
"""A reply whose update has a larger ratio is refused."""
CLIPPED = 1.0
"""With robust="clip", updates with a larger ratio are scaled down to it."""
SAMPLE = 5
"""Clients of a round whose updates are measured, unless all are."""
FEWEST = 3
"""Norms of a block from which their median says what is usual."""

_ROUNDS = 5  # earlier rounds whose norms are remembered
_KEPT = 21  # of each of them: quantiles, in the middle of which is the median

UPDATE, VALUE = "update", "value"

Norms = Mapping[str, float]
"""Norms of one reply, by a key for each block of each tree: of the update, or of the values if it was not measured."""


class UpdateNorms:
    """Running medians of the norms of updates, by block. A hostile client counts for one norm a round, as any other.

    The medians are those of earlier rounds, so that a reply's ratio does not depend on the order of the replies. While
    there are none, as in the first round, they are those of the present round.

    Args:
        blocks: label → entries, a partition of the model's entries.
    """

    def __init__(self, blocks: Mapping[str, Names]) -> None:
        self._block_of = {name: block for block, names in blocks.items() for name in names}
        self._earlier: deque[dict[str, list[float]]] = deque(maxlen=_ROUNDS)
        self._now: dict[str, list[float]] = {}
        self._medians: dict[str, float] = {}  # of the earlier rounds
        self.ratios: dict[str, float] = {}
        """Client → ratio of its update in the present round, estimated if it was not measured."""
        self.merged_ratios: dict[str, float] = {}
        """The same of the last merge that counts."""

    @property
    def first(self) -> bool:
        """Whether no norms of earlier rounds are known."""
        return not self._medians

    def begin(self) -> None:
        """Begin a round: the norms of the one before count from now on."""
        if self._now:
            self._earlier.append({key: _quantiles(found) for key, found in self._now.items()})
        self._now, self.ratios = {}, {}
        found: dict[str, list[float]] = {}
        for norms in self._earlier:
            for key, values in norms.items():
                found.setdefault(key, []).extend(values)
        self._medians = {key: median(values) for key, values in found.items() if len(values) >= FEWEST}

    def merged(self) -> None:
        """Enter that the present round was merged."""
        self.merged_ratios = dict(self.ratios)

    def record(self) -> dict[str, np.ndarray]:
        """`updates` (n,): clients; `ratios` (n,): the ratios of their updates in the present round."""
        clients = sorted(self.ratios)
        return {
            "updates": np.array(clients, str),
            "ratios": np.array([self.ratios[client] for client in clients], np.float32),
        }

    def enter(self, norms: Norms) -> bool:
        """Count the norms of a reply. Returns whether enough norms are known to judge it by."""
        for key, norm in norms.items():
            self._now.setdefault(key, []).append(norm)
        return all(self._usual(key) is not None for key in norms)

    def ratio(self, client: str, norms: Norms) -> float:
        """The ratio of a client's update; 0 if nothing is known to compare it with.

        If the client was not measured, this is the least ratio that the norms of its values allow.
        """
        update: list[tuple[float, float]] = []  # (norm, the usual one) of each block
        value: list[tuple[float, float, float]] = []  # the same of its values, and the usual norm of its update
        for key, norm in norms.items():
            usual, what = self._usual(key), key.partition("/")[0]
            if usual is not None and what == UPDATE:
                update.append((norm, usual))
            elif usual is not None and (of_update := self._usual(key.replace(VALUE, UPDATE, 1))) is not None:
                value.append((norm, usual, of_update))
        ratio = 0.0
        if update:
            norm, usual = (math.hypot(*norms) for norms in zip(*update, strict=True))
            ratio = _over(norm, usual)
        if value:
            norm, usual, of_update = (math.hypot(*norms) for norms in zip(*value, strict=True))
            if math.isfinite(usual):
                ratio = max(ratio, _over(norm - usual, of_update))
        self.ratios[client] = ratio
        return ratio

    def _usual(self, key: str) -> float | None:
        if key in self._medians:
            return self._medians[key]
        now = self._now.get(key, ())
        return median(now) if len(now) >= FEWEST else None

    def of(self, reply: Reply, model: Tree) -> Norms:
        """The norms of a reply to a plan with this model.

        The model's blocks have one key, whatever the name of its tree; in other trees the client returns changes, which
        start from zero.
        """
        sums: dict[str, float] = {}
        for tree, squares in reply.squares.items():
            what = VALUE if tree == model and not reply.measured else UPDATE
            for name, square in squares.items():
                key = f"{what}/{'' if tree == model else tree}/{self._block_of.get(name, '')}"
                sums[key] = sums.get(key, 0.0) + square
        return {key: math.sqrt(total) for key, total in sums.items()}

    def to_facts(self) -> dict[str, Any]:
        """The norms, as a checkpoint has them."""
        now = [{key: _quantiles(found) for key, found in self._now.items()}] if self._now else []
        return {"rounds": [*self._earlier, *now][-_ROUNDS:], "ratios": dict(self.merged_ratios)}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts, which are empty in one of an earlier version."""
        self._earlier.extend(facts.get("rounds", ()))
        self.merged_ratios = dict(facts.get("ratios", {}))


def sample(clients: Sequence[str]) -> Collection[str]:
    """The clients of a round whose updates are measured: `SAMPLE` of them.

    They are drawn by the system's random numbers: a client that knows the run's seed must not know who is measured.
    """
    return clients if len(clients) <= SAMPLE else set(random.SystemRandom().sample(list(clients), SAMPLE))


def clipped(reply: Reply, plan: Plan, starts: Mapping[str, np.ndarray], ratio: float) -> Reply:
    """A reply whose update is scaled down to the ratio `CLIPPED`: s + c·(x − s), with c = CLIPPED / ratio.

    Counters stay as they are. In trees other than the model, which are changes, s is zero.
    """
    c = CLIPPED / ratio
    return replace(
        reply,
        parts={tree: _scaled(part, c, starts if tree == plan.model else {}) for tree, part in reply.parts.items()},
    )


def _scaled(part: Mapping[str, np.ndarray], c: float, starts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """s + c·(x − s) of each floating-point entry, in threads; s is zero where there is no start."""
    scaled = {name: np.empty_like(x) if x.dtype.kind == "f" else x for name, x in part.items()}
    pieces = []
    for name, x in part.items():
        if x.dtype.kind == "f":
            flat, out, s = x.reshape(-1), scaled[name].reshape(-1), starts.get(name)
            for k in range(0, x.size, PIECE):
                at = slice(k, k + PIECE)
                pieces.append((flat[at], out[at], None if s is None else s.reshape(-1)[at]))

    def scale(piece: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> None:
        x, out, s = piece
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(0, x.size, CHUNK):
                at = slice(k, k + CHUNK)
                change = np.multiply(x[at] if s is None else np.subtract(x[at], s[at], out=out[at]), c, out=out[at])
                if s is not None:
                    np.add(change, s[at], out=out[at])

    in_threads(scale, pieces, sum(x.nbytes for x, _, _ in pieces))
    return scaled


def largest(ratios: Mapping[str, float]) -> list[str]:
    """The clients with the largest updates: those beyond three times the median ratio, at least one, and at most a
    third."""
    if len(ratios) < 2:
        return []
    order = sorted(ratios, key=lambda client: (-ratios[client], client))
    usual = median(ratios.values())
    beyond = [client for client in order if ratios[client] > 3 * usual]
    return sorted(beyond[: max(len(order) // 3, 1)] or order[:1])


def _quantiles(values: Sequence[float]) -> list[float]:
    if len(values) <= _KEPT:
        return list(values)
    ordered = sorted(values)
    return [ordered[round(k * (len(ordered) - 1) / (_KEPT - 1))] for k in range(_KEPT)]


def _over(norm: float, usual: float) -> float:
    if norm <= 0 or usual <= 0:  # a usual norm of zero, as with a learning rate of zero, says nothing
        return 0.0
    return norm / usual if math.isfinite(usual) else 0.0
