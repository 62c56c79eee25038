"""The weights of replies: no client counts for more than a share of its round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

from tepal.exchange.bounds import MOST_EXAMPLES, is_count
from tepal.exchange.plan import TEST_EXAMPLES, Reply

FEWEST = 3
"""Clients from which a share of their total is bounded: one of two may well have more than half."""


def weight_limit(weights: Iterable[float], share: float) -> float:
    """The largest c for which no weight min(n_k, c) is more than `share` of their sum; infinite if none must be cut.

    Of fewer than `FEWEST` weights none is cut. A share below 1/n is not possible for n weights: then all are equal.
    Weights that are not positive, or not finite, are left out.
    """
    descending = sorted((weight for weight in weights if 0 < weight < math.inf), reverse=True)
    n = len(descending)
    if n < FEWEST:
        return math.inf
    # rest[k] is the sum of all but the k largest, added up from the smallest: a difference of sums would be rounded to
    # nothing beside a weight that is very much larger.
    share, rest = max(share, 1 / n), [*accumulate(reversed(descending))][::-1]
    if descending[0] <= share * rest[0]:
        return math.inf
    for cut in range(1, n):  # the `cut` largest are cut to c = share·(rest + cut·c)
        if share * cut >= 1:
            break
        c = share * rest[cut] / (1 - share * cut)
        if c >= descending[cut]:
            return c
    return descending[-1]


def limited(examples: int, limit: float) -> int:
    """A weight, at most the limit; at least 1."""
    return examples if examples <= limit else max(int(limit), 1)


def with_limited_weights(
    replies: Mapping[str, tuple[Mapping[str, float], int]], share: float
) -> dict[str, tuple[Mapping[str, float], int]]:
    """Client → (metrics, weight), with limited weights. `test-examples` are limited too: they are scores' weights."""
    limit = weight_limit([weight for _, weight in replies.values()], share)
    counts = {client: max(int(metrics.get(TEST_EXAMPLES, 0)), 0) for client, (metrics, _) in replies.items()}
    most = weight_limit([count for count in counts.values() if count], share)
    return {
        client: (
            {**metrics, TEST_EXAMPLES: min(counts[client], max(int(min(most, MOST_EXAMPLES)), 1))}
            if TEST_EXAMPLES in metrics
            else metrics,
            limited(weight, limit),
        )
        for client, (metrics, weight) in replies.items()
    }


def exceeds(reply: Reply, introduced: Mapping[str, float], weighted_by: str, *, tests: bool) -> str:
    """Why a reply's numbers of examples are more than its client's introduction said; "" if they are not.

    `tests`: the reply is weighted by test examples, as those to an evaluation are.
    """
    for name in (weighted_by, TEST_EXAMPLES):
        found, most = reply.metrics.get(name), introduced.get(TEST_EXAMPLES if tests else name)
        if found is not None and most is not None and found > most:
            return (
                f"its metrics have {name}={found:g}, and its introduction said {most:g}: a client whose data has grown "
                "introduces itself again, before the next round"
            )
    return _not_counted(reply, TEST_EXAMPLES)


def misstated(introduction: Reply, weighted_by: str) -> str:
    """Why the numbers of examples in a client's introduction cannot be true; "" if they can, or it has none."""
    return _not_counted(introduction, weighted_by) or _not_counted(introduction, TEST_EXAMPLES)


def _not_counted(reply: Reply, name: str) -> str:
    found = reply.metrics.get(name)
    if found is None:
        wrong = "is not a finite number" if name in {*reply.not_finite, *reply.vectors} else ""
    else:
        wrong = "" if is_count(found) else f"is {found:g}"
    return wrong and f"its metric {name} {wrong}; a number of examples is a whole number from 0 to {MOST_EXAMPLES:.0e}"
