"""The weights of replies: no client counts for more than a share of its round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tepal.exchange.bounds import MOST_EXAMPLES
from tepal.exchange.plan import TEST_EXAMPLES, Reply

FEWEST = 3
"""Clients from which a share of their total is bounded: one of two may well have more than half."""


def weight_limit(weights: Iterable[float], share: float) -> float:
    """The largest c for which no weight min(n_k, c) is more than `share` of their sum; infinite if none must be cut.

    Of fewer than `FEWEST` weights none is cut. A share below 1/n is not possible for n weights: then all are equal.
    """
    descending = sorted(weights, reverse=True)
    n = len(descending)
    if n < FEWEST:
        return math.inf
    share, rest = max(share, 1 / n), math.fsum(descending)
    if descending[0] <= share * rest:
        return math.inf
    for cut, weight in enumerate(descending[:-1], 1):  # the `cut` largest are cut to c = share·(rest + cut·c)
        rest -= weight
        if share * cut >= 1:
            break
        c = share * rest / (1 - share * cut)
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
    if (found := reply.metrics.get(TEST_EXAMPLES)) is not None and (found < 0 or found != int(found)):
        return f"its metrics have {TEST_EXAMPLES}={found:g}, which is not a number of examples"
    return ""
