"""Who is connected, and under which name. A client's name outlives its node id, which changes at every restart."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger

from flwr.serverapp import Grid

log = getLogger("flwr")


class Nodes:
    """Connected nodes, by what is known of them.

    A node is *new* until it has introduced itself; then it is *available* under its name, or *refused* with a reason.
    A node that did not answer its introduction is *silent*; it is asked again only when there are too few others.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[str, str]] = {}  # node id → (when it was last activated, registered name)
        self._new: list[int] = []
        self._silent: list[int] = []
        self._names: dict[int, str] = {}
        self._refused: dict[int, str] = {}

    def update(self, grid: Grid) -> None:
        """Read who is connected. A node that was restarted is new again: it may have lost what it held."""
        now = {node.node_id: (node.last_activated_at, node.name) for node in grid.get_nodes()}
        changed = [node_id for node_id, session in now.items() if self._sessions.get(node_id) != session]
        for node_id in {*(set(self._sessions) - set(now)), *changed}:
            for known in (self._names, self._refused):
                known.pop(node_id, None)
            for waiting in (self._new, self._silent):
                if node_id in waiting:
                    waiting.remove(node_id)
        self._sessions = now
        self._new += sorted(changed)

    def take_new(self, *, silent_too: bool = False) -> list[tuple[int, str]]:
        """(node id, registered name or "") of nodes that are to introduce themselves now."""
        chosen, self._new = self._new, []
        if silent_too:
            chosen, self._silent = chosen + self._silent, []
        return [(node_id, self._sessions[node_id][1]) for node_id in chosen]

    def settle(self, introduced: Mapping[int, str], refused: Mapping[int, str], asked: Mapping[int, str]) -> None:
        """Enter the outcome of introductions: node id → name, node id → reason; all others of `asked` are silent."""
        for node_id, name in sorted(introduced.items()):
            for other, taken in list(self._names.items()):
                if taken != name:
                    continue
                registered = self._sessions[other][1] == taken != self._sessions[node_id][1]
                if other in introduced or registered:  # a name that a key is registered under is not for others
                    name = f"{name}@{node_id}"
                    log.warning("Two nodes call themselves %r; node %d goes by %r. Give each its own `name`.",
                                taken, node_id, name)  # fmt: skip
                else:
                    log.info("%s is back as node %d (was %d).", name, node_id, other)
                    del self._names[other]
            self._names[node_id] = name
        self._refused.update(refused)
        self._silent += [node_id for node_id in asked if node_id not in introduced and node_id not in refused]

    def available(self) -> list[str]:
        """Names of the clients that can take part, sorted."""
        return sorted(self._names.values())

    def node_of(self) -> dict[str, int]:
        """Name → node id of the available clients."""
        return {name: node_id for node_id, name in self._names.items()}

    def refusals(self) -> list[str]:
        """Why nodes that are connected cannot take part."""
        return list(self._refused.values())
