"""Large arrays of .npz files that stay on disk: only the rows that a client needs are read.

A .npz file that was written by `numpy.savez` has its arrays uncompressed, one after another, so that the place of each
row is known. The simulation of many clients touches few of them: of 100,000 clients only those of the cohorts.
"""

from __future__ import annotations

import os
import struct
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tepal.training.data.config import DataError

LARGE = 2**29
"""Bytes of an array from which it stays on disk."""

_LOCAL_HEADER = 30  # bytes of a file's header in a .zip, before its name and its further fields
_MOST = 2**30  # bytes that are read at once; Linux reads at most 2 GiB


class StoredArray:
    """An array of bytes in a .npz file, (n, …), of which rows are read when they are indexed.

    Args:
        path: the file, which must stay as it is.
        offset: where the array begins in it.
        shape: (n, …), as it is stored.
        channels: where an image's channels are in the file: "first", "last", or "none" for one that is not stored. They
            are read as (n, C, H, W).
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], channels: str = "first") -> None:
        self._path, self._offset, self._stored, self._channels = path, offset, shape, channels
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._state = self._now()
        self.shape: tuple[int, ...] = (shape[0], *self._viewed(np.empty((0, *shape[1:]), np.uint8)).shape[1:])
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def with_channels(self, where: str) -> StoredArray:
        """Return this array, read as channel-first images of those whose channels are "last", or that have "none"."""
        return StoredArray(self._path, self._offset, self._stored, where)

    def __getitem__(self, rows: ArrayLike | slice) -> NDArray[np.uint8]:
        """Return the rows with these numbers. Raises DataError if the file has been changed."""
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else self._numbers(np.asarray(rows, np.int64))
        nbytes = self.size // max(len(self), 1)
        read = np.empty((len(numbers), nbytes), np.uint8)
        ends = np.flatnonzero(np.diff(numbers, append=-1) != 1) + 1  # of rows that follow each other in the file
        begin = 0
        for end in ends.tolist():
            self._read(read[begin:end].reshape(-1).data, self._offset + int(numbers[begin]) * nbytes)
            begin = end
        if self._now() != self._state:
            self._changed()
        return self._viewed(read.reshape(len(numbers), *self._stored[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(rows) and not (-len(self) <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"rows from {rows.min()} to {rows.max()} of {len(self)}")
        return np.where(rows < 0, rows + len(self), rows)

    def _read(self, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(self._file, [into[:_MOST]], offset)
            if not count:
                self._changed()
            into, offset = into[count:], offset + count

    def _viewed(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._channels == "none":
            return rows[:, None]
        return np.moveaxis(rows, -1, 1) if self._channels == "last" else rows

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._file)
        return state.st_mtime_ns, state.st_size

    def _changed(self) -> None:
        raise DataError(
            f"{self._path}: the file was changed while it is in use: its images are read from it as clients need them; "
            "start the run again, and write another version of the data to another file"
        )


def stored_array(path: Path, archive: zipfile.ZipFile, name: str) -> StoredArray | None:
    """Return an array of a .npz file without reading it; None if it is small, compressed, or not of bytes by rows.

    The archive's checksum of it is not verified. Raises OSError, ValueError and BadZipFile for a damaged file.
    """
    member = archive.getinfo(f"{name}.npy")
    if member.file_size < LARGE or member.compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name_and_extra: tuple[int, int] = struct.unpack("<26x2H", file.read(_LOCAL_HEADER))
        begin = member.header_offset + _LOCAL_HEADER + sum(name_and_extra)
        file.seek(begin)
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = header(file)
        offset = file.tell()
    rows = len(shape) > 1 and not by_columns and dtype == np.uint8
    if not rows or offset - begin + int(np.prod(shape)) != member.file_size:
        return None
    return StoredArray(path, offset, shape)
