"""Ditto's local training (Li et al. 2021, arXiv:2012.04221, algorithm 1): a personal model close to the global one."""

from __future__ import annotations

import torch

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import DITTO, LAMBDA


class DittoObjective(Objective):
    """w is trained on F_i as in FedAvg; then v ← v − η(∇F_i(v) + λ(v − w^t)), with the received w^t (eq. 2).

    Both take the same number of steps. λ = 0 is local training.
    """

    name = DITTO
    personal = True

    def fit(self, work: Work) -> Outcome:
        fitted = work.fit()
        returned = work.read()
        work.load({**work.received, **work.personal})
        anchors, strength = work.of_parameters(work.received), work.number(LAMBDA)
        pairs = [(work.model.get_parameter(name), anchor) for name, anchor in anchors.items()]

        @torch.no_grad()
        def correct() -> None:  # λ(v − w^t) itself: differentiating its square takes several times as long
            for v, anchor in pairs:
                apart = (v - anchor).mul_(strength)
                v.grad = apart if v.grad is None else v.grad.add_(apart)

        work.fit(lambda: 0.0, correct=correct)
        personal = work.read()
        work.load(returned)
        return Outcome(fitted, personal=personal)
