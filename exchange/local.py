"""Messages of a simulation: in one process, between those that it forked, or between Ray's.

They are passed on as objects, by a grid that is trusted as the server is: none is damaged on its way or altered, and
nothing that Flower sends over a network can have this mark. So no checksum is computed for them; the exchange's id is
not compared with the content, and the digests of arrays that are not cached are not verified. Everything else is
checked as for any message.
"""

from __future__ import annotations

from flwr.app import Message

_LOCAL = "_tepal_local"


def mark_local(message: Message) -> None:
    """Mark a message as one of a simulation; only a grid does that."""
    message.__dict__[_LOCAL] = True


def is_local(message: Message) -> bool:
    return _LOCAL in message.__dict__
