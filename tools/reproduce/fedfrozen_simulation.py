"""When freezing the query and key block helps linear attention: FedFrozen (arXiv 2605.06446), Figures 1 to 3.

A run that freezes after T_warm rounds is FedAvg's until then. A trial therefore trains with FedAvg once, and from its
model at each T_warm continues with the value block alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from tepal.models.blocks import find_blocks
from tepal.report.page import Figure, add_band, empty_plot
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
from tepal.tools.reproduce.experiment import Experiment, Reproduction, Trial, TrialInputs, Values, joined, table

STEPS, RATE, RIDGE, PROFILE_RATE, MU = 20, 2e-4, 1e-3, 1e-3, 200.0
"""E, η, λ, η of Figure 1, and FedProx's μ."""
WARMUPS, CHOSEN = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0), 0.75
"""Values of T_warm/T, and the one that is used when something else varies."""
SHIFTED, PROFILED = 2.0, (0.0, 1.0, 2.0)
"""ρ when something else varies, and the values of ρ of Figure 1."""
ROLES = {"FedFrozen": "main", "FedAvg": "fedavg", "FedProx": "second", "SCAFFOLD": "third"}
_DIVERGED = 1e9  # a loss above that of all initial weights
_ALMOST = 1e-3  # relative difference below which medians count as equal


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
SMALL = Scale(3, 100, 25, (0.0, 1.0, 2.0), (5, 20, 40), (1.0, 100.0))


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
        "A seed whose weights exceed 10⁶ has diverged; its loss counts as infinite, and an infinite median is a dash.",
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
        kept = [of for of in found.values() if not of["profile"]]
        fedavg = [of for of in kept if of["method"] == "FedAvg"]
        return joined(
            _by_warmup([of for of in kept if len(of["warmups"]) == len(WARMUPS)]),
            _by_steps([of for of in fedavg if _at(of, rho=SHIFTED, ridge=RIDGE)]),
            _by_rho([of for of in kept if _at(of, steps=STEPS, ridge=RIDGE)]),
            _by_ridge([of for of in fedavg if _at(of, rho=SHIFTED, steps=STEPS)]),
            _profiles([of for of in found.values() if of["profile"]]),
            Reproduction([], findings=[*_closed_form_finding(kept), *_step_size_finding(found.values())]),
        )


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


# --- the results ----------------------------------------------------------------------------------------------------


Spread = tuple[float, float, float]


def spread(values: Iterable[float | None]) -> Spread:
    """Median, lower and upper quartile over seeds; infinite if that many of them diverged."""
    far = 1e300  # stands for infinity, of which percentiles are NaN
    known = [value if value is not None and value < _DIVERGED else far for value in values]
    low, median, high = (float(each) if each < far / 1e3 else math.inf for each in np.percentile(known, (25, 50, 75)))
    return median, low, high


_QUARTILES = ("median", "lower quartile", "upper quartile")
_BAND = "Median over the seeds, with a band between the quartiles."
_FREEZES = f"{CHOSEN:g}"  # key of the run that freezes at the chosen time


def _loss(of: Values, share: float = 1.0) -> Spread:
    return spread(of["runs"][f"{share:g}"]["loss"])


def _frozen(kept: Sequence[Values], key: str) -> list[Values]:
    """Trials with a run that freezes at the chosen time, sorted by an option."""
    return sorted((of for of in kept if _FREEZES in of["runs"]), key=lambda of: of[key])


def _less(a: float, b: float) -> bool:
    """Whether a median is less than another by more than a negligible difference."""
    return a < b * (1 - _ALMOST)


