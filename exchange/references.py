"""References: what the clients have in their caches, as the server knows it, so that it can send them differences.

    <folder>/<tree>.<block>@<part id>-<target id>.safetensors

A reference is a part as a client decoded it. The client reports the id of the part, and the server then has the same
values to the bit. Clients with equal parts share a reference: if all take part in every round there is one of each
block, and at most as many as there are clients. They are on disk and memory-mapped: the system can release their
memory. A run that is resumed finds them again. A reference that is lost costs bytes only: its clients are sent the
whole part.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from tepal.exchange.files import SUFFIX, DamagedFile, map_arrays, read_arrays, remove_unfinished, write_arrays
from tepal.exchange.layout import Arrays, Names
from tepal.exchange.parts import Part
from tepal.exchange.plan import Tree

log = getLogger("flwr")

DEFAULT_MEGABYTES = 8000.0
"""Of all references together. Beyond it the least recently used are forgotten."""

_NAME = re.compile(rf"([^.@]*)\.([^.@]*)@([0-9a-f]+)-([0-9a-f]+){re.escape(SUFFIX)}")


@dataclass
class Reference:
    """Values of a part that clients have cached."""

    id: str
    """Of the part."""
    target: str
    """Id of the part with the server's own values, which these stand for."""
    tree: Tree
    block: str
    path: Path
    nbytes: int
    values: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Name → array, mapped from the file; empty until `References.open`."""
    digests: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    used: int = 0
    """The number of the round in which it was last used, counted by `References`."""
    made: int = 0
    """How many were made before it."""

    def part(self, names: Names) -> Part:
        """The part, whose entries are in this order. Raises KeyError if it has not all of them."""
        return Part(self.tree, self.block, names, tuple(self.digests[name] for name in names))


class References:
    """The references of a run.

    Args:
        folder: of their files. Those that are in it already are of the same run, before it was resumed.
        megabytes: limit of all of them. Those of the present round are kept in any case.
    """

    def __init__(self, folder: Path, megabytes: float = DEFAULT_MEGABYTES) -> None:
        self._folder = folder
        self._limit = megabytes * 1e6
        self._round = 0
        self._found: dict[str, Reference] = {}
        self._made = 0
        remove_unfinished(folder)
        for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
            if named := _NAME.fullmatch(path.name):
                tree, block, id, target = map(unquote, named.groups())
                self._enter(Reference(id, target, tree, block, path, path.stat().st_size))

    def begin(self, held: Collection[str]) -> None:
        """Begin a round. References that no client has are forgotten, unless they were used in the round before."""
        for reference in list(self._found.values()):
            if reference.id not in held and reference.used < self._round:
                self._forget(reference)
        self._round += 1

    def of(self, held: Collection[str], tree: Tree, block: str) -> list[Reference]:
        """The references of this block among the parts that a client has, the newest first."""
        found = [self._found[id] for id in held if id in self._found]
        mine = [reference for reference in found if (reference.tree, reference.block) == (tree, block)]
        return sorted(mine, key=lambda reference: -reference.made)

    def open(self, id: str) -> Reference | None:
        """The reference of this id with its values; None if there is none, or if its file is damaged."""
        reference = self._found.get(id)
        if reference is None:
            return None
        if not reference.values:
            try:
                read_arrays(reference.path)  # it may be older than this process, and is compared with its digests
                self._map(reference)
            except (OSError, DamagedFile) as error:
                log.warning("What clients have of block %r is sent as a whole: %s", reference.block, error)
                self._forget(reference)
                return None
        reference.used = self._round
        return reference

    def add(self, part: Part, target: str, values: Arrays) -> Reference:
        """Keep the values of a part that a client is about to receive; returns its reference.

        If they cannot be written they stay in memory, within the limit of all references.
        """
        if (known := self.open(part.id)) is not None:
            known.target = target
            return known
        path = self._folder / f"{_quoted(part.tree)}.{_quoted(part.block)}@{part.id}-{target}{SUFFIX}"
        nbytes = sum(array.nbytes for array in values.values())
        self._make_room(nbytes)
        reference = Reference(part.id, target, part.tree, part.block, path, nbytes, values, part.digest_of, self._round)
        self._enter(reference)
        try:
            # Not durable: a file that a crash damages is found by its digests.
            write_arrays(path, values, durable=False)
            self._map(reference)
        except (OSError, DamagedFile) as error:
            log.warning("What clients have of block %r stays in memory: %s", part.block, error)
        return reference

    def remove(self) -> None:
        """Remove all files: the run has ended."""
        for reference in list(self._found.values()):
            self._forget(reference)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _enter(self, reference: Reference) -> None:
        self._made += 1
        reference.made = self._made
        self._found[reference.id] = reference

    def _map(self, reference: Reference) -> None:
        found = map_arrays(reference.path)
        reference.values = {name: array for name, (array, _) in found.items()}
        reference.digests = {name: value for name, (_, value) in found.items()}

    def _make_room(self, nbytes: int) -> None:
        for reference in self._oldest():
            if nbytes + sum(reference.nbytes for reference in self._found.values()) <= self._limit:
                return
            log.info("References have reached their limit: block %r of some clients is sent as a whole.",
                     reference.block)  # fmt: skip
            self._forget(reference)

    def _oldest(self) -> Iterator[Reference]:
        """Those that are not of this round, the least recently used first."""
        earlier = [reference for reference in self._found.values() if reference.used < self._round]
        return iter(sorted(earlier, key=lambda reference: reference.used))

    def _forget(self, reference: Reference) -> None:
        del self._found[reference.id]
        with contextlib.suppress(OSError):
            reference.path.unlink()


def _quoted(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")
