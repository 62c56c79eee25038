"""A TCP relay that counts what passes, and can be slowed down, cut and reset: the network between two processes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["up", "down"]
"""Up is towards the target: what a SuperNode sends to the SuperLink."""

CHUNK = 256 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


@dataclass(eq=False)
class _Flow:
    """One direction of a connection: at most one chunk is held between reading and sending it."""

    source: socket.socket
    target: socket.socket
    direction: Direction
    held: memoryview = field(default_factory=lambda: memoryview(b""))
    ended: bool = False  # the source sends no more, and the target has been told


class Relay:
    """Relays TCP connections from a port of 127.0.0.1 to a target, inside a `with` block.

    Bytes are counted when the target's, or the client's, kernel has taken them. A target that cannot be reached resets
    the client's connection; a reset of either side is passed on to the other. All methods may be called from any thread
    and are in force when they return.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.target = (target_host, target_port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._waker, self._wake = socket.socketpair()
        for end in (self._waker, self._wake):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._flows: list[tuple[_Flow, _Flow]] = []
        self._events: list[tuple[float, Direction, int]] = []
        self._bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self._rate: float | None = None
        self._allowance: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._refilled = time.monotonic()
        self._cut = self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"relay-{self.port}", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing():
            self._closing = True
        self._thread.join()
        for pair in self._flows:
            self._drop(pair, reset=True)
        self._flows.clear()
        self._selector.close()
        for end in (self._listener, self._waker, self._wake):
            end.close()

    # What has passed --------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where to connect to instead of the target."""
        return f"127.0.0.1:{self.port}"

    @property
    def up(self) -> int:
        """Bytes delivered to the target so far."""
        return self._bytes["up"]

    @property
    def down(self) -> int:
        """Bytes of the target delivered to its clients so far."""
        return self._bytes["down"]

    @property
    def events(self) -> list[tuple[float, Direction, int]]:
        """(time.monotonic(), direction, bytes) of every delivery, oldest first."""
        with self._lock:
            return list(self._events)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._flows)

    def moved(self, since: float, until: float = float("inf")) -> tuple[int, int]:
        """Return the bytes (up, down) delivered between two times of `time.monotonic()`."""
        total: dict[Direction, int] = {"up": 0, "down": 0}
        for when, direction, count in self.events:
            if since <= when < until:
                total[direction] += count
        return total["up"], total["down"]

    def bursts(self, direction: Direction, gap: float = 0.25) -> list[tuple[float, float, int]]:
        """Return (start, end, bytes) of each stretch of activity: a pause of more than `gap` seconds ends one."""
        found: list[tuple[float, float, int]] = []
        for when, towards, count in self.events:
            if towards != direction:
                continue
            if found and when - found[-1][1] <= gap:
                start, _, before = found.pop()
                found.append((start, when, before + count))
            else:
                found.append((when, when, count))
        return found

    # What can be done to it -------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Deliver nothing from now on, and say so to nobody: the cable is out.

        Open connections stay open: what is sent into them is held back, in the relay and in the kernel's buffers, and
        so is the news that a side has closed. New connections seem to open (the kernel answers) but get no byte.
        """
        with self._changing():
            self._cut = True

    def mend(self) -> None:
        """End a cut: everything held back is delivered, and waiting connections are served."""
        with self._changing():
            self._cut = False

    def reset(self) -> None:
        """Reset every open connection, both sides of it. What it held is lost. New connections are served."""
        with self._changing():
            for pair in self._flows:
                self._drop(pair, reset=True)
            self._flows.clear()

    def throttle(self, bytes_per_second: float | None) -> None:
        """Deliver no more than this in each direction, over all connections; None for no limit.

        Senders notice late: the kernel takes some megabytes off their hands before they have to wait.
        """
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"throttle: {bytes_per_second} bytes per second, expected more than 0 or None")
        with self._changing():
            self._rate = bytes_per_second
            self._allowance = {"up": 0.0, "down": 0.0}
            self._refilled = time.monotonic()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
        with contextlib.suppress(OSError):  # full: it is awake already
            self._waker.send(b"x")

    # The relay's own thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                self._refill()
                self._watch()
                wait = self._pause()
            ready = self._selector.select(wait)
            with self._lock:
                self._handle(ready)

    def _watch(self) -> None:
        """Have the selector look at exactly what could be acted upon."""
        wanted: dict[socket.socket, int] = {} if self._cut else {self._listener: selectors.EVENT_READ}
        for flow in () if self._cut else (flow for pair in self._flows for flow in pair):
            if not flow.held and not flow.ended:
                wanted[flow.source] = wanted.get(flow.source, 0) | selectors.EVENT_READ
            if flow.held and self._allowed(flow.direction):
                wanted[flow.target] = wanted.get(flow.target, 0) | selectors.EVENT_WRITE
        for key in list(self._selector.get_map().values()):
            if key.fileobj is self._wake:
                continue
            events = wanted.pop(key.fileobj, 0)
            if not events:
                self._selector.unregister(key.fileobj)
            elif events != key.events:
                self._selector.modify(key.fileobj, events)
        for end, events in wanted.items():
            self._selector.register(end, events)

    def _handle(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        able = {key.fileobj: events for key, events in ready}
        if self._wake in able:
            self._wake.recv(4096)
        if self._cut or self._closing:
            return
        for pair in list(self._flows):
            try:
                for flow in pair:
                    if able.get(flow.source, 0) & selectors.EVENT_READ and not flow.held and not flow.ended:
                        self._read(flow)
                    if able.get(flow.target, 0) & selectors.EVENT_WRITE and flow.held:
                        self._send(flow)
            except OSError:
                self._flows.remove(pair)
                self._drop(pair, reset=True)
                continue
            if all(flow.ended for flow in pair):
                self._flows.remove(pair)
                self._drop(pair)
        if self._listener in able:
            self._accept()

    def _read(self, flow: _Flow) -> None:
        with contextlib.suppress(BlockingIOError):
            flow.held = memoryview(flow.source.recv(CHUNK))
            if not flow.held:
                flow.target.shutdown(socket.SHUT_WR)
                flow.ended = True
            elif self._rate is None:
                self._send(flow)

    def _send(self, flow: _Flow) -> None:
        most = len(flow.held) if self._rate is None else int(self._allowance[flow.direction])
        if most < 1:
            return
        with contextlib.suppress(BlockingIOError):
            count = flow.target.send(flow.held[:most])
            flow.held = flow.held[count:]
            self._allowance[flow.direction] -= count
            self._bytes[flow.direction] += count
            self._events.append((time.monotonic(), flow.direction, count))

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        try:
            server = socket.create_connection(self.target, timeout=2)
        except OSError:
            _close(client, reset=True)
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flows.append((_Flow(client, server, "up"), _Flow(server, client, "down")))

    def _drop(self, pair: tuple[_Flow, _Flow], *, reset: bool = False) -> None:
        for end in (pair[0].source, pair[0].target):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            _close(end, reset=reset)

    # Throttling: an allowance that grows with time and is spent by sending --------------------------------------------

    def _refill(self) -> None:
        now = time.monotonic()
        if self._rate is not None:
            for direction, left in self._allowance.items():
                self._allowance[direction] = min(left + self._rate * (now - self._refilled), max(1.0, self._rate / 10))
        self._refilled = now

    def _allowed(self, direction: Direction) -> bool:
        return self._rate is None or self._allowance[direction] >= max(1.0, self._rate / 50)

    def _pause(self) -> float | None:
        """How long to wait for something to happen at most."""
        waiting = self._rate is not None and not self._cut and any(flow.held for pair in self._flows for flow in pair)
        return max(0.02, 1 / self._rate) if waiting and self._rate else None


def _close(end: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
