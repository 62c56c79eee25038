"""Local training alone: each client trains a personal model from round to round, and sends nothing."""

from __future__ import annotations

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import LOCAL


class LocalObjective(Objective):
    """v ← v trained on F_i, starting from the common initial model."""

    name = LOCAL
    personal = True

    def fit(self, work: Work) -> Outcome:
        work.load(work.personal)
        fitted = work.fit()
        return Outcome(fitted, personal=work.read())
