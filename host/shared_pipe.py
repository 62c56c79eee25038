"""A pipe between forked processes that passes the bytes of Flower's Arrays through shared memory.

A pipe copies every byte twice, in portions of 64 kB, and wakes the other process for each of them. Here the sender
copies an Array's bytes into an area that both processes map, and the receiver copies them out. An Array that is
requested again, such as the part of a model that all clients receive, is not copied: the other end has kept it.

The two ends send in turn: request, reply, request. The area stays as large as the largest message.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array

_WORTH = 1 << 14  # bytes of an Array from which it is passed through shared memory
_PAGE = 1 << 20  # the area grows by so many bytes


def shared_pipe() -> tuple[SharedPipe, SharedPipe]:
    """Return the two ends of a pipe, that of requests first, for processes that are forked from this one."""
    if hasattr(os, "memfd_create"):  # not in every Python for Linux
        area = os.memfd_create("tepal-pipe")
    else:
        with tempfile.TemporaryFile() as file:
            area = os.dup(file.fileno())
    first, second = Pipe()
    return SharedPipe(first, area, asks=True), SharedPipe(second, os.dup(area), asks=False)


class SharedPipe:
    """One end of a pipe; see `shared_pipe`.

    An Array of a request must not be changed in place while anything refers to it. The other end keeps it, and forgets
    it with the first request after the last reference at this end is gone. Those of replies are not kept.
    """

    def __init__(self, connection: Connection, area: int, *, asks: bool) -> None:
        self._asks = asks
        self._connection = connection
        self._area = area
        self._map: mmap.mmap | None = None
        self._sent: dict[int, tuple[weakref.ref[Array], int]] = {}  # by id of the Array: itself, and its number
        self._gone: list[int] = []  # numbers of Arrays that were freed here, and that the other end still has
        self._next = 0
        self._kept: dict[int, Array] = {}  # Arrays from the other end, by number

    def send(self, thing: object) -> None:
        """Send an object. Raises OSError if the other end is closed."""
        gone, self._gone = self._gone, []
        sent, body, arrays = io.BytesIO(), io.BytesIO(), list[Array]()
        _Pickler(body, self, arrays).dump(thing)
        self._write(arrays)
        pickle.dump((gone, [len(array.data) for array in arrays]), sent)
        sent.write(body.getbuffer())
        self._connection.send_bytes(sent.getbuffer())

    def recv(self) -> Any:
        """Wait for an object, and return it. Raises EOFError if the other end is closed."""
        received = io.BytesIO(self._connection.recv_bytes())
        gone, sizes = pickle.load(received)
        for number in gone:
            self._kept.pop(number, None)
        _receiving.pipe, _receiving.contents = self, iter(self._read(sizes))
        try:
            return pickle.load(received)
        finally:
            _receiving.pipe = _receiving.contents = None

    def close(self) -> None:
        """Close this end; again, it does nothing."""
        if self._connection.closed:
            return
        self._connection.close()
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self._area)

    def _number(self, array: Array) -> tuple[int, bool]:
        """Return the number of an Array, and whether the other end has it."""
        key = id(array)  # another object may have it when this one is freed, which removes the entry
        if key in self._sent:
            return self._sent[key][1], True
        self._next = number = self._next + 1

        def freed(_: object) -> None:
            del self._sent[key]
            self._gone.append(number)

        self._sent[key] = weakref.ref(array, freed), number
        return number, False

    def _write(self, arrays: list[Array]) -> None:
        if not (size := sum(len(array.data) for array in arrays)):
            return
        if os.fstat(self._area).st_size < size:
            os.ftruncate(self._area, -(-size // _PAGE) * _PAGE)
        area, place = self._mapped(size), 0
        for array in arrays:
            area[place : place + len(array.data)] = array.data
            place += len(array.data)

    def _read(self, sizes: list[int]) -> list[bytes]:
        area, place, found = self._mapped(sum(sizes)) if sizes else None, 0, []
        for size in sizes:
            found.append(area[place : place + size] if area else b"")
            place += size
        return found

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._area, os.fstat(self._area).st_size)
        return self._map


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, pipe: SharedPipe, arrays: list[Array]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._pipe, self._arrays = pipe, arrays

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not Array or len(thing.data) < _WORTH:
            return NotImplemented
        number, there = self._pipe._number(thing) if self._pipe._asks else (0, False)
        if there:
            return _kept, (number,)
        self._arrays.append(thing)
        return _new, (number, thing.dtype, thing.shape, thing.stype)


# An unpickler calls these, in the thread that receives.
_receiving = threading.local()


def _kept(number: int) -> Array:
    pipe: SharedPipe = _receiving.pipe
    return pipe._kept[number]


def _new(number: int, dtype: str, shape: tuple[int, ...], stype: str) -> Array:
    pipe: SharedPipe = _receiving.pipe
    array = Array(dtype, shape, stype, next(_receiving.contents))
    if number:
        pipe._kept[number] = array
    return array
