"""Local training alone: each client trains its own model from round to round, and sends nothing."""

from __future__ import annotations

from tepal.client_app.objectives.work import Objective, Outcome, Work
from tepal.exchange.plan import LOCAL


class LocalObjective(Objective):
    """v ← v trained on F_i, from the common initial model on."""

    name = LOCAL
    personal = True

    def fit(self, work: Work) -> Outcome:
        work.load(work.personal)
        fitted = work.fit()
        return Outcome(fitted, personal=work.read())

    def personalise(self, work: Work) -> None:
        work.load(work.personal)
