"""References: what the clients have in their caches, as the server knows it, so that it can send them differences.

    <folder>/<tree>.<block>@<part id>-<target id>-<since>[-fine].safetensors

A reference is a part as a client decoded it. The client reports the id of the part, and the server then has the same
values to the bit. Clients with equal parts share a reference. References are on disk, and mapped into memory while they
are in use. A run that is resumed finds them again. One that is lost costs bytes only: its clients are sent the whole
part.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from urllib.parse import unquote

from tepal.exchange.files import (
    LONGEST_LABEL,
    SUFFIX,
    DamagedFile,
    file_name,
    map_arrays,
    read_arrays,
    remove_unfinished,
    shortened,
    write_arrays,
)
from tepal.exchange.layout import Arrays
from tepal.exchange.parts import Digests, Part
from tepal.exchange.plan import Tree

log = getLogger("flwr")

_NAME = re.compile(rf"([^.@]*)\.([^.@]*)@([0-9a-f]+)-([0-9a-f]+)-(\d+)(-fine)?{re.escape(SUFFIX)}")
_MOST_MAPPED = 64  # each takes a file descriptor of the process
_LONG = 50  # rounds

Slot = tuple[Tree, str, str]
"""(Tree, block, part id), see `slot_of`. Equal values in two trees are two references: a client caches them apart."""


def slot_of(tree: Tree, block: str, id: str) -> Slot:
    """The slot of a part. Long labels are shortened, so that they can be part of a file's name."""
    return shortened(tree, LONGEST_LABEL), shortened(block, LONGEST_LABEL), id


@dataclass
class Reference:
    """A part that clients have cached."""

    slot: Slot
    target: str
    """Id of the part with the server's own values, for which these stand."""
    since: int
    """The round in which a client was first sent it for the target."""
    fine: bool
    """Whether further differences would not bring it closer to the target, or by no more than rounding."""
    nbytes: int
    path: Path
    made: int = 0
    """How many were made before it."""
    used: int = 0
    """The round in which a client was last sent it, or did not need to be."""
    holders: int = 0
    """The number of clients that have it and were not sent a difference from it in this round."""

    @property
    def id(self) -> str:
        """Id of the part."""
        return self.slot[2]


@dataclass(frozen=True)
class Known:
    """The content of a reference."""

    values: Arrays
    digests: Mapping[str, bytes]
    """Name → digest."""


