"""Which replies of a round are merged, and with what weight."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path

import numpy as np

from tepal.exchange.layout import Arrays
from tepal.exchange.plan import Plan, Reply, Tree
from tepal.strategies.rounds.norms import CLIPPED, LARGEST, Norms, UpdateNorms, clipped
from tepal.strategies.rounds.weights import limited, weight_limit

log = getLogger("flwr")

_ENOUGH = 9  # replies from which the first ones are judged, if no earlier norms are known: five decide the median
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

    def judged(
        self,
        replies: Iterable[Reply],
        plans: Mapping[str, Plan],
        sizes: Mapping[str, float | None],
        starts: Callable[[str, Tree], Arrays],
    ) -> Iterator[Reply | Refused]:
        """Yield each reply as it must be merged, or why it must not.

        A reply that cannot be judged yet waits in a file: the first ones of a run, until enough norms are known (with
        `clip` until all have come), and the heaviest one if the clients' numbers of examples were not known before.

        Args:
            replies: as they arrive.
            plans: client → plan.
            sizes: client → number of training examples, as far as it is known, of all clients that were asked.
            starts: (client, tree) → the values that it was sent.
        """

        def scaled(reply: Reply) -> Reply:
            ratio = self.norms.ratios[reply.client]
            if not self.clip or ratio <= CLIPPED:
                return reply
            plan = plans[reply.client]
            return clipped(reply, plan, starts(reply.client, plan.model), ratio)

        known = [size for size in sizes.values() if size is not None]
        limit = weight_limit(known, self.share) if len(known) == len(sizes) else None
        heaviest: Reply | None = None
        others: list[int] = []  # weights of the replies that were yielded
        for reply in self._plausible(replies, plans):
            if isinstance(reply, Refused):
                yield reply
                continue
            if limit is not None:
                yield scaled(replace(reply, examples=limited(reply.examples, limit)))
                del reply  # it may be as large as the model, and the next one arrives now
                continue
            lighter: Reply | None = reply
            if heaviest is None or _weight(reply) > _weight(heaviest):
                lighter, heaviest = heaviest, self._stored(reply)
            del reply
            if lighter is not None:
                others.append(lighter.examples)
                yield scaled(lighter)
            del lighter
        if heaviest is not None:
            others.append(heaviest.examples)
            yield scaled(replace(heaviest, examples=limited(heaviest.examples, weight_limit(others, self.share))))

    def _plausible(self, replies: Iterable[Reply], plans: Mapping[str, Plan]) -> Iterator[Reply | Refused]:
        """Yield each reply whose update is not too large, and why the others must not be merged."""
        hold, waiting = self.norms.first, list[tuple[Reply, Norms]]()
        for reply in replies:
            model = plans[reply.client].model
            norms = self.norms.of(reply, model)
            self.norms.enter(reply.client, norms)
            if not hold:
                judged = self._judge(reply, norms)
                del reply
                yield judged
                del judged
                continue
            waiting.append((self._stored(reply), norms))
            del reply
            hold = self.clip or len(waiting) < _ENOUGH
            while waiting and not hold:
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
        if sum(array.nbytes for values in reply.parts.values() for array in values.values()) < _WORTH:
            return reply
        try:
            return replace(reply, parts={tree: self._mapped(values) for tree, values in reply.parts.items()})
        except OSError as error:
            log.warning("The reply of %s waits in memory: %s", reply.client, error)
            return reply

    def _mapped(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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


def _weight(reply: Reply) -> tuple[int, str]:
    return reply.examples, reply.client
