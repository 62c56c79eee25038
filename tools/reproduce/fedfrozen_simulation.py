"""Figures 1 to 3 of FedFrozen (arXiv 2605.06446): when freezing query and key helps linear attention, and how much.

FedAvg is FedFrozen that never freezes, and a run that freezes after T_warm rounds is FedAvg's until then: so a cell
trains with FedAvg once, and goes on from its model at each T_warm with the value block alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
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
from tepal.tools.reproduce.experiment import Cell, Outcome, Place, Table, Values

STEPS, RATE, RIDGE, PROFILE_RATE, MU = 20, 2e-4, 1e-3, 1e-3, 200.0
"""E, η, λ, η of figure 1, and FedProx's μ."""
WARMUPS, CHOSEN = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0), 0.75
"""T_warm/T, and the one that FedFrozen has where it is not what varies."""
SHIFTED, PROFILED = 2.0, (0.0, 1.0, 2.0)
"""ρ where it is not what varies, and those of figure 1."""
ROLES = {"FedFrozen": "main", "FedAvg": "fedavg", "FedProx": "second", "SCAFFOLD": "third"}
_DIVERGED = 1e9  # a loss that no start has
_ALMOST = 1e-3  # a relative difference of medians that is none


@dataclass(frozen=True)
class Scale:
    """Seeds, T, T of figure 1, and what the figures vary: ρ, E and λ."""

    seeds: int
    rounds: int
    profile_rounds: int
    rhos: tuple[float, ...]
    steps: tuple[int, ...]
    ridges: tuple[float, ...]


FULL = Scale(10, 200, 200, (0.0, 0.5, 1.0, 1.5, 2.0), (5, 10, 20, 40), (0.0, 0.1, 1.0, 10.0, 100.0))
SMALL = Scale(3, 100, 25, (0.0, 1.0, 2.0), (5, 20, 40), (1.0, 100.0))


class FedFrozenSimulation:
    """Loss by the length of the warm-up, by local steps, by heterogeneity and by ridge, and the profile h_λ."""

    name = "fedfrozen-simulation"
    title = "FedFrozen on linear attention"
    paper = "FedFrozen, Figures 1 to 3 (arXiv 2605.06446)"
    deviations = (
        "The paper does not give φ and the scales. Chosen here: φ(x) = sigmoid(x)/√d_k; teacher and student from "
        "N(0, 1/d), the teacher's W_Q and W_K times 4; the squared error summed over d_v, averaged over tokens and "
        "examples.",
        "Nor does it say what a final loss is: here f, the mean of the clients' training losses at the global model, "
        "without the ridge.",
        f"Nor T_warm and ρ where another thing varies: here T_warm/T = {CHOSEN:g} and ρ = {SHIFTED:g}.",
        "Nor the measure of client drift: here 1/K Σ ‖w_k − w̄‖ after local training, of what is trained, in the last "
        "quarter of the rounds (50 of 200, as in the paper).",
        "A seed whose weights pass 10⁶ has diverged; its loss counts as infinite, and a dash is such a median.",
        "The paper's numbers are in figures alone, so that its sentences stand here beside ours.",
        "A seed's data and weights are the same draws for every ρ, but for the clients' means, which are ρ times one.",
    )

    def data(self, full: bool) -> Sequence[str]:
        return ()

    def scale(self, full: bool) -> str:
        of = FULL if full else SMALL
        text = f"{of.seeds} seeds, T = {of.rounds}"
        if full:
            return f"{text}, as in the paper."
        return (
            f"{text} and {of.profile_rounds} for the profile, of the paper's {FULL.seeds} and {FULL.rounds}, and fewer "
            "values of ρ, E and λ."
        )

    def cells(self, full: bool) -> Sequence[Cell]:
        of = FULL if full else SMALL
        usual = {"seeds": of.seeds, "rounds": of.rounds, "rate": RATE, "profile": False}
        shifted = {"rho": SHIFTED, "warmups": (CHOSEN, 1.0), **usual}
        made = [_cell("FedAvg", **usual, rho=rho, warmups=WARMUPS) for rho in of.rhos]
        made += [_cell("FedAvg", **shifted, steps=steps) for steps in of.steps if steps != STEPS]
        made += [_cell("FedAvg", **shifted, ridge=ridge) for ridge in of.ridges if ridge != RIDGE]
        others = ("FedProx", "SCAFFOLD")
        made += [_cell(method, **usual, rho=rho) for method in others for rho in of.rhos]
        profiled = {"seeds": of.seeds, "rounds": of.profile_rounds, "rate": PROFILE_RATE, "profile": True}
        return made + [_cell(method, **profiled, rho=rho) for method in ("FedAvg", *others) for rho in PROFILED]

    def compute(self, cell: Cell, place: Place) -> Values:
        of = cell.options
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
            if of["method"] == "FedAvg":
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

    def outcome(self, found: Mapping[str, Values]) -> Outcome:
        kept = [of for of in found.values() if not of["profile"]]
        parts = [
            _by_warmup([of for of in kept if len(of["warmups"]) == len(WARMUPS)]),
            _by_steps([of for of in kept if of["method"] == "FedAvg" and _at(of, rho=SHIFTED, ridge=RIDGE)]),
            _by_rho([of for of in kept if _at(of, steps=STEPS, ridge=RIDGE)]),
            _by_ridge([of for of in kept if of["method"] == "FedAvg" and _at(of, rho=SHIFTED, steps=STEPS)]),
            _profiles([of for of in found.values() if of["profile"]]),
            _frozen_phase(kept),
            _step_sizes(found.values()),
        ]
        return Outcome(*([each for part in parts for each in getattr(part, name)]
                         for name in ("tables", "figures", "findings")))  # fmt: skip


