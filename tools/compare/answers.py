"""Answers to the questions of a comparison's sections, and the differences between variants that they rest on.

With several seeds, differences to the baseline are paired by seed: the runs of a seed have the same partition, cohorts
and initial model. Their interval is Student's for the mean of the pairs' differences, at 95 %. What needs times as many
bytes is a difference of logarithms; its mean and interval are shown as factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tepal.records.columns import bytes_text, score_text
from tepal.tools.compare.comparison import Group, Result, Statistic, over_seeds
from tepal.tools.compare.doubt import DOUBT_COLUMNS, FLAGGED
from tepal.tools.compare.sections import BYTES, DOUBT, OWN_TESTS

CONFIDENCE = 0.95

# --- paired differences ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """A variant's figure compared with the baseline's, paired by seed.

    Args:
        mean: The mean difference or, of a ratio, the mean factor (geometric).
        interval: Its 95 % interval by Student's t; None with fewer than two pairs.
        pairs: The seeds of which both have the figure.
        seeds: All seeds of the comparison.
        ratio: Whether it is a factor, for which 1 is no difference.
        finished: Whether both figures are of runs that finished.
    """

    mean: float
    interval: tuple[float, float] | None
    pairs: int
    seeds: int
    ratio: bool = False
    finished: bool = True

    @property
    def undecided(self) -> bool:
        """Whether several seeds do not show which of the two is better. Never of one seed, which shows no spread.

        If a seed lacks the figure, the comparison is undecided: the missing seeds may differ systematically. So it is
        if no run of a variant finished: its figures are then of an earlier round than those of the other.
        """
        if self.seeds == 1:
            return False
        if self.interval is None or self.pairs < self.seeds or not self.finished:
            return True
        low, high = self.interval
        return low <= (1 if self.ratio else 0) <= high

    @property
    def verdict(self) -> str:
        """The word "undecided", "higher" or "lower" than the baseline; "" with one seed."""
        if self.seeds == 1:
            return ""
        return "undecided" if self.undecided else "higher" if self.mean > (1 if self.ratio else 0) else "lower"

    def write(self, number: float) -> str:
        """The mean, or an end of the interval, as text."""
        return factor_text(number) if self.ratio else f"{number:+.4f}"

    @property
    def text(self) -> str:
        """The mean with its interval, and whether it is undecided: +0.0200 (+0.0100 to +0.0300)."""
        if self.seeds == 1:
            return self.write(self.mean)
        return f"{self.write(self.mean)} ({self.certainty})"

    @property
    def certainty(self) -> str:
        """The interval as text, and whether it is undecided; "" with one seed."""
        if self.seeds == 1:
            return ""
        some = f"{self.pairs} of {self.seeds} seeds" if self.pairs < self.seeds else ""
        lasting = "" if self.finished else "not finished"
        return ", ".join(filter(None, (self.range, some, lasting, "undecided" if self.undecided else "")))

    @property
    def range(self) -> str:
        """The interval as text; "" if there is none."""
        return f"{self.write(self.interval[0])} to {self.write(self.interval[1])}" if self.interval else ""


def paired(
    variant: Mapping[int, float], baseline: Mapping[int, float], seeds: int, *, ratio: bool = False
) -> Paired | None:
    """Compare two variants by a figure of each seed: variant less baseline, or with `ratio` baseline / variant.

    Returns None without a seed of which both have the figure, or if it cannot be calculated (a ratio to 0).
    """
    common = sorted(variant.keys() & baseline.keys())
    try:
        if ratio:
            differences = [math.log(baseline[seed] / variant[seed]) for seed in common]
        else:
            differences = [variant[seed] - baseline[seed] for seed in common]
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    over = over_seeds(differences)
    if over is None:
        return None
    interval = _interval(over)
    if ratio:
        ends = interval and (_exp(interval[0]), _exp(interval[1]))
        return Paired(_exp(over.mean), ends, over.runs, seeds, ratio=True)
    return Paired(over.mean, interval, over.runs, seeds)


def _interval(of: Statistic) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean."""
    if of.deviation is None:
        return None
    from scipy.special import stdtrit  # scipy.stats takes half a second to import

    half = float(stdtrit(of.runs - 1, (1 + CONFIDENCE) / 2)) * of.deviation / math.sqrt(of.runs)
    return of.mean - half, of.mean + half


