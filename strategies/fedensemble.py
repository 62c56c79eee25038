"""Fed-ensemble: K models are trained in rotation, one by each client in a round (arXiv:2107.10663, section 3).

The K models, called modes, w_1 … w_K are initialised independently; clients are divided into Q strata once.

    round   the clients of stratum q train mode P[q, r]; r is the round's number in its age (`schedule.py`)
    merge   w_k = mean over the clients that trained k in this round (Remark 3.1); other modes do not change
    predict mean over the K models, of probabilities or outputs

One mode is sent down and up for each client and round: FedAvg's bytes. All K modes are sent to be scored by the
clients: after the last round, or after each round if the app does not score the models that it trains. A mode is
trained with any method of one global model (the member), which has a separate state for each mode.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Annotated, Any, Literal, Unpack

import numpy as np
from pydantic import BaseModel, Field

from tepal.exchange.layout import Arrays, Names
from tepal.exchange.modes import mode_of_tree, tree_of_mode
from tepal.exchange.plan import MODEL, SCORED_AS, Plan, Reply, Tree
from tepal.strategies.fedavg import FedAvgMethod, ModelState
from tepal.strategies.fedfrozen import FedFrozenMethod, usual_warmup
from tepal.strategies.method import Merger, Method, MethodError, Run, ServerModel
from tepal.strategies.options import RoundOptions, listed
from tepal.strategies.personal.averaging import PersonalisedMethod
from tepal.strategies.rounds.strategy import MethodStrategy
from tepal.strategies.schedule import mode_of, rounds_of

log = getLogger("flwr")

_OF_MEMBER = "member "  # before the name of a member's option, in the method's description


def rounds_of_mode(rounds: int, modes: int, strata: int) -> int:
    """Return the mean number of rounds in which a mode is trained: in each by at least one of Q strata, with the
    probability 1 − (1 − 1/K)^Q. All rounds if `strata` is 0: their number is that of the clients in a round.
    """
    return round(rounds * (1 - (1 - 1 / modes) ** strata)) if strata else rounds


@dataclass(frozen=True)
class EnsembleState:
    """The member's states for the K modes, the clients' strata, and the modes' last known losses at the clients."""

    modes: tuple[ModelState, ...]
    count: int = 0
    """Q; 0 before the first cohort. If it is the number of clients in a round, it grows with that."""
    strata: Mapping[str, int] = field(default_factory=dict)
    """Client → stratum, which never changes."""
    losses: Mapping[str, list[float]] = field(default_factory=dict)
    """Client → loss of each mode on its test examples, infinite for a mode that it has not received."""


