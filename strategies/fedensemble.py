"""Fed-ensemble: K models travel in rotation, one to a client and round (arXiv:2107.10663, section 3).

K modes w_1 … w_K are initialised independently; clients are split into Q strata once.

    round   the clients of stratum q get mode P[q, r], r the round's place in its age (`schedule.py`), and return it
    merge   w_k = mean over the clients that had k in this round; a mode that nobody had stays as it is
    predict mean over the K models, of probabilities or outputs

One mode goes down and one comes up for each client and round: FedAvg's bytes. All K travel when they are scored at the
clients: after the last round, or after each one with apps that do not score what they train. A mode is trained with any
method of one global model, which keeps a state of its own for each mode.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Unpack

import numpy as np
from pydantic import BaseModel, Field

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.plan import MODEL, SCORED_AS, Plan, Reply, Tree
from tepal.strategies.fedavg import Averaging, ModelState
from tepal.strategies.method import Merger, Method, MethodError, Run, ServerModel
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.rounds.strategy import MethodStrategy
from tepal.strategies.schedule import mode_of, rounds_of

_TREE = "mode/"


@dataclass(frozen=True)
class EnsembleState:
    """K member states, who belongs to which stratum, and what each mode's loss was where it was last seen."""

    modes: tuple[ModelState, ...]
    count: int = 0
    """Q; 0 before the first cohort. Where it is as many as take part in a round, it grows with them."""
    strata: Mapping[str, int] = field(default_factory=dict)
    """Client → stratum, for good."""
    losses: Mapping[str, list[float]] = field(default_factory=dict)
    """Client → loss of each mode on its test examples, infinite for one that it has not had."""


