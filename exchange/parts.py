"""Parts: the arrays of some entries, as they travel and as they are kept. One block of one tree is one part.

A part travels as **one** Flower `Array` of our own stype, because each `Array` of a message costs kilobytes and tens
of milliseconds whatever its size. Its bytes are the entries' own, little-endian and row-major, the widest dtypes
first, so that every entry lies aligned without padding and is read as a view. Nothing else is in it: a part's length
is the sum of its entries' `nbytes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flwr.app import Array

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import Tree

STYPE = "tepal.packed"

DIGEST_BYTES = 16

Shaped = tuple[str, str, tuple[int, ...]]
"""(name, dtype, shape) of an array in a packed part."""


def raw_bytes(array: np.ndarray) -> memoryview:
    """The array's elements, row-major, little-endian: a view where the array already lies so."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return memoryview(np.ascontiguousarray(little).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def digest(array: np.ndarray) -> bytes:
    """Identity of a value: 16 bytes of SHA-256 over dtype, shape and elements."""
    known = hashlib.sha256(f"{array.dtype.name}{array.shape}".encode())
    known.update(raw_bytes(array))
    return known.digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class Part:
    """Which values the named entries of one block have. `digests[k]` belongs to `names[k]`."""

    tree: Tree
    block: str
    names: Names
    digests: tuple[bytes, ...]

    @cached_property
    def id(self) -> str:
        """Content digest of the whole part, 32 hexadecimal digits: equal values have equal ids on every machine."""
        known = hashlib.sha256()
        for name, value in zip(self.names, self.digests, strict=True):
            known.update(name.encode() + b"\0" + value)
        return known.hexdigest()[: 2 * DIGEST_BYTES]

    @cached_property
    def digest_of(self) -> Mapping[str, bytes]:
        return dict(zip(self.names, self.digests, strict=True))


def packing_order(shaped: Iterable[Shaped]) -> list[Shaped]:
    """The order in which arrays lie in a packed part: wider dtypes first, else as given."""
    return sorted(shaped, key=lambda item: -np.dtype(item[1]).itemsize)


def pack(values: Arrays, names: Iterable[str]) -> Array:
    """Pack the named arrays into one Flower `Array` (uint8, one copy)."""
    order = packing_order((name, values[name].dtype.name, values[name].shape) for name in names)
    data = b"".join(raw_bytes(values[name]) for name, _, _ in order)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def unpack(array: Array, shaped: Iterable[Shaped]) -> dict[str, np.ndarray]:
    """Read-only views on a packed part. Raises ValueError when its length is not what the shapes say."""
    if array.stype != STYPE:
        raise ValueError(f"an Array of stype {array.stype!r} came where {STYPE!r} was expected")
    order = packing_order(shaped)
    counts = [int(np.prod(shape, dtype=np.int64)) for _, _, shape in order]
    expected = sum(count * np.dtype(dtype).itemsize for count, (_, dtype, _) in zip(counts, order, strict=True))
    if len(array.data) != expected:
        raise ValueError(f"a packed part has {len(array.data)} bytes, and its shapes say {expected}")
    values: dict[str, np.ndarray] = {}
    offset = 0
    for count, (name, dtype, shape) in zip(counts, order, strict=True):
        kind = np.dtype(dtype)
        flat = np.frombuffer(array.data, kind.newbyteorder("<"), count, offset)
        values[name] = flat.astype(kind, copy=False).reshape(shape)
        offset += count * kind.itemsize
    return values
