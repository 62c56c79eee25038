"""What a client is sent of each part: nothing, its values, or their difference from what the client has.

With differences (`Encoding.differences_down`) a client is sent C(x − w): x are the server's values, w those that the
client has, and C is the encoding. Both sides then have w' = w + C(x − w) to the bit. What C leaves out is in the next
difference, for w is no longer what it was: the error feedback of EF21-P (Gruntkowska et al. 2023, arXiv:2209.15218,
algorithm 1). A client that missed rounds is sent one difference, as long as `References` has its w.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array

from tepal.exchange.encodings import PLAIN, Encoding, Wire
from tepal.exchange.layout import Arrays, Names, dtype_name
from tepal.exchange.manifest import Parcel
from tepal.exchange.parts import Digests, Part, digest, digests_of, pack, shapes_of, unpack, unpack_sums, unpacked
from tepal.exchange.plan import Tree
from tepal.exchange.references import Reference, References

_MOST = 1 << 28  # bytes of packed differences in memory, for the clients of a round that have the same part

@dataclass(frozen=True)
class Packed:
    """What one client is sent of a block of a tree."""

    parcel: Parcel
    data: Array | None
    """None: nothing is sent."""
    rounded: bool
    """Whether the client's values differ from the server's own."""


class Packer:
    """Packs the parts of messages; a part for many clients is packed once.

    Args:
        encoding: of the run.
        references: what clients have; None: no differences are sent.
    """

    def __init__(self, encoding: Encoding, references: References | None = None) -> None:
        self.digests = Digests()
        """Of the server's own values."""
        self._encoding = encoding
        self._references = references if encoding.differences_down else None
        self._decoded = Digests()  # of the values that clients decode, where they are not differences
        # The last packed values of each tree and block: of a tree that differs between clients there is never more than
        # one part in memory.
        self._packed: dict[tuple[Tree, str], tuple[tuple[str, Names, Wire], Array]] = {}
        # (id of the base, id of the server's part) → (id of the part that a client then has, packed difference)
        self._differences: OrderedDict[tuple[str, str], tuple[str, Array]] = OrderedDict()

    def begin(self, held: Collection[str]) -> None:
        """Begin a round. `held`: ids of the parts that clients have."""
        self.forget()
        if self._references:
            self._references.begin(held)

    def forget(self) -> None:
        """Forget packed parts, when all messages of an exchange have been sent."""
        self._packed.clear()
        self._differences.clear()

    def parcel(
        self,
        tree: Tree,
        block: str,
        names: Names,
        values: Arrays,
        held: Collection[str],
        missing: Mapping[str, Names] | None,
        *,
        exact: bool,
        keep: bool,
    ) -> Packed:
        """What one client is sent of a block of a tree.

        Args:
            tree: the tree.
            block: the block.
            names: the entries that the client needs.
            values: the server's values of the tree.
            held: ids of the parts that the client has.
            missing: part id → entries that it lacked of this message before; None for the first message.
            exact: whether it needs the values without an encoding.
            keep: whether it should cache the part.
        """
        exact = exact or self._encoding.download.plain
        known = {*held, *(missing or ())}
        part, rounded = None, False
        if exact or known or self._references:
            part = Part(tree, block, names, tuple(self.digests.of_all([values[name] for name in names])))
        if part is None or not (exact or part.id in known):
            if part is not None and self._references:
                return self._from_reference(part, values, held, missing or {}, self._references)
            part, rounded = self._encoded(tree, block, names, values), True
        if missing is not None:
            sent = tuple(name for name in names if name in missing.get(part.id, ()))
        else:
            sent = () if part.id in held else names
        wire = self._encoding.download if rounded and sent else PLAIN
        data = self._pack(part, sent, values, wire) if sent else None
        return Packed(Parcel(part, keep=keep, sent=sent, wire=wire), data, rounded)

    def decoded(self, part: Part, name: str, value: np.ndarray) -> np.ndarray:
        """An entry as a client decoded it, of a part whose values differ from the server's own `value`."""
        reference = self._references.open(part.id) if self._references else None
        return reference.values[name] if reference else self._encoding.download.decoded(value)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _encoded(self, tree: Tree, block: str, names: Names, values: Arrays) -> Part:
        """The part that a client decodes from encoded values."""
        wire = self._encoding.download
        packed = None
        digests = [self._decoded.find(values[name]) for name in names]
        if None in digests:
            packed = pack(values, names, wire)
            decoded = unpacked(packed, shapes_of(values, names), wire)
            of_name = {name: self._decoded.know(values[name], digest(array)) for name, array in decoded}
            digests = [of_name[name] for name in names]
        part = Part(tree, block, names, tuple(filter(None, digests)))
        if packed is not None:
            self._packed[tree, block] = (part.id, names, wire), packed
        return part

    def _pack(self, part: Part, names: Names, values: Arrays, wire: Wire) -> Array:
        key, packed = self._packed.get((part.tree, part.block), (None, None))
        if packed is None or key != (part.id, names, wire):
            packed = pack(values, names, wire)
            self._packed[part.tree, part.block] = (part.id, names, wire), packed
        return packed

    # ---- differences -------------------------------------------------------------------------------------------------

    def _from_reference(
        self, own: Part, values: Arrays, held: Collection[str], missing: Mapping[str, Names], references: References
    ) -> Packed:
        """What a client is sent of a part that it need not have exactly."""
        names = own.names
        for found in references.of(held, own.tree, own.block):
            base = references.open(found.id) if found.id not in missing else None
            if base is None or base.values.keys() != set(names):
                continue
            if base.target == own.id:  # the client has what stands for these values
                return Packed(Parcel(base.part(names), keep=True, sent=()), None, rounded=True)
            new, packed = self._sum(base, own, values, references)
            if new.id not in missing:
                parcel = Parcel(new.part(names), keep=True, sent=names, wire=self._encoding.download, base=base.id)
                return Packed(parcel, packed, rounded=True)
        new, packed = self._sum(None, own, values, references)
        parcel = Parcel(new.part(names), keep=True, sent=names, wire=self._encoding.download_whole)
        return Packed(parcel, packed, rounded=True)

    def _sum(
        self, base: Reference | None, own: Part, values: Arrays, references: References
    ) -> tuple[Reference, Array]:
        """The packed difference of the server's values from a base, or the values, and what a client has with it."""
        key = base.id if base else "", own.id
        if (known := self._differences.get(key)) and (reference := references.open(known[0])):
            self._differences.move_to_end(key)
            return reference, known[1]
        wire = self._encoding.download if base else self._encoding.download_whole
        starts = base.values if base else {}

        def written(name: str) -> np.ndarray:
            value = values[name]
            encoded = wire.codec(dtype_name(value.dtype), value.shape)
            return value - starts[name] if encoded and name in starts else value

        packed, shaped = pack(values, own.names, wire, written=written), shapes_of(values, own.names)
        new = unpack_sums(packed, shaped, wire, starts) if base else unpack(packed, shaped, wire)
        digests = digests_of(new)
        part = Part(own.tree, own.block, own.names, tuple(digests[name] for name in own.names))
        reference = references.add(part, own.id, new)
        self._differences[key] = reference.id, packed
        while len(self._differences) > 1 and sum(len(data.data) for _, data in self._differences.values()) > _MOST:
            self._differences.popitem(last=False)
        return reference, packed
