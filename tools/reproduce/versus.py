"""One method against the others: means over seeds, and differences that are paired by seed, with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tepal.report.table import Table
from tepal.tools.compare.answers import Paired, paired
from tepal.tools.reproduce.experiment import FAILS, HOLDS, UNDECIDED, Claim, Reproduction, Values, table
from tepal.tools.reproduce.runs import mean_text
from tepal.tools.reproduce.tuning import text_of

Runs = Mapping[str, Mapping[int, Values]]
"""Method → seed → what was measured."""
Scores = Mapping[str, Mapping[int, float]]
"""Method → seed → score, of which higher ones are better."""

_VERDICTS = {"higher": "ahead of", "lower": "behind", "undecided": "undecided against"}


def by_seed(found: Mapping[str, Values], name: str) -> dict[int, Values]:
    """Seed → the values of the trial `<name>-<seed>`."""
    return {int(each.rpartition("-")[2]): of for each, of in found.items() if each.rpartition("-")[0] == name}


def on_server(runs: Runs) -> Scores:
    """The accuracy on examples that no client has."""
    return {method: {seed: float(of["server"]) for seed, of in seeds.items()} for method, seeds in runs.items()}


def on_common_clients(runs: Runs) -> tuple[Scores, int]:
    """The mean accuracy over the clients that every run scored, each counted alike; and the number of these clients."""
    common = sorted(set.intersection(*(set(of["of_clients"]) for seeds in runs.values() for of in seeds.values())))

    def mean(of: Values) -> float:
        return float(np.mean([of["of_clients"][client][0] for client in common]))

    return {method: {seed: mean(of) for seed, of in seeds.items()} for method, seeds in runs.items()}, len(common)


def versus(
    ours: str, runs: Runs, scores: Scores, title: str, *, what: str, paper: Mapping[str, float] | None = None
) -> Reproduction:
    """A table of all methods, and a finding for each verdict.

    Args:
        ours: the method that the others are compared with; a difference is its score less theirs.
        runs, scores: of the same methods.
        title: of the table.
        what: the setting, for the findings.
        paper: method → the paper's score.
    """
    gains = differences(ours, scores)
    rows: list[Sequence[Any]] = []
    for method, of in scores.items():
        gain = gains.get(method)
        shown = (gain.text, verdict(gain)) if gain else (None, None)
        settings = next(iter(runs[method].values())).get("settings") or {}
        rows.append((method, mean_text([*of.values()]), *shown, (paper or {}).get(method), text_of(settings) or None))
    headings = ["method", "accuracy", f"{ours} less it", f"{ours} is", "paper", "settings found"]
    return Reproduction([_without_empty(title, headings, rows)], findings=[*_findings(ours, gains, what)])


def differences(ours: str, scores: Scores) -> dict[str, Paired]:
    """Method → the score of `ours` less its own, paired by seed; none without `ours`."""
    found = {
        method: paired(scores[ours], of, len({*of, *scores[ours]}))
        for method, of in scores.items()
        if ours in scores and method != ours
    }
    return {method: gain for method, gain in found.items() if gain is not None}


def verdict(gain: Paired) -> str:
    """What the first method is to the other: "ahead of", "behind", "undecided against"; "" with one seed."""
    return _VERDICTS.get(gain.verdict, "")


def ahead(
    text: str, gains: Mapping[str, Paired], least: float = 0.0, wanted: Iterable[str] = ()
) -> Claim | None:
    """The claim that a method is ahead of others by more than `least`; None without a difference that has an interval.

    It holds if every interval lies above `least`, and does not hold if one lies below it. As long as another method or
    a seed is missing it cannot hold.

    Args:
        text: the claim.
        gains: other method → how much higher the score of the claim's method is.
        least: what the difference has to exceed.
        wanted: the other methods that the claim is about, if some of them may not be in `gains`.
    """
    ends, measured, whole = _known(gains, wanted)
    fails, holds = any(high < least for _, high in ends), whole and all(low > least for low, _ in ends)
    return Claim(text, measured, FAILS if fails else HOLDS if holds else UNDECIDED) if ends else None


def as_good(text: str, gains: Mapping[str, Paired], within: float) -> Claim | None:
    """The claim that a method scores as others do, up to `within`; arguments as of `ahead`.

    It holds if every interval lies within ±`within`, and does not hold if one lies outside.
    """
    ends, measured, whole = _known(gains)
    outside = any(low > within or high < -within for low, high in ends)
    inside = whole and all(low >= -within and high <= within for low, high in ends)
    return Claim(text, measured, FAILS if outside else HOLDS if inside else UNDECIDED) if ends else None


def as_most(text: str, gains: Mapping[str, Paired], within: float, wanted: Iterable[str]) -> Claim | None:
    """The claim that a method scores as most of the others do, up to `within`; arguments as of `ahead`.

    It holds if more than half of the intervals lie within ±`within`, and does not hold if at least half lie outside.
    """
    others = {*gains, *wanted}
    ends, measured, whole = _known(gains, others)
    inside = sum(low >= -within and high <= within for low, high in ends)
    outside = sum(low > within or high < -within for low, high in ends)
    holds, fails = inside > len(others) / 2, outside >= len(others) / 2
    return Claim(text, measured, FAILS if fails else HOLDS if holds and whole else UNDECIDED) if ends else None


def claimed(*claims: Claim | None) -> list[Claim]:
    """The claims that there is a verdict on."""
    return [claim for claim in claims if claim]


def _known(gains: Mapping[str, Paired], wanted: Iterable[str] = ()) -> tuple[list[tuple[float, float]], str, bool]:
    """The intervals of the differences that have one, these differences as text, and whether none is missing."""
    known = {method: gain for method, gain in gains.items() if gain.interval is not None}
    missing = [method for method in dict.fromkeys([*gains, *wanted]) if method not in known]
    named = len(known) > 1 or bool(missing)
    texts = [f"{method}: {gain.text}" if named else gain.text for method, gain in known.items()]
    texts += [f"{method}: not computed yet" for method in missing]
    whole = not missing and all(gain.pairs == gain.seeds for gain in known.values())
    return [gain.interval for gain in known.values() if gain.interval is not None], "; ".join(texts), whole


def _findings(ours: str, gains: Mapping[str, Paired], what: str) -> Iterable[str]:
    for each in _VERDICTS.values():
        if named := [method for method, gain in gains.items() if verdict(gain) == each]:
            yield f"{what}: {ours} is {each} {', '.join(named)}."


def _without_empty(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table without the columns that are empty in all rows."""
    used = [place for place in range(len(headings)) if any(row[place] is not None for row in rows)]
    return table(title, [headings[place] for place in used], [[row[place] for place in used] for row in rows])
