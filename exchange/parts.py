"""Parts: the arrays of one block of one tree, the unit that is sent and cached.

A part is sent as **one** Flower `Array` with its own stype, because each `Array` of a message costs kilobytes and tens
of milliseconds, whatever its size. It contains only its entries' bytes, little-endian and row-major. The widest dtypes
come first, so that every entry is aligned without padding and can be read as a view. A part that is not encoded (see
`encodings`) has the sum of its entries' `nbytes` as its length.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from blake3 import blake3
from flwr.app import Array

from tepal.exchange.encodings import PLAIN, Codec, EncodingError, Steps, TopK, Wire, add_difference
from tepal.exchange.layout import Arrays, Names, Shaped, dtype_name
from tepal.exchange.plan import Tree
from tepal.exchange.threads import in_threads

STYPE = "tepal.packed"
_KNOWN = "_tepal_values"

DIGEST_BYTES = 16

_TRIES = 8  # to write a part within the limit of its codec; each comes closer by its excess


def raw_bytes(array: np.ndarray) -> memoryview:
    """The array's elements, row-major and little-endian; a view if the array has this order already."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return memoryview(np.ascontiguousarray(little).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def digest(array: np.ndarray) -> bytes:
    """Content digest of an array: 16 bytes of BLAKE3 over dtype, shape and elements.

    It names values in caches, so it must be a cryptographic one: nobody can find other values with the same digest.
    """
    known = blake3(_kind(array))
    known.update(raw_bytes(array))
    return known.digest(DIGEST_BYTES)


def earlier_digest(array: np.ndarray) -> bytes:
    """The digest in files that earlier versions wrote: 16 bytes of SHA-256 over dtype, shape and elements."""
    known = hashlib.sha256(_kind(array))
    known.update(raw_bytes(array))
    return known.digest()[:DIGEST_BYTES]


def _kind(array: np.ndarray) -> bytes:
    return f"{array.dtype.name}{array.shape}".encode()


class Digests:
    """Digests of arrays that are never changed in place, such as those of a method's state: each is hashed once.

    The arrays are referenced weakly, so that those made for one client are freed once they have been sent.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[np.ndarray], bytes]] = {}

    def of(self, array: np.ndarray) -> bytes:
        """The array's digest."""
        return self.find(array) or self.know(array, digest(array))

    def find(self, array: np.ndarray) -> bytes | None:
        """The array's digest, if it is known."""
        found = self._known.get(id(array))
        return found[1] if found else None

    def of_all(self, arrays: Sequence[np.ndarray]) -> list[bytes]:
        """The arrays' digests, in their order; large arrays are hashed in several threads."""
        return in_threads(self.of, arrays, sum(array.nbytes for array in arrays))

    def know(self, array: np.ndarray, value: bytes) -> bytes:
        """Remember and return `value` as the array's digest."""
        number = id(array)  # another array may have it when this one is freed, which removes the entry
        self._known[number] = weakref.ref(array, lambda _: self._known.pop(number, None)), value
        return value


@dataclass(frozen=True)
class Part:
    """The named entries of one block, and the digests of their values. `digests[k]` belongs to `names[k]`."""

    tree: Tree
    block: str
    names: Names
    digests: tuple[bytes, ...] = ()
    """(): they are not known, but the id is."""
    known_id: str = ""

    @cached_property
    def id(self) -> str:
        """Content digest of the part, 32 hexadecimal digits: equal values have equal ids on every machine."""
        if not self.digests and self.known_id:
            return self.known_id
        known = hashlib.sha256()
        for name, value in zip(self.names, self.digests, strict=True):
            known.update(name.encode() + b"\0" + value)
        return known.hexdigest()[: 2 * DIGEST_BYTES]

    @cached_property
    def digest_of(self) -> Mapping[str, bytes]:
        return dict(zip(self.names, self.digests, strict=True))

    def with_digests(self, found: Mapping[str, bytes]) -> Part:
        """The part of the same entries with these digests."""
        return replace(self, digests=tuple(found[name] for name in self.names), known_id="")

    def right(self, found: Mapping[str, bytes]) -> Names:
        """The names whose digests are those of the part. Where only its id is known, all or none."""
        if self.digests:
            return tuple(name for name in self.names if found.get(name) == self.digest_of[name])
        whole = found.keys() == set(self.names) and self.with_digests(found).id == self.id
        return self.names if whole else ()