def _exp(logarithm: float) -> float:
    return math.exp(min(max(logarithm, -700.0), 700.0))  # no float is the factor, or its inverse, of more


def factor_text(factor: float) -> str:
    """A factor with three figures: 0.52, 10.4, 1,250."""
    return f"{factor:,.0f}" if 99.95 <= factor < 1e6 else f"{factor:.3g}"


@dataclass(frozen=True)
class Compared:
    """A figure in which a section's variants are compared with its baseline: its key in `Result.figures`, its name."""

    key: str
    name: str
    ratio: bool = False

    def of(self, variant: Result, group: Group) -> Paired | None:
        """The comparison of a variant with the baseline; None for the baseline itself."""
        if variant is group.baseline:
            return None
        own, base, seeds = variant.by_seed(self.key), group.baseline.by_seed(self.key), len(group.comparison.seeds)
        found = paired(own, base, seeds, ratio=self.ratio)
        return found and replace(found, finished=bool(variant.finished and group.baseline.finished))


def compared_in(group: Group) -> Sequence[Compared]:
    """The figures in which the question of a section compares variants."""
    by = group.by
    match group.section.question:
        case question if question == BYTES:
            return (Compared("bytes_to_target", "bytes to target", ratio=True),)
        case question if question == OWN_TESTS:
            return (Compared(f"clients_{by.key}", f"{by.name}, clients’ own tests"),)
        case question if question == DOUBT:
            score = Compared(f"server_{by.key}", f"{by.name}, server’s data")
            return (score, *(Compared(column.key, column.heading) for column in DOUBT_COLUMNS))
    return ()


# --- answers --------------------------------------------------------------------------------------------------------


def answer(group: Group) -> str:
    """The answer to the question of a section, as a sentence; "" if it asks none."""
    question = group.section.question
    return _ANSWERS[question](group) if question else ""


def threshold(group: Group) -> str:
    """The target of a section, as the subject of a sentence, or why there is none."""
    target, by = group.target, group.by
    if target is None:
        of = group.baseline.label
        if relative := group.comparison.relative_target:
            # A comparison.json that was changed by hand may name what the section does not have.
            of = group.comparison.reference(group.section, relative.of) or relative.of
        return f"No finished run of {of} has an {by.name} on the server's data, so there is no target"
    own = f" on {target.data}" if target.own_tests else ""
    if target.margin is None:
        return f"An {by.name} of {target.score:.4f}{own}"
    size = f"{100 * abs(target.margin):g} points" if by.share else f"{abs(target.margin):g}"
    margin = f" {'plus' if target.margin > 0 else 'less'} {size}" if target.margin else ""
    return f"{target.of}'s final {by.name}{own}{margin} ({target.score:.4f})"


def _bytes(group: Group) -> str:
    what = threshold(group)
    if group.target is None:
        return f"{what}."
    needs = {result.name: figure for result in group.variants if (figure := result.figures.get("bytes_to_target"))}
    reached = [result for result in group.variants if result.name in needs]
    # What reached it with some seeds only may have the fewest bytes because those were the easy ones.
    whole = [result for result in reached if needs[result.name].runs == result.aimed] or reached
    rest = [result for result in group.variants if result not in whole]
    also = "".join(f"; {text}" for text in map(_not_reached, rest))
    if not reached:
        unknown = [result.label for result in group.variants if result.figures.get("rounds_to_target")]
        if unknown:
            return f"{what} is reached, but the bytes of {_listed(unknown)} until then are not known."
        return f"{what} is reached by no variant."
    best = min(whole, key=lambda result: needs[result.name].mean)
    if needs[best.name].mean == 0:
        return f"{what} is reached by the initial model, before anything is transferred."
    said = f"{what} is reached with {_needs(best)} by {best.label}"
    if best is not group.baseline:
        following = group.baseline if group.baseline in whole else None
    else:
        following = min((one for one in whole if one is not best), key=lambda one: needs[one.name].mean, default=None)
        said += ", the baseline" if following is None else " itself"
    if following is None:
        return f"{said}{also}."
    other = best if following is group.baseline else following
    times = compared_in(group)[0].of(other, group)
    return f"{said}; {following.label} needs {_needs(following)}{_times(times, other is not best)}{also}."


def _needs(result: Result) -> str:
    figure = result.figures["bytes_to_target"]
    if figure is None:
        return bytes_text(None)
    some = f" ({figure.runs} of {result.aimed} seeds)" if figure.runs < result.aimed else ""
    return bytes_text(figure.mean) + some


