"""What a client is sent of each part: nothing, its values, or their difference from what the client has.

With differences (`Encoding.differences_down`) a client is sent C(x − w): x are the server's values, w those that the
client has, and C is the encoding. Both sides then have w' = w + C(x − w) to the bit. What C leaves out is in the next
difference, for w is no longer what it was: the error feedback of EF21-P (Gruntkowska et al. 2023, arXiv:2209.15218,
algorithm 1, where one w is that of all clients). A client that missed rounds is sent one difference, from its own w.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from flwr.app import Array

from tepal.exchange.encodings import AUTO, FOR_DIFFERENCES, PLAIN, Encoding, EncodingError, LeftOut, Wire
from tepal.exchange.initial import InitialParts
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.manifest import Parcel
from tepal.exchange.parts import Digests, Part, digest, digests_of, pack, shapes_of, unpack, unpack_sums, unpacked
from tepal.exchange.plan import Tree
from tepal.exchange.references import References, slot_of

_MOST_PACKED = 1 << 28  # bytes of packed differences in memory, for the clients of a round that have the same part


@dataclass(frozen=True)
class Wanted:
    """A block's entries that a client needs, with the server's values."""

    tree: Tree
    block: str
    names: Names
    values: Arrays
    """Of the tree, which may have more entries."""
    keep: bool = False
    """Whether the client should cache the part. Where differences are sent it always does."""
    exact: bool = False
    """Whether it needs the values without an encoding."""
    final: bool = False
    """Whether they are the run's result, which is sent as exactly as a whole part."""
    bits: float = 0.0
    """Most bits for a value of its differences, in the mean, within a budget of the round; 0: no limit."""

    def part(self, digests: Mapping[str, bytes]) -> Part:
        """The part that has these digests."""
        return Part(self.tree, self.block, self.names, tuple(digests[name] for name in self.names))


@dataclass(frozen=True)
class Packed:
    """What one client is sent of a block of a tree."""

    parcel: Parcel
    data: Array | None
    """None: nothing is sent."""
    rounded: bool
    """Whether the client's values may differ from the server's own."""
    left_out: LeftOut | None = None
    """What differences in AUTO leave out."""


class _Sum(NamedTuple):
    """What a client has after a message of differences or values, the message, and what it leaves out of differences.
    """

    part: Part
    data: Array
    left_out: LeftOut | None


