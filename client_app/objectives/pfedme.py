"""pFedMe's local training (Dinh et al. 2020, arXiv:2006.08848, algorithm 1): the gradient of a Moreau envelope."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import INNER_RATE, INNER_STEPS, LAMBDA, OUTER_STEP, PFEDME
from tepal.training.loop import Batch, clip, descend, trained_parameters


class PFedMeObjective(Objective):
    """Minimises F_i(w) = min_θ f_i(θ) + (λ/2)‖θ − w‖² (eq. 3), whose gradient is λ(w − θ̂(w)) (eq. 5).

    In each local step, θ̃ is found for one batch by K steps of gradient descent on f_i(θ) + (λ/2)‖θ − w‖², starting from
    the last θ̃ (the first time from w), and w ← w − ηλ(w − θ̃), or w ← w − s(w − θ̃) if the plan gives an outer step s. w
    is returned; θ̃ is the personal model.
    """

    name = PFEDME
    personal = True

    def fit(self, work: Work) -> Outcome:
        model_parameters = trained_parameters(work.model)
        theta = list(model_parameters.values())  # the model's own parameters are θ
        w = [parameter.detach().clone() for parameter in theta]
        penalty, rate = work.number(LAMBDA), work.number(INNER_RATE)
        inner_steps = int(work.number(INNER_STEPS))
        outer_step = work.number(OUTER_STEP) or work.config.learning_rate * penalty

        def step(stream: Iterator[Batch]) -> Tensor:
            batch = next(stream)
            for _ in range(inner_steps):
                loss, g = work.gradient(theta, batch)
                for parameter, direction in zip(theta, g, strict=True):
                    parameter.grad = direction
                clip(theta, work.config)
                with torch.no_grad():
                    for parameter, anchor, direction in zip(theta, w, g, strict=True):
                        parameter.sub_(direction + penalty * (parameter - anchor), alpha=rate)
            with torch.no_grad():
                for parameter, anchor in zip(theta, w, strict=True):
                    anchor.sub_(anchor - parameter, alpha=outer_step)
            return loss

        try:
            fitted = descend(work.model, work.batches, work.config, step)
        except FloatingPointError as error:
            remedy = "lower the inner learning rate, or set clip-norm"
            if outer_step >= 2:  # |1 − s| ≥ 1: each step leaves w further from θ
                remedy = (
                    f"the step from w towards θ is {outer_step:g} and must be below 2: lower learning-rate, or set "
                    "pfedme.outer-step"
                )
            raise FloatingPointError(
                f"local training diverged with pfedme.inner-learning-rate={rate:g} and pfedme.lambda={penalty:g}: "
                f"{remedy}"
            ) from error
        personal = work.read()
        with torch.no_grad():
            for parameter, anchor in zip(theta, w, strict=True):
                parameter.copy_(anchor)
        return Outcome(fitted, personal=personal)
