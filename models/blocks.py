"""What a model is made of: its entries, and the blocks that the methods freeze, select and exchange.

FedFrozen (arXiv 2605.06446) divides a model in two: `query_key`, the weights and biases of all query and key
projections of every attention module (self- and cross-attention), and `value`, everything else. Selective layer
fine-tuning (arXiv 2408.15600) divides it into transformer blocks (`layers`), `embedding` and `head`.

Blocks are found by family and proved. `RULES` lists how attention modules name their projections; what is found is
then held against what the model's configuration says about the number of attention modules and about their shapes,
and whatever still looks like a query or key projection afterwards is an error. No model library is imported here: a
family is told by attribute and class names. To add one is a line in `RULES`; a model of one's own needs no line:

    class MyAttention(nn.Module):
        tepal_projections = {"wqkv": "qkv"}      # attribute → which of q, k, v it holds, stacked in this order
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from tepal.exchange.layout import Entry, Layout, Names, RawTensor


class BlocksError(ValueError):
    """A model's parts could not be found, or what was found is not what its configuration says."""


@dataclass(frozen=True)
class Rule:
    """How the attention modules of a family hold their projections.

    `holds` maps an attribute (submodule or parameter) to its role, "q", "k" or "v"; a fused one has several, in the
    order in which they are stacked. All of `holds` must be there for the rule to match, `also` may be. `fused_in` is
    the class of a fused submodule: its name decides along which axis the parts are stacked. A module that has an
    attribute named in `unless` does not match: its fused projection is laid out head by head.
    """

    family: str
    holds: Mapping[str, str]
    also: Mapping[str, str] = field(default_factory=dict)
    fused_in: str = "Linear"
    unless: Names = ()


_MHA_ALSO = {"in_proj_bias": "qkv", "bias_k": "k", "bias_v": "v"}

RULES = (
    Rule("nn.MultiheadAttention", {"in_proj_weight": "qkv"}, _MHA_ALSO),
    Rule(
        "nn.MultiheadAttention with kdim or vdim",
        {"q_proj_weight": "q", "k_proj_weight": "k", "v_proj_weight": "v"},
        _MHA_ALSO,
    ),
    Rule("ViT, CLIP, BART, LLaMA, Qwen, Mistral", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}),
    Rule("BERT, RoBERTa, ELECTRA, Tepal's own", {"query": "q", "key": "k", "value": "v"}),
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

# A part of a name that says query or key, wherever it stands. Norms (`q_norm`, `k_norm`) are not projections.
_QUERY_OR_KEY = re.compile(
    r"(to_)?(w_?)?(pos_)?(q|k|qk|kv|qkv|query|key|query_key|key_value|query_key_value|in_proj|c_attn|q_attn)s?"
    r"(_?(proj|projection|lin|linear|layer|weight|bias|with_mqa|w|a|b))*",
    re.IGNORECASE,
)
_EMBEDDING = re.compile(r".*embed.*|.*_tokens?|shared|wte|wpe|conv_proj|pre_layrnorm|norm_pre")
_HEAD = re.compile(
    r"head|heads|head_dist|classifier|pre_classifier|classification_head|score|fc|cls|lm_head|generator_lm_head|"
    r"qa_outputs|final_logits_bias|(discriminator|generator)_predictions|vocab_(transform|layer_norm|projector)"
)
# Where the final norm and the projection count as head (arXiv 2408.15600, CLIP): class → what belongs to it.
_HEAD_OF_CLASS = {
    "CLIPVisionModel": ("*post_layernorm.*",),
    "CLIPTextModel": ("*final_layer_norm.*",),
    "CLIPVisionTransformer": ("post_layernorm.*",),  # what holds them in transformers 4
    "CLIPTextTransformer": ("final_layer_norm.*",),
    "CLIPVisionModelWithProjection": ("visual_projection.*",),
    "CLIPTextModelWithProjection": ("text_projection.*",),
    "CLIPModel": ("visual_projection.*", "text_projection.*", "logit_scale"),
}
# The stages of a network without attention: the first of these that its modules' names match.
_STAGES = (r"stages\.[^.]+", r"layer\d+", r"stage\d+", r"features\.[^.]+", r"blocks\.[^.]+")


