"""What an answer of the exchange carries: it has no list, because the message to which it is the answer says it."""

from __future__ import annotations

from flwr.app import Message

from tepal.exchange.mod import received
from tepal.exchange.parts import Shaped


def returned_by(msg: Message) -> dict[str, list[Shaped]]:
    """Tree → the arrays of its packed part in the answer to this message, once the mod has read the message."""
    found = received(msg)
    if found is None:
        return {}
    entries = found.layout.by_name
    return {
        tree: [(name, entries[name].dtype, entries[name].shape) for name in names]
        for tree, names in found.plan.returns.items()
    }
