"""Messages that stay on this machine, in one process or between those that it forked.

They are passed on as objects, by a grid that is trusted as the server is: none is damaged on its way or altered, and
nothing that comes over a network can have this mark. So no checksum is computed for them, and the exchange's id is not
compared with the content. Everything else is checked as for any message.
"""

from __future__ import annotations

from flwr.app import Message

_LOCAL = "_tepal_local"


def mark_local(message: Message) -> None:
    """Mark a message as one that stays on this machine; only a grid does that."""
    message.__dict__[_LOCAL] = True


def is_local(message: Message) -> bool:
    return _LOCAL in message.__dict__
