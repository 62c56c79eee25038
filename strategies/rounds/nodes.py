"""The connected nodes, and the names of their clients.

A client keeps its name when its node is restarted; the node's id changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from logging import getLogger
from random import Random
from typing import Any

from flwr.proto.node_pb2 import NodeInfo

from tepal.host.text import name_key

log = getLogger("flwr")


class Nodes:
    """The connected nodes and their states.

    A node is *new* until it has introduced itself; then it is *available* under its name, or *refused* with a reason.
    A node that did not answer is *silent*. It is asked again after 1, 2, 4, … rounds, because the others may have to
    wait for it every time, and at once if there are too few others.

    Args:
        expected: name → node id of clients whose names are known before they introduce themselves. Each of these names
            belongs to its node.
    """

    def __init__(self, expected: Mapping[str, int] | None = None) -> None:
        self._expected = dict(sorted((expected or {}).items()))
        self._listed: Iterable[NodeInfo] = ()
        self._candidates: Sequence[str] | None = None  # sorted; None: must be computed
        self._sessions: dict[int, tuple[str, str]] = {}  # node id → (when it was last activated, registered name)
        self._new: dict[int, None] = {}  # in their order
        self._silent: dict[int, int] = {}  # node id → the round in which it is asked again
        self._tries: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._node_of: dict[str, int] = {}  # the inverse
        self._kept: dict[int, str] = {}  # node id → its last name, also while it is not available
        self._looks: dict[str, str] = {}  # what names that look the same share → the first of them
        self._available: list[str] | None = None  # sorted; None: must be computed
        self._refused: dict[int, str] = {}
        self._met: set[str] = set()
        self._again: set[str] = set()  # clients that introduce themselves again, though their nodes were not restarted

    def update(self, nodes: Iterable[NodeInfo]) -> None:
        """Enter the connected nodes. A node that was restarted is new again: its cache may be lost."""
        if nodes is self._listed and type(nodes) is tuple:
            return
        self._listed = nodes
        now = {node.node_id: (node.last_activated_at, node.name) for node in nodes}
        changed = [node_id for node_id, session in now.items() if self._sessions.get(node_id) != session]
        for node_id in {*(self._sessions.keys() - now.keys()), *changed}:
            known: dict[int, Any]
            for known in (self._new, self._refused, self._silent, self._tries):
                known.pop(node_id, None)
            self._unname(node_id)
        self._sessions, self._candidates = now, None
        self._new.update(dict.fromkeys(sorted(changed)))

    def take_new(self, round: int, *, silent_too: bool = False, most: int | None = None) -> list[tuple[int, str]]:
        """(node id, registered name or "") of the nodes that must introduce themselves now.

        With more than `most`, that many are drawn at random; the others follow in later calls.
        """
        chosen = [*self._new, *self._due(round, all_of_them=silent_too)]
        if most is not None and len(chosen) > most:
            chosen = Random(round).sample(chosen, most)
        return self._taken(chosen)

    def take(self, clients: Iterable[str]) -> list[tuple[int, str]]:
        """As `take_new`, of these clients."""
        return self._taken([node_id for client in clients if (node_id := self._expected.get(client)) in self._new])

    def take_silent(self, round: int, *, all_of_them: bool) -> list[tuple[int, str]]:
        """As `take_new`, of silent nodes only."""
        return self._taken(self._due(round, all_of_them=all_of_them))

    def _due(self, round: int, *, all_of_them: bool) -> list[int]:
        """The silent nodes that are asked again now."""
        return [node_id for node_id, due in self._silent.items() if all_of_them or due <= round]

    def _taken(self, chosen: Sequence[int]) -> list[tuple[int, str]]:
        for node_id in chosen:
            self._new.pop(node_id, None)
            if self._silent.pop(node_id, None) is not None:
                self._candidates = None  # it is one if it answers now
        return [(node_id, self._sessions[node_id][1]) for node_id in chosen]

    def refuse(self, clients: Mapping[str, str]) -> None:
        """Enter expected clients that were refused before the run was resumed: name → reason. They are not new."""
        for client, reason in clients.items():
            if (node_id := self._expected.get(client, -1)) in self._new:
                del self._new[node_id]
                self._refused[node_id] = reason
                self._candidates = None

    def renew(self, client: str) -> None:
        """Let an available client introduce itself again: what it said of itself is no longer true."""
        if (node_id := self._node_of.get(client)) is not None:
            self._unname(node_id)
            self._new[node_id] = None
            self._again.add(client)

    def waiting(self) -> int:
        """The number of nodes that have not been asked to introduce themselves yet."""
        return len(self._new)

    def settle(
        self,
        introduced: Mapping[int, str],
        refused: Mapping[int, str],
        asked: Mapping[int, str],
        round: int,
        proofs: Mapping[int, str] | None = None,
        holders: MutableMapping[str, str] | None = None,
    ) -> dict[int, str]:
        """Enter the results of introductions.

        A name belongs to the node whose key is registered under it, or that is expected under it; otherwise, for the
        whole run, to its first holder, which proves by its secret that it is the same when it comes back as another
        node. So do names that a reader would take for it. Others are called `<name>@<node id>`. A node that introduces
        itself again keeps the name that it has.

        Args:
            introduced: node id → the client's name.
            refused: node id → the reason.
            asked: all nodes that were asked; the others of them are silent.
            round: the current round.
            proofs: node id → digest of its secret; "", or missing, if it has none.
            holders: name → digest of the first holder's secret; new names are entered.

        Returns:
            Node id → the name that the client has from now on.
        """
        proofs, holders = proofs or {}, {} if holders is None else holders
        introduced = {node_id: self._wanted(node_id, name) for node_id, name in introduced.items()}
        if not self._looks:
            self._looks = {name_key(name): name for name in holders}

        def turn(item: tuple[int, str]) -> tuple[bool, bool, int]:
            node_id, name = item
            proof = proofs.get(node_id, "")
            return self._sessions[node_id][1] != name, not proof or holders.get(name) != proof, node_id

        names: dict[int, str] = {}
        for node_id, name in sorted(introduced.items(), key=turn):
            proof, wanted = proofs.get(node_id, ""), name
            while not self._may_have(node_id, name, proof, holders, names):
                name = f"{name}@{node_id}"
            if name != wanted:
                log.warning(
                    "Two nodes have the name %r, or one that looks the same; node %d is now called %r. Give each its "
                    "own `name`. If it is the client that had the name before, and its cache folder was lost, register "
                    "its key under this name.",
                    wanted, node_id, name,
                )  # fmt: skip
            other = self._node_of.get(name)
            if other is not None and other != node_id:
                log.warning(
                    "%s is back, as node %d. Node %d, which had the name, still counts as connected. If it was killed, "
                    "this will end; if both run, only the newer one takes part: give each its own `name` and "
                    "`cache-path`.",
                    name, node_id, other,
                )  # fmt: skip
            elif name in self._met and name not in self._again:
                log.info("%s is back, as node %d.", name, node_id)
            if other is not None:
                self._unname(other)
            if name not in self._expected:
                holders[name] = holders.get(name) or proof
            self._looks.setdefault(name_key(name), name)
            self._names[node_id] = self._kept[node_id] = names[node_id] = name
            self._node_of[name] = node_id
        self._available = None
        if any(self._expected.get(names.get(node_id, "")) != node_id for node_id in asked):
            self._candidates = None  # else all of them were candidates already, under the same names
        self._refused.update(refused)
        for node_id in asked:
            if node_id not in introduced and node_id not in refused:
                self._tries[node_id] = self._tries.get(node_id, 0) + 1
                self._silent[node_id] = round + 2 ** (self._tries[node_id] - 1)
        return names

    def _wanted(self, node_id: int, name: str) -> str:
        """The name with which a node introduces itself, or that it keeps."""
        kept = self._kept.get(node_id, name)
        if self._sessions[node_id][1]:
            return name
        if kept != name and not kept.startswith(f"{name}@"):
            log.warning("%s, node %d, now calls itself %r; it keeps its name for this run.", kept, node_id, name)
        return kept

    def _may_have(
        self, node_id: int, name: str, proof: str, holders: Mapping[str, str], settled: Collection[int]
    ) -> bool:
        """Whether a node may have this name. `settled`: the nodes that have got theirs in the same turn."""
        other = self._node_of.get(name)
        if other in settled or (other is not None and self._sessions[other][1] == name):
            return False
        if self._sessions[node_id][1] == name or self._expected.get(name) == node_id:
            return True
        if other is None and self._kept.get(node_id) == name:
            return True
        if self._looks.get(name_key(name), name) != name:
            return False
        holder = holders.get(name, "")
        if holder:
            return proof == holder
        return other is None

    def _unname(self, node_id: int) -> None:
        name = self._names.pop(node_id, "")
        if self._node_of.get(name) == node_id:
            del self._node_of[name]
            self._available = self._candidates = None

    def returned(self, names: Collection[str]) -> set[str]:
        """Those of these clients, just introduced, that were known before: their nodes were restarted."""
        back = self._met.intersection(names) - self._again
        self._again.difference_update(names)
        self._met.update(names)
        return back

    def available(self) -> Sequence[str]:
        """Names of the available clients, sorted."""
        if self._available is None:
            self._available = sorted(self._node_of)
        return self._available

    def candidates(self) -> Sequence[str]:
        """Names of the available clients, and of those that are expected and have not introduced themselves; sorted."""
        if self._candidates is None:
            # The expected names are sorted already, so that sorting takes one pass.
            expected = filter(self.__contains__, self._expected)
            self._candidates = tuple(sorted(dict.fromkeys([*expected, *self._node_of])))
        return self._candidates

    def __contains__(self, client: object) -> bool:
        """Whether a client is one of the candidates."""
        return client in self._node_of or self._expected.get(client) in self._new  # type: ignore[call-overload]

    def node_of(self) -> Mapping[str, int]:
        """Name → node id of the available clients."""
        return self._node_of

    def connected(self) -> int:
        """The number of connected nodes, in any state."""
        return len(self._sessions)

    def refusals(self) -> list[str]:
        """The reasons for which connected nodes cannot take part."""
        return list(self._refused.values())
