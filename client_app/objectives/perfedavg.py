"""Per-FedAvg's local half (Fallah et al. 2020, arXiv:2002.07948): a start from which one step makes a good model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import ALPHA, DELTA, HESSIAN_FREE, PERFEDAVG
from tepal.training.loop import Batch, clip, descend, optimizer_for, trained_parameters


class PerFedAvgObjective(Objective):
    """Minimises F_i(w) = f_i(w − α∇f_i(w)) by steps along an estimate of its gradient (I − α∇²f(w; D″))·∇f(w̃; D′),
    with w̃ = w − α∇f(w; D), each of another batch (algorithm 1).

    First order: without the second derivative.
    Hessian-free: ∇²f(w; D″)·g ≈ (∇f(w + δg; D″) − ∇f(w − δg; D″))/2δ (eq. 9).
    """

    name = PERFEDAVG
    personal = True

    def fit(self, work: Work) -> Outcome:
        named = trained_parameters(work.model)
        parameters = list(named.values())
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
        """One step of size α from what was received, on the first batch of the round."""
        work.model.train()
        parameters = list(trained_parameters(work.model).values())
        _, g = work.gradient(parameters, next(work.batches.epoch(0)))
        with torch.no_grad():
            for parameter, direction in zip(parameters, g, strict=True):
                parameter.sub_(direction, alpha=work.number(ALPHA))


class moved:
    """Within it, parameters are `scale` times `directions` away from where they were; then they are back exactly."""

    def __init__(self, parameters: Sequence[Tensor], directions: Sequence[Tensor], scale: float) -> None:
        self._parameters, self._directions, self._scale = parameters, directions, scale

    def __enter__(self) -> None:
        self._were = [parameter.detach().clone() for parameter in self._parameters]
        with torch.no_grad():
            for parameter, direction in zip(self._parameters, self._directions, strict=True):
                parameter.add_(direction, alpha=self._scale)

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for parameter, was in zip(self._parameters, self._were, strict=True):
                parameter.copy_(was)
