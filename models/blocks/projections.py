"""The entries of query, key and value projections, and the checks that none is missing or has a wrong shape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from tepal.exchange.layout import Entry, Layout
from tepal.models.blocks.attention import Attention, is_mha, raw_of, rows_of
from tepal.models.blocks.errors import BlocksError, few, name_of
from tepal.models.blocks.modules import below, integer, join

# A component of a name that denotes query or key. Norms (`q_norm`, `k_norm`) are not projections.
_QUERY_OR_KEY = re.compile(
    r"(to_)?(w_?)?((pos|layout|[ew]2[ew])_)?"
    r"(q|k|qk|kv|qkv|query|key|query_key|key_value|query_key_value|in_proj|c_attn|q_attn)s?"
    r"(_?(proj|projection|lin|linear|layer|weight|bias|with_mqa|global|w|a|b))*",
    re.IGNORECASE,
)


def _entries_of(layout: Layout, attention: Attention) -> Iterator[tuple[Entry, str, str]]:
    """Yield (entry, its role, its raw name in this attention module) for each projection."""
    owners = {tensor.name: tensor.same_as or tensor.name for tensor in layout.raw}
    for raw, (roles, _) in raw_of(attention, owners).items():
        for entry in layout.entries_of[owners[raw]]:
            yield entry, roles if entry.whole else entry.name[-1], raw


def roles_of(model: nn.Module, layout: Layout, attentions: Sequence[Attention]) -> dict[str, str]:
    """Return entry name → "q", "k" or "v" for every projection. Raises BlocksError for a tensor with both uses."""
    roles: dict[str, str] = {}
    for attention in attentions:
        for entry, role, raw in _entries_of(layout, attention):
            if (roles.setdefault(entry.name, role) == "v") != (role == "v"):
                raise BlocksError(f"{name_of(model)}: {raw} is both a value projection and a query or key projection")
    return roles


def value_weights(layout: Layout, attentions: Sequence[Attention], roles: Mapping[str, str]) -> set[str]:
    """Return the value projections' matrices, without biases and `bias_v`, which is not a projection."""
    weights = set()
    for attention in attentions:
        optional = tuple(join(attention.path, attribute) for attribute in attention.rule.optional)
        for entry, role, raw in _entries_of(layout, attention):
            if role == "v" and len(entry.shape) > 1 and raw not in optional:
                weights.add(entry.name)
    return weights


def check_complete(model: nn.Module, layout: Layout, attentions: Sequence[Attention], roles: Mapping[str, str]) -> None:
    """Raise BlocksError for an unknown projection or attention module, which would silently be part of `value`."""
    cure = (
        "declare it on the module's class (tepal_projections = {attribute: 'q', 'k', 'v' or 'qkv'}), "
        "or name the entries: find_blocks(model, query_key=[patterns])"
    )
    names = [name for name in layout.names if name not in roles and _is_query_or_key_name(name)]
    if names:
        raise BlocksError(
            f"{name_of(model)}: {few(names)} look like query or key projections but fit no known family; {cure}"
        )
    known = [attention.path for attention in attentions]
    for path, module in model.named_modules() if known else ():
        looks = re.search(r"attention|attn", type(module).__name__, re.IGNORECASE)
        related = any(below(path, other) or below(other, path) for other in known)
        if looks and not related and any(parameter.ndim > 1 for parameter in module.parameters()):
            raise BlocksError(
                f"{name_of(model)}: {path} ({type(module).__name__}) looks like attention but fits no known family, "
                f"unlike {len(known)} other attention modules; {cure}"
            )


def _is_query_or_key_name(name: str) -> bool:
    parts = name.split(":")[0].split(".")
    attention = any(re.search(r"attn|attention", part, re.IGNORECASE) for part in parts[:-1])
    # State-space models call their input projection `in_proj`, too: it counts only within attention.
    return any(_QUERY_OR_KEY.fullmatch(part) and (part != "in_proj" or attention) for part in parts)


def check_shapes(model: nn.Module, layout: Layout, attentions: Sequence[Attention]) -> None:
    """Raise BlocksError for output features, or input features of a query, that differ from the configuration."""
    for attention in attentions:
        rows, hidden = rows_of(attention), integer(attention.config, "hidden_size", "n_embd")
        axes = {raw: axis for raw, (_, axis) in raw_of(attention, [tensor.name for tensor in layout.raw]).items()}
        own = {join(attention.path, attribute) for attribute in attention.rule.projections}
        for entry, role, raw in _entries_of(layout, attention):
            if raw not in own and raw.rpartition(".")[0] not in own:
                continue  # an adapter inside the projection, or bias_k: the configuration does not give its size
            if entry.shape:
                _expect(model, entry, "output features", entry.shape[axes[raw]], rows.get(role))
            if role == "q" and len(entry.shape) == 2 and "q" in rows and not is_mha(attention):
                _expect(model, entry, "input features", entry.shape[1 - axes[raw]], hidden)


def _expect(model: nn.Module, entry: Entry, what: str, found: int, expected: int | None) -> None:
    if expected and found != expected:
        raise BlocksError(
            f"{name_of(model)}: {entry.name} has {found} {what}, expected {expected} from the configuration; "
            "is it a plain projection? If so, name the entries: find_blocks(model, query_key=[patterns])"
        )
