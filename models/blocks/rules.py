"""The names of projections in the attention modules of each family, and the rule that a module matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from tepal.exchange.layout import Names
from tepal.models.blocks.modules import is_a


@dataclass(frozen=True)
class Rule:
    """The projections of a family's attention modules.

    projections: attribute (submodule or parameter) → its role, "q", "k" or "v"; several for a fused one, in the order
        in which they are stacked. All must exist for the rule to match.
    optional: likewise, for attributes that may exist.
    fused_in: class name of a fused submodule, which determines the axis along which its parts are stacked.
    unless: a module with one of these attributes does not match: its fused projection is stored head by head.
    """

    family: str
    projections: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    fused_in: str = "Linear"
    unless: Names = ()


_MHA_OPTIONAL = {"in_proj_bias": "qkv", "bias_k": "k", "bias_v": "v"}
RULES = (
    Rule("nn.MultiheadAttention", {"in_proj_weight": "qkv"}, _MHA_OPTIONAL),
    Rule(
        "nn.MultiheadAttention with kdim or vdim",
        {"q_proj_weight": "q", "k_proj_weight": "k", "v_proj_weight": "v"},
        _MHA_OPTIONAL,
    ),
    Rule("ViT, CLIP, BART, LLaMA, Qwen, Mistral", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}),
    Rule(
        "BERT, RoBERTa, ELECTRA, Longformer, Tepal's own",
        {"query": "q", "key": "k", "value": "v"},
        {"query_global": "q", "key_global": "k"},
    ),
    Rule("DistilBERT", {"q_lin": "q", "k_lin": "k", "v_lin": "v"}),
    Rule("T5", {"q": "q", "k": "k", "v": "v"}),
    Rule(
        "timm",
        {"qkv": "qkv"},
        {"q_bias": "q", "k_bias": "k", "v_bias": "v"},
        unless=("head_first", "key_dim"),
    ),
    Rule("GPT-2 cross-attention", {"q_attn": "q", "c_attn": "kv"}, fused_in="Conv1D"),
    Rule("GPT-2", {"c_attn": "qkv"}, fused_in="Conv1D"),
)


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule that a module declares (`tepal_projections`) or matches; None for other modules."""
    declared = getattr(module, "tepal_projections", None)
    if declared is not None:
        return Rule("declared", declared)
    return next((rule for rule in RULES if _matches(rule, module)), None)


def _matches(rule: Rule, module: nn.Module) -> bool:
    for attribute, roles in rule.projections.items():
        submodule = module._modules.get(attribute)
        if submodule is None and module._parameters.get(attribute) is None:
            return False
        if submodule is not None and len(roles) > 1 and not is_a(submodule, rule.fused_in):
            return False
    return not any(hasattr(module, attribute) for attribute in rule.unless)