class FedEnsembleMethod(Method[EnsembleState]):
    """The method of Fed-ensemble. Arguments are those of `FedEnsemble`, `member` as a method."""

    def __init__(
        self, modes: int, strata: int = 0, *, member: FedAvgMethod, weighting: str = "uniform", assign: str = "schedule"
    ) -> None:
        self.modes = modes
        self.strata = strata
        self.member = member
        self.averages = member.averages
        self.weighting = weighting
        self.assign = assign
        self.phases = member.phases
        self.eval_metrics_of = "ensemble" if modes > 1 else "received"
        self._run: Run
        self._rounds = 0

    def init(self, model: ServerModel, run: Run) -> EnsembleState:
        if len(model.starts) != self.modes:
            raise MethodError(
                f"{self.modes} modes start from {self.modes} models that were initialised independently, and the "
                f"initial arrays are of {len(model.starts)}: join_modes([...]) makes one record of several"
            )
        self._run = run
        starts = [replace(model, starts=(start,)) for start in model.starts]
        return EnsembleState(tuple(self.member.init(start, run) for start in starts))

    def begin(self, rounds: int) -> None:
        self._rounds = rounds
        self.member.begin(rounds_of_mode(rounds, self.modes, self.strata))

    def resumed(self, options: Mapping[str, Any]) -> None:
        of_member = (item for item in options.items() if item[0].startswith(_OF_MEMBER))
        self.member.resumed({key.removeprefix(_OF_MEMBER): value for key, value in of_member})

    def transfer_blocks(self, model: ServerModel) -> Mapping[str, Names]:
        return self.member.transfer_blocks(model)

    # ---- which client trains which mode --------------------------------------------------------------------------

    def cohort(
        self, state: EnsembleState, available: Sequence[str], size: int, rng: np.random.Generator
    ) -> tuple[EnsembleState, Sequence[str]]:
        """Choose clients of all strata in turn, at least one of each; new clients join the smallest stratum."""
        count = self.strata or max(state.count, size)
        if not state.count and count > size:
            raise MethodError(
                f"strata={count}: at least one client of every stratum must train in a round, and {size} of "
                f"{len(available)} clients do; set fewer strata, or a larger fraction_train"
            )
        if not state.count:
            self._warn_if_nothing_is_frozen(count)
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
        while len(cohort) < size:  # `size` is at most the number of available clients
            cohort += [waiting[q].pop() for q in order[: size - len(cohort)]]
            order = [q for q in order if waiting[q]]
        return replace(state, count=count, strata=strata), cohort

    def _warn_if_nothing_is_frozen(self, strata: int) -> None:
        """With few clients in a round, a mode may have fewer merges than FedFrozen's warm-up has."""
        if not isinstance(self.member, FedFrozenMethod):
            return
        fewest = min(rounds_of(k, strata, self.modes, self._rounds, self._run.seed) for k in range(self.modes))
        if (warmup := self.member.warmup_rounds) >= fewest:
            log.warning(
                "FedFrozen's warm-up has %d rounds of each mode, but with %d clients of different strata in a round a "
                "mode is trained in only %d of the %d rounds: it is never frozen. Set fewer warm-up rounds, such as "
                "%d, fewer modes, or more rounds.",
                warmup, strata, fewest, self._rounds, usual_warmup(fewest),
            )  # fmt: skip

    def mode_of(self, state: EnsembleState, client: str, round: int) -> int:
        """The mode that this client trains in this round."""
        scheduled = mode_of(state.strata[client], self.modes, round, self._run.seed)
        if self.assign == "schedule":
            return scheduled
        losses = state.losses.get(client, [math.inf] * self.modes)
        # Of several with the highest loss, such as those it has never received, the next one from the scheduled on.
        return max((k % self.modes for k in range(scheduled, scheduled + self.modes)), key=losses.__getitem__)

    def progress(self, state: EnsembleState, plan: Plan, rounds: int) -> tuple[int, int]:
        """(t, T) of the plan's mode: its merges, of the rounds in which the schedule has the mode trained."""
        if self.assign != "schedule":
            return plan.round, rounds
        mode = mode_of_tree(plan.model)
        total = rounds_of(mode, state.count, self.modes, rounds, self._run.seed)
        return min(state.modes[mode].merges + 1, total), total

    # ---- what is sent -------------------------------------------------------------------------------------------

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
        # Not sorted by mode: with `max-replies` the last ones may be dropped, which must not always be the same mode.
        return [plans[client] for client in cohort if client in plans]

    def accept(self, plan: Plan, reply: Reply) -> None:
        self.member.accept(plan, reply)

    def evaluation(self, state: EnsembleState, round: int, cohort: Sequence[str], *, more_rounds: bool) -> list[Plan]:
        """Send all K modes to each client, which scores their mean prediction."""
        of_modes = [
            [_of_mode(plan, k) for plan in self.member.evaluation(mode, round, cohort, more_rounds=more_rounds)]
            for k, mode in enumerate(state.modes)
        ]
        # The option tells apps that know ensembles which name the score has; others score the first model only.
        options = {SCORED_AS: self.eval_metrics_of}
        return [
            replace(
                plans[0],
                needs=_joined(p.needs for p in plans),
                keeps=_joined(p.keeps for p in plans),
                # What is frozen in one mode is sent whole of all: `exact` has no trees.
                exact=tuple(dict.fromkeys(name for p in plans for name in p.exact)),
                options=options,
            )
            for plans in zip(*of_modes, strict=True)
        ]

    def values(self, state: EnsembleState, client: str, tree: Tree) -> Arrays:
        return self.member.values(state.modes[mode_of_tree(tree)], client, MODEL)

    def initial_values(self, model: ServerModel, state: EnsembleState) -> Mapping[Tree, Arrays]:
        return {tree_of_mode(k): mode.entries for k, mode in enumerate(state.modes)}

    def merger(self, state: EnsembleState, round: int) -> EnsembleMerger:
        return EnsembleMerger(self, state, round)

    def models(self, state: EnsembleState) -> tuple[Arrays, ...]:
        return tuple(mode.entries for mode in state.modes)

    # ---- what is logged and recorded ----------------------------------------------------------------------------

    def phase_name(self, state: EnsembleState) -> str:
        names = [self.member.phase_name(mode) for mode in state.modes]
        counts = {name: names.count(name) for name in names}
        return names[0] if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in counts.items())

    def describe(self) -> Mapping[str, str | int | float]:
        return {
            "modes": self.modes,
            "strata": self.strata or "as clients in a round",
            "weighting": self.weighting,
            "assign": self.assign,
            "member": type(self.member).__name__,
            **{f"{_OF_MEMBER}{key}": value for key, value in self.member.describe().items()},
        }

    def record(self, state: EnsembleState, plans: Sequence[Plan]) -> Mapping[str, np.ndarray]:
        """`clients` (n,), and their `modes` (n,) and `strata` (n,); and the member's record."""
        return {
            "clients": np.array([plan.client for plan in plans], str),
            "modes": np.array([mode_of_tree(plan.model) for plan in plans], int),
            "strata": np.array([state.strata[plan.client] for plan in plans], int),
            **self.member.record(state.modes[0], plans),
        }


