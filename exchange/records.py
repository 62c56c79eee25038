"""ArrayRecords of arrays in memory, and the values of an Array, both without a copy.

Flower itself converts an array to `.npy` bytes and back, which makes four copies, each with the time and memory of one
model, even if nothing leaves the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from io import BytesIO
from typing import Any

import flwr.app
import numpy as np
from flwr.app import ArrayRecord
from flwr.common.constant import SType
from numpy.lib import format as npy

_text = cache(str)  # of a dtype, which NumPy writes slowly
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Array(flwr.app.Array):  # type: ignore[misc]
    """A Flower Array of a NumPy array that is not changed while it is in use. Its bytes are made when they are read.

    The class has the name of Flower's, which Flower writes into messages; a copied or pickled one is Flower's class.
    """

    values: np.ndarray

    def __init__(self, values: np.ndarray) -> None:
        self.__dict__.update(dtype=_text(values.dtype), shape=values.shape, stype=SType.NUMPY, values=values)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return flwr.app.Array.from_numpy_ndarray(self.values).data

    def numpy(self) -> np.ndarray:
        """A copy, which may be changed."""
        return np.array(self.values, order="C")

    def __reduce__(self) -> tuple[Any, ...]:
        return flwr.app.Array, (self.dtype, self.shape, self.stype, self.data)


def record_of(values: Mapping[str, np.ndarray]) -> ArrayRecord:
    """An ArrayRecord of arrays that are not changed while it is in use."""
    record = ArrayRecord()
    for name, array in values.items():  # ArrayRecord({…}) would make Flower's Arrays, with bytes
        record[name] = Array(np.asarray(array))
    return record


def values_of(array: flwr.app.Array) -> np.ndarray:
    """The values of an Array, which must not be changed. Raises as `Array.numpy`."""
    if isinstance(array, Array):
        return array.values
    if array.stype == SType.NUMPY:
        file = BytesIO(array.data)  # shares the bytes
        if (read := _HEADERS.get(npy.read_magic(file))) is not None:
            shape, fortran_order, dtype = read(file)
            count = int(np.prod(shape, dtype=np.int64))
            if not dtype.hasobject and len(array.data) - file.tell() >= count * dtype.itemsize:
                flat = np.frombuffer(array.data, dtype, count, file.tell())
                return flat.reshape(shape[::-1]).T if fortran_order else flat.reshape(shape)
    return array.numpy()