class Ensembling(Method[EnsembleState]):
    """The method of Fed-ensemble. Arguments are those of `FedEnsemble`, `member` as a method."""

    def __init__(
        self, modes: int, strata: int = 0, *, member: Averaging, weighting: str = "uniform", assign: str = "schedule"
    ) -> None:
        self.modes = modes
        self.strata = strata
        self.member = member
        self.weighting = weighting
        self.assign = assign
        self.phases = member.phases
        self.eval_metrics_of = "ensemble" if modes > 1 else "received"
        self._run: Run

    def init(self, model: ServerModel, run: Run) -> EnsembleState:
        if len(model.starts) != self.modes:
            raise MethodError(
                f"{self.modes} modes start from {self.modes} models that were initialised independently, and the "
                f"initial arrays are of {len(model.starts)}: join_modes([...]) makes one record of several"
            )
        self._run = run
        starts = [replace(model, starts=(start,)) for start in model.starts]
        return EnsembleState(tuple(self.member.init(start, run) for start in starts))

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        return self.member.transfer_blocks(model)

    # ---- who gets which mode ------------------------------------------------------------------------------------

    def cohort(
        self, state: EnsembleState, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[EnsembleState, Sequence[str]]:
        """Clients of all strata in turn, at least one of each; joiners go to the smallest stratum."""
        count = self.strata or max(state.count, size)
        if not state.count and count > size:
            raise MethodError(
                f"strata={count}: every stratum gives at least one client a round, and {size} of {len(available)} "
                "clients train in one; set fewer strata, or a larger fraction_train"
            )
        strata = dict(state.strata)
        sizes = np.bincount(np.array([*strata.values()], int), minlength=count)
        joiners = [client for client in available if client not in strata]
        smallest = [(n, q) for q, n in enumerate(sizes.tolist())]
        heapq.heapify(smallest)
        for k in rng.permutation(len(joiners)).tolist():
            n, q = smallest[0]
            strata[joiners[k]] = q
            heapq.heapreplace(smallest, (n + 1, q))
        waiting: list[list[str]] = [[] for _ in range(count)]
        for k in rng.permutation(len(available)).tolist():
            waiting[strata[available[k]]].append(available[k])
        order = [q for q in rng.permutation(count).tolist() if waiting[q]]
        cohort: list[str] = []
        while len(cohort) < size:  # `size` is at most the number of clients that are there
            cohort += [waiting[q].pop() for q in order[: size - len(cohort)]]
            order = [q for q in order if waiting[q]]
        return replace(state, count=count, strata=strata), cohort

    def mode_of(self, state: EnsembleState, client: str, round: int) -> int:
        """The mode that this client trains in this round."""
        scheduled = mode_of(state.strata[client], self.modes, round, self._run.seed)
        if self.assign == "schedule":
            return scheduled
        losses = state.losses.get(client, [math.inf] * self.modes)
        highest = max(losses)
        # Of several that are equal, such as those it has never had, the one that comes next in the schedule.
        in_turn = (k % self.modes for k in range(scheduled, scheduled + self.modes))
        return next(k for k in in_turn if losses[k] == highest)

    def progress(self, state: EnsembleState, plan: Plan, rounds: int) -> tuple[int, int]:
        """A mode's own count: its merges so far, of the rounds in which the schedule has it trained."""
        if self.assign != "schedule":
            return plan.round, rounds
        mode = _mode(plan.model)
        total = rounds_of(mode, state.count, self.modes, rounds, self._run.seed)
        return min(state.modes[mode].merges + 1, total), total

    # ---- what travels -------------------------------------------------------------------------------------------

    def plan(
        self, state: EnsembleState, round: int, phase: str, cohort: Sequence[str], probe_replies: Mapping[str, Reply]
    ) -> list[Plan]:
        clients_of: dict[int, list[str]] = {}
        for client in cohort:
            clients_of.setdefault(self.mode_of(state, client, round), []).append(client)
        plans = {
            plan.client: _of_mode(plan, mode)
            for mode, clients in clients_of.items()
            for plan in self.member.plan(state.modes[mode], round, phase, clients, probe_replies)
        }
        # Not mode by mode: who is asked last may be dropped, and that must not always be the same mode.
        return [plans[client] for client in cohort if client in plans]

    def accept(self, plan: Plan, reply: Reply) -> None:
        self.member.accept(plan, reply)

    def evaluation(self, state: EnsembleState, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        """All K modes go to each client: what is scored is their mean."""
        of_modes = [
            [_of_mode(plan, k) for plan in self.member.evaluation(mode, round, cohort, more_rounds=more_rounds)]
            for k, mode in enumerate(state.modes)
        ]
        # An app that scores only the first model, because it knows no other, does not say that it is the ensemble's.
        options = {SCORED_AS: self.eval_metrics_of}
        return [
            replace(
                plans[0], needs=_joined(p.needs for p in plans), keeps=_joined(p.keeps for p in plans), options=options
            )
            for plans in zip(*of_modes, strict=True)
        ]

    def values(self, state: EnsembleState, client: str, tree: Tree) -> Arrays:
        return self.member.values(state.modes[_mode(tree)], client, MODEL)

    def merger(self, state: EnsembleState, round: int) -> EnsembleMerger:
        return EnsembleMerger(self, state, round)

    def models(self, state: EnsembleState) -> tuple[Arrays, ...]:
        return tuple(mode.entries for mode in state.modes)

    # ---- what is said -------------------------------------------------------------------------------------------

    def phase_name(self, state: EnsembleState) -> str:
        names = [self.member.phase_name(mode) for mode in state.modes]
        counts = {name: names.count(name) for name in names}
        return names[0] if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts.items())

    def describe(self) -> Mapping[str, str | int | float]:
        own = {"modes": self.modes, "strata": self.strata or "as clients in a round"}
        member = {f"member {key}": value for key, value in self.member.describe().items()}
        return {
            **own, "weighting": self.weighting, "assign": self.assign, "member": type(self.member).__name__, **member
        }  # fmt: skip

    def record(self, state: EnsembleState, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """`clients` (n,), `modes` (n,) and `strata` (n,): who trains which mode; and what the member says."""
        return {
            "clients": np.array([plan.client for plan in plans], str),
            "modes": np.array([_mode(plan.model) for plan in plans], int),
            "strata": np.array([state.strata[plan.client] for plan in plans], int),
            **self.member.record(state.modes[0], plans),
        }


class EnsembleMerger:
    """A merger of the member for each mode that comes back."""

    def __init__(self, method: Ensembling, state: EnsembleState, round: int) -> None:
        self._method = method
        self._state = state
        self._round = round
        self._mergers: dict[int, Merger[Any]] = {}
        self._losses: dict[str, list[float]] = {}

    def add(self, reply: Reply) -> None:
        (tree, part), *_ = reply.parts.items()
        mode = _mode(tree)
        if mode not in self._mergers:
            self._mergers[mode] = self._method.member.merger(self._state.modes[mode], self._round)
        weight = 1 if self._method.weighting == "uniform" else reply.examples
        self._mergers[mode].add(replace(reply, parts={MODEL: part}, examples=weight))
        if "received-loss" in reply.metrics:
            losses = list(self._state.losses.get(reply.client, [math.inf] * self._method.modes))
            losses[mode] = reply.metrics["received-loss"]
            self._losses[reply.client] = losses

    def finish(self) -> EnsembleState:
        modes = list(self._state.modes)
        for mode, merger in self._mergers.items():
            modes[mode] = merger.finish()
        return replace(self._state, modes=tuple(modes), losses={**self._state.losses, **self._losses})


class Member(BaseModel):
    """The key of the run config for `member`: the server app makes this strategy by its own keys."""

    member: Literal["fedavg", "fedfrozen", "selective"] = Field("fedavg", description="what a mode is trained with")


@listed(
    "fedensemble",
    title="Fed-ensemble",
    does="K models in rotation, which predict together",
    paper="arXiv:2107.10663",
    travels="P down, P up; K·P down where the result is scored",
    further=Member,
)
class FedEnsemble(MethodStrategy):
    """Fed-ensemble over Tepal's exchange.

    The initial arrays are those of K models, each initialised on its own: `join_modes([model.state_dict(), …])`. The
    result's arrays are the K modes in the same form; `modes_of` takes them apart.

    Args:
        modes: K, models in the ensemble. 1 is the member alone.
        strata: Q, groups of clients; 0: as many as clients take part in a round, so that each is of another stratum.
        member: the strategy that a mode is trained with, by default FedAvg; of its options those of its method count.
        weighting: of the clients that had a mode in a round: alike (the paper's), or by their numbers of examples.
        assign: which mode a client gets: in rotation, or that which had the highest loss on its test examples when it
            had it last, and first those that it has not had.
        round_options: see `MethodStrategy`. `model` is by default the member's. `min_available_nodes` is raised to
            what the strata need.

    Raises:
        ValueError: an option out of range, or a member that is not a method of one global model.
    """

    def __init__(
        self,
        *,
        modes: Annotated[int, Field(ge=1, le=1000)] = 3,
        strata: Annotated[int, Field(ge=0)] = 0,
        member: MethodStrategy | None = None,
        weighting: Literal["uniform", "examples"] = "uniform",
        assign: Literal["schedule", "highest-loss"] = "schedule",
        **round_options: Unpack[RoundOptions],
    ) -> None:
        method = Averaging() if member is None else member.method
        if not isinstance(method, Averaging):
            raise ValueError(f"a mode is one global model, and {type(member).__name__} trains others; choose FedAvg, …")
        if round_options.get("model") is None and member is not None:
            round_options["model"] = member.blocks
        ensembling = Ensembling(modes, strata, member=method, weighting=weighting, assign=assign)
        super().__init__(ensembling, **round_options)
        rules = self.rules
        enough = next(n for n in itertools.count(max(strata, 1)) if rules.size(n, rules.fraction_train) >= strata)
        if enough > rules.needed:
            self.rules = replace(rules, min_available_nodes=enough, needed_by=f"strata={strata}")


def _of_mode(plan: Plan, mode: int) -> Plan:
    """A member's plan, for one of the ensemble's modes."""
    trees = {tree: f"{_TREE}{mode}" if tree == MODEL else tree for tree in plan.needs}

    def renamed(names: Mapping[Tree, Names]) -> dict[Tree, Names]:
        return {trees[tree]: chosen for tree, chosen in names.items()}

    return replace(plan, needs=renamed(plan.needs), returns=renamed(plan.returns), keeps=renamed(plan.keeps))


def _mode(tree: Tree) -> int:
    return int(tree.removeprefix(_TREE))


def _joined(of_modes: Iterable[Mapping[Tree, Names]]) -> dict[Tree, Names]:
    return {tree: names for of_mode in of_modes for tree, names in of_mode.items()}
