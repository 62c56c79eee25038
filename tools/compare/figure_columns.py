"""The columns of a comparison's tables: figures over the seeds, and differences to a section's baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tepal.records.columns import Column, bytes_text, score_text, seconds_text, step_text
from tepal.records.round_record import COLUMNS
from tepal.records.run_directory import Measure
from tepal.tools.compare.answers import Paired, compared_in
from tepal.tools.compare.comparison import Group, Result, Statistic
from tepal.tools.compare.doubt import DOUBT_COLUMNS
from tepal.tools.compare.grid.best import BEST, marks
from tepal.tools.compare.measured import TO_TARGET
from tepal.tools.compare.sections import BYTES, DOUBT, OWN_TESTS, value_text

Figure = tuple[Statistic, int]
"""A figure of a strategy or variant over its seeds, and the number of its runs."""


def count_text(number: float) -> str:
    """A mean of whole numbers: 8.3, or 8."""
    return f"{number:.1f}".removesuffix(".0")


def _mean(write: Callable[[float], str], *, deviates: bool = False) -> Callable[[Figure], str]:
    """A text of a figure: its mean, if `deviates` with ± its deviation; if only some runs have it, their number."""

    def text(figure: Figure) -> str:
        statistic, counted = figure
        spread = f" ± {write(statistic.deviation)}" if deviates and statistic.deviation is not None else ""
        some = "" if statistic.runs == counted else f" ({statistic.runs} of {counted})"
        return write(statistic.mean) + spread + some

    return text


def _of_rounds(name: str, *, deviates: bool = False) -> Column:
    """A column of the rounds as a column of their mean or sum."""
    return replace(COLUMNS[name], text=_mean(COLUMNS[name].text, deviates=deviates))


_TO_TARGET = (
    Column("bytes to target", "bytes_to_target", text=_mean(bytes_text, deviates=True)),
    Column("bytes down to target", "bytes_down_to_target", text=_mean(bytes_text)),
    Column("bytes up to target", "bytes_up_to_target", text=_mean(bytes_text)),
    Column("manifests and headers to target", "overhead_to_target", text=_mean(bytes_text)),
    Column("rounds to target", "rounds_to_target", text=_mean(count_text, deviates=True)),
    Column("time to target", "seconds_to_target", text=_mean(seconds_text, deviates=True)),
)
_TOTAL = Column("bytes in total", "bytes_total", text=_mean(bytes_text))
_SPREAD = _of_rounds("clients_spread")
_COLUMNS = (
    _SPREAD,
    *_TO_TARGET,
    _of_rounds("bytes_down"),
    _of_rounds("bytes_up"),
    _TOTAL,
    Column("share of FedAvg’s bytes", "bytes_vs_fedavg", text=_mean(score_text)),
    Column("the same, not encoded", "plain_vs_fedavg", text=_mean(score_text)),
    _of_rounds("seconds", deviates=True),
    Column("time per round", "round_seconds", text=_mean(seconds_text, deviates=True)),
    Column("client’s step", "step_seconds", text=_mean(step_text)),
)


def columns_of(by: Measure) -> tuple[Column, ...]:
    """The columns of all figures of a strategy; keys are those of `Result.figures`."""
    return (*_scores(by), *_COLUMNS)


def _scores(by: Measure) -> tuple[Column, Column]:
    score = _mean(score_text, deviates=True)
    return (
        Column(f"{by.name}, server’s data", f"server_{by.key}", text=score),
        Column(f"{by.name}, clients’ own tests", f"clients_{by.key}", text=score),
    )


def group_columns(group: Group) -> tuple[Column, ...]:
    """The columns that answer a section's question; if it asks none, those of all figures."""
    server, clients = _scores(group.by)
    of_target = clients if clients.key == group.score_key else server
    match group.section.question:
        case question if question == BYTES:
            figures: tuple[Column, ...] = (of_target, *_TO_TARGET, _TOTAL)
        case question if question == OWN_TESTS:
            figures = (clients, _SPREAD)
        case question if question == DOUBT:
            figures = (server, *(replace(one, text=_mean(one.text, deviates=True)) for one in DOUBT_COLUMNS))
        case _:
            return columns_of(group.by)
    return (*figures, *_differences(group))


def grid_columns(group: Group) -> list[Column]:
    """The columns of the varied keys; with several seeds also that of the marks of the best combinations."""
    keys = [Column(key, f"vary {key}", text=value_text) for key in group.varied]
    return [*keys, Column(BEST, BEST, left=True)] if keys and len(group.comparison.seeds) > 1 else keys


def _differences(group: Group) -> list[Column]:
    """The columns of what `compared_in` compares; the factor of bytes also with one seed."""
    several, baseline = len(group.comparison.seeds) > 1, group.baseline.label
    return [
        Column(
            (f"times fewer than {baseline}" if one.ratio else f"{one.name}: difference to {baseline}")
            + (", 95% interval" if several else ""),
            difference_key(one.key),
            text=_paired_text,
        )
        for one in compared_in(group)
        if several or one.ratio
    ]


def _paired_text(found: Paired) -> str:
    return found.text


def difference_key(key: str) -> str:
    """The key of the difference in a figure to the baseline."""
    return f"{key}_vs_baseline"


def rows(group: Group) -> list[dict[str, Any]]:
    """The rows of a section's table, under the keys of all its columns."""
    best = marks(group)
    return [{**cells(result, group), BEST: best.get(result.name)} for result in group.variants]


def _of(result: Result, key: str) -> int:
    """How many runs may have a figure: those until a target are of runs that have one."""
    return result.aimed if key in TO_TARGET else len(result.counted)


def cells(result: Result, group: Group) -> dict[str, Any]:
    """A row's values under the keys of `group_columns` and of the varied keys, and its outcome."""
    return {
        "name": result.base,
        "outcome": result.outcome,
        **{f"vary {key}": value for key, value in result.values.items()},
        **{key: figure and (figure, _of(result, key)) for key, figure in result.figures.items()},
        **{difference_key(one.key): one.of(result, group) for one in compared_in(group)},
    }