def shapes_of(values: Arrays, names: Iterable[str]) -> list[Shaped]:
    return [(name, dtype_name(array.dtype), array.shape) for name in names for array in [values[name]]]


def listed(parts: Mapping[Tree, Sequence[Shaped]]) -> str:
    """Digest (16 hexadecimal digits) of names, dtypes and shapes of the arrays in an answer's packed parts, by tree.

    It shows that both sides mean the same arrays, in the same order. Without parts it is "".
    """
    if not parts:
        return ""
    return hashlib.sha256(repr(sorted((tree, [*shaped]) for tree, shaped in parts.items())).encode()).hexdigest()[:16]


def _packing_order(shaped: Iterable[Shaped], wire: Wire) -> list[tuple[Shaped, Codec | None]]:
    """The arrays in their order in a packed part, each with its codec: wider items first, otherwise as given."""
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
    """Pack the named arrays into one Flower `Array` (uint8). Arrays that are not encoded are copied once.

    Args:
        values: the arrays, by name.
        names: the arrays to pack.
        wire: their encoding.
        written: name → the array to pack instead, of the same shape and dtype; called for one array after the other.
        random: generator for an encoding that rounds at random.

    Raises:
        EncodingError: an array has values that the encoding cannot represent.
    """
    written = written or values.__getitem__
    order = _of_all(_packing_order(shapes_of(values, names), wire), written)
    pieces = _pieces(order, written, wire, random)
    for _ in range(_TRIES):
        fewer = _within(order, pieces)
        if fewer is None:
            break
        order = fewer
        pieces = _pieces(order, written, wire, random)
    data = b"".join(pieces)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def _pieces(
    order: list[tuple[Shaped, Codec | None]],
    written: Callable[[str], np.ndarray],
    wire: Wire,
    random: np.random.Generator | None,
) -> list[bytes | memoryview]:
    pieces: list[bytes | memoryview] = []
    for (name, _, _), codec in order:
        if codec is None:
            pieces.append(raw_bytes(written(name)))
            continue
        try:
            pieces.append(codec.write(np.asarray(written(name), np.float32), random))
        except EncodingError as error:
            raise EncodingError(f"entry {name!r} cannot be sent as {wire.dtype}: {error}") from error
    return pieces


def _within(
    order: list[tuple[Shaped, Codec | None]], pieces: list[bytes | memoryview]
) -> list[tuple[Shaped, Codec | None]] | None:
    """The same with a codec that writes fewer values; None if what was written is within the codec's limit."""
    several = [(math.prod(item[2]), len(piece)) for (item, codec), piece in zip(order, pieces, strict=True) if codec]
    codec = next((codec for _, codec in order if isinstance(codec, Steps)), None)
    found = codec.within(sum(n for _, n in several), len(several), sum(n for n, _ in several)) if codec else None
    return [(item, found if codec else None) for item, codec in order] if found else None


def _of_all(
    order: list[tuple[Shaped, Codec | None]], written: Callable[[str], np.ndarray]
) -> list[tuple[Shaped, Codec | None]]:
    """The same with one threshold for all arrays of which the largest values are sent.

    So an array that changed much has more of its values sent than one that changed little.
    """
    sparse = [(name, math.prod(shape), codec) for (name, _, shape), codec in order if isinstance(codec, TopK | Steps)]
    if not sparse:
        return order
    sizes = [size for _, size, _ in sparse]
    fitted = sparse[0][2].fitted(sizes, lambda number: np.asarray(written(sparse[number][0]), np.float32))
    return [(item, fitted if isinstance(codec, TopK | Steps) else codec) for item, codec in order]


def unpack(array: Array, shaped: Iterable[Shaped], wire: Wire = PLAIN) -> dict[str, np.ndarray]:
    """The read-only arrays of a packed part: views, or new arrays if they were encoded. Raises as `unpacked`."""
    values = dict(unpacked(array, shaped, wire))
    for value in values.values():
        value.flags.writeable = False
    return values


