"""The parts of a round's clients in a file, read by blocks of columns."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tepal.strategies.aggregate import check_part
from tepal.strategies.personal.store import write_at
from tepal.strategies.scaled import as_returned

_PIECE = 1 << 23  # bytes of all clients' values that a thread reads at a time
_LEAST = 1 << 10  # columns, at least: shorter reads take longer than what they read is worth


@dataclass
class StoredEntry:
    """One entry: where the file has the values of each client that sent it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    clients: list[int] = field(default_factory=list)
    """Numbers of the clients that sent it, in the order of the parts."""
    offsets: list[int] = field(default_factory=list)
    """Where their values begin in the file, in bytes."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


Piece = tuple[str, int, int]
"""(entry, first column, last column + 1)."""


class PartStore:
    """Parts of clients, appended to an unnamed file that is removed when it is closed or the process ends.

    Args:
        folder: of the file; it is made if it does not exist. None: the folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._end = 0  # bytes of the file that belong to parts
        self.entries: dict[str, StoredEntry] = {}
        self.weights: list[float] = []

    def prepare(self, part: Mapping[str, np.ndarray], weight: float) -> Callable[[], None]:
        """Write a part at the end of the file, and return the function that adds it. See `Mean.prepare`."""
        returned = as_returned(part)
        check_part(returned, weight, {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()})
        handle, offset = self._opened().fileno(), self._end
        offsets = {}
        try:
            for name, array in part.items():
                if array.size:
                    write_at(handle, offset, array.reshape(-1))
                offsets[name] = offset
                offset += array.nbytes
        except OSError:
            os.ftruncate(handle, self._end)  # the disk is full: the others need the space
            raise

        def add() -> None:
            for name, array in returned.items():
                entry = self.entries.setdefault(name, StoredEntry(array.shape, array.dtype))
                entry.clients.append(len(self.weights))
                entry.offsets.append(offsets[name])
            self.weights.append(float(weight))
            self._end = offset

        return add

    def pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """Pieces that cover these entries, of about 8 MB for all clients together."""
        for name in names:
            entry = self.entries[name]
            columns = max(_PIECE // (len(entry.clients) * entry.dtype.itemsize), _LEAST)
            for start in range(0, entry.size, columns):
                yield name, start, min(start + columns, entry.size)

    def read(self, piece: Piece, rows: Sequence[int] | None = None) -> np.ndarray:
        """Values of a piece, (clients, columns), in the order of the entry's clients.

        Args:
            piece: of `pieces`.
            rows: the clients, by their place among those that sent the entry; default: all.

        Raises:
            OSError: the file cannot be read.
        """
        name, start, stop = piece
        entry = self.entries[name]
        offsets = entry.offsets if rows is None else [entry.offsets[row] for row in rows]
        values = np.empty((len(offsets), stop - start), entry.dtype)
        for row, offset in zip(values, offsets, strict=True):
            view, at = memoryview(row.view(np.uint8)), offset + start * entry.dtype.itemsize  # type: ignore[arg-type]
            while view:
                count = os.preadv(self._opened().fileno(), [view], at)
                if not count:
                    raise OSError("the file of the clients' parts ends before their values do")
                view, at = view[count:], at + count
        return values

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of the values of these entries, of all clients."""
        return sum(
            self.entries[name].size * self.entries[name].dtype.itemsize * len(self.entries[name].clients)
            for name in names
        )

    def close(self) -> None:
        """Close the file, which removes it."""
        if self._file is not None:
            self._file.close()

    def _opened(self) -> BinaryIO:
        # Made with the first part: if the disk is full, that reply is lost, but not the run.
        if self._file is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".parts-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        return self._file


class StoredMean:
    """Base class of the robust means: parts are stored in a file, and subclasses define `_compute`.

    Args:
        folder: of the file, see `PartStore`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._store = PartStore(folder)

    def add(self, part: Mapping[str, np.ndarray], weight: float) -> None:
        """Append the entries of one client to the file. See `Mean.add`."""
        self.prepare(part, weight)()

    def prepare(self, part: Mapping[str, np.ndarray], weight: float) -> Callable[[], None]:
        """See `Mean.prepare`."""
        return self._store.prepare(part, weight)

    def result(self) -> dict[str, np.ndarray]:
        """Entry name → mean, read-only, in the dtype of the parts. Call it once, after the last part.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            result = self._compute(self._store)
        finally:
            self._store.close()
        for array in result.values():
            array.flags.writeable = False
        return result

    def _compute(self, store: PartStore) -> dict[str, np.ndarray]:
        raise NotImplementedError
