"""What methods share in which clients keep a model of their own beside the global one, by an objective of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tepal.exchange.plan import SCORED_AS, Plan, Reply, Scalar
from tepal.strategies.fedavg import Averaging, ModelState

COMMON_MODEL = "the common model, of which every client makes one of its own"
"""What the model of such a run is."""


class Personalised(Averaging):
    """FedAvg on the global model; each client has its own by the objective, and that is what is scored."""

    train_metrics_of = "personal"
    eval_metrics_of = "personal"
    objective: str

    def options(self) -> Mapping[str, Scalar]:
        """Of the objective."""
        return {}

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        return [replace(plan, objective=self.objective, options=self.options()) for plan in plans]

    def evaluation(self, state: ModelState, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        options = {**self.options(), SCORED_AS: self.eval_metrics_of}
        plans = super().evaluation(state, round, cohort, more_rounds=more_rounds)
        return [replace(plan, objective=self.objective, options=options) for plan in plans]

    def describe(self) -> Mapping[str, str | int | float]:
        return self.options()
