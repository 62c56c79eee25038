"""Requests and replies as files, between a process and workers to which something else carries the files.

    <folder>/<worker>/requests/<number>    what is asked; removed when its reply has been read
    <folder>/<worker>/arrays/<number>      the bytes of an Array of requests; removed when the Array is freed
    <folder>/<worker>/replies/<number>     what the worker answers; it removes its copy with the request
    <folder>/<worker>/away                 while the worker has no machine; with a text: why it never has one again
    <folder>/<worker>/end                  the worker is to end

`Workers` asks, `answer_all` is a worker. An Array that is asked again, such as the part of a model that all clients
receive, is written once for each worker.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Array

from tepal.host.files import replacing

REQUESTS, ARRAYS, REPLIES, AWAY, END = "requests", "arrays", "replies", "away", "end"

_WORTH = 1 << 14  # bytes of an Array from which it has a file of its own
_PAUSES = 0.002, 0.05  # seconds between two looks at a folder: at first, and at most


class WorkerEnded(RuntimeError):
    """A worker has ended while it had the request, or no worker is left."""


class Workers:
    """Asks workers. Several threads may ask at the same time.

    Args:
        folder: has the workers' folders, or is made.
        count: the number of workers: 0 … count - 1.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self._numbers = itertools.count()
        self._arrays = _SentArrays(folder)
        self._pending = defaultdict[int, set[int]](set)  # worker → numbers of requests
        self._at_fault = dict[int, int]()  # worker that ended for good → the request that it then had
        self._lock = threading.Lock()
        for worker in range(count):
            for name in (REQUESTS, ARRAYS, REPLIES):
                (folder / str(worker) / name).mkdir(parents=True, exist_ok=True)

    def ask(self, key: int, thing: object) -> Any:
        """Ask the worker of a key, and wait for its reply.

        The worker is always the same one, so that it can keep what belongs to the key. While it is away, the request
        goes to another one.

        Args:
            key: 0 or more; the keys are divided evenly.
            thing: what to ask.

        Raises WorkerEnded if a worker ended for good with this request, which was the first of those that it had.
        """
        while True:
            worker = self._worker(key)
            with self._lock:
                number = next(self._numbers)
                self._pending[worker].add(number)
            try:
                self._write(worker, number, thing)
                reply = self._reply(worker, number)
            finally:
                for name in (REQUESTS, REPLIES):
                    (self._folder / str(worker) / name / str(number)).unlink(missing_ok=True)
                with self._lock:
                    self._pending[worker].discard(number)
            if reply is not None:
                return reply[0]

    def _worker(self, key: int) -> int:
        """Wait for a worker that is not away: that of the key, or else the next one."""
        while True:
            reasons = list[str]()
            for step in range(self._count):
                worker = (key + step) % self._count
                if (reason := self._away(worker)) is None:
                    return worker
                reasons.append(reason)
            if all(reasons):
                raise WorkerEnded(f"no worker is left: {reasons[0]}")
            time.sleep(_PAUSES[1])

    def _away(self, worker: int) -> str | None:
        """Why a worker never has a machine again; "" if it may have one; None if it has one."""
        try:
            return (self._folder / str(worker) / AWAY).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _write(self, worker: int, number: int, thing: object) -> None:
        content = io.BytesIO()
        _Pickler(content, lambda array: self._arrays.number_for(worker, array)).dump(thing)
        with replacing(self._folder / str(worker) / REQUESTS / str(number)) as partial:
            partial.write_bytes(content.getbuffer())

    def _reply(self, worker: int, number: int) -> tuple[Any] | None:
        """Wait for the reply to a request; None if the worker went away. Raises WorkerEnded."""
        path, pauses = self._folder / str(worker) / REPLIES / str(number), _Pauses()
        while True:
            away = self._away(worker)  # before it is looked for: a reply may be there all the same
            with suppress(FileNotFoundError):
                return (pickle.loads(path.read_bytes()),)
            if away is None:
                pauses.wait()
                continue
            with self._lock:
                if away and self._at_fault.setdefault(worker, min(self._pending[worker])) == number:
                    raise WorkerEnded(away)
            return None