class EnsembleMerger:
    """Merge the replies with a merger of the member for each mode that is returned."""

    def __init__(self, method: FedEnsembleMethod, state: EnsembleState, round: int) -> None:
        self._method = method
        self._state = state
        self._round = round
        self._mergers: dict[int, Merger[Any]] = {}
        self._losses: dict[str, list[float]] = {}

    def add(self, reply: Reply) -> None:
        (tree, part), *_ = reply.parts.items()
        mode = mode_of_tree(tree)
        merger = self._mergers.get(mode) or self._method.member.merger(self._state.modes[mode], self._round)
        weight = 1 if self._method.weighting == "uniform" else reply.examples
        merger.add(replace(reply, parts={MODEL: part}, examples=weight))
        self._mergers[mode] = merger  # not before: a mode whose only reply is refused stays as it is
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
    """Key of the run config for `member`: the server app creates that strategy with its own keys."""

    member: Literal["fedavg", "fedfrozen", "selective"] = Field("fedavg", description="strategy that trains a mode")


@listed(
    "fedensemble",
    title="Fed-ensemble",
    does="K models, trained in rotation, whose predictions are averaged",
    paper="arXiv:2107.10663",
    transfers="P down, P up; K·P down to score the ensemble",
    further=Member,
)
class FedEnsemble(MethodStrategy):
    """Fed-ensemble over Tepal's exchange.

    The initial arrays are those of K independently initialised models: `join_modes([model.state_dict(), …])`. The
    result's arrays are the K modes in the same form; `modes_of` separates them.

    Args:
        modes: K, models in the ensemble. 1 is the member alone.
        strata: Q, groups of clients; 0: as many as clients train in a round, one of each stratum.
        member: strategy with which a mode is trained, by default FedAvg; only the options of its method are used.
        weighting: weights of the clients that trained the same mode: uniform (the paper's, Remark 3.1), or their
            numbers of examples.
        assign: mode that a client trains: by the schedule, in rotation, or the one with the highest loss on the
            client's test examples when it last received it, after those that it has not received.
        round_options: see `MethodStrategy`. `model` is by default the member's. `min_available_nodes` is raised to
            the number that the strata need.

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
        method = FedAvgMethod() if member is None else member.method
        if not isinstance(method, FedAvgMethod) or isinstance(method, PersonalisedMethod):
            raise ValueError(
                f"member is {type(member).__name__}, but a mode must be one global model: choose FedAvg, FedProx, "
                "FedFrozen or SelectiveLayers"
            )
        if round_options.get("model") is None and member is not None:
            round_options["model"] = member.blocks
        ensembling = FedEnsembleMethod(modes, strata, member=method, weighting=weighting, assign=assign)
        super().__init__(ensembling, **round_options)
        rules = self.rules
        enough = next(n for n in itertools.count(max(strata, 1)) if rules.size(n, rules.fraction_train) >= strata)
        if enough > rules.needed:
            self.rules = replace(rules, min_available_nodes=enough, needed_by=f"strata={strata}")


def _of_mode(plan: Plan, mode: int) -> Plan:
    """A member's plan, with the tree of one of the ensemble's modes in place of the model."""
    trees = {tree: tree_of_mode(mode) if tree == MODEL else tree for tree in plan.needs}

    def renamed(names: Mapping[Tree, Names]) -> dict[Tree, Names]:
        return {trees[tree]: chosen for tree, chosen in names.items()}

    return replace(plan, needs=renamed(plan.needs), returns=renamed(plan.returns), keeps=renamed(plan.keeps))


def _joined(of_modes: Iterable[Mapping[Tree, Names]]) -> dict[Tree, Names]:
    return {tree: names for of_mode in of_modes for tree, names in of_mode.items()}
