"""When freezing the query and key block helps linear attention: FedFrozen (arXiv 2605.06446), Figures 1 to 3.

A run that freezes after T_warm rounds is FedAvg's until then. A trial therefore trains with FedAvg once, and from its
model at each T_warm continues with the value block alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from tepal.models.blocks import find_blocks
from tepal.strategies import FedFrozen, FedProx, Scaffold
from tepal.tools.reproduce.attention_clients import (
    CLIENTS,
    Client,
    affine_round,
    drift,
    matrices_of,
    mean_quadratic,
    problem,
    steepness,
    train,
)
from tepal.tools.reproduce.experiment import (
    HOLDS,
    UNDECIDED,
    Claim,
    Experiment,
    Reproduction,
    Trial,
    TrialInputs,
    Values,
    joined,
)
from tepal.tools.reproduce.fedfrozen_figures import (
    CHOSEN,
    PROFILE_RATE,
    SHIFTED,
    WARMUPS,
    by_rho,
    by_ridge,
    by_steps,
    by_warmup,
    closed_form_finding,
    profiles,
    step_size_finding,
)

STEPS, RATE, RIDGE, MU = 20, 2e-4, 1e-3, 200.0
"""E, η, λ, and FedProx's μ."""
PROFILED = (0.0, 1.0, 2.0)
"""The values of ρ of Figure 1."""


@dataclass(frozen=True)
class Scale:
    """Number of seeds, T, T of Figure 1, and the values of ρ, E and λ."""

    seeds: int
    rounds: int
    profile_rounds: int
    rhos: tuple[float, ...]
    steps: tuple[int, ...]
    ridges: tuple[float, ...]


FULL = Scale(10, 200, 200, (0.0, 0.5, 1.0, 1.5, 2.0), (5, 10, 20, 40), (0.0, 0.1, 1.0, 10.0, 100.0))
SMALL = Scale(5, 100, 25, (0.0, 1.0, 2.0), (5, 20, 40), (1.0, 100.0))


class FedFrozenSimulation(Experiment):
    """Loss by the length of the warm-up, by local steps, by heterogeneity and by ridge, and the profile h_λ."""

    name = "fedfrozen-simulation"
    title = "FedFrozen on linear attention"
    paper = "FedFrozen, Figures 1 to 3 (arXiv 2605.06446)"
    deviations = (
        "The paper gives neither φ nor the scales. Chosen here: φ(x) = sigmoid(x)/√d_k; teacher and student from "
        "N(0, 1/d), the teacher's W_Q and W_K times 4; the squared error summed over d_v, averaged over tokens and "
        "examples.",
        "The paper does not define the final loss: here it is f, the mean of the clients' training losses at the "
        "global model, without the ridge.",
        f"The paper does not give T_warm and ρ when another parameter varies: here T_warm/T = {CHOSEN:g} and ρ = "
        f"{SHIFTED:g}.",
        "The paper does not define client drift: here it is 1/K Σ ‖w_k − w̄‖ of the trained matrices after local "
        "training, averaged over the last quarter of the rounds (50 of 200, as in the paper).",
        "Tables and figures show medians and quartiles, as in the paper; findings also compare losses as factors that "
        "are paired by seed: geometric means with Student's intervals at 95 %.",
        "If a weight of a matrix exceeds 10⁶ after local training, the client returns that matrix unchanged. A seed "
        "with a final loss of 10⁹ or more has diverged; its loss counts as infinite. An infinite median is shown as a "
        "dash, and so is the final h_λ of a method that was run, if any of its seeds diverged.",
        "The paper's numbers are only in figures; therefore its statements are quoted next to our numbers.",
        "For every ρ a seed has the same data and weights, except that the clients' means are scaled by ρ.",
    )
    small_scale = (
        f"{SMALL.seeds} seeds, T = {SMALL.rounds} and {SMALL.profile_rounds} for the profile, of the paper's "
        f"{FULL.seeds} and {FULL.rounds}, and fewer values of ρ, E and λ."
    )
    full_scale = f"{FULL.seeds} seeds, T = {FULL.rounds}, as in the paper."

    def trials(self, full: bool) -> Sequence[Trial]:
        of = FULL if full else SMALL
        usual = {"seeds": of.seeds, "rounds": of.rounds, "rate": RATE, "profile": False}
        shifted = {"rho": SHIFTED, "warmups": (CHOSEN, 1.0), **usual}
        profiled = {"seeds": of.seeds, "rounds": of.profile_rounds, "rate": PROFILE_RATE, "profile": True}
        others = ("FedProx", "SCAFFOLD")
        return [
            *(_trial("FedAvg", **usual, rho=rho, warmups=WARMUPS) for rho in of.rhos),
            *(_trial("FedAvg", **shifted, steps=steps) for steps in of.steps if steps != STEPS),
            *(_trial("FedAvg", **shifted, ridge=ridge) for ridge in of.ridges if ridge != RIDGE),
            *(_trial(method, **usual, rho=rho) for method in others for rho in of.rhos),
            *(_trial(method, **profiled, rho=rho) for method in ("FedAvg", *others) for rho in PROFILED),
        ]

    def compute(self, trial: Trial, inputs: TrialInputs) -> Values:
        of = trial.options
        rounds, ridge, local = of["rounds"], of["ridge"], {"rate": of["rate"], "steps": of["steps"]}
        with _one_thread():
            clients, student = problem(range(of["seeds"]), of["rho"])
            common: dict[str, Any] = {
                "fraction_evaluate": 0, "min_available_nodes": CLIENTS, "deterministic": True,
                "model": find_blocks(student),
            }  # fmt: skip
            watch = _Watch(clients, rounds, ridge, profiled=of["profile"])
            start = ArrayRecord(student.state_dict())
            steep = steepness(clients, student.query.detach(), student.key.detach())
            if of["method"] == "FedAvg":  # FedFrozen that never freezes; its plan contains the ridge
                whole = FedFrozen(warmup_rounds=rounds, ridge=ridge, **common)
                train(whole, clients, start, rounds, watch, ridge=0.0, **local)
            else:
                other = FedProx(mu=MU, **common) if of["method"] == "FedProx" else Scaffold(**common)
                train(other, clients, start, rounds, watch, ridge=ridge, **local)
            runs = {1.0: watch.result()}
            for share in of["warmups"]:
                if (warmup := round(share * rounds)) < rounds:
                    frozen = FedFrozen(warmup_rounds=0, ridge=ridge, **common)
                    again = _Watch(clients, rounds, ridge, warmup)
                    train(frozen, clients, watch.models[warmup], rounds - warmup, again, ridge=0.0, **local)
                    closed = _closed_form(clients, watch.models[warmup], rounds - warmup, ridge=ridge, **local)
                    away = (matrices_of(again.models[rounds])[2] - closed).norm(dim=(1, 2)) / closed.norm(dim=(1, 2))
                    runs[share] = {**again.result(), "from closed form": away.tolist()}
        by_share = {f"{share:g}": runs[share] for share in sorted(runs)}
        return {**of, "runs": by_share, "h": watch.profile, "steepness": steep.tolist()}

    def results(self, found: Mapping[str, Values]) -> Reproduction:
        results = self._results(found)
        full = any(of["seeds"] == FULL.seeds for of in found.values())
        if len(found) == len(self.trials(full)):
            return results
        return replace(results, claims=[*map(_unfinished, results.claims)])

    def _results(self, found: Mapping[str, Values]) -> Reproduction:
        kept = [of for of in found.values() if not of["profile"]]
        fedavg = [of for of in kept if of["method"] == "FedAvg"]
        return joined(
            by_warmup([of for of in kept if len(of["warmups"]) == len(WARMUPS)]),
            by_steps([of for of in fedavg if _at(of, rho=SHIFTED, ridge=RIDGE)]),
            by_rho([of for of in kept if _at(of, steps=STEPS, ridge=RIDGE)]),
            by_ridge([of for of in fedavg if _at(of, rho=SHIFTED, steps=STEPS)]),
            profiles([of for of in found.values() if of["profile"]]),
            Reproduction([], findings=[*closed_form_finding(kept), *step_size_finding(found.values())]),
        )