def _cell(method: str, **of: Any) -> Cell:
    of = {"method": method, "steps": STEPS, "ridge": RIDGE, "warmups": (), **of}
    name = f"{method}-rho-{of['rho']:g}-steps-{of['steps']}-ridge-{of['ridge']:g}-rate-{of['rate']:g}"
    return Cell(name.lower(), of)


def _at(of: Values, **wanted: float) -> bool:
    return all(of[key] == value for key, value in wanted.items())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Watch:
    """What is measured of a run while it goes on; `before`: the rounds that were before it."""

    clients: Sequence[Client]
    rounds: int
    ridge: float
    before: int = 0
    profiled: bool = False
    models: dict[int, ArrayRecord] = field(default_factory=dict)
    """By how many rounds they had."""
    profile: list[list[float]] = field(default_factory=list)
    """h_λ of each seed, round by round, from the start on."""
    drifts: list[Tensor] = field(default_factory=list)

    def __call__(self, number: int, arrays: ArrayRecord) -> None:
        self.models[number + self.before] = arrays
        if number and number + self.before > self.rounds - self.rounds // 4:
            self.drifts.append(drift(self.clients))
        if self.profiled:
            self.profile.append(mean_quadratic(self.clients, *matrices_of(arrays)[:2]).profile(self.ridge).tolist())

    def result(self) -> dict[str, Any]:
        """Final loss and mean drift of each seed."""
        query, key, value = matrices_of(self.models[self.rounds])
        loss = mean_quadratic(self.clients, query, key).loss(value.double())
        return {"loss": loss.tolist(), "drift": torch.stack(self.drifts).mean(0).tolist()}


def _closed_form(
    clients: Sequence[Client], arrays: ArrayRecord, rounds: int, *, rate: float, steps: int, ridge: float
) -> Tensor:
    """θ after so many frozen rounds, by the affine map of one."""
    query, key, value = matrices_of(arrays)
    p, b = affine_round(clients, query, key, rate=rate, ridge=ridge, steps=steps)
    theta = value.double()
    for _ in range(rounds):
        theta = p @ theta + b
    return theta


# --- what is told ---------------------------------------------------------------------------------------------------


Spread = tuple[float, float, float]


def spread(values: Iterable[float | None]) -> Spread:
    """Median, lower and upper quartile over seeds; infinite where so many of them diverged."""
    far = 1e300  # percentiles of infinity are no numbers
    known = [value if value is not None and value < _DIVERGED else far for value in values]
    low, median, high = (float(each) if each < far / 1e3 else math.inf for each in np.percentile(known, (25, 50, 75)))
    return median, low, high


_QUARTILES = ("median", "lower quartile", "upper quartile")
_BAND = "Median and quartiles over the seeds."


def _loss(of: Values, share: float = 1.0) -> Spread:
    return spread(of["runs"][f"{share:g}"]["loss"])


def _less(a: float, b: float) -> bool:
    """Whether a median is less than another by more than almost nothing."""
    return a < b * (1 - _ALMOST)


