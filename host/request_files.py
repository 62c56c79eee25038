"""Requests and replies as files, between a process and workers to which something else carries the files.

    <folder>/<worker>/requests/<number>    what is asked; removed when its reply has been read
    <folder>/<worker>/arrays/<number>      the bytes of an Array of requests; removed when the Array is freed
    <folder>/<worker>/replies/<number>     what the worker answers; it removes its copy with the request
    <folder>/<worker>/ready                written by the worker; removed while it has no machine
    <folder>/<worker>/gone                 why it never has one again
    <folder>/<worker>/crashed              besides, if its process ended by itself: by its first request, it is assumed
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Array

from tepal.host.files import replacing

REQUESTS, ARRAYS, REPLIES = "requests", "arrays", "replies"
READY, GONE, CRASHED, END = "ready", "gone", "crashed", "end"

_WORTH = 1 << 14  # bytes of an Array from which it has a file of its own
_PAUSE = 0.01  # least seconds between two looks at folders
_LONG_PAUSE = 0.5  # the same while no worker is ready
_SHARE = 0.1  # greatest share of a core's time for these looks


class WorkerEnded(RuntimeError):
    """A worker has ended while it had the request, or no worker is left."""


class Workers:
    """Asks workers. Several threads may ask at the same time.

    Args:
        folder: has the workers' folders, or is made.
        count: the number of workers: 0 … count - 1.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._workers = [_Worker(folder / str(number)) for number in range(count)]
        self._arrays = _SentArrays()
        self._looking, self._begun = threading.Lock(), False

    def ask(self, key: int, thing: object) -> Any:
        """Ask the worker of a key, and wait for its reply.

        The worker is always the same one, so that it can keep what belongs to the key. While it is not ready, the
        request goes to another one, or waits for one.

        Args:
            key: 0 or more; the keys are divided evenly.
            thing: what to ask.

        Raises WorkerEnded if a worker crashed with this request, which was the first of those that it had.
        """
        while True:
            worker = self._worker_of(key)
            number, answered = worker.ask(thing, self._arrays)
            try:
                self._begin_to_look()
                while True:
                    answered.wait()
                    answered.clear()
                    if (reply := worker.reply(number)) is not None:
                        return reply[0]
                    if not worker.is_ready:  # else it has another machine already, which is sent the request
                        break
            finally:
                worker.take_back(number)

    def _worker_of(self, key: int) -> _Worker:
        """Wait for a worker that is ready: that of the key, or else one of the others."""
        while True:
            if (own := self._workers[key % len(self._workers)]).is_ready:
                return own
            if ready := [worker for worker in self._workers if worker.is_ready]:
                return ready[key % len(ready)]
            if all(reasons := [worker.why_gone() for worker in self._workers]):
                raise WorkerEnded(f"no worker is left: {reasons[0]}")
            time.sleep(_LONG_PAUSE)

    def _begin_to_look(self) -> None:
        with self._looking:
            if not self._begun:
                self._begun = True
                threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        """Wake those that wait for a reply when it is there, or the worker is not ready. One thread does it for all."""
        while True:
            with self._looking:
                if not any(worker.is_asked for worker in self._workers):
                    self._begun = False
                    return
            begun = time.monotonic()
            for worker in self._workers:
                with suppress(OSError):
                    worker.look()
            time.sleep(max(_PAUSE, (time.monotonic() - begun) / _SHARE))


