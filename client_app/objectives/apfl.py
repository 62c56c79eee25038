"""APFL's local training (Deng et al. 2020, arXiv:2003.13461, algorithm 1): a local model mixed with the global one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import ADAPTIVE, ALPHA, APFL
from tepal.training.loop import Batch, clip, descend, optimizer_for, trained_parameters
from tepal.training.tasks import Call

_ALPHA = "apfl.alpha"  # α's name in the personal state, next to the entries of v


class APFLObjective(Objective):
    """w ← w − η∇f_i(w), and v ← v − η∇_v f_i(v̄) at the mixture v̄ = αv + (1−α)w, where ∇_v f_i(v̄) = α∇f_i(v̄).

    Adaptive: α ← α − η⟨v − w, ∇f_i(v̄)⟩ (eq. 11), limited to [0, 1]. All gradients of a step are taken before the step.
    w is returned; v and α are the personal state, and v̄ is the personal model. Statistics such as BatchNorm's are
    those of v̄, with which it was trained: they are not mixed.
    """

    name = APFL
    personal = True

    def fit(self, work: Work) -> Outcome:
        if work.config.gradient_checkpointing:
            raise ValueError(
                "APFL needs gradient-checkpointing=false, and this client has true: its mixture of models no longer "
                "exists when activations are recomputed; micro-batch-size saves memory, too"
            )
        shared = trained_parameters(work.model)
        state = self._own(work)
        own = {name: state[name] for name in shared}
        buffers = {name: state[name] for name, _ in work.model.named_buffers() if name in state}
        alpha = self._alpha(work)
        of_shared, of_own = optimizer_for(shared.values(), work.config), optimizer_for(own.values(), work.config)

        def step(stream: Iterator[Batch]) -> Tensor:
            nonlocal alpha
            batch = next(stream)
            mixed = {name: alpha * own[name] + (1 - alpha) * w.detach() for name, w in shared.items()}
            for tensor in mixed.values():
                tensor.requires_grad_()
            _, at_mixture = work.gradient(mixed.values(), batch, _with(work.model, {**mixed, **buffers}))
            slopes = []
            for (name, w), g in zip(shared.items(), at_mixture, strict=True):
                slopes.append(((own[name] - w.detach()) * g).sum())
                own[name].grad = alpha * g
            loss, at_shared = work.gradient(shared.values(), batch)
            for w, g in zip(shared.values(), at_shared, strict=True):
                w.grad = g
            for optimizer, parameters in ((of_shared, shared), (of_own, own)):
                clip(parameters.values(), work.config)
                optimizer.step()
            if work.options[ADAPTIVE]:
                slope = float(torch.stack(slopes).sum())
                alpha = min(max(alpha - work.config.learning_rate * slope, 0.0), 1.0)
            return loss

        fitted = descend(work.model, work.batches, work.config, step)
        returned = work.read()
        with torch.no_grad():
            for name, tensor in {**own, **buffers}.items():
                work.model.state_dict()[name].copy_(tensor)
        personal = work.read() | {_ALPHA: np.array([alpha])}
        work.load(returned)
        return Outcome(fitted, personal=personal)

    def personalise(self, work: Work) -> None:
        alpha, trained = self._alpha(work), dict(work.model.named_parameters(remove_duplicate=False))
        raw = {entry.name: entry.raw for entry in work.layout.entries}
        mixed = {
            name: alpha * value + (1 - alpha) * work.received[name] if raw[name] in trained else value
            for name, value in work.personal.items()
            if name != _ALPHA
        }
        work.load(mixed)

    @staticmethod
    def _alpha(work: Work) -> float:
        return float(work.personal[_ALPHA][0]) if work.personal else work.number(ALPHA)

    @staticmethod
    def _own(work: Work) -> dict[str, Tensor]:
        """v as a raw `state_dict`; the received values for a client that has no v yet."""
        values = {name: value for name, value in work.personal.items() if name != _ALPHA} or work.received
        raw = work.layout.join(values)
        device = work.batches.labels.device
        return {name: torch.from_numpy(np.array(value)).to(device) for name, value in raw.items()}


def _with(model: nn.Module, values: dict[str, Tensor]) -> Call:
    """The model, called with other parameters and buffers."""
    return lambda *inputs, **named: functional_call(model, values, inputs, named)
