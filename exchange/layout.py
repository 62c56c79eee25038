"""A model's entries, and their places in its raw `state_dict`. This module needs no torch.

A **raw** tensor is one tensor of a `state_dict`. An **entry** is what strategies handle: a raw tensor, or a slice of a
fused projection of query, key and value (`attn.in_proj_weight` has the entries `attn.in_proj_weight:q`, `:k` and `:v`).
Raw tensors that share storage (tied embeddings) are one entry.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from blake3 import blake3

from tepal.exchange.texts import to_text

Names = tuple[str, ...]
Arrays = Mapping[str, np.ndarray]
Shaped = tuple[str, str, tuple[int, ...]]
"""(name, dtype, shape) of an array."""

LAYOUT_ID = re.compile("[0-9a-f]{8}")
"""Format of a layout's id."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_buffer(name: str) -> bool:
    """Whether an entry is one of BatchNorm's buffers, by the last part of its name."""
    return name.rpartition(".")[2] in _BUFFERS


@cache
def dtype_name(dtype: np.dtype) -> str:
    """`dtype.name`, which NumPy makes anew, and slowly, each time."""
    return str(dtype.name)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor of a `state_dict`. `same_as`: the raw tensor whose storage it shares; "" if it has its own."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A named tensor of a model: `raw[start:stop]` along `axis`, or the whole raw tensor if `axis` is -1."""

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
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values. Raises ValueError for a dtype that NumPy does not have: the entry cannot be sent."""
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.isbuiltin != 1:  # other libraries may have added bfloat16 to NumPy's
            raise ValueError(
                f"the entry {self.name!r} is {self.dtype}, which cannot be sent: make the model float32 "
                '(model.float()). autocast="bf16" trains it in bfloat16, and wire-dtype="bfloat16" halves what is sent'
            )
        return self.size * dtype.itemsize

    @property
    def index(self) -> tuple[slice, ...]:
        """The index with which the raw tensor gives this entry as a view."""
        if self.whole:
            return ()
        return (slice(None),) * self.axis + (slice(self.start, self.stop),)

    def of(self, raw: np.ndarray) -> np.ndarray:
        """This entry of its raw tensor, as a view."""
        return raw if self.whole else raw[self.index]  # raw[()] of a 0-d array is a scalar


@dataclass(frozen=True)
class Layout:
    """All raw tensors of a model, and the entries that they consist of, in the order of its `state_dict`."""

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
    def id(self) -> str:
        """A digest of the layout (8 hexadecimal digits), which distinguishes it from other layouts of the run."""
        return blake3(to_text(self.to_json())).hexdigest(4)

    @cached_property
    def entries_of(self) -> Mapping[str, tuple[Entry, ...]]:
        """Raw name → its entries, for raw tensors with their own storage."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.raw, []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of the named entries (by default, of all), not encoded."""
        return sum(self.by_name[name].nbytes for name in (self.names if names is None else names))

    def shaped(self, names: Iterable[str]) -> list[Shaped]:
        """The named entries' arrays, in the order of the names."""
        return [(entry.name, entry.dtype, entry.shape) for entry in map(self.by_name.__getitem__, names)]

    def difference(self, other: Layout, *, mine: str, others: str) -> str:
        """How the tensors of another layout differ, in words; "" if they do not. `mine`, `others`: their owners."""
        here, there = ({t.name: f"{t.dtype}{list(t.shape)}" for t in layout.raw} for layout in (self, other))
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
        """The layout of a `state_dict` without fused or shared tensors: every tensor is one entry."""
        raw = tuple(RawTensor(name, tuple(a.shape), str(a.dtype)) for name, a in arrays.items())
        return Layout(raw, tuple(Entry(t.name, t.name, t.shape, t.dtype) for t in raw))

    def split(self, raw: Arrays) -> dict[str, np.ndarray]:
        """Entries of a raw `state_dict`, as views."""
        return {entry.name: entry.of(raw[entry.raw]) for entry in self.entries}

    def join(self, entries: Arrays) -> dict[str, np.ndarray]:
        """The raw `state_dict` of all entries, in which fused tensors are assembled and shared ones repeated."""
        raw: dict[str, np.ndarray] = {}
        for tensor in self.raw:
            if tensor.same_as:
                continue
            first, *others = self.entries_of[tensor.name]
            if first.whole:
                raw[tensor.name] = entries[first.name]
            else:
                raw[tensor.name] = np.empty(tensor.shape, np.dtype(tensor.dtype))
                for entry in (first, *others):
                    raw[tensor.name][entry.index] = entries[entry.name]
        return {tensor.name: raw[tensor.same_as or tensor.name] for tensor in self.raw}

    def to_json(self) -> dict[str, Any]:
        return {
            "raw": [[t.name, list(t.shape), t.dtype, t.same_as] for t in self.raw],
            "split": [[e.name, e.raw, list(e.shape), e.axis, e.start, e.stop] for e in self.entries if not e.whole],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` wrote. Raises KeyError, TypeError or ValueError for other data."""
        raw = tuple(RawTensor(name, tuple(shape), dtype, same_as) for name, shape, dtype, same_as in data["raw"])
        for tensor in raw:
            _check_texts(tensor.name, tensor.dtype, tensor.same_as)
            _check_sizes(tensor.shape)
            _check_dtype(tensor.dtype)
        dtypes = {tensor.name: tensor.dtype for tensor in raw}
        split: dict[str, list[Entry]] = {}
        for name, of, shape, *place in data["split"]:
            entry = Entry(name, of, tuple(shape), dtypes[of], *place)
            _check_texts(name)
            _check_sizes((*entry.shape, entry.axis, entry.start, entry.stop))
            split.setdefault(of, []).append(entry)
        entries: list[Entry] = []
        for tensor in raw:
            if not tensor.same_as:
                whole = Entry(tensor.name, tensor.name, tensor.shape, tensor.dtype)
                entries += split.get(tensor.name, [whole])
        return Layout(raw, tuple(entries))


def _check_texts(*texts: Any) -> None:
    for text in texts:
        if type(text) is not str:
            raise TypeError(f"{reprlib.repr(text)} is not text")
        text.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates


def _check_sizes(sizes: tuple[Any, ...]) -> None:
    for size in sizes:
        if type(size) is not int or not 0 <= size < 2**48:
            raise ValueError(f"{reprlib.repr(size)} is not a size")


@cache
def _check_dtype(name: str) -> None:
    if np.dtype(name).hasobject:
        raise ValueError(f"{name} is no dtype of numbers")


def runs_of(numbers: Iterable[int]) -> list[int]:
    """Numbers of entries as runs of consecutive ones: the first of each, and how many there are, in turn."""
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 1]
    return runs


def numbers_of(runs: list[int], entries: int) -> list[int]:
    """The numbers of which these are the runs. Raises ValueError unless each is one of so many entries, and once."""
    firsts, counts = runs[::2], runs[1::2]
    if len(firsts) != len(counts) or not all(type(k) is int and k >= 0 for k in runs) or sum(counts) > entries:
        raise ValueError("entries are not listed by runs of their numbers")
    numbers = [number for first, count in zip(firsts, counts, strict=True) for number in range(first, first + count)]
    if max(numbers, default=-1) >= entries or len(set(numbers)) < len(numbers):
        raise ValueError("an entry's number is too large, or occurs twice")
    return numbers