@dataclass(frozen=True)
class Blocks:
    """The parts of a model, as names of entries (see `tepal.exchange.layout`), each in the order of the layout.

    `query_key` and `value` are complete and disjoint: `value` is everything that is not in `query_key`, so norms of
    queries and keys (Qwen3, timm's qk_norm) and relative position biases (T5) too: they are not projections.
    `bias_k` of `nn.MultiheadAttention`, a learned key, counts with the keys. `value_projection`, a part of `value`, is
    the weights (no biases) of the value projections: what FedFrozen's ridge term is about.

    `layers`, `embedding`, `head` and `rest` are complete and disjoint too. Layers go from input to output, the
    encoder's before the decoder's; side by side (CLIP's text and vision towers) in the order of the `state_dict`.
    Embedding is patch, token and position embeddings, with their norm and projection, and class and mask tokens. What
    the last layer's output goes through before the head (final norm, pooler) is rest, in every family but CLIP, where
    the final norm and the projection are head. A head tied to the embedding is embedding.

    `buffers` are the entries that no gradient trains: BatchNorm's statistics and counters, and the like.
    """

    model: str
    layout: Layout
    query_key: Names
    value: Names
    value_projection: Names
    layers: tuple[Names, ...]
    embedding: Names
    head: Names
    buffers: Names
    attentions: int

    @property
    def rest(self) -> Names:
        """Entries in neither a layer nor embedding nor head."""
        taken = {*self.embedding, *self.head, *(name for layer in self.layers for name in layer)}
        return tuple(name for name in self.layout.names if name not in taken)


def layout_of(model: nn.Module) -> Layout:
    """The raw tensors of a model's `state_dict` and its entries, fused query/key/value projections split.

    Works on any device, meta included. Raises BlocksError for a fused projection whose size does not fit its parts,
    and for tensors that overlap in memory without being equal.
    """
    return _layout(model, _find_attentions(model))


def canonical_state(model: nn.Module) -> dict[str, Tensor]:
    """Entry name → tensor, detached, on the model's own storage: copying into it loads the model."""
    state = model.state_dict()
    return {
        entry.name: state[entry.raw] if entry.whole else state[entry.raw][entry.index]
        for entry in layout_of(model).entries
    }


def find_blocks(
    model: nn.Module,
    *,
    query_key: Sequence[str] | None = None,
    value_projection: Sequence[str] = (),
    layers: Sequence[str] | str | None = None,
    embedding: Sequence[str] | None = None,
    head: Sequence[str] | None = None,
) -> Blocks:
    """The blocks of a model, found by family and proved against its configuration.

    Where no family fits, name them: `query_key` and `value_projection` are glob patterns over entry names, and so are
    `embedding` and `head`; `layers` is one pattern a layer, from input to output ("encoder.3.*"), or a text with one
    `*` that stands for the layer's number ("encoder.*"). Given patterns replace the search and its proof. A model
    without attention has an empty `query_key`; its layers are its stages.

    Raises BlocksError, naming the model, what was found and what was expected: when the number of attention modules
    or the shape of a projection differs from the configuration, when something that looks like a query or key
    projection fits no family, and when a pattern matches nothing.
    """
    attentions = _find_attentions(model)
    layout = _layout(model, attentions)
    if query_key is None:
        if value_projection:
            raise BlocksError(f"{_name(model)}: value_projection is given without query_key; give both or neither")
        roles = _roles(model, layout, attentions)
        chosen = {name for name, role in roles.items() if role in "qk"}
        values = _value_weights(layout, attentions, roles)
        _refuse_leftovers(model, layout, attentions, roles)
        _prove_shapes(model, layout, attentions)
        paths = [attention.path for attention in attentions]
    else:
        chosen = _matching(model, layout, query_key)
        values = _matching(model, layout, value_projection)
        if both := sorted(chosen & values):
            raise BlocksError(f"{_name(model)}: {_few(both)} are in both query_key and value_projection")
        paths = [layout.by_name[name].raw for name in layout.names if name in chosen]
    stacks = _stacks(model, paths)
    if query_key is None:
        _prove_counts(model, stacks, paths)
    named = (_numbered(model, layout, layers) if isinstance(layers, str) else layers, embedding, head)
    found_layers, found_embedding, found_head = _parts_of(model, layout, stacks, *named)
    return Blocks(
        model=_name(model),
        layout=layout,
        query_key=_in_order(layout, chosen),
        value=_in_order(layout, set(layout.names) - chosen),
        value_projection=_in_order(layout, values),
        layers=tuple(_in_order(layout, layer) for layer in found_layers),
        embedding=_in_order(layout, found_embedding),
        head=_in_order(layout, found_head),
        buffers=_in_order(layout, _buffers(model, layout)),
        attentions=len(attentions) if query_key is None else 0,
    )