class _Worker:
    """The folder of a worker, and the requests that it has not answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = dict[int, threading.Event]()
        self._numbers = itertools.count()
        self._at_fault: int | None = None  # the request with which it crashed
        self._writing, self._changing = threading.Lock(), threading.Lock()
        for name in (REQUESTS, ARRAYS, REPLIES):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def ask(self, thing: object, arrays: _SentArrays) -> tuple[int, threading.Event]:
        """Write a request; return its number, and what is set when the reply is there or the worker is not ready."""
        content, answered = io.BytesIO(), threading.Event()
        with self._writing:  # in the order of their numbers, which is that of the answers
            _Pickler(content, lambda array: arrays.number_for(self.folder / ARRAYS, array)).dump(thing)
            number = next(self._numbers)
            with replacing(self._file(REQUESTS, number)) as partial:
                partial.write_bytes(content.getbuffer())
            with self._changing:
                self._asked[number] = answered
        return number, answered

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def look(self) -> None:
        """Raises OSError."""
        if not self._asked:
            return
        ready, there = self.is_ready, {*os.listdir(self.folder / REPLIES)}
        with self._changing:
            for number, answered in self._asked.items():
                if not ready or _name(number) in there:
                    answered.set()

    def reply(self, number: int) -> tuple[Any] | None:
        """The reply; None if there is none. Raises WorkerEnded if the worker has crashed with this request."""
        with suppress(FileNotFoundError):
            return (pickle.loads(self._file(REPLIES, number).read_bytes()),)
        if (self.folder / CRASHED).exists():
            with self._changing:
                if self._at_fault is None:
                    self._at_fault = min(each for each in self._asked if not self._file(REPLIES, each).exists())
            if self._at_fault == number:
                raise WorkerEnded(self.why_gone())
        return None

    def take_back(self, number: int) -> None:
        with self._changing:
            del self._asked[number]
        for name in (REQUESTS, REPLIES):
            self._file(name, number).unlink(missing_ok=True)

    @property
    def is_ready(self) -> bool:
        return (self.folder / READY).exists()

    def why_gone(self) -> str:
        """Why it never is ready again; "" if it may be."""
        with suppress(FileNotFoundError):
            return (self.folder / GONE).read_text(encoding="utf-8")
        return ""

    def _file(self, name: str, number: int) -> Path:
        return self.folder / name / _name(number)


def _name(number: int) -> str:
    """The name of a file, in the order of the numbers."""
    return f"{number:012d}"


class _SentArrays:
    """The files of Arrays of requests, which must not be changed in place while anything refers to them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._sent = dict[int, tuple[weakref.ref[Array], int, set[Path]]]()  # by id: the Array, its number, its files
        self._lock = threading.RLock()  # an Array may be freed in any line, also of this class

    def number_for(self, folder: Path, array: Array) -> int:
        """The number of an Array's file, which is written if this folder does not have it yet."""
        key = id(array)  # another object may have it when this one is freed, which removes the entry
        with self._lock:
            if key not in self._sent:
                number, files = next(self._numbers), set[Path]()
                self._sent[key] = weakref.ref(array, lambda _: self._forget(key, files)), number, files
            _, number, files = self._sent[key]
            if (file := folder / _name(number)) not in files:
                with replacing(file) as partial:
                    if files:  # the same content
                        os.link(next(iter(files)), partial)
                    else:
                        partial.write_bytes(array.data)
                files.add(file)
            return number

    def _forget(self, key: int, files: set[Path]) -> None:
        with self._lock:
            del self._sent[key]
        for file in files:
            file.unlink(missing_ok=True)


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
    """Answer the requests in a worker's folder, the lowest number first, until it is to end or its parent ends.

    Args:
        folder: the worker's. Its files are there for as long as they are on the other side.
        answer: function of what is asked; what it returns is the reply.
    """
    requests, replies = folder / REQUESTS, folder / REPLIES
    for each in (requests, replies):
        each.mkdir(parents=True, exist_ok=True)
    answered, parent = set[str](), os.getppid()  # of all, because one may come again after a cut of the network
    with replacing(folder / READY) as partial:
        partial.touch()
    _answering.kept, _answering.folder = dict[int, Array](), folder / ARRAYS
    while not (folder / END).exists() and os.getppid() == parent:
        waiting = sorted(name for name in os.listdir(requests) if name.isdecimal())
        for name in {name for name in os.listdir(replies) if name.isdecimal()}.difference(waiting):
            (replies / name).unlink(missing_ok=True)
        due = next((name for name in waiting if name not in answered), None)
        asked = None if due is None else _read(requests / due)
        if due is None or asked is None:
            time.sleep(_PAUSE)
            continue
        reply = answer(asked[0])
        del asked
        with replacing(replies / due) as partial, partial.open("wb") as file:
            pickle.dump(reply, file, pickle.HIGHEST_PROTOCOL)
        del reply
        answered.add(due)
        for gone in [each for each in _answering.kept if not (_answering.folder / _name(each)).exists()]:
            del _answering.kept[gone]


def _read(request: Path) -> tuple[Any] | None:
    """What is asked; None if the request, or an Array of it, was taken back."""
    with suppress(FileNotFoundError):
        return (pickle.loads(request.read_bytes()),)
    return None


def _array(number: int, dtype: str, shape: tuple[int, ...], stype: str) -> Array:
    """An Array of a request: an unpickler calls it, in the thread of `answer_all`."""
    kept: dict[int, Array] = _answering.kept
    if number not in kept:
        kept[number] = Array(dtype, shape, stype, (_answering.folder / _name(number)).read_bytes())
    return kept[number]
