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

from tepal.exchange.encodings import PLAIN, Codec, EncodingError, Mixed, Steps, TopK, Wire, add_difference
from tepal.exchange.layout import Arrays, Names, Shaped, dtype_name
from tepal.exchange.plan import Tree
from tepal.exchange.threads import in_threads

STYPE = "tepal.packed"
_KNOWN = "_tepal_values"

DIGEST_BYTES = 16

_JOINED = 1 << 18  # values: arrays of fewer are encoded together, up to about as many. Another number: another protocol
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


@dataclass(frozen=True)
class Piece:
    """Arrays that follow each other in a packed part: one, or several that are encoded together."""

    items: tuple[Shaped, ...]
    codec: Codec | None

    @property
    def coder(self) -> Codec | None:
        """What writes and reads it: matrices in steps may be products instead."""
        if isinstance(self.codec, Steps) and self.codec.or_products:
            return Mixed(tuple(shape for *_, shape in self.items), self.codec)
        return self.codec

    @property
    def width(self) -> int:
        """Bytes of the widest item."""
        return self.codec.width if self.codec else np.dtype(self.items[0][1]).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is encoded: several arrays are flat, one after the other."""
        return self.items[0][2] if len(self.items) == 1 else (self.size,)

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(math.prod(shape) for _, _, shape in self.items)

    def floats(self, written: Callable[[str], np.ndarray]) -> np.ndarray:
        """The values to encode, in float32. Raises EncodingError for a float64 beyond its range."""
        values = [_in_float32(name, written(name)) for name, _, _ in self.items]
        return values[0] if len(values) == 1 else np.concatenate([value.reshape(-1) for value in values])

    def arrays(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Name and array of each of the arrays in what was decoded. Several are views of it."""
        flat, start = values.reshape(-1), 0
        for name, dtype, shape in self.items:
            stop = start + math.prod(shape)
            yield name, flat[start:stop].reshape(shape).astype(np.dtype(dtype), copy=False)
            start = stop


def _in_float32(name: str, value: np.ndarray) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.asarray(value, np.float32)
    except FloatingPointError as error:
        raise EncodingError(f"entry {name!r} cannot be sent encoded: it has values beyond float32's range") from error


def pieces_of(shaped: Iterable[Shaped], wire: Wire) -> list[Piece]:
    """The arrays in their order in a packed part: wider items first, otherwise as given; then those joined."""
    alone: list[Piece] = []
    joined: list[list[Shaped]] = []
    size = _JOINED
    for item in shaped:
        codec = wire.codec_of(*item)
        few = math.prod(item[2]) if isinstance(codec, Steps) else _JOINED
        if few >= _JOINED:
            alone.append(Piece((item,), codec))
            continue
        if size >= _JOINED:
            joined.append([])
            size = 0
        joined[-1].append(item)
        size += few
    pieces = sorted(alone, key=lambda piece: -piece.width)
    return pieces + [Piece(tuple(items), wire.codec_of(*items[0])) for items in joined]


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
    pieces = _of_all(pieces_of(shapes_of(values, names), wire), written)
    packed = _packed(pieces, written, wire, random)
    for _ in range(_TRIES):
        fewer = _within(pieces, packed)
        if fewer is None:
            break
        pieces = fewer
        packed = _packed(pieces, written, wire, random)
    data = b"".join(packed)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def _packed(
    pieces: list[Piece],
    written: Callable[[str], np.ndarray],
    wire: Wire,
    random: np.random.Generator | None,
) -> list[bytes | memoryview]:
    packed: list[bytes | memoryview] = []
    for piece in pieces:
        name = piece.items[0][0]
        if (coder := piece.coder) is None:
            packed.append(raw_bytes(written(name)))
            continue
        values = piece.floats(written)
        try:
            packed.append(coder.write(values, random))
        except EncodingError as error:
            raise EncodingError(f"entry {name!r} cannot be sent as {wire.dtype}: {error}") from error
    return packed


def _within(pieces: list[Piece], packed: list[bytes | memoryview]) -> list[Piece] | None:
    """The same with a codec that writes fewer values; None if what was written is within the codec's limit."""
    several = [(piece.size, len(data)) for piece, data in zip(pieces, packed, strict=True) if piece.codec]
    codec = next((piece.codec for piece in pieces if isinstance(piece.codec, Steps)), None)
    found = codec.within(sum(n for _, n in several), len(several), sum(n for n, _ in several)) if codec else None
    return [replace(piece, codec=found) if piece.codec else piece for piece in pieces] if found else None


def _of_all(pieces: list[Piece], written: Callable[[str], np.ndarray]) -> list[Piece]:
    """The same with one threshold for all arrays of which the largest values are sent.

    So an array that changed much has more of its values sent than one that changed little.
    """
    sparse = [(piece, piece.codec) for piece in pieces if isinstance(piece.codec, TopK | Steps)]
    if not sparse:
        return pieces
    sizes = [piece.size for piece, _ in sparse]
    fitted = sparse[0][1].fitted(sizes, lambda number: sparse[number][0].floats(written))
    return [replace(piece, codec=fitted) if isinstance(piece.codec, TopK | Steps) else piece for piece in pieces]


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
        if wire.encodes(name, value):
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
    pieces = pieces_of(shaped, wire)
    if all(piece.codec is None for piece in pieces):
        expected = sum(piece.size * piece.width for piece in pieces)
        if len(array.data) != expected:
            raise ValueError(f"a packed part has {len(array.data)} bytes; by its shapes it must have {expected}")
    data = memoryview(array.data)
    offset = 0
    for piece in pieces:
        coder = piece.coder
        length = coder.length(piece.shape, data[offset:]) if coder else piece.size * piece.width
        own = data[offset : offset + length]
        if len(own) < length:
            last = piece.items[-1][0]
            raise ValueError(f"a packed part has {len(data)} bytes, but entry {last!r} ends at byte {offset + length}")
        if coder:
            yield from piece.arrays(coder.read(own, piece.shape))
        else:
            name, dtype, shape = piece.items[0]
            kind = np.dtype(dtype)
            yield name, np.frombuffer(own, kind.newbyteorder("<")).astype(kind, copy=False).reshape(shape)
        offset += length
    if offset != len(data):
        raise ValueError(f"a packed part has {len(data)} bytes, but its entries have {offset}")