# --- attention modules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    path: str
    module: nn.Module
    rule: Rule
    config: Any

    @property
    def attributes(self) -> dict[str, str]:
        """Attribute → roles, of what this module has."""
        has = {**self.module._parameters, **self.module._modules}
        roles = {**self.rule.holds, **self.rule.also}
        return {attribute: roles[attribute] for attribute in roles if has.get(attribute) is not None}


def _find_attentions(model: nn.Module) -> list[_Attention]:
    """Every attention module that a rule knows, in the order of the model's modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = [(path, module, _rule_of(module)) for path, module in model.named_modules()]
    return [_Attention(path, module, rule, _nearest(modules, path, "config")) for path, module, rule in found if rule]


def _rule_of(module: nn.Module) -> Rule | None:
    declared = getattr(module, "tepal_projections", None)
    if declared is not None:
        return Rule("declared", declared)
    return next((rule for rule in RULES if _matches(rule, module)), None)


def _matches(rule: Rule, module: nn.Module) -> bool:
    for attribute, roles in rule.holds.items():
        held = module._modules.get(attribute)
        if held is None and module._parameters.get(attribute) is None:
            return False
        if held is not None and len(roles) > 1 and not _is_a(held, rule.fused_in):
            return False
    return not any(hasattr(module, attribute) for attribute in rule.unless)


def _raw_of(attention: _Attention, names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Raw tensors of an attention module's projections: name → (roles, axis along which they are stacked)."""
    found: dict[str, tuple[str, int]] = {}
    if missing := attention.rule.holds.keys() - attention.attributes.keys():
        raise BlocksError(f"{attention.path}: {_few(sorted(missing))} in tepal_projections, but not on the module")
    for attribute, roles in attention.attributes.items():
        path = _join(attention.path, attribute)
        held = attention.module._modules.get(attribute)
        mine = [name for name in names if name == path or name.startswith(path + ".")]
        direct = {path, path + ".weight", path + ".bias"}
        if attribute in attention.rule.holds and not mine:
            raise BlocksError(f"{path}: a {attention.rule.family} projection without a tensor in the state_dict")
        if len(roles) > 1 and not direct.issuperset(mine):
            raise BlocksError(f"{path}: a fused projection that holds {_few(mine)}, not just weight and bias")
        for name in mine:
            transposed = held is not None and _is_a(held, "Conv1D") and name.endswith(".weight")
            found[name] = (roles, 1 if transposed else 0)
    return found


def _rows(attention: _Attention) -> dict[str, int]:
    """Output features that the configuration gives each projection; only what it says."""
    module, config = attention.module, attention.config
    if attention.rule.family.startswith("nn.MultiheadAttention"):
        return dict.fromkeys("qkv", int(module.embed_dim))  # type: ignore[arg-type]
    hidden, heads = _integer(config, "hidden_size", "n_embd"), _integer(config, "num_attention_heads", "n_head")
    if hidden and heads:
        size = _integer(config, "head_dim", "d_kv") or hidden // heads
        return {"q": heads * size} | dict.fromkeys("kv", size * (_integer(config, "num_key_value_heads") or heads))
    heads, size = _integer(module, "num_heads"), _integer(module, "head_dim")
    return {"q": heads * size} if heads and size else {}


# --- layout --------------------------------------------------------------------------------------------------------


