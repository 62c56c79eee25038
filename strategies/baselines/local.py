"""Local training: each client trains its own model from the common initial one, and returns nothing.

The initial model is sent to each client once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from tepal.exchange.plan import LOCAL, Plan, Reply
from tepal.strategies.fedavg import ModelMerger, ModelState
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.personal.averaging import PersonalisedMethod
from tepal.strategies.rounds.strategy import MethodStrategy


class LocalMethod(PersonalisedMethod):
    """The method of LocalOnly."""

    objective = LOCAL

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        plans = super().plan(state, round, phase, cohort, probe_replies)
        return [replace(plan, returns={}, keeps=plan.needs) for plan in plans]

    def evaluation(self, state: ModelState, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        plans = super().evaluation(state, round, cohort, more_rounds=more_rounds)
        return [replace(plan, keeps=plan.needs) for plan in plans]

    def merger(self, state: ModelState, round: int) -> ModelMerger[ModelState]:
        return NullMerger(state)


class NullMerger(ModelMerger[ModelState]):
    """Merge nothing: clients return no entries. Only the number of merges grows."""

    def add(self, reply: Reply) -> None:
        return None


@listed(
    "local",
    title="Local training",
    does="each client trains alone",
    paper="The lower bound of personalisation",
    transfers="P down once, nothing up",
    result="the initial model, from which every client trained its own",
)
class LocalOnly(MethodStrategy):
    """Local training from the common initial model. Takes the keyword arguments of `MethodStrategy` and no others."""

    def __init__(self, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(LocalMethod(), **round_options)