def _not_reached(result: Result) -> str:
    figure = result.figures.get("bytes_to_target")
    if not result.counted:
        return f"{result.label} has no results"
    if not result.aimed:
        return f"{result.label} finished with no seed that has a target"
    if figure is None:
        reached = result.figures.get("rounds_to_target")
        if reached:
            return f"the bytes of {result.label} are not known"
        return f"{result.label} has {result.lacks}" if result.lacks else f"{result.label} does not reach it"
    return f"{result.label} reaches it with {figure.runs} of {result.aimed} seeds"


def _times(times: Paired | None, turned: bool) -> str:
    """How many times as many bytes: of the baseline or, `turned`, of the variant that needs more than it."""
    if times is None:
        return ""
    turn: Callable[[float], float] = (lambda factor: 1 / factor) if turned else (lambda factor: factor)
    said = f", {factor_text(turn(times.mean))} times as many"
    if times.seeds == 1:
        return said
    some = f" of {times.pairs} of {times.seeds} seeds" if times.pairs < times.seeds else ""
    if times.interval is None:
        return f"{said} (undecided: no interval{some})"
    low, high = sorted(map(turn, times.interval))
    undecided = "undecided: " if times.undecided else ""
    return f"{said} ({undecided}95% interval{some} {factor_text(low)} to {factor_text(high)})"


def _own_tests(group: Group) -> str:
    by = group.by
    key = f"clients_{by.key}"
    scored = {result.name: figure for result in group.variants if (figure := result.figures.get(key))}
    if not scored:
        return "No result was scored on the clients' own tests."
    order = sorted(
        (result for result in group.variants if result.name in scored), key=lambda one: scored[one.name].mean
    )
    best, *others = reversed(order) if by.share else order
    # The baseline next, with which all are compared.
    others.sort(key=lambda result: result is not group.baseline)
    said = f"The {'highest' if by.share else 'lowest'} {by.name} on the clients' own tests is that of {best.label}"
    texts = [f"{said}: {score_text(scored[best.name].mean)}{_difference(best, group)}"]
    for place, result in enumerate(others):
        has = " has" if place == 0 else ""
        texts.append(f"{result.label}{has} {score_text(scored[result.name].mean)}{_difference(result, group)}")
    missing = [f"{result.label} was not scored" for result in group.variants if result.name not in scored]
    return f"{'; '.join(filter(None, (texts[0], ', '.join(texts[1:]), ', '.join(missing))))}."


def _difference(result: Result, group: Group) -> str:
    """What follows a variant's score: that it is the baseline's, or the difference to it with its interval."""
    if result is group.baseline:
        return " (the baseline)"
    found = compared_in(group)[0].of(result, group)
    return f" ({found.write(found.mean)}{_behind(found)})" if found else ""


def _behind(found: Paired) -> str:
    return f", {'95% interval ' if found.range else ''}{found.certainty}" if found.certainty else ""


def _doubt(group: Group) -> str:
    baseline = group.baseline
    texts = []
    for result in group.others:
        parts = [text for compared in compared_in(group) if (text := _beside(compared, result, group))]
        if parts and any(result.figures.get(column.key) for column in DOUBT_COLUMNS):
            texts.append(f"{result.label} has {_listed(parts)}")
    if not texts:
        return "Loss, calibration error and flagged images were not measured, so there is no answer."
    return f"Compared with {baseline.label} (in brackets), {'; '.join(texts)}."


def _beside(compared: Compared, result: Result, group: Group) -> str:
    """A figure of a variant, and the baseline's in brackets."""
    own, base = (each.figures.get(compared.key) for each in (result, group.baseline))
    if own is None or base is None:
        return ""
    found = compared.of(result, group)
    flagged = compared.key in FLAGGED
    write: Callable[[float], str] = share_text if flagged else score_text
    name = compared.name.partition(",")[0].removesuffix(" flagged")
    what = f"{write(own.mean)} of {name} flagged" if flagged else f"{name} {write(own.mean)}"
    undecided = ", undecided" if found is not None and found.undecided else ""
    return f"{what} ({write(base.mean)}{undecided})"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def share_text(share: float) -> str:
    """A share as per cent: 71.4%."""
    return f"{100 * share:.1f}%"


_ANSWERS: Mapping[str, Callable[[Group], str]] = {BYTES: _bytes, OWN_TESTS: _own_tests, DOUBT: _doubt}
