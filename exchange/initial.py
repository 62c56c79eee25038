"""The values that a run begins with. A client that can make them itself need not be sent them.

The server lists their parts in an introduction, by id alone. The client makes the values: it builds the model from the
run's seed, or loads the pretrained weights that it has, too. It caches the parts that have these ids, and reports them
with all others in its cache. What it makes otherwise (by another version of a library, from another file) has another
id, and is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from logging import getLogger
from typing import Any

from tepal.exchange.cache import ClientCache
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.manifest import Manifest
from tepal.exchange.parts import Digests, Part, digests_of
from tepal.exchange.plan import Tree
from tepal.host.text import visible

log = getLogger("flwr")

MakeInitial = Callable[[Tree], Arrays | None]
"""Tree → the raw `state_dict` with which it begins; None if this client cannot make it."""

_DIGESTS = Digests()  # of arrays that several clients of a process share


class InitialParts:
    """The server's half: the parts of the initial values, which clients may have before they are sent any.

    A checkpoint has them, because a server that is resumed may not have the values any more.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[Tree, str], str] = {}  # tree, block → id: modes may begin with equal values
        self._found: set[str] | None = None  # ids that were found in this round; None before the first round
        self._useful: Collection[str] = ()

    def __contains__(self, id: object) -> bool:
        return id in self._parts.values()

    def add(self, part: Part) -> None:
        self._parts[part.tree, part.block] = part.id

    def begin(self) -> None:
        """Begin a round."""
        self._useful = [*self._parts.values()] if self._found is None else self._found
        self._found = set()

    def found(self, id: str) -> None:
        """Enter that the server's present values are those of the part of this id, which a client has."""
        if self._found is not None and id in self:
            self._found.add(id)

    def listed(self, blocks: Mapping[str, Names], has: Callable[[Tree, str, str], bool] | None) -> list[Part]:
        """The parts that new clients should make.

        Args:
            blocks: label → entries.
            has: of a run that sends differences: whether there is a reference (tree, block, id). Without differences a
                part is listed as long as its values stand: if a client needed it in the round before.
        """
        return [
            Part(tree, block, blocks[block], known_id=id)
            for (tree, block), id in self._parts.items()
            if (id in self._useful if has is None else has(tree, block, id)) and block in blocks
        ]

    def to_facts(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        useful = {} if self._found is None else {"useful": sorted(self._found)}
        return {"parts": [[id, tree, block] for (tree, block), id in self._parts.items()], **useful}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts, which are empty in one of an earlier version."""
        self._parts = {(tree, block): id for id, tree, block in facts.get("parts", ())}
        self._found = set(facts["useful"]) if "useful" in facts else None


def keep_initial(manifest: Manifest, cache: ClientCache, make: MakeInitial) -> None:
    """The client's half: cache the parts that an introduction lists, where the client makes the same values.

    Parts of blocks of which the client has another one already are left: that one is newer.
    """
    asked: dict[Tree, list[Part]] = {}
    for parcel in manifest.parcels:
        if not cache.has(parcel.part.tree, parcel.part.block):
            asked.setdefault(parcel.part.tree, []).append(parcel.part)
    for tree, parts in asked.items():
        try:
            if (raw := make(tree)) is None:
                continue
            made = manifest.layout.split(raw)
            for part in parts:
                values = {name: made[name] for name in part.names}
                own = part.with_digests(digests_of(values, _DIGESTS.of))
                if own.id == part.id:
                    cache.keep(own, values)
                else:
                    log.info("Block %r does not begin with the values that this client makes; it is sent.", part.block)
        except Exception as error:  # it is sent
            log.info("This client cannot make the initial values of %r; they are sent: %s", tree, visible(str(error)))
