"""A file of models, one in each row: the clients' personal models on the server."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import operator
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from tepal.exchange.layout import Arrays, Entry, Names
from tepal.exchange.parts import DIGEST_BYTES
from tepal.host.files import sync_folder
from tepal.strategies.method import MethodError, ServerModel, parameters_of

_GROWTH = 1 << 28, 64  # bytes and rows that the file grows by at a time, whichever is less, and at least one row

_KIND = "blake3:"  # before the digits of a digest; those of earlier versions, of SHA-256, have nothing before them

_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # by this file system, for reserving room


class ModelStore:
    """Rows of `width` numbers in a file, read through a memory map.

    A row lies in a slot, 0, 1, … in the order of the file, which has no header. `write` takes a free slot and returns
    it; nothing else changes a row. `keep` says which slots are in use, and thereby frees all others. Of a file that
    was there before, all slots are in use until the first `keep`.

    The memory is the operating system's file cache, which it takes back when it needs room: the process's own
    (anonymous) memory does not grow with the number of rows. Rows are written with `pwrite` and only read through the
    map. So a full disk is an OSError and never the signal SIGBUS, which a store into a map would get, and the process
    has no changed pages mapped.

    Rows are known to be on disk after `flush` alone. The file has no digests: a caller that keeps slots across a
    restart must keep their `digest` as well, and compare. One process and one thread at a time.
    """

    def __init__(
        self, path: Path | None, width: int, dtype: str | np.dtype = "float32", *, folder: Path | None = None
    ) -> None:
        """Open a file or make it, with the folders above it.

        Args:
            path: the file. None: an unnamed file, which is removed when it is closed or the process ends.
            width: numbers in a row, at least 1.
            dtype: of all rows; bool, integer or floating-point.
            folder: of an unnamed file; None: the folder for temporary files.

        A part of a row at the end of the file, left by an interrupted growth, is not a slot; the next growth completes
        it. Opening a file does not change it.

        Raises:
            ValueError: a width or dtype out of range.
            OSError: a file that cannot be opened or made.
        """
        if width < 1:
            raise ValueError(f"width is {width}; a row has at least 1 number")
        self.width = width
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "biuf" or not self.dtype.isnative:
            raise ValueError(f"dtype is {self.dtype}; it must be bool, integer or floating-point, in native byte order")
        self._row_bytes = width * self.dtype.itemsize
        self._file: BinaryIO
        if path is None:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".tepal-", buffering=0)  # noqa: SIM115
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(handle, "r+b", buffering=0)
        self._folder = None if path is None else path.parent
        self._free: list[int] = []  # a heap: the first free slot is taken, so that the file stays short
        self._map_file()

    def write(self, values: Iterable[np.ndarray]) -> int:
        """Write one model into a free slot.

        Args:
            values: 1-D pieces that together have `width` numbers, of any dtypes; one piece at a time is in memory.
                Each number must be one that the store's dtype has.

        Returns:
            The slot, which is in use from now on.

        Raises:
            ValueError: too many or too few numbers, a piece that is not 1-D, a number that the dtype does not have.
            OSError: the disk is full, or cannot be written. After any error the slot is free as before.
        """
        if not self._free:
            self._grow()
        slot = self._free[0]
        written = 0
        for piece in values:
            if piece.ndim != 1:
                raise ValueError(f"a piece of a model has the shape {piece.shape}; it must be 1-D")
            if written + piece.size > self.width:
                raise ValueError(f"a model has {written + piece.size} numbers or more; a row has {self.width}")
            offset = slot * self._row_bytes + written * self.dtype.itemsize
            write_at(self._file.fileno(), offset, self._cast(piece, written))
            written += piece.size
        if written != self.width:
            raise ValueError(f"a model has {written} numbers; a row has {self.width}")
        heapq.heappop(self._free)
        return slot

    def row(self, slot: int) -> np.memmap:
        """The model in a slot, (width,), read-only.

        It stays valid whatever becomes of the store, but shows what is in the slot: when the slot was freed and
        written again, the new model. Raises ValueError for a slot out of range.
        """
        view: np.memmap = self._map[self._slots([slot])[0]]
        return view

    def rows(self, slots: Iterable[int]) -> StoredModels:
        """The models in these slots, in this order, as `tepal.strategies.mixing.Models`.

        Like `row`, it stays valid when the store grows. Raises ValueError for a slot out of range.
        """
        return StoredModels(self._map, self._slots(slots))

    def keep(self, slots: Iterable[int]) -> None:
        """Free all slots but these.

        `slots` must name every slot that any state refers to that the caller may go back to, such as a checkpoint:
        the others are written over. Raises ValueError for a slot out of range.
        """
        kept = set(self._slots(slots))
        self._free = [slot for slot in range(len(self._map)) if slot not in kept]

    def digest(self, slot: int) -> str:
        """`blake3:` and 32 hexadecimal digits of the row's bytes. ValueError: no such slot."""
        return _KIND + blake3(self._bytes(slot)).hexdigest(DIGEST_BYTES)

    def has_digest(self, slot: int, digest: str) -> bool:
        """Whether this is the row's `digest`, or the one that earlier versions gave it. ValueError: no such slot."""
        if digest.startswith(_KIND):
            return self.digest(slot) == digest
        return hashlib.sha256(self._bytes(slot)).hexdigest()[: 2 * DIGEST_BYTES] == digest

    def _bytes(self, slot: int) -> memoryview:
        return memoryview(self.row(slot).view(np.uint8))  # type: ignore[arg-type]

    def flush(self) -> None:
        """Wait until the disk has everything that was written. Raises OSError."""
        # Nothing is written through the map, so there is nothing in it to synchronise.
        os.fsync(self._file.fileno())
        if self._folder is not None:
            sync_folder(self._folder)

    def close(self) -> None:
        """Close the file. Rows that were handed out stay valid; what was not flushed gets to the disk in time."""
        self._file.close()

    def __len__(self) -> int:
        """How many slots there are, free or not."""
        return len(self._map)

    def _slots(self, slots: Iterable[int]) -> list[int]:
        chosen = [operator.index(slot) for slot in slots]
        for slot in chosen:
            if not 0 <= slot < len(self._map):
                raise ValueError(f"slot {slot} is out of range; the store has {len(self._map)}, from 0 on")
        return chosen

    def _map_file(self) -> None:
        slots = os.fstat(self._file.fileno()).st_size // self._row_bytes
        # Views keep the map that they were made from: a map is never resized, a larger one takes its place.
        self._map: np.ndarray = (
            np.memmap(self._file, self.dtype, "r", shape=(slots, self.width))
            if slots
            else np.empty((0, self.width), self.dtype)  # nothing cannot be mapped
        )

    def _grow(self) -> None:
        before = os.fstat(self._file.fileno()).st_size
        slots = len(self._map)
        step = max(1, min(_GROWTH[0] // self._row_bytes, _GROWTH[1]))
        try:
            _reserve(self._file.fileno(), before, (slots + step) * self._row_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)  # give back what part of it was reserved
            raise
        self._map_file()
        self._free = list(range(slots, slots + step))

    def _cast(self, piece: np.ndarray, before: int) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(piece, self.dtype)
            if not np.can_cast(piece.dtype, self.dtype, "safe"):
                same = (values.astype(piece.dtype) == piece) | (piece != piece)
                if not same.all():
                    at = int(np.argmin(same))
                    found = f"number {before + at} of a model is {piece[at]!r}"
                    raise ValueError(f"{found}, which {self.dtype} cannot represent")
        return values


class StoredModels:
    """Some rows of a `ModelStore`, as `tepal.strategies.mixing.Models`."""

    def __init__(self, rows: np.ndarray, slots: list[int]) -> None:
        self._rows = np.asarray(rows)  # slices of a memmap are slow to make
        self._slots = slots
        self.shape: tuple[int, int] = (len(slots), rows.shape[1])

    def block(self, start: int, stop: int) -> np.ndarray:
        """Columns start … stop−1, (n, stop − start) contiguous: a copy, n·(stop − start)·itemsize bytes of memory."""
        block = np.empty((len(self._slots), stop - start), self._rows.dtype)
        for k, slot in enumerate(self._slots):
            block[k] = self._rows[slot, start:stop]
        return block


@dataclass(frozen=True)
class RowLayout:
    """How a model lies in a row of a store: its parameters, then its floating-point buffers."""

    entries: tuple[Entry, ...]
    counted: int
    """Numbers of parameters, which come first."""
    width: int
    dtype: np.dtype
    own: Names
    """Entries that are no floating-point numbers, such as counters: they lie in no row."""

    @property
    def names(self) -> Names:
        return tuple(entry.name for entry in self.entries)

    @staticmethod
    def of(model: ServerModel, *, needed_for: str) -> RowLayout:
        """The rows of a model. Raises MethodError, which says `needed_for` what, for one without parameters."""
        parameters = [model.layout.by_name[name] for name in parameters_of(model)]
        if not parameters:
            raise MethodError(f"{model.name} has no floating-point parameters, but {needed_for} them")
        floating = [entry for entry in model.layout.entries if np.dtype(entry.dtype).kind == "f"]
        entries = (*parameters, *(entry for entry in floating if entry not in parameters))
        return RowLayout(
            entries=entries,
            counted=sum(entry.size for entry in parameters),
            width=sum(entry.size for entry in entries),
            dtype=np.result_type(np.float32, *(np.dtype(entry.dtype) for entry in entries)),
            own=tuple(entry.name for entry in model.layout.entries if entry not in floating),
        )

    def pieces(self, entries: Arrays) -> Iterator[np.ndarray]:
        """What `ModelStore.write` takes of a model: one 1-D piece for each entry of the row."""
        return (entries[entry.name].reshape(-1) for entry in self.entries)

    def entries_of(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """The entries in a row, or in the beginning of one: views where the row has their dtype."""
        row = np.asarray(row)
        found: dict[str, np.ndarray] = {}
        start = 0
        for entry in self.entries:
            if start + entry.size > len(row):
                break
            found[entry.name] = row[start : start + entry.size].astype(entry.dtype, copy=False).reshape(entry.shape)
            start += entry.size
        return found


def write_at(handle: int, offset: int, values: np.ndarray) -> None:
    """Write all of an array at an offset of an open file. Raises OSError."""
    left = memoryview(np.ascontiguousarray(values).view(np.uint8))  # type: ignore[arg-type]
    while left:
        written = os.pwrite(handle, left, offset)
        left, offset = left[written:], offset + written


def _reserve(handle: int, before: int, size: int) -> None:
    """Make a file of `before` bytes `size` bytes long, with room on the disk for all of them where that can be had."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, before, size - before)
            return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    os.ftruncate(handle, size)  # a full disk then shows at the write
