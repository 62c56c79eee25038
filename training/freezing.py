"""`apply_plan`: the one line that a training function needs if the server's plan freezes entries of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tepal.exchange.layout import Entry
from tepal.exchange.mod import received
from tepal.exchange.plan import PROXIMAL

_FROZEN = "_tepal_frozen"  # on a Parameter that apply_plan froze as a whole
_ROWS = "_tepal_frozen_rows"  # on a Parameter with frozen and trained entries: a _FrozenRows
_STATISTICS = "_tepal_frozen_statistics"  # on a module whose running statistics are frozen: a _FrozenStatistics


@dataclass(frozen=True)
class AppliedPlan:
    """Terms that a plan adds to the local loss."""

    ridge: float = 0.0
    value_projection: tuple[tuple[nn.Parameter, Entry], ...] = field(default=(), repr=False)
    proximal: float = 0.0
    trained: tuple[tuple[nn.Parameter, Entry, np.ndarray], ...] = field(default=(), repr=False)

    def penalty(self) -> Tensor | float:
        """Return the scalar to add to the loss; 0.0 if the plan has no such term.

        It is (λ/2)·‖W_V‖²_F over the weights of the value projections (FedFrozen's ridge) plus (μ/2)·‖w − w_received‖²
        over all trained entries (FedProx).
        """
        terms: list[Tensor] = []
        if self.ridge:
            squares = [parameter[entry.index].square().sum() for parameter, entry in self.value_projection]
            terms.append(0.5 * self.ridge * torch.stack(squares).sum())
        if self.proximal:
            changes = [(p[entry.index] - anchor).square().sum() for p, entry, anchor in self._anchored]
            terms.append(0.5 * self.proximal * torch.stack(changes).sum())
        return sum(terms) if terms else 0.0

    @cached_property
    def _anchored(self) -> list[tuple[nn.Parameter, Entry, Tensor]]:
        # Created at the first use, because the model may be moved to another device after the plan was applied.
        return [(p, entry, torch.from_numpy(np.array(value)).to(p)) for p, entry, value in self.trained]


def apply_plan(model: nn.Module, msg: Message) -> AppliedPlan:
    """Freeze the entries of `model` that the plan in `msg` freezes, and unfreeze those of an earlier plan.

    Call it before the optimizer is created: frozen entries then have no gradient and no optimizer state. If a frozen
    entry is part of a tensor with trained ones (a fused query-key-value projection), its gradient is set to zero before
    any clipping, and its values are restored after every optimizer step, so that weight decay and momentum have no
    effect. If the running statistics of a norm (such as batch norm) are frozen, the norm runs as in eval mode, whatever
    the model's mode: it uses these statistics and does not update them. Other frozen buffers may change while the app
    trains; its answer then has them as they were received.

    Args:
        model: the torch module whose `state_dict` the message has; it may be loaded before or after this call.
        msg: the message that the ClientApp received. A message of another strategy than Tepal's freezes nothing.

    Returns:
        The plan's terms of the loss; see `AppliedPlan.penalty`.

    Raises:
        ValueError: the model has no parameter with a name that the plan freezes or regularises.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        _release(parameter)
    for module in model.modules():
        if hasattr(module, _STATISTICS):
            getattr(module, _STATISTICS).release(module)
    content = received(msg)
    if content is None:
        return AppliedPlan()
    layout = content.layout
    buffers = dict(model.named_buffers(remove_duplicate=False))
    frozen = set(content.frozen)
    for raw, entries in layout.entries_of.items():
        rows = [entry for entry in entries if entry.name in frozen]
        if not rows:
            continue
        if raw in buffers:
            path, _, name = raw.rpartition(".")
            # Selected by name: modules of other buffers may use the train mode for something else. Most of these do
            # not change (position tables, an image's mean). Those that do (spectral norm's vectors) are not returned.
            if name.startswith("running_") and buffers[raw].is_floating_point():
                norm = model.get_submodule(path)
                if not hasattr(norm, _STATISTICS):
                    setattr(norm, _STATISTICS, _FrozenStatistics(norm))
            else:
                content.moving.update(entry.name for entry in rows)
            continue
        parameter = _parameter(parameters, raw)
        if len(rows) == len(entries):
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                setattr(parameter, _FROZEN, True)
        else:
            values = [(entry, content.model[entry.name]) for entry in rows]
            setattr(parameter, _ROWS, _FrozenRows(parameter, values))
    ridge = float(content.plan.options.get("ridge", 0.0))
    group = [layout.by_name[name] for name in content.plan.groups.get("value_projection", ())]
    proximal = float(content.plan.options.get(PROXIMAL, 0.0))
    trained = [layout.by_name[name] for name in content.plan.trains] if proximal else []
    return AppliedPlan(
        ridge,
        tuple((_parameter(parameters, entry.raw), entry) for entry in group),
        proximal,
        tuple((parameters[e.raw], e, content.model[e.name]) for e in trained if e.raw in parameters),
    )


def frozen_by_plan(parameter: nn.Parameter) -> bool:
    """Return whether a plan freezes all of this parameter, which the app itself trains."""
    return hasattr(parameter, _FROZEN)


def frozen_rows(parameter: nn.Parameter) -> bool:
    """Return whether a plan freezes some, but not all, rows of this parameter."""
    return hasattr(parameter, _ROWS)


@contextmanager
def plan_lifted(model: nn.Module) -> Iterator[None]:
    """Return a context in which norms with frozen running statistics follow the mode of the model."""
    frozen = [getattr(module, _STATISTICS) for module in model.modules() if hasattr(module, _STATISTICS)]
    for statistics in frozen:
        statistics.lifted = True
    try:
        yield
    finally:
        for statistics in frozen:
            statistics.lifted = False


class _FrozenRows:
    """Rows of a parameter that keep their received values while the other rows are trained."""

    def __init__(self, parameter: nn.Parameter, rows: list[tuple[Entry, np.ndarray]]) -> None:
        self.rows = [(entry.index, torch.from_numpy(np.array(value))) for entry, value in rows]
        # One that the app itself does not train has no gradient.
        self.hook = parameter.register_hook(self.without_gradient) if parameter.requires_grad else None

    def without_gradient(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for index, _ in self.rows:
            gradient[index] = 0
        return gradient

    def restore(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            for index, value in self.rows:
                parameter[index].copy_(value)


class _FrozenStatistics:
    """Hooks that run a norm in eval mode while its statistics are frozen.

    The mode is changed during the forward pass only, because training code calls `model.train()` after `apply_plan`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.lifted = False
        self.mode = module.training
        self.hooks = [
            module.register_forward_pre_hook(self.before),
            module.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args: object) -> None:
        self.mode = module.training
        module.training = module.training and self.lifted

    def after(self, module: nn.Module, args: object, output: object) -> None:
        module.training = self.mode

    def release(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.remove()
        delattr(module, _STATISTICS)


def _release(parameter: nn.Parameter) -> None:
    """Undo an earlier plan: a process may use one model for several messages."""
    if hasattr(parameter, _FROZEN):
        delattr(parameter, _FROZEN)
        parameter.requires_grad_(True)
    if hasattr(parameter, _ROWS):
        if (hook := getattr(parameter, _ROWS).hook) is not None:
            hook.remove()
        delattr(parameter, _ROWS)


def _parameter(parameters: dict[str, nn.Parameter], name: str) -> nn.Parameter:
    if name not in parameters:
        raise ValueError(
            f"the plan names the entry {name!r}, but the model has no such parameter: give apply_plan the model whose "
            "state_dict the app loads and returns, not a wrapper of it"
        )
    return parameters[name]


def _restore_after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if frozen_rows(parameter):
                getattr(parameter, _ROWS).restore(parameter)


# For all optimizers of the process, because apply_plan does not know the optimizer that the app creates. A parameter
# without frozen rows costs one attribute lookup per step.
register_optimizer_step_post_hook(_restore_after_step)
