"""Ditto's local training (Li et al. 2021, arXiv:2012.04221, algorithm 1): a personal model close to the global one."""

from __future__ import annotations

from tepal.client_app.objectives.work import Objective, Outcome, Work, proximal
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
        anchors = work.of_parameters(work.received)
        parameters = [work.model.get_parameter(name) for name in anchors]
        work.fit(lambda: proximal(parameters, anchors.values(), work.number(LAMBDA)))
        personal = work.read()
        work.load(returned)
        return Outcome(fitted, personal=personal)