def _layout(model: nn.Module, attentions: Sequence[_Attention]) -> Layout:
    tensors = _tensors(model)
    owners = _owners(model, tensors)
    split: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    for attention in attentions:
        for name, (roles, axis) in _raw_of(attention, tensors).items():
            if len(roles) > 1:
                sizes = _sizes(model, attention, name, roles, tensors[name].shape[axis])
                split[owners[name]] = (roles, axis, sizes)
    raw = tuple(
        RawTensor(name, tuple(tensor.shape), _dtype(tensor), owners[name] if owners[name] != name else "")
        for name, tensor in tensors.items()
    )
    entries: list[Entry] = []
    for tensor in raw:
        if tensor.name in split:
            entries += _split(tensor, *split[tensor.name])
        elif not tensor.same_as:
            entries.append(Entry(tensor.name, tensor.name, tensor.shape, tensor.dtype))
    if len({entry.name for entry in entries}) != len(entries):
        raise BlocksError(f"{_name(model)}: a tensor's name ends in ':q', ':k' or ':v' and collides with a split one")
    return Layout(raw, tuple(entries))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise BlocksError(f"{_name(model)}: {_few(other)} in its state_dict are no tensors and cannot travel")
    return state


def _owners(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name → name of the first tensor on the same storage (itself for most). Partial overlaps are refused."""
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
                raise BlocksError(f"{_name(model)}: {name} and {other} overlap in memory but are not the same tensor")
    return owners


def _sizes(model: nn.Module, attention: _Attention, name: str, roles: str, length: int) -> tuple[int, ...]:
    rows = _rows(attention)
    known = all(role in rows for role in roles)
    sizes = tuple(rows[role] if known else length // len(roles) for role in roles)
    if sum(sizes) != length:
        raise BlocksError(
            f"{_name(model)}: {name} holds {', '.join(roles)} in {length} rows; expected "
            f"{' + '.join(map(str, sizes)) if known else f'a multiple of {len(roles)}'}"
        )
    return sizes


def _split(raw: RawTensor, roles: str, axis: int, sizes: Sequence[int]) -> Iterator[Entry]:
    for role, size, stop in zip(roles, sizes, accumulate(sizes), strict=True):
        shape = (*raw.shape[:axis], size, *raw.shape[axis + 1 :])
        yield Entry(f"{raw.name}:{role}", raw.name, shape, raw.dtype, axis, stop - size, stop)


# --- query, key and value ------------------------------------------------------------------------------------------


def _entries_of(layout: Layout, attention: _Attention) -> Iterator[tuple[Entry, str, str]]:
    """(entry, its role, the raw name it has in this attention module) of each projection."""
    owners = {tensor.name: tensor.same_as or tensor.name for tensor in layout.raw}
    for raw, (roles, _) in _raw_of(attention, owners).items():
        for entry in layout.entries_of[owners[raw]]:
            yield entry, roles if entry.whole else entry.name[-1], raw


def _roles(model: nn.Module, layout: Layout, attentions: Sequence[_Attention]) -> dict[str, str]:
    """Entry name → "q", "k" or "v" for every projection's entries."""
    roles: dict[str, str] = {}
    for attention in attentions:
        for entry, role, raw in _entries_of(layout, attention):
            if (roles.setdefault(entry.name, role) == "v") != (role == "v"):
                raise BlocksError(f"{_name(model)}: {raw} is both a value projection and a query or key projection")
    return roles


def _value_weights(layout: Layout, attentions: Sequence[_Attention], roles: Mapping[str, str]) -> set[str]:
    """Value projections' matrices: no biases, and not `bias_v`, which is no projection."""
    weights = set()
    for attention in attentions:
        also = tuple(_join(attention.path, attribute) for attribute in attention.rule.also)
        for entry, role, raw in _entries_of(layout, attention):
            if role == "v" and len(entry.shape) > 1 and raw not in also:
                weights.add(entry.name)
    return weights


def _refuse_leftovers(
    model: nn.Module, layout: Layout, attentions: Sequence[_Attention], roles: Mapping[str, str]
) -> None:
    """Nothing that looks like attention may be left over: it would silently count as value."""
    cure = (
        "declare it on the module's class (tepal_projections = {attribute: 'q', 'k', 'v' or 'qkv'}), "
        "or name the entries: find_blocks(model, query_key=[patterns])"
    )
    names = [name for name in layout.names if name not in roles and _says_query_or_key(name)]
    if names:
        raise BlocksError(f"{_name(model)}: {_few(names)} look like query or key but fit no known family; {cure}")
    known = [attention.path for attention in attentions]
    for path, module in model.named_modules() if known else ():
        looks = re.search(r"attention|attn", type(module).__name__, re.IGNORECASE)
        related = any(_below(path, other) or _below(other, path) for other in known)
        if looks and not related and any(parameter.ndim > 1 for parameter in module.parameters()):
            raise BlocksError(
                f"{_name(model)}: {path} ({type(module).__name__}) looks like attention but fits no known family, "
                f"beside {len(known)} attention modules that do; {cure}"
            )


def _says_query_or_key(name: str) -> bool:
    parts = name.split(":")[0].split(".")
    attention = any(re.search(r"attn|attention", part, re.IGNORECASE) for part in parts[:-1])
    # `in_proj` is also what state-space models call their input projection: only within attention, or as torch has it.
    return any(_QUERY_OR_KEY.fullmatch(part) and (part != "in_proj" or attention) for part in parts)


def _prove_shapes(model: nn.Module, layout: Layout, attentions: Sequence[_Attention]) -> None:
    """Each projection has as many output features as the configuration says, and a query reads the hidden size."""
    for attention in attentions:
        rows, hidden = _rows(attention), _integer(attention.config, "hidden_size", "n_embd")
        axes = {raw: axis for raw, (_, axis) in _raw_of(attention, [tensor.name for tensor in layout.raw]).items()}
        own = {_join(attention.path, attribute) for attribute in attention.rule.holds}
        for entry, role, raw in _entries_of(layout, attention):
            if raw not in own and raw.rpartition(".")[0] not in own:
                continue  # an adapter inside the projection, or bias_k: of no size that the configuration tells
            if entry.shape:
                _expect(model, entry, "output features", entry.shape[axes[raw]], rows.get(role))
            if role == "q" and len(entry.shape) == 2 and "q" in rows and not _is_mha(attention):
                _expect(model, entry, "input features", entry.shape[1 - axes[raw]], hidden)


def _expect(model: nn.Module, entry: Entry, what: str, found: int, expected: int | None) -> None:
    if expected and found != expected:
        raise BlocksError(
            f"{_name(model)}: {entry.name} has {found} {what}, expected {expected} from the configuration; "
            "is it a plain projection? If so, name the entries: find_blocks(model, query_key=[patterns])"
        )


# --- layers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stack:
    """A list of transformer blocks: the module that holds them, and its children's paths."""

    path: str
    children: Names


def _stacks(model: nn.Module, paths: Sequence[str]) -> list[_Stack]:
    """The lists of blocks that the attention modules at `paths` lie in; encoders before decoders."""
    found: dict[str, _Stack] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        lists = [up for up in _upwards(path)[1:] if _is_list_of_alike(modules[up])]
        # A list of bare attention modules is a part of a block, unless nothing encloses it.
        whole = [up for up in lists if not all(child in paths for child in _children(modules, up))] or lists
        if whole:
            found[whole[0]] = _Stack(whole[0], _children(modules, whole[0]))
    return sorted(found.values(), key=lambda stack: _side(stack.path) == "decoder")


def _is_list_of_alike(module: nn.Module) -> bool:
    """Blocks are of one class; the sub-layers of one block (T5 lists those too) are not."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module.children()}) == 1


def _prove_counts(model: nn.Module, stacks: Sequence[_Stack], paths: Sequence[str]) -> None:
    """As many blocks as the configuration says, and in each as many attention modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for stack in stacks:
        layers, key = _declared_layers(modules, stack.path)
        per_layer = _declared_attentions(_nearest(modules, stack.path, "config"), _side(stack.path))
        counts = [sum(_below(path, child) for path in paths) for child in stack.children]
        expected = [per_layer or max(counts)] * (layers or len(counts))
        if counts != expected:
            says = f"its configuration says {key}={layers}" if layers else "every block should have the same number"
            raise BlocksError(
                f"{_name(model)}: found {sum(counts)} attention modules in the {len(counts)} blocks of "
                f"{stack.path or 'the model'} ({', '.join(map(str, counts))}), expected {sum(expected)}: {says}, "
                f"with {expected[0]} in each; for a model that mixes kinds of blocks, name its parts: "
                "find_blocks(model, query_key=[patterns], layers=[patterns])"
            )
    layers, key = _declared_layers(modules, "")
    if paths and layers and not stacks:
        raise BlocksError(
            f"{_name(model)}: its configuration says {key}={layers}, but no list of blocks holds the "
            f"{len(paths)} attention modules found ({_few(paths)})"
        )


def _declared_layers(modules: Mapping[str, nn.Module], path: str) -> tuple[int, str]:
    """The number of blocks that the nearest configuration gives the stack at `path`, and the key that says so."""
    side = _side(path)
    depths, stage = getattr(_nearest(modules, path, "config"), "depths", None), re.findall(r"\.(\d+)\.", path)
    if depths and stage:  # Swin: a stack for each stage
        return int(depths[int(stage[-1])]), f"depths[{stage[-1]}]"
    keys = [f"{side}_layers", f"num_{side}_layers"] if side else []
    keys += ["num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"]
    for up in _upwards(path):
        for told in (getattr(modules[up], "config", None), modules[up]):
            if key := next((key for key in keys if _integer(told, key)), ""):
                return _integer(told, key), key
    return 0, ""


def _declared_attentions(config: Any, side: str) -> int:
    """Attention modules in each block: 1, and 1 more where it attends to an encoder's output; 0 when nothing says."""
    if config is None:
        return 0
    # BART and T5 say it by being a decoder, BERT and GPT-2 by add_cross_attention.
    keys = ["add_cross_attention"] + (["is_encoder_decoder", "is_decoder"] if side == "decoder" else [])
    return 2 if any(getattr(config, key, False) for key in keys) else 1


def _parts_of(
    model: nn.Module,
    layout: Layout,
    stacks: Sequence[_Stack],
    layers: Sequence[str] | None,
    embedding: Sequence[str] | None,
    head: Sequence[str] | None,
) -> tuple[list[set[str]], set[str], set[str]]:
    """Layers, embedding and head: disjoint sets of entry names. What is named goes before what is searched."""
    free = set(layout.names)
    of_embedding = set() if embedding is None else _take(free, _matching(model, layout, embedding))
    of_head = set() if head is None else _take(free, _matching(model, layout, head))
    if layers is not None:
        found = [_take(free, _matching(model, layout, [pattern])) for pattern in layers]
        if not all(found):
            raise BlocksError(f"{_name(model)}: two patterns of layers={list(layers)} match the same entries")
    else:
        paths = [child for stack in stacks for child in stack.children] or _named_stages(model)
        found = [_take(free, _entries_below(layout, path)) for path in paths]
    if embedding is None:
        of_embedding = _take(free, _embedding(model, layout))
    if head is None:
        of_head = _take(free, _head(model, layout, free))
    if not found:
        found = [_take(free, stage) for stage in _children_as_stages(model, layout, free)]
    return [layer for layer in found if layer], of_embedding, of_head


def _numbered(model: nn.Module, layout: Layout, pattern: str) -> list[str]:
    """One pattern a layer, by number, from one whose `*` stands for it."""
    before, star, after = pattern.partition("*")
    if not star or "*" in after:
        raise BlocksError(f"layers={pattern!r}: expected is one * in it, for a layer's number, as in 'encoder.*'")
    layer = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}\.")
    numbers = {int(match[1]) for name in layout.names if (match := layer.match(name))}
    if not numbers:
        raise BlocksError(
            f"{_name(model)}: no entry has a number where layers={pattern!r} has its *; entries are "
            f"{_few(layout.names)}"
        )
    return [f"{before}{number}{after}.*" for number in sorted(numbers)]