class _SentArrays:
    """The files of Arrays of requests, which must not be changed in place while anything refers to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._sent = dict[int, tuple[weakref.ref[Array], int, set[int]]]()  # by id: the Array, its number, workers
        self._lock = threading.RLock()  # an Array may be freed in any line, also of this class

    def number_for(self, worker: int, array: Array) -> int:
        """The number of an Array's file, which is written if this worker does not have it yet."""
        key = id(array)  # another object may have it when this one is freed, which removes the entry
        with self._lock:
            if key not in self._sent:
                number, having = next(self._numbers), set[int]()
                self._sent[key] = weakref.ref(array, lambda _: self._forget(key, number, having)), number, having
            _, number, having = self._sent[key]
            if worker not in having:
                with replacing(self._file(worker, number)) as partial:
                    if having:  # the same content
                        os.link(self._file(next(iter(having)), number), partial)
                    else:
                        partial.write_bytes(array.data)
                having.add(worker)
            return number

    def _forget(self, key: int, number: int, having: set[int]) -> None:
        with self._lock:
            del self._sent[key]
        for worker in having:
            self._file(worker, number).unlink(missing_ok=True)

    def _file(self, worker: int, number: int) -> Path:
        return self._folder / str(worker) / ARRAYS / str(number)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number_of: Callable[[Array], int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._number_of = number_of

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not Array or len(thing.data) < _WORTH:
            return NotImplemented
        return _array, (self._number_of(thing), thing.dtype, thing.shape, thing.stype)


# --- a worker -------------------------------------------------------------------------------------------------------

_answering = threading.local()


def answer_all(folder: Path, answer: Callable[[Any], object]) -> None:
    """Answer the requests in a worker's folder, in the order of their numbers, until it is to end or its parent ends.

    Args:
        folder: the worker's. Its files are there for as long as they are on the other side.
        answer: function of what is asked; what it returns is the reply.
    """
    requests, replies = folder / REQUESTS, folder / REPLIES
    for each in (requests, replies):
        each.mkdir(parents=True, exist_ok=True)
    answered, pauses, parent = set[int](), _Pauses(), os.getppid()
    _answering.kept, _answering.folder = dict[int, Array](), folder / ARRAYS
    while not (folder / END).exists() and os.getppid() == parent:
        waiting = _numbers_in(requests)
        for number in [number for number in answered if number not in waiting]:
            (replies / str(number)).unlink(missing_ok=True)
            answered.remove(number)
        due = next((number for number in waiting if number not in answered), None)
        if due is None:
            pauses.wait()
            continue
        pauses = _Pauses()
        with suppress(FileNotFoundError):  # it was taken back
            asked = pickle.loads((requests / str(due)).read_bytes())
            reply = answer(asked)
            del asked
            with replacing(replies / str(due)) as partial, partial.open("wb") as file:
                pickle.dump(reply, file, pickle.HIGHEST_PROTOCOL)
            del reply
            answered.add(due)
        for gone in [each for each in _answering.kept if not (_answering.folder / str(each)).exists()]:
            del _answering.kept[gone]


def _numbers_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _array(number: int, dtype: str, shape: tuple[int, ...], stype: str) -> Array:
    """An Array of a request: an unpickler calls it, in the thread of `answer_all`."""
    kept: dict[int, Array] = _answering.kept
    if number not in kept:
        kept[number] = Array(dtype, shape, stype, (_answering.folder / str(number)).read_bytes())
    return kept[number]


class _Pauses:
    """Pauses that become longer."""

    def __init__(self) -> None:
        self._seconds = _PAUSES[0]

    def wait(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(1.5 * self._seconds, _PAUSES[1])
