"""Names of what travels: a model's entries, and how they lie in its raw `state_dict`. No torch here.

A **raw** tensor is one tensor of a `state_dict`. An **entry** is what strategies handle: a raw tensor, or a slice of
one where a fused projection holds query, key and value together (`attn.in_proj_weight` shows as
`attn.in_proj_weight:q`, `:k`, `:v`). Raw tensors that share storage (tied embeddings) are one entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Names = tuple[str, ...]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor of a `state_dict`. `same_as` names the raw tensor whose storage it shares ("" when it has its own)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named part of a model: `raw[start:stop]` along `axis`, or the whole raw tensor when `axis` is -1."""

    name: str
    raw: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = -1
    start: int = 0
    stop: int = 0

    @property
    def whole(self) -> bool:
        return self.axis < 0

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def index(self) -> tuple[slice, ...]:
        """What to index the raw tensor with to get this entry as a view."""
        if self.whole:
            return ()
        return (slice(None),) * self.axis + (slice(self.start, self.stop),)

    def of(self, raw: np.ndarray) -> np.ndarray:
        """This entry of its raw tensor, as a view."""
        return raw if self.whole else raw[self.index]  # raw[()] would make a scalar of a 0-d array


@dataclass(frozen=True)
class Layout:
    """All raw tensors of a model in the order of its `state_dict`, and the entries they are made of, in that order."""

    raw: tuple[RawTensor, ...]
    entries: tuple[Entry, ...]
    by_name: Mapping[str, Entry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {entry.name: entry for entry in self.entries})
        if len(self.by_name) != len(self.entries):
            raise ValueError("two entries of a layout have the same name")

    @cached_property
    def names(self) -> Names:
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def entries_of(self) -> Mapping[str, tuple[Entry, ...]]:
        """Raw name → its entries, for raw tensors that have storage of their own."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.raw, []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of the named entries (all of them by default) as they travel."""
        return sum(self.by_name[name].nbytes for name in (self.names if names is None else names))

    def difference(self, other: Layout, *, mine: str, others: str) -> str:
        """In words, what tensors another layout has otherwise; "" for none. `mine`, `others`: whose they are."""
        here = {t.name: f"{t.dtype}{list(t.shape)}" for t in self.raw}
        there = {t.name: f"{t.dtype}{list(t.shape)}" for t in other.raw}
        different = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        if not different:
            return ""
        first = different[0]
        return (
            f"{len(different)} tensors differ, {first!r} first ({mine}: {here.get(first, 'absent')}, "
            f"{others}: {there.get(first, 'absent')})"
        )

    @staticmethod
    def of_arrays(arrays: Arrays) -> Layout:
        """The layout of a plain `state_dict`: every tensor is one entry, nothing is fused or shared."""
        raw = tuple(RawTensor(name, tuple(a.shape), str(a.dtype)) for name, a in arrays.items())
        return Layout(raw, tuple(Entry(t.name, t.name, t.shape, t.dtype) for t in raw))

    def split(self, raw: Arrays) -> dict[str, np.ndarray]:
        """Entries of a raw `state_dict`, as views."""
        return {entry.name: entry.of(raw[entry.raw]) for entry in self.entries}

    def join(self, entries: Arrays) -> dict[str, np.ndarray]:
        """The raw `state_dict`: whole entries are passed on, fused ones assembled, shared ones repeated."""
        raw: dict[str, np.ndarray] = {}
        for tensor in self.raw:
            if tensor.same_as:
                continue
            parts = self.entries_of[tensor.name]
            if parts[0].whole:
                raw[tensor.name] = entries[parts[0].name]
            else:
                whole = np.empty(tensor.shape, np.dtype(tensor.dtype))
                for part in parts:
                    whole[part.index] = entries[part.name]
                raw[tensor.name] = whole
        return {tensor.name: raw[tensor.same_as or tensor.name] for tensor in self.raw}

    def to_json(self) -> dict[str, Any]:
        return {
            "raw": [[t.name, list(t.shape), t.dtype, t.same_as] for t in self.raw],
            "split": [[e.name, e.raw, list(e.shape), e.axis, e.start, e.stop] for e in self.entries if not e.whole],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        raw = tuple(RawTensor(name, tuple(shape), dtype, same_as) for name, shape, dtype, same_as in data["raw"])
        split: dict[str, list[tuple[Any, ...]]] = {}
        for name, of, shape, axis, start, stop in data["split"]:
            split.setdefault(of, []).append((name, tuple(shape), axis, start, stop))
        entries: list[Entry] = []
        for tensor in raw:
            if tensor.same_as:
                continue
            if tensor.name in split:
                entries += [
                    Entry(name, tensor.name, shape, tensor.dtype, axis, start, stop)
                    for name, shape, axis, start, stop in split[tensor.name]
                ]
            else:
                entries.append(Entry(tensor.name, tensor.name, tensor.shape, tensor.dtype))
        return Layout(raw, tuple(entries))
