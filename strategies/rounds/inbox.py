"""Pulls replies in threads, while the round does its work."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from tepal.host.flower.polling import FirstPause

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two requests for replies:
_PAUSE = 1 / 8  # of the time since the last reply, so that the delay stays small in proportion
_STUCK = 1.0  # seconds after which another thread pulls the other replies
_MOST_THREADS = 16

PullNext = Callable[[Collection[str], float], "tuple[str, Message | Exception] | None"]


class Inbox:
    """Pulls the replies to the messages that it expects.

    Flower announces a reply before its arrays have arrived, and a pull then waits for them: for minutes if a network is
    slow or cut. One such client must neither delay the others nor the end of the round. So pulls run in threads: one at
    first, and another one whenever all threads have been pulling one reply for a second without progress (`moved_at` of
    a grid that measures it). A pull starts only after the reply that was taken last has been processed, so that
    normally one reply is in memory.

    A grid with a method `pull_next` runs the clients itself: it is called where a reply is taken, and there are no
    threads.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._came: queue.Queue[tuple[str, Message | Exception]] = queue.Queue(maxsize=1)
        self._lock = threading.Lock()
        self._pull_next: PullNext | None = getattr(grid, "pull_next", None)
        self._expected: dict[str, None] = {}  # in their order
        self._to_look: deque[str] = deque()  # expected ids that no thread is pulling
        self._pulling: set[str] = set()
        self._failing: dict[str, float] = {}
        self._first_pause = FirstPause()  # of a thread
        self._looking: dict[int, float] = {}  # thread → since when it has been pulling one id
        self._room = threading.Event()  # no reply waits to be taken or is being processed
        self._room.set()
        self._closed = threading.Event()

    def expect(self, message_ids: Iterable[str]) -> None:
        """Pull the replies to these messages from the next `take` on."""
        with self._lock:
            new = [message_id for message_id in message_ids if message_id not in self._expected]
            self._expected.update(dict.fromkeys(new))
            self._to_look.extend(message_id for message_id in new if message_id not in self._pulling)

    def forget(self) -> None:
        """Expect no more replies. One that is being pulled now is still returned by a later `take`."""
        with self._lock:
            self._expected.clear()
            self._to_look.clear()

    def close(self) -> None:
        """Expect no more replies and let the threads end; a reply that one of them has is dropped."""
        self._closed.set()
        self.forget()

    def take(self, timeout: float) -> tuple[str, Message | Exception] | None:
        """(message id, its reply or the error of pulling it), or None after `timeout` seconds.

        The caller must have processed the reply that it took before, and keep no reference to it.
        """
        if self._pull_next is not None:
            return self._take_here(self._pull_next, timeout)
        deadline = time.monotonic() + timeout
        if self._came.empty():
            self._room.set()
        while True:
            self._ensure_puller()
            left = deadline - time.monotonic()
            try:
                message_id, reply = self._came.get(timeout=max(min(left, 0.2), 0))
            except queue.Empty:
                if left <= 0:
                    return None
                continue
            with self._lock:
                self._expected.pop(message_id, None)
            return message_id, reply

    def _take_here(self, pull_next: PullNext, timeout: float) -> tuple[str, Message | Exception] | None:
        end = time.monotonic() + timeout
        came = pull_next(self._expected, timeout)
        if came is None:  # perhaps at once, if no reply will come
            self._closed.wait(max(end - time.monotonic(), 0))
            return None
        self._expected.pop(came[0], None)
        if isinstance(came[1], Exception):
            self._failing.setdefault(came[0], time.monotonic())
        return came

    def failing_since(self, message_id: str) -> float:
        """The time (`time.monotonic`) since which every pull of this message's reply has failed."""
        with self._lock:
            return self._failing.get(message_id, time.monotonic())

    def _ensure_puller(self) -> None:
        with self._lock:
            stuck = time.monotonic() - _STUCK
            free = any(max(since, getattr(self._grid, "moved_at", 0.0)) > stuck for since in self._looking.values())
            if not self._to_look or free or len(self._looking) >= _MOST_THREADS:
                return
            thread = threading.Thread(target=self._pull, name="inbox", daemon=True)
            # Entered before it runs, so that the next call does not start a second one.
            self._looking[id(thread)] = time.monotonic()
            thread.start()

    def _pull(self) -> None:
        me = id(threading.current_thread())
        began = since = time.monotonic()
        in_vain, first = 0, True
        if pause := self._first_pause.seconds:
            self._closed.wait(pause)
        while True:
            while self._to_look and not self._room.wait(0.5):
                pass
            with self._lock:
                if not self._to_look:
                    del self._looking[me]
                    return
                message_id = self._to_look.popleft()
                self._pulling.add(message_id)
                self._looking[me] = time.monotonic()
            reply: Message | Exception | None
            try:
                reply = next(iter(self._grid.pull_messages([message_id])), None)
            except Exception as error:  # the caller decides whether to try again
                reply = error
            with self._lock:
                # A thread that waits for its reply to be taken, or pauses, is not stuck.
                self._looking[me] = time.monotonic() + 3600
                self._pulling.discard(message_id)
                if isinstance(reply, Exception):
                    self._failing.setdefault(message_id, time.monotonic())
                else:
                    self._failing.pop(message_id, None)
                if reply is None and message_id in self._expected:
                    self._to_look.append(message_id)
                in_vain = in_vain + 1 if reply is None else 0
                swept = in_vain >= len(self._to_look)
            if reply is not None:
                if first:
                    self._first_pause.waited(time.monotonic() - began)
                    first = False
                self._room.clear()
                self._hand_over(message_id, reply)
                del reply
                since = time.monotonic()
            elif swept:
                self._closed.wait(min(max(_PAUSE * (time.monotonic() - since), _SHORTEST_PAUSE), _LONGEST_PAUSE))
                in_vain = 0

    def _hand_over(self, message_id: str, reply: Message | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._came.put((message_id, reply), timeout=0.5)
                return
            except queue.Full:
                pass