def _named_stages(model: nn.Module) -> list[str]:
    for pattern in _STAGES:
        paths: list[str] = []
        for path, _ in model.named_modules():
            if re.fullmatch(rf"(.+\.)?{pattern}", path) and not any(_below(path, other) for other in paths):
                paths.append(path)
        if paths:
            return paths
    return []


def _children_as_stages(model: nn.Module, layout: Layout, free: set[str]) -> list[set[str]]:
    """Without named stages: each child that has a weight matrix or kernel, with the norms after it."""
    trunk, module = _trunk(model)
    stages: list[set[str]] = []
    for child, _ in module.named_children():
        entries = _entries_below(layout, _join(trunk, child)) & free
        if stages and not any(len(layout.by_name[name].shape) > 1 for name in entries):
            stages[-1] |= entries
        else:
            stages.append(entries)
    return [stage for stage in stages if stage] or [set(free)]


def _trunk(model: nn.Module) -> tuple[str, nn.Module]:
    """The model without wrappers that only hold one other module."""
    path, module = "", model
    while not module._parameters and len(module._modules) == 1:
        (name, child), *_ = module.named_children()
        path, module = _join(path, name), child
    return path, module


def _embedding(model: nn.Module, layout: Layout) -> set[str]:
    tables = {path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Embedding)}
    found = set()
    for tensor in layout.raw:
        module = tensor.name.rpartition(".")[0]
        if module in tables or any(_EMBEDDING.fullmatch(part) for part in tensor.name.split(".")):
            # By any of its names: a head that is tied to the embedding is embedding.
            found |= {entry.name for entry in layout.entries_of[tensor.same_as or tensor.name]}
    return found