def unpack_sums(array: Array, shaped: Iterable[Shaped], wire: Wire, starts: Arrays) -> dict[str, np.ndarray]:
    """The read-only arrays of a packed part whose encoded arrays are differences from `starts`.

    Raises as `unpacked`, and KeyError if `starts` lacks an array.
    """
    values = dict(unpacked(array, shaped, wire))
    for name, value in values.items():
        if wire.codec(dtype_name(value.dtype), value.shape):
            add_difference(starts[name], value)
        value.flags.writeable = False
    return values


def unpack_checked(
    array: Array,
    shaped: Iterable[Shaped],
    wire: Wire,
    part: Part | None,
    base: str = "",
    starts: Callable[[], Arrays] = dict,
) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
    """As `unpack`, without the arrays that are not those of `part`; and the digests of the others.

    An Array that several clients of one process receive is read and hashed once.

    Args:
        array: the packed part.
        shaped: its arrays.
        wire: their encoding.
        part: the arrays' digests, or the id of all; None: all are returned, without digests.
        base: id of the part from which the encoded arrays are differences; "" if they are none.
        starts: returns the arrays of that part; without them nothing can be read, and nothing is returned.
    """
    asked = array.data, tuple(shaped), wire, base
    known = array.__dict__.get(_KNOWN)
    if known is None or known[0][0] is not array.data or known[0][1:] != asked[1:]:
        if not base:
            values = unpack(array, asked[1], wire)
        elif not (found := starts()):
            return {}, {}
        else:
            values = unpack_sums(array, asked[1], wire, found)
        known = array.__dict__[_KNOWN] = asked, values, None
    _, values, digests = known
    if part is None:
        return dict(values), {}
    if digests is None:
        digests = digests_of(values)
        array.__dict__[_KNOWN] = asked, values, digests  # at once: several threads may have this Array
    right = part.right(digests)
    if base and len(right) < len(values):
        array.__dict__.pop(_KNOWN, None)  # the fault may be this client's base
    return {name: values[name] for name in right}, {name: digests[name] for name in right}


def digests_of(values: Arrays, of: Callable[[np.ndarray], bytes] = digest) -> dict[str, bytes]:
    """Name → digest; large arrays are hashed in several threads."""
    found = in_threads(of, values.values(), sum(array.nbytes for array in values.values()))
    return dict(zip(values, found, strict=True))


def unpacked(array: Array, shaped: Iterable[Shaped], wire: Wire = PLAIN) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each entry of a packed part, one after the other. Arrays that were encoded may be changed.

    Raises:
        ValueError: the length does not match the shapes. It is raised before the first array, or, for an encoding whose
            length depends on the values, at the last.
    """
    if array.stype != STYPE:
        raise ValueError(f"an Array has the stype {array.stype!r}; a packed part has {STYPE!r}")
    order = _packing_order(shaped, wire)
    if all(codec is None for _, codec in order):
        expected = sum(math.prod(shape) * np.dtype(dtype).itemsize for (_, dtype, shape), _ in order)
        if len(array.data) != expected:
            raise ValueError(f"a packed part has {len(array.data)} bytes; by its shapes it must have {expected}")
    data = memoryview(array.data)
    offset = 0
    for (name, dtype, shape), codec in order:
        kind = np.dtype(dtype)
        length = codec.length(shape, data[offset:]) if codec else math.prod(shape) * kind.itemsize
        piece = data[offset : offset + length]
        if len(piece) < length:
            raise ValueError(f"a packed part has {len(data)} bytes, but entry {name!r} ends at byte {offset + length}")
        if codec:
            value = codec.read(piece, shape).astype(kind, copy=False)
        else:
            value = np.frombuffer(piece, kind.newbyteorder("<")).astype(kind, copy=False).reshape(shape)
        yield name, value
        offset += length
    if offset != len(data):
        raise ValueError(f"a packed part has {len(data)} bytes, but its entries have {offset}")
