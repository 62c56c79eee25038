"""How many names of metrics the clients of a run may bring: names stay, in every round's record."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from logging import getLogger

from tepal.exchange.bounds import MOST_METRIC_NAMES, MOST_METRICS
from tepal.exchange.plan import EVALUATE, KNOWN_METRICS, TRAIN, Outgoing, Reply
from tepal.strategies.aggregate import ON_TESTS, RECORDED

log = getLogger("flwr")

_RECORDED = frozenset(prefix + name for prefix in ("", *ON_TESTS) for name in RECORDED)


@dataclass
class MetricNames:
    """The names of metrics in a run's reports. `weighted_by` is the metric that is a reply's weight."""

    weighted_by: str
    names: set[str] = field(default_factory=set)
    brought: dict[int, int] = field(default_factory=dict)
    """Node id → how many of the names it was the first to report."""

    def limited(self, outgoing: Outgoing, reply: Reply) -> Reply:
        """Return the reply without metrics whose names are new in a run that has many.

        A node may bring as many new names as one answer can have; so no single one can use up those of the run. What
        enters no record is kept: metrics that the server computes with, and all of introductions and of the phases
        before training, which the method reads; and the scores that every run records, which nobody can displace.
        """
        if reply.not_finite:
            log.warning("%s reports metrics that are not finite, too large, or no share from 0 to 1: %s.",
                        outgoing.name, ", ".join(reply.not_finite[:10]))  # fmt: skip
        if outgoing.plan.action not in (TRAIN, EVALUATE):
            return reply
        known = {*self.names, *KNOWN_METRICS, *_RECORDED, self.weighted_by}
        new = [name for name in (*reply.metrics, *reply.vectors) if name not in known]
        brought = self.brought.get(outgoing.node_id, 0)
        left = max(min(MOST_METRICS - brought, MOST_METRIC_NAMES - len(self.names)), 0)
        kept, dropped = new[:left], set(new[left:])
        self.names.update(kept)
        self.brought[outgoing.node_id] = brought + len(kept)
        if not dropped:
            return reply
        log.warning(
            "%s reports %d new metrics, %r first; a run has at most %d names, %d of a client: they are dropped.",
            outgoing.name, len(dropped), new[left], MOST_METRIC_NAMES, MOST_METRICS,
        )  # fmt: skip
        return replace(
            reply,
            metrics={name: value for name, value in reply.metrics.items() if name not in dropped},
            vectors={name: value for name, value in reply.vectors.items() if name not in dropped},
        )
