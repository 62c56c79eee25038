"""The values that a run begins with. A client that can make them itself need not be sent them.

The server lists their parts in an introduction, by id alone. The client makes the values: it builds the model from the
run's seed, or loads the pretrained weights that it has, too. It caches the parts that have these ids, and reports them
with all others in its cache. What it makes otherwise (by another version of a library, from another file) has another
id, and is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger

from tepal.exchange.cache import ClientCache
from tepal.exchange.layout import Arrays
from tepal.exchange.manifest import Manifest
from tepal.exchange.parts import Part, digests_of
from tepal.exchange.plan import Tree
from tepal.host.text import visible

log = getLogger("flwr")

MakeStart = Callable[[Tree], Arrays | None]
"""Tree → the raw `state_dict` with which it begins; None if this client cannot make it."""


def keep_start(manifest: Manifest, cache: ClientCache, make: MakeStart) -> None:
    """Cache the parts that an introduction lists, where the client makes the same values.

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
                own = part.with_digests(digests_of(values))
                if own.id == part.id:
                    cache.keep(own, values)
                else:
                    log.info("Block %r does not begin with the values that this client makes; it is sent.", part.block)
        except Exception as error:  # it is sent
            log.warning(
                "This client cannot make the initial values of %r; they are sent: %s", tree, visible(str(error))
            )
