"""The norms of clients' updates, beside the running median over clients and rounds.

The update of a client is what it returned less what it was sent. Its expected norm is √(Σ_b m_b²), where m_b is the
running median of the norms of block b, over the blocks that it returned: so clients that return different layers can be
compared. The **ratio** of an update is its norm over the expected one. Statistics such as BatchNorm's have a ratio of
their own, and the larger one counts: they change by far more than the weights, which would be hidden beside them.

Norms are found as replies are read: measured where updates are clipped and with `deterministic`, otherwise estimated
from a sample of each large entry, which costs next to nothing. A client that changes few values can escape the sample;
the norm of all its values bounds it: by the triangle inequality it exceeds that of the sent values by no more than the
norm of the update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import numpy as np

from tepal.exchange.layout import Names
from tepal.exchange.plan import Plan, Reply, Tree
from tepal.strategies.scaled import ScaledPart

LARGEST = 1000.0
"""A reply whose update is more times as large as usual is refused."""
CLIPPED = 1.0
"""Where updates are clipped, those with a larger ratio are scaled down to it."""
FEWEST = 3
"""Norms of a block from which their median says what is usual."""

_SMALLEST = 0.01
"""A block's usual norm, for the bound, is at least this share of its tree's: one that hardly changes may change."""
ROUNDS = 5
"""Earlier rounds of which it is remembered what is usual."""
_KEPT = 21  # of each of them: quantiles, in the middle of which is the median

UPDATE, VALUE, INTEGER = "update", "value", "integer"
_STATISTICS = "statistics"  # in place of the model's tree, in the keys of its statistics

Norms = Mapping[str, float]
"""Norms of one reply, by a key for each block of each tree: of the updates, of the values of a model whose update was
estimated, and of the changes of integers."""


class UpdateNorms:
    """Running medians of the norms of updates, by block. A hostile client counts for one norm a round, as any other.

    The medians are those of earlier rounds, so that a reply's ratio does not depend on the order of the replies. For
    blocks without one, as all are in the first round, they are those of the present round.

    Args:
        blocks: label → entries, a partition of the model's entries.
        statistics: entries that are no parameters.
    """

    def __init__(self, blocks: Mapping[str, Names], statistics: Iterable[str] = ()) -> None:
        self._statistics = frozenset(statistics)
        self._block_of = {name: block for block, names in blocks.items() for name in names}
        self._earlier: deque[dict[str, list[float]]] = deque(maxlen=ROUNDS)
        self._now: dict[str, dict[str, float]] = {}  # key → client → norm
        self._medians: dict[str, float] = {}  # of the earlier rounds
        self.ratios: dict[str, float] = {}
        """Client → ratio of its update in the present attempt at a round, of those that may be merged."""

    def lacks(self, norms: Norms) -> bool:
        """Whether no median of earlier rounds is known for one of these norms, so that later replies decide on it."""
        return any(key not in self._medians for key in norms)

    def begin(self) -> None:
        """Begin a round: the norms of the one before count from now on."""
        if self._now:
            self._earlier.append(_kept(self._now))
        self._now, self.ratios = {}, {}
        found: dict[str, list[float]] = {}
        for norms in self._earlier:
            for key, values in norms.items():
                found.setdefault(key, []).extend(values)
        self._medians = {key: median(values) for key, values in found.items() if len(values) >= FEWEST}

    def record(self, clients: Iterable[str]) -> dict[str, np.ndarray]:
        """`updates` (n,): those of these clients that have a ratio; `ratios` (n,): the ratios of their updates."""
        known = sorted(client for client in clients if client in self.ratios)
        return {
            "updates": np.array(known, str),
            "ratios": np.array([self.ratios[client] for client in known], np.float32),
        }

    def of(self, reply: Reply, model: Tree) -> Norms:
        """The norms of a reply to a plan with this model.

        The model's blocks have one key, whatever the name of its tree; in other trees the client returns changes, which
        start from zero.
        """
        sums: dict[str, float] = {}

        def enter(what: str, tree: str, name: str, square: float) -> None:
            group = _STATISTICS if not tree and name in self._statistics else tree
            key = f"{what}/{group}/{self._block_of.get(name, '')}"
            sums[key] = sums.get(key, 0.0) + square

        for tree, squares in reply.squares.items():
            arrays, label = reply.parts.get(tree, {}), "" if tree == model else tree
            for name, square in squares.items():
                integer = name in arrays and arrays[name].dtype.kind in "biu"
                enter(INTEGER if integer else UPDATE, label, name, square)
        for name, square in reply.value_squares.items():
            enter(VALUE, "", name, square)
        return {key: math.sqrt(total) for key, total in sums.items()}

    def enter(self, client: str, norms: Norms) -> None:
        """Count the norms of a client's reply in the present round."""
        for key, norm in norms.items():
            self._now.setdefault(key, {})[client] = norm

    def ratio(self, norms: Norms) -> float:
        """The ratio of an update, in the tree, or its statistics, where it is largest; 0 if nothing is known to compare
        it with.
        """
        return max((_over(math.hypot(*have), math.hypot(*usual)) for have, usual in self._updates(norms)), default=0.0)

    def excess(self, norms: Norms) -> float:
        """How many times an update is as large as usual, in the block where that is most; at least its ratio.

        A block that no other client returns is compared with the median of the other blocks. Integers, such as
        counters, may change by `LARGEST` where they usually stay. 0 if nothing is known to compare with.
        """
        found = [self.ratio(norms)]
        for have, usual in self._updates(norms):
            least = _SMALLEST * math.hypot(*usual)
            found += [_over(norm, max(of_block, least)) for norm, of_block in zip(have, usual, strict=True)]
        values: dict[str, list[tuple[float, float, float]]] = {}  # of blocks: norm of values, the usual, of the update
        for key, norm in norms.items():
            what, known = key.partition("/")[0], self._usual(key)
            if what == INTEGER and known is not None:
                found.append(_over(norm, max(known, 1.0)))
            of_update = self._usual(key.replace(VALUE, UPDATE, 1)) if what == VALUE else None
            if known is not None and of_update is not None and math.isfinite(known):
                values.setdefault(key.split("/")[1], []).append((norm, known, of_update))
        # Parameters and statistics also apart: a mask of huge numbers would hide all changes of parameters.
        for blocks in (*values.values(), list(chain(*values.values()))):
            if blocks:
                of_values, expected, of_update = (math.hypot(*each) for each in zip(*blocks, strict=True))
                found.append(_over(of_values - expected, of_update))
        return max(found)

    def _updates(self, norms: Norms) -> Iterable[tuple[list[float], list[float]]]:
        """For each tree, and for the model's statistics, the norms of an update by block, and the usual ones."""
        by_tree: dict[str, dict[str, float]] = {}
        for key, norm in norms.items():
            if key.startswith(UPDATE):
                by_tree.setdefault(key.split("/")[1], {})[key] = norm
        for tree, blocks in by_tree.items():
            usual = {key: self._usual(key) for key in blocks}
            if None in usual.values():
                others = self._usual_of(f"{UPDATE}/{tree}/")
                usual = {key: others if value is None else value for key, value in usual.items()}
            known = [(norm, of_block) for key, norm in blocks.items() if (of_block := usual[key]) is not None]
            if known:
                yield [norm for norm, _ in known], [of_block for _, of_block in known]

    def _usual(self, key: str) -> float | None:
        if key in self._medians:
            return self._medians[key]
        now = self._now.get(key, {})
        return median(now.values()) if len(now) >= FEWEST else None

    def _usual_of(self, prefix: str) -> float | None:
        """The median of the usual norms of those blocks for which one is known."""
        known = [self._usual(key) for key in {*self._medians, *self._now} if key.startswith(prefix)]
        return median(found) if (found := [norm for norm in known if norm is not None]) else None

    def to_facts(self) -> dict[str, Any]:
        """The norms, as a checkpoint has them."""
        return {"rounds": [*self._earlier, *([_kept(self._now)] if self._now else [])][-ROUNDS:]}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts, which are empty in one of an earlier version."""
        self._earlier.extend(facts.get("rounds", ()))


def clipped(reply: Reply, plan: Plan, starts: Mapping[str, np.ndarray], ratio: float) -> Reply:
    """A reply whose update is scaled down to the ratio `CLIPPED`: s + c·(x − s), with c = CLIPPED / ratio.

    Counters stay as they are. In trees other than the model, which are changes, s is zero.
    """
    c = CLIPPED / ratio
    return replace(
        reply,
        parts={tree: ScaledPart(part, starts if tree == plan.model else {}, c) for tree, part in reply.parts.items()},
    )


def largest(ratios: Mapping[str, float]) -> list[str]:
    """The clients with by far the largest updates: beyond three times the median ratio, and at most a third of all."""
    order = sorted(ratios, key=lambda client: (-ratios[client], client))
    usual = median(ratios.values()) if ratios else 0.0
    return sorted([client for client in order if ratios[client] > 3 * usual][: len(order) // 3])


def _kept(now: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: quantiles(list(norms.values())) for key, norms in now.items()}


def quantiles(values: Sequence[float]) -> list[float]:
    """At most 21 of a round's values from which their median is known well: all, or equally spaced quantiles."""
    if len(values) <= _KEPT:
        return list(values)
    ordered = sorted(values)
    return [ordered[round(k * (len(ordered) - 1) / (_KEPT - 1))] for k in range(_KEPT)]


def _over(norm: float, usual: float) -> float:
    if norm <= 0 or usual <= 0:  # a usual norm of zero, as with a learning rate of zero, says nothing
        return 0.0
    return norm / usual if math.isfinite(usual) else 0.0
