"""Which replies of a round are merged, and with what weight."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import Plan, Reply, Tree
from tepal.strategies.rounds.norms import CLIPPED, LARGEST, Norms, UpdateNorms, clipped
from tepal.strategies.rounds.weights import FEWEST, limited, weight_limit

log = getLogger("flwr")

_ENOUGH = 9  # replies from which those are judged whose usual norms are not known: five decide the median
_WORTH = 1 << 20  # bytes of a reply from which it waits in a file


@dataclass(frozen=True)
class Refused:
    """A reply that is not merged."""

    client: str
    reason: str


class Judge:
    """Judges the replies to the last phase of a round, one by one.

    Args:
        norms: running medians of the norms of updates.
        share: the largest share of a client in the weights of a round.
        clip: whether updates beyond the median norm are scaled down to it.
        folder: where replies wait that cannot be judged yet; None: in the system's folder for temporary files.
    """

    def __init__(self, norms: UpdateNorms, share: float, *, clip: bool = False, folder: Path | None = None) -> None:
        self.norms = norms
        self.share = share
        self.clip = clip
        self.folder = folder
        self._weights: dict[str, int] = {}  # of the replies that were yielded in this round, before they are limited
        self._sum = 0  # of these weights

    def judged(
        self, replies: Iterable[Reply], plans: Mapping[str, Plan], starts: Callable[[str, Tree], Arrays]
    ) -> Iterator[Reply | Refused]:
        """Yield each reply as it must be merged, or why it must not.

        A reply that cannot be judged yet waits in a file: one with a block whose usual norm is not known yet, until
        enough norms are known (with `clip` until all replies have come), and one that may count for too much.

        Args:
            replies: as they arrive.
            plans: client → plan.
            starts: (client, tree) → the values that it was sent.
        """

        def scaled(reply: Reply) -> Reply:
            ratio = self.norms.ratios[reply.client]
            if not self.clip or ratio <= CLIPPED:
                return reply
            plan = plans[reply.client]
            return clipped(reply, plan, starts(reply.client, plan.model), ratio)

        plausible = self._plausible(replies, plans)
        bounded = len(plans) >= FEWEST
        alike = bounded and self.share * len(plans) <= 1
        for reply in self._weighted(plausible, self.share if bounded else 1.0, alike=alike):
            judged = reply if isinstance(reply, Refused) else scaled(reply)
            del reply  # it may be as large as the model, and the next one arrives now
            yield judged
            del judged

    def not_merged(self, client: str) -> None:
        """Enter that a reply that was yielded could not be merged: its weight does not raise the limit of the others'.

        Those that were yielded before keep their weights.
        """
        self._sum -= self._weights.pop(client, 0)

    def _weighted(
        self, replies: Iterable[Reply | Refused], share: float, *, alike: bool
    ) -> Iterator[Reply | Refused]:
        """Yield each reply with its weight in the round, which depends on the weights alone, not on their order.

        Replies may be lost, and a client may answer with fewer examples than it introduced itself with: only the
        weights that came count. A weight w need not be cut if w ≤ share · Σ_i min(w_i, w) over them. The sum only grows
        as others come, so a reply is yielded once this holds, and never has to be cut later. Fewer than 1 / share
        replies wait at any time: if j do, and w is the least of their weights, the sum is at least j·w. As w / Σ_i
        min(w_i, w) grows with w, they are the heaviest. In the end they are cut to `weight_limit`. If the share is so
        small that all weights must be equal, they are 1, and none waits.
        """
        self._weights, self._sum = {}, 0
        waiting: list[Reply] = []
        for reply in replies:
            if isinstance(reply, Refused):
                yield reply
                continue
            if alike:
                yield replace(reply, examples=1)
                continue
            client = reply.client
            waiting.append(reply)
            del reply
            while (place := self._fitting(waiting, share)) is not None:
                yield self._entered(waiting.pop(place))
            if waiting and waiting[-1].client == client:
                waiting[-1] = self._stored(waiting[-1])
        waiting.sort(key=lambda each: (each.examples, each.client))
        while waiting:
            limit = weight_limit([*self._weights.values(), *(each.examples for each in waiting)], self.share)
            yield self._entered(waiting.pop(0), limit)

    def _fitting(self, waiting: Sequence[Reply], share: float) -> int | None:
        """The place of the first reply that never has to be cut, whatever follows."""
        numerator, denominator = share.as_integer_ratio()  # integers have no rounding errors
        for place, one in enumerate(waiting):
            total = self._sum + sum(min(other.examples, one.examples) for other in waiting)
            if denominator * one.examples <= numerator * total:
                return place
        return None

    def _entered(self, reply: Reply, limit: float = math.inf) -> Reply:
        """The reply with a weight of at most the limit. Its own weight is entered."""
        self._weights[reply.client] = reply.examples
        self._sum += reply.examples
        return replace(reply, examples=limited(reply.examples, limit))

    def _plausible(self, replies: Iterable[Reply], plans: Mapping[str, Plan]) -> Iterator[Reply | Refused]:
        """Yield each reply whose update is not too large, and why the others must not be merged."""
        enough, waiting = False, list[tuple[Reply, Norms]]()
        for reply in replies:
            norms = self.norms.of(reply, plans[reply.client].model)
            self.norms.enter(reply.client, norms)
            if enough or not self.norms.lacks(norms):
                judged = self._judge(reply, norms)
                del reply
                yield judged
                del judged
                continue
            waiting.append((self._stored(reply), norms))
            del reply
            enough = not self.clip and len(waiting) >= _ENOUGH
            while waiting and enough:
                yield self._judge(*waiting.pop(0))
        while waiting:
            yield self._judge(*waiting.pop(0))

    def _judge(self, reply: Reply, norms: Norms) -> Reply | Refused:
        if (excess := self.norms.excess(norms)) > LARGEST:
            return Refused(
                reply.client,
                f"its update is {excess:.3g} times as large as usual (the median norm of the clients' updates); at "
                f"most {LARGEST:g} times is allowed",
            )
        self.norms.ratios[reply.client] = self.norms.ratio(norms)
        return reply

    def _stored(self, reply: Reply) -> Reply:
        """The reply with its arrays mapped from an unnamed file, so that it needs no memory while it waits."""
        arrays = [array for values in reply.parts.values() for array in values.values()]
        if sum(array.nbytes for array in arrays) < _WORTH or any(isinstance(array, np.memmap) for array in arrays):
            return reply  # it is small, or waits in a file already
        try:
            return replace(reply, parts={tree: self._mapped(values) for tree, values in reply.parts.items()})
        except OSError as error:
            log.warning("The reply of %s waits in memory: %s", reply.client, error)
            return reply

    def _mapped(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not any(array.nbytes for array in values.values()):
            return dict(values)  # an empty file cannot be mapped
        places: dict[str, int] = {}
        with tempfile.TemporaryFile(dir=self.folder, prefix=".waiting-") as file:
            for name, array in values.items():
                file.write(bytes(-file.tell() % 64))
                places[name] = file.tell()
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            whole = np.memmap(file, np.uint8, "r")
        return {
            name: whole[start : start + values[name].nbytes].view(values[name].dtype).reshape(values[name].shape)
            for name, start in places.items()
        }
