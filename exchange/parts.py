"""Parts: the arrays of some entries, as they travel and as they are kept. One block of one tree is one part.

A part travels as **one** Flower `Array` of our own stype, because each `Array` of a message costs kilobytes and tens
of milliseconds whatever its size. Its bytes are the entries' own, little-endian and row-major, the widest dtypes
first, so that every entry lies aligned without padding and is read as a view. Nothing else is in it: a part's length
is the sum of its entries' `nbytes`, where it is not encoded (see `encodings`).
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flwr.app import Array

from tepal.exchange.encodings import PLAIN, Codec, EncodingError, Wire
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import Tree
from tepal.exchange.threads import in_threads

STYPE = "tepal.packed"
_KNOWN = "_tepal_values"

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


class Digests:
    """Digests of arrays that are never changed in place, such as those of a method's state, so that identity stands for
    value and each is hashed once. Arrays are held weakly: what was made for one client is gone when it has been sent.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[np.ndarray], bytes]] = {}

    def of(self, array: np.ndarray) -> bytes:
        """The array's digest."""
        return self.find(array) or self.know(array, digest(array))

    def find(self, array: np.ndarray) -> bytes | None:
        """The array's digest where it is known."""
        found = self._known.get(id(array))
        return found[1] if found and found[0]() is array else None  # another may have the id of one that is gone

    def of_all(self, arrays: Sequence[np.ndarray]) -> list[bytes]:
        """The arrays' digests, in their order; several are hashed at once."""
        return in_threads(self.of, arrays, sum(array.nbytes for array in arrays))

    def know(self, array: np.ndarray, value: bytes) -> bytes:
        """Take `value` for the array's digest, and return it."""
        self._known[id(array)] = weakref.ref(array), value
        return value

    def forget_gone(self) -> None:
        """Forget arrays that are gone."""
        self._known = {number: found for number, found in self._known.items() if found[0]() is not None}


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


def shapes_of(values: Arrays, names: Iterable[str]) -> list[Shaped]:
    return [(name, array.dtype.name, array.shape) for name in names for array in [values[name]]]


def _packing_order(shaped: Iterable[Shaped], wire: Wire) -> list[tuple[Shaped, Codec | None]]:
    """The order in which arrays lie in a packed part: wider items first, else as given."""
    found = [(item, wire.codec(item[1], item[2])) for item in shaped]
    return sorted(found, key=lambda one: -(one[1].width if one[1] else np.dtype(one[0][1]).itemsize))


def pack(
    values: Arrays,
    names: Iterable[str],
    wire: Wire = PLAIN,
    *,
    written: Callable[[str], np.ndarray] | None = None,
    random: np.random.Generator | None = None,
) -> Array:
    """Pack the named arrays into one Flower `Array` (uint8): one copy of what travels as it is, the rest encoded.

    Args:
        values: the arrays, by name.
        names: of those that are packed.
        wire: how they are encoded.
        written: what is packed in place of an array, of the same shape and dtype; asked for one after the other.
        random: of what is rounded at random.

    Raises:
        EncodingError: an array that cannot be encoded so.
    """
    pieces: list[bytes | memoryview] = []
    written = written or values.__getitem__
    for (name, _, _), codec in _packing_order(shapes_of(values, names), wire):
        if codec is None:
            pieces.append(raw_bytes(written(name)))
            continue
        try:
            pieces.append(codec.write(np.asarray(written(name), np.float32), random))
        except EncodingError as error:
            raise EncodingError(f"entry {name!r} cannot be sent as {wire.dtype}: {error}") from error
    data = b"".join(pieces)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def unpack(array: Array, shaped: Iterable[Shaped], wire: Wire = PLAIN) -> dict[str, np.ndarray]:
    """Read-only arrays of a packed part: views, or new ones of what was encoded. ValueErrors as `unpacked`."""
    values = dict(unpacked(array, shaped, wire))
    for value in values.values():
        value.flags.writeable = False
    return values


def unpack_checked(
    array: Array, shaped: Iterable[Shaped], wire: Wire, digests: Iterable[bytes]
) -> dict[str, np.ndarray]:
    """As `unpack`, without the arrays whose digest is not the one that is given. An Array that several clients of one
    process are sent is read and hashed once."""
    asked = array.data, tuple(shaped), wire
    known = array.__dict__.get(_KNOWN)
    if known is None or known[0][0] is not array.data or known[0][1:] != asked[1:]:
        values = unpack(array, asked[1], wire)
        known = array.__dict__[_KNOWN] = asked, values, {name: digest(value) for name, value in values.items()}
    _, values, found = known
    expected = zip(asked[1], digests, strict=True)
    return {name: values[name] for (name, _, _), digest_of_it in expected if found[name] == digest_of_it}


def unpacked(array: Array, shaped: Iterable[Shaped], wire: Wire = PLAIN) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array, one after the other; what was encoded may be written to.

    Raises ValueError when the length is not what the shapes say: before the first, or, where the length of what is
    encoded stands in it, at the last.
    """
    if array.stype != STYPE:
        raise ValueError(f"an Array of stype {array.stype!r} came where {STYPE!r} was expected")
    order = _packing_order(shaped, wire)
    if all(codec is None for _, codec in order):
        expected = sum(math.prod(shape) * np.dtype(dtype).itemsize for (_, dtype, shape), _ in order)
        if len(array.data) != expected:
            raise ValueError(f"a packed part has {len(array.data)} bytes, and its shapes say {expected}")
    data = memoryview(array.data)
    offset = 0
    for (name, dtype, shape), codec in order:
        kind = np.dtype(dtype)
        length = codec.length(shape, data[offset:]) if codec else math.prod(shape) * kind.itemsize
        piece = data[offset : offset + length]
        if len(piece) < length:
            raise ValueError(f"a packed part has {len(data)} bytes, and entry {name!r} goes on to {offset + length}")
        if codec:
            value = codec.read(piece, shape).astype(kind, copy=False)
        else:
            value = np.frombuffer(piece, kind.newbyteorder("<")).astype(kind, copy=False).reshape(shape)
        yield name, value
        offset += length
    if offset != len(data):
        raise ValueError(f"a packed part has {len(data)} bytes, and its entries are {offset}")
