"""The attention modules of a model, and the raw tensors of their projections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tepal.models.blocks.errors import BlocksError, few
from tepal.models.blocks.modules import integer, is_a, join, nearest
from tepal.models.blocks.rules import Rule, rule_of

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Attention:
    """An attention module of a model: its path, the rule that matches it, and the nearest configuration above it."""

    path: str
    module: nn.Module
    rule: Rule
    config: Any

    @property
    def attributes(self) -> dict[str, str]:
        """Attribute → roles, for the projections that this module has."""
        has = {**self.module._parameters, **self.module._modules}
        roles = {**self.rule.projections, **self.rule.optional}
        return {attribute: roles[attribute] for attribute in roles if has.get(attribute) is not None}


def find_attentions(model: nn.Module) -> list[Attention]:
    """Return every attention module that matches a rule, in the order of the model's modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = [(path, module, rule_of(module)) for path, module in model.named_modules()]
    return [Attention(path, module, rule, nearest(modules, path, "config")) for path, module, rule in found if rule]


def raw_of(attention: Attention, names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return the raw tensors of an attention module's projections: name → (roles, axis along which they are stacked).

    Raises BlocksError for a declared projection that is missing, empty or not just weight and bias.
    """
    found: dict[str, tuple[str, int]] = {}
    if missing := attention.rule.projections.keys() - attention.attributes.keys():
        raise BlocksError(f"{attention.path}: tepal_projections names {few(sorted(missing))}, which the module lacks")
    for attribute, roles in attention.attributes.items():
        path = join(attention.path, attribute)
        submodule = attention.module._modules.get(attribute)
        mine = [name for name in names if name == path or name.startswith(path + ".")]
        direct = {path, path + ".weight", path + ".bias"}
        if attribute in attention.rule.projections and not mine:
            raise BlocksError(
                f"{path}: this {attention.rule.family} projection has no tensor in the state_dict: load the model "
                "without quantisation"
            )
        if len(roles) > 1 and not direct.issuperset(mine):
            raise BlocksError(
                f"{path}: this fused projection has {few(mine)}, expected only weight and bias: name its entries"
            )
        for name in mine:
            transposed = submodule is not None and is_a(submodule, "Conv1D") and name.endswith(".weight")
            found[name] = (roles, 1 if transposed else 0)
    return found


def is_mha(attention: Attention) -> bool:
    """Return whether the module is torch's `nn.MultiheadAttention`."""
    return attention.rule.family.startswith("nn.MultiheadAttention")


def rows_of(attention: Attention) -> dict[str, int]:
    """Return role → output features of its projection, for the roles whose size the configuration gives."""
    module, config = attention.module, attention.config
    if is_mha(attention):
        return dict.fromkeys("qkv", int(module.embed_dim))  # type: ignore[arg-type]
    hidden, heads = integer(config, "hidden_size", "n_embd"), integer(config, "num_attention_heads", "n_head")
    if hidden and heads:
        size = integer(config, "head_dim", "d_kv") or hidden // heads
        shared = integer(config, "num_key_value_heads") or integer(module, *_KV_HEADS) or heads
        return {"q": heads * size} | dict.fromkeys("kv", size * shared)
    heads, size = integer(module, "num_heads"), integer(module, "head_dim")
    return {"q": heads * size} if heads and size else {}


def heads_of(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads that a module's attributes give; 0 if they do not."""
    return integer(module, *_HEADS), integer(module, *_KV_HEADS)


def fused_rows(attention: Attention, roles: str, length: int) -> dict[str, int]:
    """Return role → rows of a fused projection with `length` rows; empty if neither configuration nor module says.

    A module that gives the number of its key-value heads has grouped-query attention: k and v are smaller than q.
    """
    rows = rows_of(attention)
    if all(role in rows for role in roles):
        return {role: rows[role] for role in roles}
    heads, shared = heads_of(attention.module)
    if not heads or not shared:
        return {}
    count = {"q": heads, "k": shared, "v": shared}
    size = integer(attention.module, "head_dim") or length // sum(count[role] for role in roles)
    return {role: count[role] * size for role in roles}