def _say(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def _written(values: Iterable[float]) -> list[float | None]:
    """Values of a table, in which None stands for a diverged run."""
    return [value if math.isfinite(value) else None for value in values]


def _curve(plot: Any, name: str, x: Sequence[float], spreads: Sequence[Spread]) -> None:
    """Add medians, and quartiles as a band, where all are finite."""
    meta = {"role": ROLES.get(name, "main")}
    if shown := [(at, *of) for at, of in zip(x, spreads, strict=True) if all(map(math.isfinite, of))]:
        at, median, low, high = zip(*shown, strict=True)
        add_band(plot, at, low, high, meta=meta)
        plot.add_scatter(x=at, y=median, name=name, mode="lines+markers" if len(at) < 20 else "lines", meta=meta)


def _by_warmup(kept: Sequence[Values]) -> Reproduction:
    """Figure 2, middle, and Figure 3a."""
    kept = sorted(kept, key=lambda of: of["rho"])
    rows = [(f"{of['rho']:g}", f"{share:g}", *_written(_loss(of, share))) for of in kept for share in WARMUPS]
    figures, findings = [], []
    for of in kept:
        median = {share: _loss(of, share)[0] for share in WARMUPS}
        best = min(WARMUPS, key=lambda share: median[share])
        within = 0 < best < 1 and _less(median[best], median[1.0]) and _less(median[best], median[0.0])
        findings.append(
            f"ρ = {of['rho']:g}: the least median loss is at T_warm/T = {best:g}, {_say(median[best])} (never frozen "
            f"{_say(median[1.0])}, frozen from the start {_say(median[0.0])}): freezing in between is "
            f"{'better than both ends' if within else 'not better than both ends'} (paper: better than never freezing "
            "for ρ ≥ 1)."
        )
        if of["rho"] == SHIFTED:
            plot = empty_plot("T_warm/T", "final loss")
            _curve(plot, f"ρ = {SHIFTED:g}", WARMUPS, [_loss(of, share) for share in WARMUPS])
            figures.append(Figure("warmup", f"Loss by warm-up at ρ = {SHIFTED:g}", _BAND, plot))
    if kept:
        values = [_written(math.log10(_loss(of, share)[0]) for share in WARMUPS) for of in kept]
        plot = empty_plot("T_warm/T", "ρ")
        plot.add_heatmap(
            z=values, x=[f"{share:g}" for share in WARMUPS], y=[f"{of['rho']:g}" for of in kept], showscale=False,
            xgap=1, ygap=1, texttemplate="%{z:.2f}", meta={"role": "second", "spoken": f"{len(kept)} values of ρ."},
            hovertemplate="ρ = %{y}, T_warm/T = %{x}: %{z:.3f}<extra></extra>",
        )  # fmt: skip
        plot.update_xaxes(type="category", rangemode="normal")
        plot.update_yaxes(type="category")
        caption = "log₁₀ of the median loss over the seeds; darker is larger, empty if it diverged."
        figures.append(Figure("heat", "Loss by warm-up and heterogeneity", caption, plot))
    return Reproduction([table("Final loss by warm-up", ("ρ", "T_warm/T", *_QUARTILES), rows)], figures, findings)


def _by_steps(kept: Sequence[Values]) -> Reproduction:
    """Figure 2, left."""
    kept = _frozen(kept, "steps")
    steps = [of["steps"] for of in kept]
    pairs = ((of["runs"][_FREEZES]["loss"], of["runs"]["1"]["loss"]) for of in kept)
    ratios = [spread(map(_ratio, *pair)) for pair in pairs]
    rows = [
        (str(of["steps"]), *_written([_loss(of, CHOSEN)[0], _loss(of)[0], *ratio]))
        for of, ratio in zip(kept, ratios, strict=True)
    ]
    plot = empty_plot("local steps E", "loss of FedFrozen / FedAvg")
    _curve(plot, "FedFrozen / FedAvg", steps, ratios)
    findings = []
    if len(kept) > 1:
        medians = [ratio[0] for ratio in ratios]
        falls = all(_less(after, before) for before, after in pairwise(medians))
        findings.append(
            f"The ratio of FedFrozen's loss to FedAvg's {'falls' if falls else 'does not fall everywhere'} with E: "
            f"{', '.join(f'{_say(m)} at {e}' for m, e in zip(medians, steps, strict=True))} (paper: falls)."
        )
    headings = ("E", "FedFrozen", "FedAvg", *(f"ratio, {each}" for each in _QUARTILES))
    figure = Figure("steps", "FedFrozen and FedAvg by local steps", f"{_BAND} Below 1, FedFrozen is better.", plot)
    tables = [table("Final loss by local steps", headings, rows)]
    return Reproduction(tables, [figure] if kept else [], findings)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below is not None else None


def _by_rho(kept: Sequence[Values]) -> Reproduction:
    """Figure 2, right."""
    found: dict[str, dict[float, Spread]] = {name: {} for name in ROLES}
    for of in sorted(kept, key=lambda of: of["rho"]):
        found[of["method"]][of["rho"]] = _loss(of)
        if _FREEZES in of["runs"]:
            found["FedFrozen"][of["rho"]] = _loss(of, CHOSEN)
    plot = empty_plot("heterogeneity ρ", "final loss")
    for name, by_rho in found.items():
        _curve(plot, name, [*by_rho], [*by_rho.values()])
    rhos = sorted({of["rho"] for of in kept})
    rows = [(f"{rho:g}", name, *_written(found[name][rho])) for rho in rhos for name in ROLES if rho in found[name]]
    findings = []
    for rho in rhos:
        known = {name: by_rho[rho][0] for name, by_rho in found.items() if rho in by_rho}
        if len(known) == len(ROLES):
            ranking = ", ".join(f"{name} {_say(known[name])}" for name in sorted(known, key=lambda name: known[name]))
            findings.append(f"ρ = {rho:g}, median losses in increasing order: {ranking}.")
    if len(rhos) > 1 and all({rhos[0], rhos[-1]} <= by_rho.keys() for by_rho in found.values()):
        grown = {name: by_rho[rhos[-1]][0] / by_rho[rhos[0]][0] for name, by_rho in found.items()}
        least = min(grown, key=lambda name: grown[name])
        findings.append(
            f"From ρ = {rhos[0]:g} to {rhos[-1]:g} the loss grows by the factor "
            f"{', '.join(f'{_say(grown[name])} ({name})' for name in grown)}: least for {least} (paper: FedFrozen)."
        )
    figure = Figure("rho", "Loss by heterogeneity", f"{_BAND} FedFrozen with T_warm/T = {_FREEZES}.", plot)
    tables = [table("Final loss by heterogeneity", ("ρ", "method", *_QUARTILES), rows)]
    return Reproduction(tables, [figure] if kept else [], findings)


def _by_ridge(kept: Sequence[Values]) -> Reproduction:
    """Figure 3b."""
    kept = _frozen(kept, "ridge")
    names = [f"{of['ridge']:g}" for of in kept]
    spreads = {key: [spread(of["runs"][_FREEZES][key]) for of in kept] for key in ("loss", "drift")}
    rows = [(name, *_written(chain(*both))) for name, *both in zip(names, *spreads.values(), strict=True)]
    headings = ("λ", *(f"{key}, {each}" for key in spreads for each in _QUARTILES))
    figures, findings = [], []
    for key, title in (("loss", "Loss by ridge"), ("drift", "Client drift by ridge")):
        medians = [of[0] for of in spreads[key]]
        plot = empty_plot("λ", key)
        plot.add_scatter(x=names, y=_written(medians), name="FedFrozen", mode="lines+markers", meta={"role": "main"})
        plot.update_xaxes(type="category", rangemode="normal")
        plot.update_yaxes(type="log", dtick="D2")
        figures.append(Figure(f"ridge-{key}", title, f"Medians over the seeds, at ρ = {SHIFTED:g}.", plot))
        if len(kept) > 1:
            least = int(np.argmin(medians))
            findings.append(
                f"The {key} is least at λ = {names[least]}: {_say(medians[least])}; at λ = {names[-1]} it is "
                f"{_say(medians[-1])} (paper: least at a moderate λ, large at an excessive one)."
            )
    return Reproduction([table("Loss and drift by ridge", headings, rows)], figures if kept else [], findings)


def _profiles(found: Sequence[Values]) -> Reproduction:
    """Figure 1."""
    rows, figures, findings = [], [], []
    for rho in sorted({of["rho"] for of in found}):
        plot, rounds = empty_plot("round", "h_λ", rounds=100), 0
        for of in (of for of in found if of["rho"] == rho):
            by_method = {of["method"]: of["h"]}
            rounds = len(of["h"]) - 1
            if of["method"] == "FedAvg":
                end = round(CHOSEN * rounds)
                by_method["FedFrozen"] = [*of["h"][:end], *[of["h"][end]] * (rounds + 1 - end)]
            for method, profile in by_method.items():
                spreads = [spread(of_round) for of_round in profile]
                _curve(plot, method, [*range(rounds + 1)], spreads)
                medians = [each[0] for each in spreads]
                least = int(np.argmin(medians))
                first, lowest, last = _written([medians[0], medians[least], medians[-1]])
                diverged = sum(loss is None or not loss < _DIVERGED for loss in of["runs"]["1"]["loss"])
                own = diverged if method == of["method"] else None
                rows.append((f"{rho:g}", method, first, lowest, least, last, own))
                if method == "FedAvg":
                    ups = sum(after > before for before, after in pairwise(medians))
                    findings.append(
                        f"ρ = {rho:g}: h_λ of FedAvg changes from {_say(medians[0])} to {_say(medians[-1])}, rises "
                        f"in {ups} of {rounds} rounds and is least in round {least} (paper: falls steadily at ρ = 0, "
                        "falls and then rises at 1 and 2)."
                    )
        caption = f"{_BAND} η = {PROFILE_RATE:g}. FedFrozen is FedAvg until T_warm = {round(CHOSEN * rounds)}."
        figures.append(Figure(f"profile-{rho:g}", f"Profile h_λ at ρ = {rho:g}", caption, plot))
    headings = ("ρ", "method", "h_λ at the start", "least", "in round", "at the end", "seeds that diverged")
    return Reproduction([table("Profile of the kernel", headings, rows)], figures, findings)


def _closed_form_finding(kept: Sequence[Values]) -> list[str]:
    """How far the trained θ of frozen phases is from the closed form."""
    runs = [run for of in kept for run in of["runs"].values() if "from closed form" in run]
    away = [
        away for run in runs for loss, away in zip(run["loss"], run["from closed form"], strict=True)
        if loss is not None and loss < _DIVERGED
    ]  # fmt: skip
    finding = (
        f"In {len(away)} frozen phases of one seed each, the final θ agrees with the closed form θ⁺ = Pθ + b to a "
        f"relative difference of {max(away, default=0):.0e}."
    )
    return [finding] if away else []


def _step_size_finding(found: Iterable[Values]) -> list[str]:
    """Settings in which training diverges because of its step size alone."""
    by_setting = {(of["rate"], of["rho"]): of["rate"] * max(of["steepness"]) for of in found}
    above = {setting: times for setting, times in sorted(by_setting.items()) if times > 2}
    steep = [f"{times:.2g} at η = {rate:g}, ρ = {rho:g}" for (rate, rho), times in above.items()]
    finding = (
        "Steps on θ diverge at a client where η times the largest eigenvalue of its G_k is above 2. At the start this "
        f"is, for the steepest client: {'; '.join(steep)}."
    )
    return [finding] if steep else []
