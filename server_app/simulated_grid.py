"""The Grid of Flower's simulation runtime, whose messages are objects in memory and never become bytes of a network.

Flower's own grid pauses for a tenth of a second between two requests for replies. This one returns each reply within a
fiftieth, and its messages need no checksum (see `tepal.exchange.local`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from tepal.exchange.local import mark_local

_PAUSE = 0.02  # seconds between two requests for replies


class SimulatedGrid(InMemoryGrid):  # type: ignore[misc]
    """Flower's grid of a simulation, over the same state; see `tepal.server_app.grid.prompt`."""

    def __init__(self, grid: Grid) -> None:
        self.__dict__ = grid.__dict__
        self._arrived: deque[Message] = deque()
        _find_messages_quickly(self.state)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push messages as Flower's grid does; returns their ids."""
        messages = list(messages)
        for message in messages:
            mark_local(message)
        return list(super().push_messages(messages))

    def pull_next(self, message_ids: Collection[str], timeout: float) -> tuple[str, Message] | None:
        """Wait for a reply to one of these messages.

        Args:
            message_ids: of all awaited replies.
            timeout: seconds to wait.

        Returns:
            (message id, its reply), perhaps of a message that was awaited earlier; None after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while not self._arrived:
            self._arrived.extend(self.pull_messages(message_ids))
            if not self._arrived:
                if (left := end - time.monotonic()) <= 0:
                    return None
                time.sleep(min(_PAUSE, left))
        reply = self._arrived.popleft()
        mark_local(reply)
        return reply.metadata.reply_to_message_id, reply


def _find_messages_quickly(state: Any) -> None:
    """Let the state look for a node's messages only if there is one that was not delivered.

    The simulation runtime asks for the messages of every node ten times a second, and Flower compares each node with
    all messages whose replies have not been pulled: with 100 clients a fifth of the ServerApp's process.
    """
    if "get_message_ins" in vars(state):  # it does so already
        return
    find, store = state.get_message_ins, state.store_message_ins
    stored_before = (message.metadata for message in state.message_ins_store.values())
    waiting = Counter(metadata.dst_node_id for metadata in stored_before if not metadata.delivered_at)

    def get_message_ins(node_id: int, limit: int | None, **options: Any) -> list[Message]:
        with state.lock:
            if not waiting[node_id]:
                return []
            found: list[Message] = find(node_id, limit, **options)
            waiting[node_id] -= len(found)
            return found

    def store_message_ins(message: Message) -> str | None:
        with state.lock:
            stored: str | None = store(message)
            waiting[message.metadata.dst_node_id] += stored is not None
            return stored

    state.get_message_ins, state.store_message_ins = get_message_ins, store_message_ins
