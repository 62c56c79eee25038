"""What FedFrozen's simulation shows: the tables, figures and findings of arXiv 2605.06446, Figures 1 to 3.

Two losses are compared as a factor, the geometric mean over the seeds with its 95 % interval; the seeds are pairs, as
all methods have the same data and initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from tepal.report.page import Figure, add_band, empty_plot
from tepal.tools.compare.answers import Paired, paired
from tepal.tools.reproduce.experiment import FAILS, HOLDS, UNDECIDED, Claim, Reproduction, Values, table

WARMUPS, CHOSEN = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0), 0.75
"""Values of T_warm/T, and the one that is used when something else varies."""
SHIFTED, PROFILE_RATE = 2.0, 1e-3
"""ρ when something else varies, and η of Figure 1."""
ROLES = {"FedFrozen": "main", "FedAvg": "fedavg", "FedProx": "second", "SCAFFOLD": "third"}
DIVERGED = 1e9
"""A loss above that of all initial weights."""


Spread = tuple[float, float, float]
Losses = Sequence[float | None]
"""A value of each seed; None if it is not finite."""


def spread(values: Iterable[float | None]) -> Spread:
    """Median, lower and upper quartile over seeds; infinite if that many of them diverged."""
    far = 1e300  # stands for infinity, of which percentiles are NaN
    known = [value if value is not None and value < DIVERGED else far for value in values]
    low, median, high = (float(each) if each < far / 1e3 else math.inf for each in np.percentile(known, (25, 50, 75)))
    return median, low, high


_QUARTILES = ("median", "lower quartile", "upper quartile")
_BAND = "Median over the seeds, with a band between the quartiles."
_FREEZES = f"{CHOSEN:g}"  # key of the run that freezes at the chosen time


def _loss(of: Values, share: float = 1.0) -> Spread:
    return spread(_losses(of, share))


def _frozen(kept: Sequence[Values], key: str) -> list[Values]:
    """Trials with a run that freezes at the chosen time, sorted by an option."""
    return sorted((of for of in kept if _FREEZES in of["runs"]), key=lambda of: of[key])


def against(ours: Losses, others: Losses) -> tuple[str, str]:
    """What our seeds have as a factor of what the same seeds of others have.

    Returns:
        Mean and interval, or how many of ours and theirs diverged; and the word "lower", "higher" or "undecided"
        ("" with one seed). If seeds diverged, it is decided only where all of one and none of the other did.
    """
    mine, theirs = (
        {seed: value for seed, value in enumerate(each) if value is not None and value < DIVERGED}
        for each in (ours, others)
    )
    count = len(ours)
    diverged = count - len(mine), count - len(theirs)
    if any(diverged):
        decided = {(0, count): "lower", (count, 0): "higher"}.get(diverged, "undecided")
        said = f"{diverged[0]} of {count} seeds diverged, against {diverged[1]} of {count}"
        return said, decided if count > 1 else ""
    gain = paired(theirs, mine, count, ratio=True)
    return (_Factor(**vars(gain)).text, gain.verdict) if gain else ("not defined", "undecided")


class _Factor(Paired):
    """A factor in four decimals: many are close to 1."""

    def write(self, number: float) -> str:
        return f"{number:.4f}" if number < 10 else f"{number:.4g}"


def lower(text: str, factors: Mapping[str, tuple[str, str]]) -> list[Claim]:
    """The claim that something is lower in each of some comparisons: name → what `against` returned.

    It holds if each is lower, and does not hold if one is higher. None without comparisons, or of one seed.
    """
    words = {decided for _, decided in factors.values()}
    measured = "; ".join(f"{name}: {factor}" if name else factor for name, (factor, _) in factors.items())
    verdict = FAILS if "higher" in words else HOLDS if words == {"lower"} else UNDECIDED
    return [Claim(text, measured, verdict)] if words - {""} else []


def _some(each: Iterable[list[Claim]]) -> list[Claim]:
    """The claim that one of several holds: the first that does; else all that was measured."""
    claims = [claim for of in each for claim in of]
    if holding := [claim for claim in claims if claim.verdict == HOLDS]:
        return holding[:1]
    verdict = FAILS if all(claim.verdict == FAILS for claim in claims) else UNDECIDED
    return [Claim(claims[0].text, "; ".join(claim.measured for claim in claims), verdict)] if claims else []


def _losses(of: Values, share: float = 1.0) -> Losses:
    """The final loss of each seed, frozen at a share of the rounds (1: never)."""
    losses: Losses = of["runs"][f"{share:g}"]["loss"]
    return losses


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


def by_warmup(kept: Sequence[Values]) -> Reproduction:
    """Figure 2, middle, and Figure 3a."""
    kept = sorted(kept, key=lambda of: of["rho"])
    rows = [(f"{of['rho']:g}", f"{share:g}", *_written(_loss(of, share))) for of in kept for share in WARMUPS]
    figures, findings, claims = [], [], []
    for of in kept:
        median = {share: _loss(of, share)[0] for share in WARMUPS}
        best = min(WARMUPS, key=lambda share: median[share])
        never, at_once = (against(_losses(of, CHOSEN), _losses(of, end)) for end in (1.0, 0.0))
        shown = "is" if never[1] == at_once[1] == "lower" else "is not shown to be"
        if of["rho"] >= 1:
            text = f"ρ = {of['rho']:g}: freezing after {CHOSEN:g} of the rounds has a lower loss than never freezing."
            claims += lower(text, {"": never})
        findings.append(
            f"ρ = {of['rho']:g}: the least median loss is at T_warm/T = {best:g}, {_say(median[best])} (never frozen "
            f"{_say(median[1.0])}, frozen from the start {_say(median[0.0])}). At {CHOSEN:g} the loss as a factor of "
            f"that of never freezing: {never[0]}; of freezing from the start: {at_once[0]}. Freezing in between "
            f"{shown} better than both ends."
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
    shown_table = table("Final loss by warm-up", ("ρ", "T_warm/T", *_QUARTILES), rows)
    return Reproduction([shown_table], figures, findings, claims)


def by_steps(kept: Sequence[Values]) -> Reproduction:
    """Figure 2, left."""
    kept = _frozen(kept, "steps")
    steps = [of["steps"] for of in kept]
    by_seed = [_ratios(_losses(of, CHOSEN), _losses(of)) for of in kept]
    ratios = [*map(spread, by_seed)]
    rows = [
        (str(of["steps"]), *_written([_loss(of, CHOSEN)[0], _loss(of)[0], *ratio]))
        for of, ratio in zip(kept, ratios, strict=True)
    ]
    plot = empty_plot("local steps E", "loss of FedFrozen / FedAvg")
    _curve(plot, "FedFrozen / FedAvg", steps, ratios)
    findings, claims = [], []
    if len(kept) > 1:
        each = [against(_losses(of, CHOSEN), _losses(of))[0] for of in kept]
        changes = [against(after, before) for before, after in pairwise(by_seed)]
        of_each = "; ".join(f"{factor} at E = {e}" for factor, e in zip(each, steps, strict=True))
        findings.append(f"FedFrozen's loss as a factor of FedAvg's: {of_each}.")
        text = "The more local steps E, the lower FedFrozen's loss is as a factor of FedAvg's."
        claims += lower(text, {f"E = {before} to {after}": change
                               for (before, after), change in zip(pairwise(steps), changes, strict=True)})  # fmt: skip
    headings = ("E", "FedFrozen", "FedAvg", *(f"ratio, {each}" for each in _QUARTILES))
    figure = Figure("steps", "FedFrozen and FedAvg by local steps", f"{_BAND} Below 1, FedFrozen is better.", plot)
    tables = [table("Final loss by local steps", headings, rows)]
    return Reproduction(tables, [figure] if kept else [], findings, claims)


def _ratios(above: Losses, below: Losses) -> Losses:
    pairs = zip(above, below, strict=True)
    return [a / b if a is not None and b is not None else None for a, b in pairs]


def by_rho(kept: Sequence[Values]) -> Reproduction:
    """Figure 2, right."""
    losses: dict[str, dict[float, Losses]] = {name: {} for name in ROLES}
    for of in sorted(kept, key=lambda of: of["rho"]):
        losses[of["method"]][of["rho"]] = _losses(of)
        if _FREEZES in of["runs"]:
            losses["FedFrozen"][of["rho"]] = _losses(of, CHOSEN)
    found = {name: {rho: spread(each) for rho, each in by_rho.items()} for name, by_rho in losses.items()}
    plot = empty_plot("heterogeneity ρ", "final loss")
    for name, by_rho in found.items():
        _curve(plot, name, [*by_rho], [*by_rho.values()])
    rhos = sorted({of["rho"] for of in kept})
    rows = [(f"{rho:g}", name, *_written(found[name][rho])) for rho in rhos for name in ROLES if rho in found[name]]
    findings, claims = [], []
    for rho in rhos:
        known = {name: by_rho[rho][0] for name, by_rho in found.items() if rho in by_rho}
        if len(known) == len(ROLES):
            ranking = ", ".join(f"{name} {_say(known[name])}" for name in sorted(known, key=lambda name: known[name]))
            factors = _ours_against({name: by_rho[rho] for name, by_rho in losses.items()})
            findings.append(
                f"ρ = {rho:g}, median losses in increasing order: {ranking}. FedFrozen's as a factor of {factors}."
            )
    if len(rhos) > 1 and all({rhos[0], rhos[-1]} <= by_rho.keys() for by_rho in found.values()):
        grown = {name: _ratios(by_rho[rhos[-1]], by_rho[rhos[0]]) for name, by_rho in losses.items()}
        medians = {name: spread(each)[0] for name, each in grown.items()}
        growths = ", ".join(f"{_say(factor)} ({name})" for name, factor in medians.items())
        findings.append(f"From ρ = {rhos[0]:g} to {rhos[-1]:g} the loss grows by the median factor {growths}.")
        text = f"From ρ = {rhos[0]:g} to {rhos[-1]:g} FedFrozen's loss grows by a lower factor than the others'."
        claims += lower(text, {f"less than {name}'s": against(grown["FedFrozen"], of) for name, of in grown.items()
                               if name != "FedFrozen"})  # fmt: skip
    figure = Figure("rho", "Loss by heterogeneity", f"{_BAND} FedFrozen with T_warm/T = {_FREEZES}.", plot)
    tables = [table("Final loss by heterogeneity", ("ρ", "method", *_QUARTILES), rows)]
    return Reproduction(tables, [figure] if kept else [], findings, claims)


def _ours_against(values: Mapping[str, Losses]) -> str:
    """FedFrozen's values as factors of each other method's: FedAvg's: 0.9 (0.8 to 0.95); FedProx's: …"""
    others = [name for name in values if name != "FedFrozen"]
    return "; ".join(f"{name}'s: {against(values['FedFrozen'], values[name])[0]}" for name in others)


def by_ridge(kept: Sequence[Values]) -> Reproduction:
    """Figure 3b."""
    kept = _frozen(kept, "ridge")
    names = [f"{of['ridge']:g}" for of in kept]
    spreads = {key: [spread(of["runs"][_FREEZES][key]) for of in kept] for key in ("loss", "drift")}
    rows = [(name, *_written(chain(*both))) for name, *both in zip(names, *spreads.values(), strict=True)]
    headings = ("λ", *(f"{key}, {each}" for key in spreads for each in _QUARTILES))
    figures, findings, claims = [], [], []
    for key, title in (("loss", "Loss by ridge"), ("drift", "Client drift by ridge")):
        medians = [of[0] for of in spreads[key]]
        plot = empty_plot("λ", key)
        plot.add_scatter(x=names, y=_written(medians), name="FedFrozen", mode="lines+markers", meta={"role": "main"})
        plot.update_xaxes(type="category", rangemode="normal")
        plot.update_yaxes(type="log", dtick="D2")
        figures.append(Figure(f"ridge-{key}", title, f"Medians over the seeds, at ρ = {SHIFTED:g}.", plot))
        if len(kept) > 1:
            least = int(np.argmin(medians))
            by_seed = [of["runs"][_FREEZES][key] for of in kept]
            factors = [f"{against(each, by_seed[0])[0]} at {at}" for each, at in zip(by_seed, names, strict=True)][1:]
            findings.append(
                f"The {key} is least at λ = {names[least]}: {_say(medians[least])}; at λ = {names[-1]} it is "
                f"{_say(medians[-1])} (medians). As a factor of that at λ = {names[0]}: {'; '.join(factors)}."
            )
            text = f"The {key} is lower at a moderate λ than at the least and the largest."
            claims += _some(
                lower(text, {f"λ = {at} against {names[end]}": against(of, by_seed[end]) for end in (0, -1)})
                for at, of in list(zip(names, by_seed, strict=True))[1:-1]
            )
    shown_table = table("Loss and drift by ridge", headings, rows)
    return Reproduction([shown_table], figures if kept else [], findings, claims)


def profiles(found: Sequence[Values]) -> Reproduction:
    """Figure 1."""
    rows, figures, findings, claims = [], [], [], []
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
                diverged = sum(loss is None or not loss < DIVERGED for loss in of["runs"]["1"]["loss"])
                own = diverged if method == of["method"] else None
                rows.append((f"{rho:g}", method, first, lowest, least, None if own else last, own))
                if method == "FedAvg":
                    ups = sum(after > before for before, after in pairwise(medians))
                    earlier = {least: f"in round {least}"} | {0: "at the start"}
                    factors = "; ".join(
                        f"that {when}: {against(profile[-1], profile[number])[0]}"
                        for number, when in earlier.items() if number < rounds
                    )  # fmt: skip
                    findings.append(
                        f"ρ = {rho:g}: the median h_λ of FedAvg changes from {_say(medians[0])} to {_say(medians[-1])},"
                        f" rises in {ups} of {rounds} rounds and is least in round {least}. At the end it is, as a "
                        f"factor of {factors}."
                    )
                    claims += _profile_claims(rho, profile)
        caption = f"{_BAND} η = {PROFILE_RATE:g}. FedFrozen is FedAvg until T_warm = {round(CHOSEN * rounds)}."
        figures.append(Figure(f"profile-{rho:g}", f"Profile h_λ at ρ = {rho:g}", caption, plot))
    headings = ("ρ", "method", "h_λ at the start", "least", "in round", "at the end", "seeds that diverged")
    return Reproduction([table("Profile of the kernel", headings, rows)], figures, findings, claims)


def _profile_claims(rho: float, profile: Sequence[Losses]) -> list[Claim]:
    """The paper's claims on FedAvg's h_λ: it falls, or falls and then rises; `profile`: (rounds + 1, seeds)."""
    quarters = [round(share * (len(profile) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)]
    falls = lower(f"ρ = {rho:g}: h_λ of FedAvg falls in each quarter of the rounds.",
                  {f"round {end} to {start}": against(profile[end], profile[start])
                   for start, end in pairwise(quarters)})  # fmt: skip
    if not rho or not falls:
        return falls
    least = [profile[_least_of_others(profile, seed)][seed] for seed in range(len(profile[0]))]
    ends = {"start": profile[0], "end": profile[-1]}
    turns = {f"the least as a factor of the {name}": against(least, of) for name, of in ends.items()}
    text = f"ρ = {rho:g}: h_λ of FedAvg falls, and then rises."
    (claim,) = lower(text, turns) or [Claim(text, "", UNDECIDED)]
    rises = all(against(profile[start], profile[end])[1] == "lower" for start, end in pairwise(quarters))
    monotone = rises or falls[0].verdict == HOLDS
    return [replace(claim, verdict=FAILS) if monotone and claim.verdict == UNDECIDED else claim]


def _least_of_others(profile: Sequence[Losses], seed: int) -> int:
    """The round in which the median of h_λ over the other seeds is least, which this seed has not helped to choose."""
    medians = [spread(value for other, value in enumerate(of) if other != seed)[0] for of in profile]
    return int(np.argmin(medians))


def closed_form_finding(kept: Sequence[Values]) -> list[str]:
    """How far the trained θ of frozen phases is from the closed form."""
    runs = [run for of in kept for run in of["runs"].values() if "from closed form" in run]
    away = [
        away for run in runs for loss, away in zip(run["loss"], run["from closed form"], strict=True)
        if loss is not None and loss < DIVERGED
    ]  # fmt: skip
    finding = (
        f"In {len(away)} frozen phases of one seed each, the final θ agrees with the closed form θ⁺ = Pθ + b to a "
        f"relative difference of {max(away, default=0):.0e}."
    )
    return [finding] if away else []


def step_size_finding(found: Iterable[Values]) -> list[str]:
    """Settings in which training diverges because of its step size alone."""
    by_setting = {(of["rate"], of["rho"]): of["rate"] * max(of["steepness"]) for of in found}
    above = {setting: times for setting, times in sorted(by_setting.items()) if times > 2}
    steep = [f"{times:.2g} at η = {rate:g}, ρ = {rho:g}" for (rate, rho), times in above.items()]
    finding = (
        "Steps on θ diverge at a client where η times the largest eigenvalue of its G_k is above 2. At the start this "
        f"is, for the steepest client: {'; '.join(steep)}."
    )
    return [finding] if steep else []
