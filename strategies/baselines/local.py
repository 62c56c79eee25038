"""Local training alone: the common initial model goes down once, and nothing else ever travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from tepal.exchange.plan import LOCAL, Plan, Reply
from tepal.strategies.fedavg import ModelState
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.personal.averaging import Personalised
from tepal.strategies.rounds.strategy import MethodStrategy


class Alone(Personalised):
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

    def merger(self, state: ModelState, round: int) -> NullMerger:
        return NullMerger(state)


class NullMerger:
    """Clients return nothing."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    def add(self, reply: Reply) -> None:
        return None

    def finish(self) -> ModelState:
        return replace(self._state, merges=self._state.merges + 1)


@listed(
    "local",
    title="Local training",
    does="each client trains alone",
    paper="the lower bound of personalisation",
    travels="P down once, nothing up",
    result="the initial model, from which every client trained its own",
)
class LocalOnly(MethodStrategy):
    """Each client trains alone, from the common initial model on. Takes the keyword arguments of `MethodStrategy`."""

    def __init__(self, **round_options: Unpack[RoundOptions]) -> None:
        super().__init__(Alone(), **round_options)
