"""The base of methods in which each client has a personal model next to a global one, trained by an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tepal.exchange.plan import SCORED_AS, Plan
from tepal.strategies.fedavg import FedAvgMethod, ModelState

COMMON_MODEL = "the common model, from which every client makes its personal one"
"""The global model of such a run, for reports."""


class PersonalisedMethod(FedAvgMethod):
    """FedAvg on the global model. Each client trains a personal model by the `objective`; that model is scored."""

    train_metrics_of = "personal"
    eval_metrics_of = "personal"

    def evaluation(self, state: ModelState, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        options = {**self.options(), SCORED_AS: self.eval_metrics_of}
        plans = super().evaluation(state, round, cohort, more_rounds=more_rounds)
        return [replace(plan, objective=self.objective, options=options) for plan in plans]

    def describe(self) -> Mapping[str, str | int | float]:
        return self.options()
