"""Large arrays of .npz files that stay on disk: only the rows that a client needs are read.

A .npz file that was written by `numpy.savez` has its arrays uncompressed, one after another, so that the place of each
row is known. The simulation of many clients touches few of them: of 100,000 clients only those of the cohorts.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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
        path: the file, which must stay as it is. It is not mapped into memory: pages that were touched would count as
            memory of the process, and a file that is cut off would end it.
        offset: where the array begins in it.
        shape: (n, …), as it is stored.
        channels: where an image's channels are in the file: "first", "last", or "none" for one that is not stored. They
            are read as (n, C, H, W).
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], channels: str = "first") -> None:
        self._path, self._offset, self._stored, self._channels = path, offset, shape, channels
        self._state = _state(path.stat())
        self.shape: tuple[int, ...] = (shape[0], *self._viewed(np.empty((0, *shape[1:]), np.uint8)).shape[1:])
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def with_channels(self, where: str) -> StoredArray:
        """Return this array, read as channel-first images of those whose channels are "last", or that have "none"."""
        return StoredArray(self._path, self._offset, self._stored, where)

    def __getitem__(self, rows: ArrayLike | slice) -> NDArray[np.uint8]:
        """Return the rows of a slice, or those with these numbers (n,).

        Raises DataError if the file has been changed or replaced, TypeError for any other index.
        """
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else self._numbers(np.asarray(rows))
        nbytes = self.size // max(len(self), 1)
        read = np.empty((len(numbers), nbytes), np.uint8)
        ends = np.flatnonzero(np.diff(numbers, append=-1) != 1) + 1  # of rows that follow each other in the file
        begin = 0
        with self._opened() as file:
            for end in ends.tolist():
                self._read(file, read[begin:end].reshape(-1).data, self._offset + int(numbers[begin]) * nbytes)
                begin = end
            self._check(file)  # once more: it may have been changed meanwhile
        return self._viewed(read.reshape(len(numbers), *self._stored[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _numbers(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(f"rows are {rows.dtype} of shape {rows.shape}; give a slice, or whole numbers (n,)")
        if len(rows) and not (-len(self) <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"rows from {rows.min()} to {rows.max()} of {len(self)}")
        return np.where(rows < 0, rows + len(self), rows).astype(np.int64)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._changed() from None
        try:
            self._check(file)
            yield file
        finally:
            os.close(file)

    def _check(self, file: int) -> None:
        if _state(os.fstat(file)) != self._state:
            raise self._changed()

    def _read(self, file: int, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(file, [into[:_MOST]], offset)
            if not count:
                raise self._changed()
            into, offset = into[count:], offset + count

    def _viewed(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._channels == "none":
            return rows[:, None]
        return np.moveaxis(rows, -1, 1) if self._channels == "last" else rows

    def _changed(self) -> DataError:
        return DataError(
            f"{self._path}: the file was changed, replaced or removed while it is in use: its images are read from it "
            "as clients need them; start the run again, and give another version of the data another name"
        )


def _state(file: os.stat_result) -> tuple[int, ...]:
    """What is another one for a file that was changed or replaced."""
    return file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size


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