class Packer:
    """Packs the parts of messages; a part for many clients is packed once.

    Args:
        encoding: of the run.
        references: what clients have, for an encoding of downloads as differences.

    Raises:
        ValueError: the encoding needs references.
    """

    def __init__(self, encoding: Encoding, references: References | None = None) -> None:
        if encoding.differences_down and references is None:
            raise ValueError(f"downloads as {encoding.down} are differences, which need references=References(folder)")
        self.digests = Digests()
        """Of the server's own values."""
        self.initial = InitialParts()
        self._encoding = encoding
        self._references = references if encoding.differences_down else None
        self._decoded = Digests()  # of the values that clients decode, where they are not differences
        # The last packed values of each tree and block: of a tree that differs between clients there is never more than
        # one part in memory.
        self._packed: dict[tuple[Tree, str], tuple[tuple[str, Names, Wire], Array]] = {}
        # (tree, block, id of the base or "", id of the server's part, encoding) → what its clients are sent
        self._differences: OrderedDict[tuple[Tree, str, str, str, Wire], _Sum] = OrderedDict()

    def begin(self, number: int, held: Mapping[str, int]) -> None:
        """Begin a round. `held`: id of a part → the number of clients that have it."""
        self.forget()
        self.initial.begin()
        if self._references:
            self._references.begin(number, held, self.initial)

    def forget(self) -> None:
        """Forget packed parts, when all messages of an exchange have been sent."""
        self._packed.clear()
        self._differences.clear()

    def parcel(self, wanted: Wanted, held: Collection[str], missing: Mapping[str, Names] | None = None) -> Packed:
        """What one client is sent of a block of a tree.

        Args:
            wanted: the block.
            held: ids of the parts that the client has.
            missing: part id → entries that it lacked of this message before; None for the first message.
        """
        whole = self._encoding.download_whole
        exact = wanted.exact or self._encoding.download.plain or (wanted.final and whole.plain)
        known = {*held, *(missing or ())}
        if exact or known or self._references:
            own = self._own(wanted)
            lost = self._references and not exact and own.id in (missing or ())
            if exact or (own.id in known and not lost):
                self.initial.found(own.id)
                if self._references:
                    for reference in self._references.of(own.tree, own.block, [own.id]):
                        self._references.used(reference)
                return self._values(own, wanted, held, missing, PLAIN)
            if self._references:
                return self._difference(own, wanted, held, missing or {}, self._references)
        return self._values(self._encoded(wanted), wanted, held, missing, self._encoding.download)

    def add_initial(self, wanted: Wanted) -> None:
        """Enter initial values, which a client may have before it is sent any (see `tepal.exchange.initial`)."""
        own = self._own(wanted)
        self.initial.add(own)
        if self._references and not self._references.has(own.tree, own.block, own.id):
            self._references.sent(own, own.id, {name: wanted.values[name] for name in wanted.names}, fine=True)

    def listed(self, blocks: Mapping[str, Names]) -> list[Part]:
        """The initial parts that new clients should make."""
        return self.initial.listed(blocks, self._references.has if self._references else None)

    def starts(self, part: Part, values: Arrays) -> Arrays:
        """The entries of a part as a client decoded them.

        Args:
            part: the part as the client has it.
            values: the server's own values.

        Raises:
            KeyError: they are not known any more.
        """
        if self._references is None:
            return {name: self._encoding.download.decoded(name, values[name]) for name in part.names}
        if (known := self._references.find(slot_of(part.tree, part.block, part.id))) is None:
            raise KeyError(part.id)
        return known.values

    def _own(self, wanted: Wanted) -> Part:
        """The part of the server's own values."""
        digests = self.digests.of_all([wanted.values[name] for name in wanted.names])
        return wanted.part(dict(zip(wanted.names, digests, strict=True)))

    # ---- values ------------------------------------------------------------------------------------------------------

    def _values(
        self, part: Part, wanted: Wanted, held: Collection[str], missing: Mapping[str, Names] | None, wire: Wire
    ) -> Packed:
        """The values of a part, or those that the client lacks."""
        if missing is not None:
            lacking = set(missing.get(part.id, ()))
            sent = tuple(name for name in part.names if name in lacking)
        else:
            sent = () if part.id in held else part.names
        data = self._pack(part, sent, wanted.values, wire) if sent else None
        parcel = Parcel(part, keep=wanted.keep, sent=sent, wire=wire if sent else PLAIN)
        return Packed(parcel, data, rounded=not wire.plain)

    def _encoded(self, wanted: Wanted) -> Part:
        """The part that a client decodes from encoded values."""
        names, values, wire = wanted.names, wanted.values, self._encoding.download
        packed = None
        digests = {name: known for name in names if (known := self._decoded.find(values[name])) is not None}
        if len(digests) < len(names):
            packed = pack(values, names, wire)
            decoded = unpacked(packed, shapes_of(values, names), wire)
            digests = {name: self._decoded.know(values[name], digest(array)) for name, array in decoded}
        part = wanted.part(digests)
        if packed is not None:
            self._packed[wanted.tree, wanted.block] = (part.id, names, wire), packed
        return part

    def _pack(self, part: Part, names: Names, values: Arrays, wire: Wire) -> Array:
        key, packed = self._packed.get((part.tree, part.block), (None, None))
        if packed is None or key != (part.id, names, wire):
            packed = pack(values, names, wire)
            self._packed[part.tree, part.block] = (part.id, names, wire), packed
        return packed

    # ---- differences -------------------------------------------------------------------------------------------------

    def _difference(
        self, own: Part, wanted: Wanted, held: Collection[str], missing: Mapping[str, Names], references: References
    ) -> Packed:
        """The difference from the newest part of this block that the client has; the whole part if it has none."""
        whole = self._encoding.download_whole
        for base in references.of(own.tree, own.block, held):
            known = references.find(base.slot) if base.id not in missing else None
            if known is None or known.values.keys() != set(own.names):
                continue
            if wanted.part(known.digests).id != base.id:  # a copy of another's file
                continue
            if references.is_current(base, own.id, final=wanted.final):
                references.used(base)
                return Packed(Parcel(wanted.part(known.digests), keep=True, sent=()), None, rounded=True)
            age, initial = references.age(base), base.id in self.initial
            newcomer = initial and age > 1
            if initial:
                references.used(base)  # others may begin with it, too
            elif not missing:  # otherwise this is the client's second message
                references.replaced(base)
            wire = replace(self._encoding.download.after(age), bits=0 if newcomer else wanted.bits)
            if wanted.final or (newcomer and wire.dtype != AUTO):
                wire = Wire(whole.dtype, differences=True)
            try:
                part, data, left_out = self._sum(own, wanted, base.id, known.values, wire, references)
            except EncodingError:
                continue
            if part.id == base.id:  # what is left is too little for the encoding
                return Packed(Parcel(part, keep=True, sent=()), None, rounded=True, left_out=left_out)
            if part.id not in missing:
                parcel = Parcel(part, keep=True, sent=own.names, wire=wire, base=base.id)
                return Packed(parcel, data, rounded=True, left_out=left_out)
        part, data, _ = self._sum(own, wanted, "", {}, whole, references)
        return Packed(Parcel(part, keep=True, sent=own.names, wire=whole), data, rounded=True)

    def _sum(
        self, own: Part, wanted: Wanted, base: str, starts: Arrays, wire: Wire, references: References
    ) -> _Sum:
        """The message, and what a client then has: differences from `starts`, or values if there are none.

        Raises EncodingError for differences that the encoding cannot represent, or that are not finite.
        """
        key = own.tree, own.block, base, own.id, wire
        if made := self._differences.get(key):
            self._differences.move_to_end(key)
            return made
        values = wanted.values

        def written(name: str) -> np.ndarray:
            value = values[name]
            encoded = wire.encodes(name, value)
            with np.errstate(over="ignore", invalid="ignore"):  # then the whole is sent
                return value - starts[name] if base and encoded else value

        data, shaped = pack(values, own.names, wire, written=written), shapes_of(values, own.names)
        sums = unpack_sums(data, shaped, wire, starts) if base else unpack(data, shaped, wire)
        if base and not all(np.isfinite(array).all() for array in sums.values() if array.dtype.kind == "f"):
            raise EncodingError("a difference is not finite, and would not become so")
        part = wanted.part(digests_of(sums))
        fine = part.id == base or (not wire.top_k and wire.dtype not in FOR_DIFFERENCES)
        references.sent(part, own.id, sums, fine=fine)
        left_out = None
        if base and wire.dtype == AUTO:
            left_out = LeftOut()
            for name in filter(lambda name: wire.encodes(name, sums[name]), sums):
                left_out.add(written(name), values[name] - sums[name])
        packed = self._differences[key] = _Sum(part, data, left_out)
        sizes = [len(one.data.data) for one in self._differences.values()]
        while len(sizes) > 1 and sum(sizes) > _MOST_PACKED:
            self._differences.popitem(last=False)
            del sizes[0]
        return packed