def _unfinished(claim: Claim) -> Claim:
    """A claim as long as trials are missing: it cannot hold."""
    if claim.verdict != HOLDS:
        return claim
    return replace(claim, measured=f"{claim.measured}; other trials: not computed yet", verdict=UNDECIDED)


def _trial(method: str, **of: Any) -> Trial:
    of = {"method": method, "steps": STEPS, "ridge": RIDGE, "warmups": (), **of}
    name = f"{method}-rho-{of['rho']:g}-steps-{of['steps']}-ridge-{of['ridge']:g}-rate-{of['rate']:g}"
    return Trial(name.lower(), of)


def _at(of: Values, **wanted: float) -> bool:
    return all(of[key] == value for key, value in wanted.items())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread of torch in a block: with matrices as small as these, more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Watch:
    """Measures a run after each round; `before`: the rounds that were trained before it."""

    clients: Sequence[Client]
    rounds: int
    ridge: float
    before: int = 0
    profiled: bool = False
    models: dict[int, ArrayRecord] = field(default_factory=dict)
    """Model by number of rounds."""
    profile: list[list[float]] = field(default_factory=list)
    """h_λ of each seed, for every round from 0."""
    drifts: list[Tensor] = field(default_factory=list)

    def __call__(self, number: int, arrays: ArrayRecord) -> None:
        self.models[number + self.before] = arrays
        if number and number + self.before > self.rounds - self.rounds // 4:
            self.drifts.append(drift(self.clients))
        if self.profiled:
            self.profile.append(mean_quadratic(self.clients, *matrices_of(arrays)[:2]).profile(self.ridge).tolist())

    def result(self) -> dict[str, Any]:
        """Final loss and mean client drift of each seed."""
        query, key, value = matrices_of(self.models[self.rounds])
        loss = mean_quadratic(self.clients, query, key).loss(value.double())
        return {"loss": loss.tolist(), "drift": torch.stack(self.drifts).mean(0).tolist()}


def _closed_form(
    clients: Sequence[Client], arrays: ArrayRecord, rounds: int, *, rate: float, steps: int, ridge: float
) -> Tensor:
    """θ after a number of frozen rounds, by the affine map of one round."""
    query, key, value = matrices_of(arrays)
    p, b = affine_round(clients, query, key, rate=rate, ridge=ridge, steps=steps)
    theta = value.double()
    for _ in range(rounds):
        theta = p @ theta + b
    return theta
