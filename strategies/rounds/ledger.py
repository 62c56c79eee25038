"""What the server remembers of each client from round to round. Nothing else writes any of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from itertools import chain, islice
from logging import getLogger
from typing import Any

from tepal.exchange.bounds import MOST_PARTS
from tepal.exchange.layout import Names
from tepal.exchange.parts import DIGEST_BYTES
from tepal.exchange.sender import ClientRecord

log = getLogger("flwr")

FAILURES = 3
"""A client is left out after this many exchanges in a row without a good reply."""
LEFT_OUT = 5
"""The number of rounds for which it is left out. If it fails again after them, it is left out again at once."""
MOST_HELD = 1_000_000
"""Most part ids that the server remembers for all clients together, some 200 MB. Those of the clients that reported
longest ago are forgotten first; such a client is sent its parts again."""

_PART_ID = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class ClientLedger:
    """For every client, by name: the parts in its cache, its current personal state, and its failures in a row.

    A failure is a reply that was refused, or no reply. A merged reply clears a client's failures, and so does a restart
    of its node, once until the next merged reply; a good reply to another exchange does not.

    Args:
        keep: how many checkpoints the run keeps.
    """

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._held: dict[str, frozenset[str]] = {}  # the last to report is last
        self._ids, self._told = 0, False  # of all of them; whether it was said that there are too many
        self._has_layout: dict[str, bool] = {}  # not in checkpoints: a resumed run sends the layout again
        self._current: dict[str, str] = {}
        self._restorable: list[Mapping[str, str]] = []  # `_current` at each checkpoint, the oldest first
        self._failures: dict[str, int] = {}  # client → exchanges in a row without a good reply
        self._until: dict[str, int] = {}  # client → the first round in which it is asked again
        self._forgiven: set[str] = set()  # clients whose failures a restart has cleared since their last merged reply
        self._introduced: dict[str, Mapping[str, float]] = {}
        self._sizes: dict[str, float] = {}  # of clients whose introduction says none: as of their last reply
        self.proofs: dict[str, str] = {}
        """Client's name → digest of the secret of its first holder; "" if that had none."""
        self.refused: dict[str, str] = {}
        """Client that is not drawn again → why it cannot take part; of clients that introduce themselves when drawn."""
        self._before: dict[str, str] = {}  # `_current` before the last merge

    def record(self, client: str) -> ClientRecord:
        """What the sender must know of a client to make a message for it."""
        current = self._current.get(client, "")
        restorable = {then[client] for then in self._restorable if client in then}
        if (before := self._before.get(client, current)) != current:  # the last merge may be undone
            restorable.add(before)
        return ClientRecord(
            held=self._held.get(client, frozenset()),
            has_layout=self._has_layout.get(client, False),
            current=current,
            restorable=tuple(sorted(restorable)),
        )

    def cached(self, client: str, parts: Iterable[str]) -> None:
        """Enter a client's report of what is in its cache: these parts, by their ids, and no others.

        Text that is no part's id is left out, and so is what exceeds `MOST_PARTS`: such parts are sent again.
        """
        self._ids -= len(self._held.pop(client, ()))
        self._held[client] = found = frozenset(islice(filter(_PART_ID.fullmatch, parts), MOST_PARTS))
        self._ids += len(found)
        while self._ids > MOST_HELD and len(self._held) > 1:
            if not self._told:
                log.warning(
                    "The server remembers at most %d cached parts of clients. Those of the clients that reported "
                    "longest ago are forgotten, and sent again.", MOST_HELD,
                )  # fmt: skip
                self._told = True
            self._ids -= len(self._held.pop(next(iter(self._held))))

    def stored_layout(self, client: str, stored: bool) -> None:
        """Enter whether a client has stored the model's layout. One that once had not is sent it from then on.

        Else a client whose cache does not last from one message to the next would be sent each message twice.
        """
        self._has_layout[client] = stored and self._has_layout.get(client, True)

    def held(self) -> Mapping[str, int]:
        """Id of a part → the number of clients that have cached it."""
        return Counter(chain.from_iterable(self._held.values()))

    def introduced(self, client: str, figures: Mapping[str, float]) -> None:
        """Enter the metrics of a client's introduction, which bound those of its replies."""
        self._introduced[client] = dict(figures)

    def introduction(self, client: str) -> Mapping[str, float]:
        """The metrics of a client's introduction; empty if it has none."""
        return self._introduced.get(client, {})

    def size(self, client: str, weighted_by: str) -> float | None:
        """A client's number of training examples as it introduced itself, or as of its last reply; None: unknown."""
        return self.introduction(client).get(weighted_by, self._sizes.get(client))

    def good(self, client: str) -> None:
        """Clear a client's failures."""
        self._failures.pop(client, None)
        self._until.pop(client, None)
        self._forgiven.discard(client)

    def restarted(self, client: str) -> None:
        """Clear a client's failures because its node was restarted, unless they were since its last merged reply."""
        if client in self._failures and client not in self._forgiven:
            self.good(client)
            self._forgiven.add(client)

    def failed(self, client: str, round: int) -> None:
        """Enter an exchange without a good reply; after `FAILURES` of them the client is left out for some rounds."""
        self._failures[client] = self._failures.get(client, 0) + 1
        if self._failures[client] >= FAILURES:
            self._until[client] = round + 1 + LEFT_OUT
            log.warning(
                "%s has failed %d times in a row; it is left out until round %d.",
                client, self._failures[client], self._until[client],
            )  # fmt: skip

    def left_out(self, clients: Container[str], round: int) -> list[str]:
        """Those of these clients that are left out of this round, sorted."""
        return sorted(client for client, until in self._until.items() if until > round and client in clients)

    def merged(self, exchanges: Mapping[str, str], sizes: Mapping[str, float]) -> None:
        """Enter a merge (client → id of the exchange): the personal states of these exchanges are current now.

        `sizes`: client → the number of examples of its reply.
        """
        self._before = dict(self._current)
        self._current.update(exchanges)
        self._sizes.update(sizes)

    def undo_merge(self) -> None:
        """Enter that the last merge does not count: the personal states before it are current again."""
        self._current = dict(self._before)

    def saved(self) -> None:
        """Enter that a checkpoint of the present state exists."""
        self._restorable = [*self._restorable, dict(self._current)][-self._keep :] if self._keep else []

    def to_facts(self) -> dict[str, Any]:
        """`held`, `current` and `standing`, as a checkpoint has them."""
        return {
            "held": {client: tuple(sorted(parts)) for client, parts in sorted(self._held.items()) if parts},
            "current": dict(self._current),
            "standing": {
                "failures": dict(self._failures),
                "until": dict(self._until),
                "sizes": dict(self._sizes),
                "proofs": dict(self.proofs),
                "refused": dict(self.refused),
            },
        }

    def restore(
        self,
        held: Mapping[str, Names],
        current: Mapping[str, str],
        standing: Mapping[str, Mapping[str, Any]],
        versions: Iterable[Mapping[str, str]],
        before: Mapping[str, str],
    ) -> None:
        """Restore from a checkpoint's facts.

        `versions`: `current` of every checkpoint, the oldest first. `before`: that before the last merge.
        """
        self._held = {client: frozenset(parts) for client, parts in held.items()}
        self._ids = sum(map(len, self._held.values()))
        self._current = dict(current)
        self._restorable = list(versions)
        self._before = dict(before)
        self._failures, self._until = dict(standing.get("failures", {})), dict(standing.get("until", {}))
        self._sizes = dict(standing.get("sizes", {}))
        self.proofs.update(standing.get("proofs", {}))
        self.refused.update(standing.get("refused", {}))
