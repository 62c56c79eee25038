"""Per-FedAvg's local training (Fallah et al. 2020, arXiv:2002.07948): a start from which one step personalises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import ALPHA, DELTA, HESSIAN_FREE, PERFEDAVG
from tepal.training.loop import Batch, clip, descend, optimizer_for, trained_parameters


class PerFedAvgObjective(Objective):
    """Minimises F_i(w) = f_i(w − α∇f_i(w)) by steps along an estimate of its gradient (I − α∇²f(w; D″))·∇f(w̃; D′),
    with w̃ = w − α∇f(w; D), each with its own batch (algorithm 1).

    First-order: the second derivative is left out.
    Hessian-free: ∇²f(w; D″)·g ≈ (∇f(w + δg; D″) − ∇f(w − δg; D″))/2δ (eq. 9).
    """

    name = PERFEDAVG
    personal = True

    def fit(self, work: Work) -> Outcome:
        parameters = list(trained_parameters(work.model).values())
        optimizer = optimizer_for(parameters, work.config)
        alpha = work.number(ALPHA)

        def step(stream: Iterator[Batch]) -> Tensor:
            _, g = work.gradient(parameters, next(stream))
            with moved(parameters, g, -alpha):
                loss, meta = work.gradient(parameters, next(stream))
            if work.options[HESSIAN_FREE]:
                delta, batch = work.number(DELTA), next(stream)
                with moved(parameters, meta, delta):
                    _, ahead = work.gradient(parameters, batch)
                with moved(parameters, meta, -delta):
                    _, behind = work.gradient(parameters, batch)
                meta = [m - alpha * (a - b) / (2 * delta) for m, a, b in zip(meta, ahead, behind, strict=True)]
            for parameter, direction in zip(parameters, meta, strict=True):
                parameter.grad = direction
            clip(parameters, work.config)
            optimizer.step()
            return loss

        return Outcome(descend(work.model, work.batches, work.config, step))

    def personalise(self, work: Work) -> None:
        """One step of size α from the received values, on the first batch of the round."""
        work.model.train()
        parameters = list(trained_parameters(work.model).values())
        _, g = work.gradient(parameters, next(work.batches.epoch(0)))
        with torch.no_grad():
            for parameter, direction in zip(parameters, g, strict=True):
                parameter.sub_(direction, alpha=work.number(ALPHA))


@contextmanager
def moved(parameters: Sequence[Tensor], directions: Sequence[Tensor], scale: float) -> Iterator[None]:
    """Add `scale` times `directions` to parameters; restore their exact values at the end."""
    values = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.add_(direction, alpha=scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
