"""The best combination of varied values of each strategy or variant, and whether the seeds show that it is the best.

A combination is marked only if it is better than each other one: its difference to it, paired by seed, has a 95 %
interval (Student's t) that does not include 0. Because all of these have to hold, a combination of equally good ones is
marked in at most 5 % of comparisons, however many there are. One seed shows no spread, so nothing is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tepal.records.columns import score_text
from tepal.tools.compare.answers import Paired, paired
from tepal.tools.compare.comparison import Group, Result, Results
from tepal.tools.compare.sections import value_text
from tepal.training.data.config import DataConfig

BEST, UNDECIDED = "best", "undecided"

TEST_NOTE = (
    "The scores are of test data: to choose values by them is to choose on the test set, and the score of the chosen "
    "ones is then too high an estimate. To tune settings, use `python -m tepal.tools.search`, which has a seed of its "
    "own and does not use the server's held-out data"
)

_OF_THE_TASK = {*(name.replace("_", "-") for name in DataConfig.model_fields), "hostile-share"}
"""Keys that determine what is to be learned from: combinations that differ in them are not alternatives."""


@dataclass(frozen=True)
class Best:
    """The combination with the best score of a strategy or variant.

    Args:
        result: The combination.
        key: The compared figure, a key of `Result.figures`.
        following: The second best.
        difference: The score less that of the second best, paired by seed.
        decided: Whether the seeds show that it is better than all others.
    """

    result: Result
    key: str
    following: Result
    difference: Paired | None
    decided: bool


def score_key(results: Sequence[Result]) -> str:
    """The figure in which combinations are compared: the score on the server's data, if they have one.

    Otherwise it is that on the clients' own tests, as of personal models.
    """
    by = results[0].by
    of_server = f"server_{by.key}"
    return of_server if any(result.figures.get(of_server) for result in results) else f"clients_{by.key}"


def best_of(group: Group) -> list[Best]:
    """The best combination of each strategy or variant, and of each value of keys of the task, such as the dataset.

    A strategy or variant with less than two combinations that have a score has none.
    """
    alternatives: dict[tuple[object, ...], list[Result]] = {}
    for result in group.variants if group.varied else ():
        task = tuple(result.values[key] for key in group.varied if key in _OF_THE_TASK)
        alternatives.setdefault((result.base, *task), []).append(result)
    return [best for each in alternatives.values() if (best := _best(each, len(group.comparison.seeds)))]


def _best(results: Sequence[Result], seeds: int) -> Best | None:
    key, by = score_key(results), results[0].by
    scored = [(result, score.mean) for result in results if (score := result.figures.get(key))]
    if len(scored) < 2:
        return None
    (first, _), (second, _), *_ = sorted(scored, key=lambda one: -one[1] if by.share else one[1])
    better = "higher" if by.share else "lower"
    differences = {
        other.name: paired(first.by_seed(key), other.by_seed(key), seeds) for other in results if other is not first
    }
    # Without a difference of every seed it may be that the missing one is better.
    decided = all(result.finished for result in results) and all(
        found and found.pairs == seeds and found.verdict == better for found in differences.values()
    )
    return Best(first, key, second, differences[second.name], decided)


def marks(group: Group) -> dict[str, str]:
    """Name of a combination → BEST, or UNDECIDED where the best score may be chance; none with one seed."""
    if len(group.comparison.seeds) == 1:
        return {}
    return {best.result.name: BEST if best.decided else UNDECIDED for best in best_of(group)}


def best_notes(group: Group) -> list[str]:
    """A sentence for each strategy or variant on its best combination, and how sure that is."""
    return [_note(best, group) for best in best_of(group)]


def _note(best: Best, group: Group) -> str:
    by, first, second = group.by, best.result, best.following
    data = "the server's data" if best.key.startswith("server_") else "the clients' own tests"
    said = f"{_named(first)} has the {'highest' if by.share else 'lowest'} {by.name} on {data}"
    scores = [score_text(figure.mean) for one in (first, second) if (figure := one.figures.get(best.key))]
    said += f", {scores[0]}; next {_named(second).removeprefix(first.base).strip()} with {scores[1]}"
    if len(group.comparison.seeds) == 1:
        return f"{said}; one seed: the difference may be chance"
    found = best.difference
    difference = f", difference {found.write(found.mean)} ({found.range})" if found and found.range else ""
    verdict = "best" if best.decided else "undecided: the finished runs do not show that it is better than all others"
    return f"{said}{difference}; {verdict}"


def _named(result: Result) -> str:
    return " ".join([result.base, *(f"{key}={value_text(value)}" for key, value in result.values.items())])


def grid_notes(results: Results) -> list[str]:
    """The notes on varied keys that all texts have; none if no key is varied."""
    return [TEST_NOTE] if results.comparison.grid else []
