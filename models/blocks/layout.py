"""The layout of a model's state_dict, with fused query, key and value projections split into entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from tepal.exchange.layout import Entry, Layout, RawTensor
from tepal.models.blocks.attention import Attention, find_attentions, fused_rows, heads_of, raw_of
from tepal.models.blocks.errors import BlocksError, few, name_of
from tepal.models.blocks.modules import below


def layout_of(model: nn.Module) -> Layout:
    """Return the raw tensors of a model's `state_dict` and its entries, with fused projections split into q, k and v.

    Works on any device, including meta.

    Raises:
        BlocksError: a fused projection has a size that does not fit its parts; tensors overlap in memory partially; or
            the state_dict has values that are not tensors.
    """
    return layout_with(model, find_attentions(model))


def canonical_state(model: nn.Module) -> dict[str, Tensor]:
    """Return entry name → detached view of the model's own storage: copying into it changes the model."""
    state = model.state_dict()
    return {
        entry.name: state[entry.raw] if entry.whole else state[entry.raw][entry.index]
        for entry in layout_of(model).entries
    }


def layout_with(model: nn.Module, attentions: Sequence[Attention]) -> Layout:
    """Return the layout as `layout_of` does, for known attention modules."""
    tensors = _tensors(model)
    owners = _owners(model, tensors)
    split: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    for attention in attentions:
        for name, (roles, axis) in raw_of(attention, tensors).items():
            if len(roles) > 1:
                sizes = _sizes(model, attention, name, roles, tensors[name].shape[axis])
                split[owners[name]] = (roles, axis, sizes)
    raw = tuple(
        RawTensor(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            owners[name] if owners[name] != name else "",
        )
        for name, tensor in tensors.items()
    )
    entries: list[Entry] = []
    for tensor in raw:
        if tensor.name in split:
            entries += _split(tensor, *split[tensor.name])
        elif not tensor.same_as:
            entries.append(Entry(tensor.name, tensor.name, tensor.shape, tensor.dtype))
    if len({entry.name for entry in entries}) != len(entries):
        raise BlocksError(
            f"{name_of(model)}: a tensor's name ends in ':q', ':k' or ':v', as a split projection's: rename it"
        )
    return Layout(raw, tuple(entries))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise BlocksError(
            f"{name_of(model)}: {few(other)} in its state_dict are not tensors and cannot be sent: remove them"
        )
    return state


def _owners(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name → name of the first tensor with the same memory. Raises BlocksError for partial overlaps."""
    first: dict[tuple[Any, ...], str] = {}
    owners: dict[str, str] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        # The storage object itself, not its address, which is 0 for every tensor on the meta device.
        storage, start = tensor.untyped_storage()._cdata, tensor.storage_offset()
        key = (storage, start, tensor.dtype, tuple(tensor.shape), tensor.stride())
        owners[name] = first.setdefault(key, name)
        if owners[name] == name and tensor.numel():
            length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size = tensor.element_size()
            spans.setdefault(storage, []).append((int(start) * size, int(start + length) * size, name))
    for shared in spans.values():
        for (_, end, name), (start, _, other) in pairwise(sorted(shared)):
            if start < end:
                raise BlocksError(f"{name_of(model)}: {name} and {other} overlap in memory partially: clone one")
    return owners


def _sizes(model: nn.Module, attention: Attention, name: str, roles: str, length: int) -> tuple[int, ...]:
    rows = fused_rows(attention, roles, length)
    sizes = tuple(rows[role] if rows else length // len(roles) for role in roles)
    if sum(sizes) != length:
        heads, shared = heads_of(attention.module)
        expected = " + ".join(map(str, sizes)) if rows else f"a multiple of {len(roles)}"
        if heads and shared:
            expected += (
                f", because its module has {heads} heads and {shared} for keys and values: set the module's num_heads, "
                "num_kv_heads and head_dim to those of the projection"
            )
        raise BlocksError(f"{name_of(model)}: {name} has {', '.join(roles)} in {length} rows; expected {expected}")
    return sizes


def _split(raw: RawTensor, roles: str, axis: int, sizes: Sequence[int]) -> Iterator[Entry]:
    for role, size, stop in zip(roles, sizes, accumulate(sizes), strict=True):
        shape = (*raw.shape[:axis], size, *raw.shape[axis + 1 :])
        yield Entry(f"{raw.name}:{role}", raw.name, shape, raw.dtype, axis, stop - size, stop)


def entries_below(layout: Layout, path: str) -> set[str]:
    """Return the entries of the module at `path`."""
    return {entry.name for entry in layout.entries if below(entry.raw, path)}


def matching(model: nn.Module, layout: Layout, patterns: Sequence[str]) -> set[str]:
    """Return the entries that match a glob pattern. Raises BlocksError for a pattern that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in layout.names if fnmatchcase(name, pattern)}
        if not names:
            raise BlocksError(f"{name_of(model)}: no entry matches {pattern!r}; entries are {few(layout.names)}")
        found |= names
    return found
