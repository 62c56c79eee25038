"""Partial training: the entries that match some patterns are trained and sent; all others are frozen.

    θ = the trained entries, φ = all others
    every round    FedAvg on θ; only θ is sent, both ways; φ does not change

φ is sent to each client once, exactly, whatever the encoding: the plan lists it among the entries that the client needs
and caches. The exchange also sends it to late joiners and to clients that lost their cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Unpack

from tepal.exchange.layout import Names
from tepal.exchange.plan import MODEL, Plan, Reply
from tepal.strategies.fedavg import FedAvgMethod, ModelState
from tepal.strategies.method import MethodError, Run, ServerModel
from tepal.strategies.options import RoundOptions
from tepal.strategies.rounds.strategy import MethodStrategy


class PartialAveraging(FedAvgMethod):
    """FedAvg on some entries: the base class of methods that freeze the others. Subclasses define `trained`."""

    @abstractmethod
    def trained(self, state: ModelState) -> Names:
        """Entries that are trained in a round which starts from this state."""

    def plan(
        self, state: ModelState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        trained, frozen = self.trained(state), self._frozen(state)
        kept = {MODEL: frozen} if frozen else {}
        return [
            replace(plan, trains=trained, returns={MODEL: trained}, keeps=kept, exact=frozen)
            for plan in super().plan(state, round, phase, cohort, probe_replies)
        ]

    def evaluation(self, state: ModelState, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        plans, frozen = super().evaluation(state, round, cohort, more_rounds=more_rounds), self._frozen(state)
        if not frozen:
            return plans
        return [replace(plan, keeps=plan.keeps or {MODEL: frozen}, exact=frozen) for plan in plans]

    def _frozen(self, state: ModelState) -> Names:
        trained = set(self.trained(state))
        return tuple(name for name in state.entries if name not in trained)


class PartialTrainingMethod(PartialAveraging):
    """The method of PartialTraining."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._trained: Names

    def init(self, model: ServerModel, run: Run) -> ModelState:
        names = model.layout.names
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = f"{', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
                raise MethodError(f"trains: no entry of {model.name} matches {pattern!r}; its entries are {known}")
        self._trained = tuple(name for name in names if any(fnmatchcase(name, each) for each in self.patterns))
        return super().init(model, run)

    def trained(self, state: ModelState) -> Names:
        return self._trained

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        trained = set(self._trained)
        frozen = tuple(name for name in model.layout.names if name not in trained)
        return {"trained": self._trained, **({"frozen": frozen} if frozen else {})}

    def describe(self) -> Mapping[str, str | int | float]:
        return {"trains": ", ".join(self.patterns)}


class PartialTraining(MethodStrategy):
    """FedAvg on some entries of the model; the others are frozen, and sent to each client once.

    The clients' training function calls `apply_plan`, which freezes these entries.

    Args:
        trains: names of the trained entries, such as `find_blocks(model).head`, or patterns in the syntax of `fnmatch`
            ("head.*"); an iterable, or one string with commas between. Each must match an entry.
        round_options: see `MethodStrategy`. With `model`, a fused projection is three entries (`…qkv.weight:q`).

    Raises:
        ValueError: no pattern is given.
        MethodError: at the start of a run, a pattern matches no entry.
    """

    def __init__(self, *, trains: str | Iterable[str], **round_options: Unpack[RoundOptions]) -> None:
        given = trains.split(",") if isinstance(trains, str) else trains
        patterns = [pattern.strip() for pattern in given if pattern.strip()]
        if not patterns:
            raise ValueError(f"trains is {trains!r}; it must be one or more patterns of entry names")
        super().__init__(PartialTrainingMethod(patterns), **round_options)