def _say(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def _written(values: Iterable[float]) -> list[float | None]:
    """For tables: None is what diverged."""
    return [value if math.isfinite(value) else None for value in values]


def _curve(plot: Any, name: str, x: Sequence[float], spreads: Sequence[Spread]) -> None:
    """Median and, as a band, quartiles, where all are finite."""
    meta = {"role": ROLES.get(name, "main")}
    if shown := [(at, of) for at, of in zip(x, spreads, strict=True) if all(map(math.isfinite, of))]:
        at = [each for each, _ in shown]
        median, low, high = ([of[k] for _, of in shown] for k in range(3))
        add_band(plot, at, low, high, meta=meta)
        plot.add_scatter(x=at, y=median, name=name, mode="lines+markers" if len(at) < 20 else "lines", meta=meta)


def _by_warmup(kept: Sequence[Values]) -> Outcome:
    """Figure 2, middle, and figure 3a."""
    kept = sorted(kept, key=lambda of: of["rho"])
    rows = [(f"{of['rho']:g}", f"{share:g}", *_written(_loss(of, share))) for of in kept for share in WARMUPS]
    table = Table("Final loss by warm-up", ("ρ", "T_warm/T", *_QUARTILES), rows)
    figures, findings = [], []
    for of in kept:
        median = {share: _loss(of, share)[0] for share in WARMUPS}
        best = min(WARMUPS, key=lambda share: median[share])
        within = 0 < best < 1 and _less(median[best], median[1.0]) and _less(median[best], median[0.0])
        findings.append(
            f"ρ = {of['rho']:g}: the least median loss is at T_warm/T = {best:g}, {_say(median[best])} (never frozen "
            f"{_say(median[1.0])}, frozen from the start {_say(median[0.0])}): freezing in between is "
            f"{'better than both ends' if within else 'not better than both ends'} (paper: better than never from ρ = "
            "1 on)."
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
        caption = "log₁₀ of the median loss, the darker the larger; nothing where it diverged."
        figures.append(Figure("heat", "Loss by warm-up and heterogeneity", caption, plot))
    return Outcome([table], figures, findings)


def _by_steps(kept: Sequence[Values]) -> Outcome:
    """Figure 2, left."""
    kept = sorted((of for of in kept if f"{CHOSEN:g}" in of["runs"]), key=lambda of: of["steps"])
    steps = [of["steps"] for of in kept]
    pairs = ((of["runs"][f"{CHOSEN:g}"]["loss"], of["runs"]["1"]["loss"]) for of in kept)
    ratios = [spread(map(_ratio, *pair)) for pair in pairs]
    rows = [(str(of["steps"]), *_written([_loss(of, CHOSEN)[0], _loss(of)[0], *ratio]))
            for of, ratio in zip(kept, ratios, strict=True)]  # fmt: skip
    headings = ("E", "FedFrozen", "FedAvg", *(f"ratio, {each}" for each in _QUARTILES))
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
    figure = Figure("steps", "FedFrozen and FedAvg by local steps", f"{_BAND} Below 1, FedFrozen is better.", plot)
    return Outcome([Table("Final loss by local steps", headings, rows)], [figure] if kept else [], findings)


def _by_rho(kept: Sequence[Values]) -> Outcome:
    """Figure 2, right."""
    found: dict[str, dict[float, Spread]] = {name: {} for name in ROLES}
    for of in sorted(kept, key=lambda of: of["rho"]):
        found[of["method"]][of["rho"]] = _loss(of)
        if f"{CHOSEN:g}" in of["runs"]:
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
            order = sorted(known, key=lambda name: known[name])
            said = ", ".join(f"{name} {_say(known[name])}" for name in order)
            findings.append(f"ρ = {rho:g}, from the least loss: {said}.")
    if len(rhos) > 1 and all({rhos[0], rhos[-1]} <= by_rho.keys() for by_rho in found.values()):
        grown = {name: by_rho[rhos[-1]][0] / by_rho[rhos[0]][0] for name, by_rho in found.items()}
        least = min(grown, key=lambda name: grown[name])
        findings.append(
            f"From ρ = {rhos[0]:g} to {rhos[-1]:g} the loss grows by the factor "
            f"{', '.join(f'{_say(grown[name])} ({name})' for name in grown)}: least for {least} (paper: FedFrozen)."
        )
    figure = Figure("rho", "Loss by heterogeneity", f"{_BAND} FedFrozen with T_warm/T = {CHOSEN:g}.", plot)
    headings = ("ρ", "method", *_QUARTILES)
    return Outcome([Table("Final loss by heterogeneity", headings, rows)], [figure] if kept else [], findings)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below is not None else None


def _by_ridge(kept: Sequence[Values]) -> Outcome:
    """Figure 3b."""
    kept = sorted((of for of in kept if f"{CHOSEN:g}" in of["runs"]), key=lambda of: of["ridge"])
    names, of_each = [f"{of['ridge']:g}" for of in kept], [of["runs"][f"{CHOSEN:g}"] for of in kept]
    losses, drifts = ([spread(of[key]) for of in of_each] for key in ("loss", "drift"))
    rows = [(name, *_written([*loss, *moved])) for name, loss, moved in zip(names, losses, drifts, strict=True)]
    headings = ("λ", *(f"{of}, {each}" for of in ("loss", "drift") for each in _QUARTILES))
    figures, findings = [], []
    for key, title, spreads in (("loss", "Loss by ridge", losses), ("drift", "Client drift by ridge", drifts)):
        plot = empty_plot("λ", key)
        plot.add_scatter(
            x=names, y=_written(of[0] for of in spreads), name="FedFrozen", mode="lines+markers", meta={"role": "main"}
        )
        plot.update_xaxes(type="category", rangemode="normal")
        plot.update_yaxes(type="log", dtick="D2")
        figures.append(Figure(f"ridge-{key}", title, f"Medians, at ρ = {SHIFTED:g}.", plot))
        if len(kept) > 1:
            medians = [of[0] for of in spreads]
            least = int(np.argmin(medians))
            findings.append(
                f"The {key} is least at λ = {names[least]}: {_say(medians[least])}; at λ = {names[-1]} it is "
                f"{_say(medians[-1])} (paper: least at a moderate λ, large at an excessive one)."
            )
    return Outcome([Table("Loss and drift by ridge", headings, rows)], figures if kept else [], findings)


def _profiles(found: Sequence[Values]) -> Outcome:
    """Figure 1."""
    rows, figures, findings = [], [], []
    for rho in sorted({of["rho"] for of in found}):
        plot, rounds = empty_plot("round", "h_λ", rounds=100), 0
        for of in (of for of in found if of["rho"] == rho):
            by_method = {of["method"]: of["h"]}
            rounds = len(of["h"]) - 1
            if of["method"] == "FedAvg":
                end = round(CHOSEN * rounds)
                by_method["FedFrozen"] = [of["h"][min(number, end)] for number in range(rounds + 1)]
            for method, profile in by_method.items():
                spreads = [spread(of_round) for of_round in profile]
                _curve(plot, method, [*range(rounds + 1)], spreads)
                medians = [each[0] for each in spreads]
                least = int(np.argmin(medians))
                first, lowest, last = _written([medians[0], medians[least], medians[-1]])
                away = sum(loss is None or not loss < _DIVERGED for loss in of["runs"]["1"]["loss"])
                rows.append((f"{rho:g}", method, first, lowest, least, last, away if method == of["method"] else None))
                if method == "FedAvg":
                    ups = sum(after > before for before, after in pairwise(medians))
                    findings.append(
                        f"ρ = {rho:g}: h_λ of FedAvg goes from {_say(medians[0])} to {_say(medians[-1])}, rises "
                        f"in {ups} of {rounds} rounds and is least in round {least} (paper: falls steadily at ρ = 0, "
                        "falls and then rises at 1 and 2)."
                    )
        caption = f"{_BAND} η = {PROFILE_RATE:g}. FedFrozen is FedAvg until T_warm = {round(CHOSEN * rounds)}."
        figures.append(Figure(f"profile-{rho:g}", f"Profile h_λ at ρ = {rho:g}", caption, plot))
    headings = ("ρ", "method", "h_λ at the start", "least", "in round", "at the end", "seeds that diverged")
    return Outcome([Table("Profile of the kernel", headings, rows)], figures, findings)


def _frozen_phase(kept: Sequence[Values]) -> Outcome:
    """Whether trained θ is that of the closed form."""
    runs = [run for of in kept for run in of["runs"].values() if "from closed form" in run]
    away = [away for run in runs for loss, away in zip(run["loss"], run["from closed form"], strict=True)
            if loss is not None and loss < _DIVERGED]  # fmt: skip
    said = (
        f"In {len(away)} frozen phases, each of one seed, θ ends where θ⁺ = Pθ + b leads, to a relative "
        f"{max(away, default=0):.0e}."
    )
    return Outcome([], [], [said] if away else [])


def _step_sizes(found: Iterable[Values]) -> Outcome:
    """Where something diverges for its step alone, and not for what the paper is about."""
    by_setting = {(of["rate"], of["rho"]): of["rate"] * max(of["steepness"]) for of in found}
    above = {setting: times for setting, times in sorted(by_setting.items()) if times > 2}
    steep = [f"{times:.2g} at η = {rate:g}, ρ = {rho:g}" for (rate, rho), times in above.items()]
    said = (
        "Steps on θ diverge at a client where η times the largest eigenvalue of its G_k is above 2. At the start this "
        f"is, for the steepest client: {'; '.join(steep)}."
    )
    return Outcome([], [], [said] if steep else [])
