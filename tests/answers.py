"""What an answer of the exchange carries: it has no list, because the message to which it is the answer says it."""

from __future__ import annotations

from flwr.app import Message

from tepal.exchange.layout import Shaped
from tepal.exchange.mod import received


def returned_by(msg: Message) -> dict[str, list[Shaped]]:
    """Tree → the arrays of its packed part in the answer to this message, once the mod has read the message."""
    found = received(msg)
    if found is None:
        return {}
    return {tree: found.layout.shaped(names) for tree, names in found.plan.returns.items()}