def _buffers(model: nn.Module, layout: Layout) -> set[str]:
    named = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {entry.name for entry in layout.entries if entry.raw in named}


def _head(model: nn.Module, layout: Layout, free: set[str]) -> set[str]:
    found = {name for name in free if _says_head(_split_name(name))}
    for path, module in model.named_modules():
        for name in _class_names(module) & _HEAD_OF_CLASS.keys():
            found |= _matching(model, layout, [_join(path, pattern) for pattern in _HEAD_OF_CLASS[name]])
    if found:
        return found
    trunk, module = _trunk(model)
    holders = [(name, child) for name, child in module.named_children() if list(child.parameters())]
    if not holders or holders[-1][0] == "pooler" or not _is_a(holders[-1][1], "Linear"):
        return set()
    return _entries_below(layout, _join(trunk, holders[-1][0]))


def _says_head(parts: Sequence[str]) -> bool:
    """By name, but not within a list of modules: a gate in a block may be called `fc` too."""
    at = next((n for n, part in enumerate(parts) if _HEAD.fullmatch(part)), len(parts))
    return at < len(parts) and not any(part.isdigit() for part in parts[:at])


# --- small things --------------------------------------------------------------------------------------------------


def _name(model: nn.Module) -> str:
    """Class name, with what the configuration calls the model."""
    config = getattr(model, "config", None)
    label = getattr(config, "name_or_path", "") or getattr(config, "model_type", "")
    return f"{type(model).__name__} ({label})" if label else type(model).__name__


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _below(path: str, top: str) -> bool:
    """Whether `path` is `top` or lies in it."""
    return not top or path == top or path.startswith(top + ".")


