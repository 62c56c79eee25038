"""What the server remembers of each client from round to round. Nothing else keeps any of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

from tepal.exchange.layout import Names
from tepal.exchange.sender import ClientRecord

log = getLogger("flwr")

FAILURES = 3
"""After so many exchanges in a row without a good reply a client is left out."""
LEFT_OUT = 5
"""For so many rounds. Should it fail again after them, it is left out again at once."""


@dataclass
class Standing:
    """Who has failed how often in a row: a client that gives no result three times is left out for some rounds.

    Failing is a reply that was refused, and no reply. A reply that was merged clears it, and a restart of the client's
    node; a good answer to another question does not.
    """

    failures: dict[str, int] = field(default_factory=dict)
    """Client → exchanges in a row without a good reply."""
    until: dict[str, int] = field(default_factory=dict)
    """Client → the first round in which it is asked again."""

    def good(self, client: str) -> None:
        self.failures.pop(client, None)
        self.until.pop(client, None)

    def failed(self, client: str, round: int) -> None:
        self.failures[client] = self.failures.get(client, 0) + 1
        if self.failures[client] >= FAILURES:
            self.until[client] = round + 1 + LEFT_OUT
            log.warning(
                "%s has given no result %d times in a row; it is left out until round %d.",
                client, self.failures[client], self.until[client],
            )  # fmt: skip

    def out(self, clients: Collection[str], round: int) -> list[str]:
        """Which of these clients are left out of this round, sorted. `clients` is asked for those alone."""
        return sorted(client for client, until in self.until.items() if until > round and client in clients)


class ClientLedger:
    """Of every client by its name: which parts it has cached, which personal state counts, how it has done.

    Args:
        keep: how many checkpoints the run may go back to.
    """

    def __init__(self, keep: int = 0) -> None:
        self.standing = Standing()
        self._keep = keep
        self._held: dict[str, frozenset[str]] = {}
        self._current: dict[str, str] = {}
        self._restorable: list[Mapping[str, str]] = []  # `_current` at each checkpoint, the oldest first

    def record(self, client: str) -> ClientRecord:
        """What a message to this client goes by."""
        return ClientRecord(
            held=self._held.get(client, frozenset()),
            current=self._current.get(client, ""),
            restorable=tuple(sorted({then[client] for then in self._restorable if client in then})),
        )

    def cached(self, client: str, parts: Iterable[str]) -> None:
        """The client reports that these parts, by their ids, are in its cache, and no others."""
        self._held[client] = frozenset(parts)

    def merged(self, exchanges: Mapping[str, str]) -> None:
        """The replies of these clients were merged, and stay so (client → id of the exchange)."""
        self._current.update(exchanges)

    def saved(self) -> None:
        """There is a checkpoint now of how things stand."""
        self._restorable = [*self._restorable, dict(self._current)][-self._keep :] if self._keep else []

    def to_facts(self) -> dict[str, Any]:
        """`held`, `current` and `standing`, as a checkpoint has them."""
        return {
            "held": {client: tuple(sorted(parts)) for client, parts in sorted(self._held.items()) if parts},
            "current": dict(self._current),
            "standing": {"failures": self.standing.failures, "until": self.standing.until},
        }

    def restore(
        self,
        held: Mapping[str, Names],
        current: Mapping[str, str],
        standing: Mapping[str, Any],
        versions: Iterable[Mapping[str, str]],
    ) -> None:
        """Take over what a checkpoint has. `versions`: `current` of every checkpoint, the oldest first."""
        self._held = {client: frozenset(parts) for client, parts in held.items()}
        self._current = dict(current)
        self._restorable = list(versions)
        self.standing = Standing(**standing)