class References:
    """The references of a run.

    Args:
        folder: of their files. Those that are in it already are of the same run, before it was resumed.
        megabytes: limit of all of them, at least twice what one client is sent. Those that are used in the present
            round are kept in any case.
    """

    def __init__(self, folder: Path, megabytes: float) -> None:
        self._folder = folder
        self._limit = megabytes * 1e6
        self._round = 0
        self._nbytes = self._made = 0
        self._found: dict[Slot, Reference] = {}
        self._mapped: OrderedDict[Slot, Known] = OrderedDict()
        self._in_memory: dict[Slot, Known] = {}  # those that could not be written
        self._verified: set[Slot] = set()
        remove_unfinished(folder)
        dated: list[tuple[int, Reference]] = []
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it
                if named := _NAME.fullmatch(path.name):
                    tree, block, id, target, since, fine = named.groups()
                    about, slot = path.stat(), (unquote(tree), unquote(block), id)
                    reference = Reference(slot, target, int(since), fine is not None, about.st_size, path)
                    dated.append((about.st_mtime_ns, reference))
        for _, reference in sorted(dated, key=lambda item: item[0]):
            if twice := self._found.get(reference.slot):  # somebody copied its file
                self._forget(twice)
            self._enter(reference)

    def begin(self, number: int, held: Mapping[str, int], initial: Container[str] = ()) -> None:
        """Begin a round. References that no client has are forgotten, unless they were used in the round before.

        Args:
            number: the round.
            held: id of a part → the number of clients that have it, as they reported.
            initial: ids of parts that a client may make itself, which are not forgotten here.
        """
        resumed, self._round = self._round == 0, number
        for reference in list(self._found.values()):
            reference.holders = held.get(reference.id, 0)
            if resumed and reference.holders:  # when it was used last is not in its file
                reference.used = max(reference.used, number - 1)
            if not reference.holders and reference.used < number - 1 and reference.id not in initial:
                self._forget(reference)

    def has(self, tree: Tree, block: str, id: str) -> bool:
        """Whether there is a reference of this part."""
        return slot_of(tree, block, id) in self._found

    def of(self, tree: Tree, block: str, held: Collection[str]) -> list[Reference]:
        """The references of this block among the parts that a client has, the newest first."""
        mine = [self._found[slot] for id in held if (slot := slot_of(tree, block, id)) in self._found]
        return sorted(mine, key=lambda reference: -reference.made)

    def is_current(self, reference: Reference, target: str, *, final: bool) -> bool:
        """Whether a client that has it need not be sent these values of the server.

        It need not if the reference stands for them, and is fine, or new in this round or in the one before: a model
        that is scored at the end of a round and trained in the next is sent once. Values that stay the same for longer
        are approached by further differences.

        Args:
            reference: what the client has.
            target: id of the part with the server's values.
            final: whether they are the run's result.
        """
        new = reference.since >= self._round - 1 and not final
        return reference.target == target and (reference.fine or new)

    def used(self, reference: Reference) -> None:
        """Enter that a client which has this reference need not be sent anything."""
        reference.used = self._round

    def age(self, reference: Reference) -> int:
        """The number of rounds over which the values may have changed since they were sent; at least 1."""
        return max(self._round - reference.since, 1)

    def find(self, slot: Slot) -> Known | None:
        """The content of a reference; None if there is none, or if its file is damaged, which is then forgotten."""
        if (reference := self._found.get(slot)) is None or slot in self._in_memory:
            return self._in_memory.get(slot)
        if slot in self._mapped:
            self._mapped.move_to_end(slot)
            return self._mapped[slot]
        try:
            if slot not in self._verified:  # an earlier process wrote it
                read_arrays(reference.path)
                self._verified.add(slot)
            return self._map(reference)
        except (OSError, DamagedFile) as error:
            log.warning("What clients have of block %r is sent as a whole: %s", slot[1], error)
            self._forget(reference)
            return None

    def sent(self, part: Part, target: str, values: Arrays, *, fine: bool) -> None:
        """Enter that a client is sent this part, which stands for the server's part `target`, and keep its values.

        If they cannot be written they stay in memory. `fine`: see `Reference`.
        """
        slot = slot_of(part.tree, part.block, part.id)
        known = self._found.get(slot)
        if known is not None and self.find(slot) is None:
            known = None
        since = known.since if known and known.target == target else max(self._round, 1)  # initial values: round 1's
        fine = fine or (known is not None and known.target == target and known.fine)
        about = f"{part.id}-{target}-{since}" + "-fine" * fine
        path = self._folder / f"{file_name(slot[0])}.{file_name(slot[1])}@{about}{SUFFIX}"
        if known is not None:
            with contextlib.suppress(OSError):
                known.path.rename(path)
                known.path = path
            known.target, known.since, known.fine, known.used = target, since, fine, self._round
            return
        nbytes = sum(array.nbytes for array in values.values())
        self._make_room(nbytes)
        self._enter(reference := Reference(slot, target, since, fine, nbytes, path, used=self._round))
        digests = Digests()
        for entry, array in values.items():
            digests.know(array, part.digest_of[entry])
        try:
            # Not durable: a file that a crash damages is found by its digests.
            write_arrays(path, values, durable=False, digests=digests)
            self._verified.add(slot)
            self._map(reference)
        except (OSError, ValueError) as error:  # a full disk, or a name that the format does not allow
            log.warning("What clients have of block %r stays in memory: %s", part.block, error)
            self._in_memory[slot] = Known(values, part.digest_of)

    def replaced(self, reference: Reference) -> None:
        """Enter that a client which has this reference is about to be sent a difference from it."""
        reference.holders -= 1

    def remove(self) -> None:
        """Remove all files: the run has ended."""
        for reference in list(self._found.values()):
            self._forget(reference)
        remove_unfinished(self._folder, after=0)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _enter(self, reference: Reference) -> None:
        self._made += 1
        reference.made = self._made
        reference.used = max(reference.used, reference.since)
        self._found[reference.slot] = reference
        self._nbytes += reference.nbytes

    def _map(self, reference: Reference) -> Known:
        found = map_arrays(reference.path)
        known = Known(
            values={name: array for name, (array, _) in found.items()},
            digests={name: value for name, (_, value) in found.items()},
        )
        self._mapped[reference.slot] = known
        if len(self._mapped) > _MOST_MAPPED:
            self._mapped.popitem(last=False)
        return known

    def _make_room(self, nbytes: int) -> None:
        """Forget references of earlier rounds until the limit allows `nbytes` more.

        First those that no client has any longer. Then those that were not used for `_LONG` rounds, the longest unused
        first: their clients may have left. Then the newest: clients are sent messages in the same order in each round,
        and those that were last then will be last now.
        """
        if self._nbytes + nbytes <= self._limit:
            return
        earlier = [one for one in self._found.values() if one.used < self._round]

        def rank(one: Reference) -> tuple[bool, bool, int]:
            recent = one.used >= self._round - _LONG
            return one.holders > 0, recent, -one.made if recent else one.used

        for reference in sorted(earlier, key=rank):
            if self._nbytes + nbytes <= self._limit:
                return
            self._forget(reference)

    def _forget(self, reference: Reference) -> None:
        del self._found[reference.slot]
        self._nbytes -= reference.nbytes
        self._mapped.pop(reference.slot, None)
        self._in_memory.pop(reference.slot, None)
        self._verified.discard(reference.slot)
        with contextlib.suppress(OSError):
            reference.path.unlink()