def _upwards(path: str) -> list[str]:
    """The path and everything above it, the model itself ("") last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _side(path: str) -> str:
    """ "encoder" or "decoder", whichever a path names last; "" for neither."""
    return next((part for part in reversed(path.split(".")) if part in ("encoder", "decoder")), "")


def _split_name(name: str) -> list[str]:
    return name.split(":")[0].split(".")


def _children(modules: Mapping[str, nn.Module], path: str) -> Names:
    return tuple(_join(path, name) for name in modules[path]._modules)


def _nearest(modules: Mapping[str, nn.Module], path: str, attribute: str) -> Any:
    """The attribute of the module at `path`, or of the nearest one above that has it."""
    return next((found for up in _upwards(path) if (found := getattr(modules[up], attribute, None)) is not None), None)


def _integer(told: Any, *keys: str) -> int:
    """The first of these attributes that is a positive integer; 0 for none."""
    values = (getattr(told, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _is_a(module: nn.Module, name: str) -> bool:
    return name in _class_names(module)


def _is_mha(attention: _Attention) -> bool:
    return attention.rule.family.startswith("nn.MultiheadAttention")


def _entries_below(layout: Layout, path: str) -> set[str]:
    return {entry.name for entry in layout.entries if _below(entry.raw, path)}


def _matching(model: nn.Module, layout: Layout, patterns: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in layout.names if fnmatchcase(name, pattern)}
        if not names:
            raise BlocksError(f"{_name(model)}: no entry matches {pattern!r}; entries are {_few(layout.names)}")
        found |= names
    return found


def _take(free: set[str], names: set[str]) -> set[str]:
    """What of `names` is still free; it is not afterwards."""
    taken = free & names
    free -= taken
    return taken


def _in_order(layout: Layout, names: set[str]) -> Names:
    return tuple(name for name in layout.names if name in names)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
