"""Figures of varied keys: the score over the values of one number, or a heat map of two keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tepal.records.columns import is_number, score_text
from tepal.report.heatmaps import heatmap
from tepal.report.page import Figure, add_curve, empty_plot
from tepal.tools.compare.comparison import Group, Result
from tepal.tools.compare.grid.best import score_key
from tepal.tools.compare.picture import Look
from tepal.tools.compare.sections import value_text

_LOG = 10
"""The axis of a key is logarithmic if its largest value is at least so many times its least."""
_MOST_TICKS = 12

_TEST = " These are scores of test data: to choose a value by them is to choose on the test set."


def grid_figures(group: Group, look: Mapping[str, Look]) -> list[Figure]:
    """The figures of a section's varied keys: one for one numeric key, one for each base of two keys, else none.

    `look`: the looks of the bases.
    """
    keys = group.varied
    if len(keys) == 1 and all(is_number(value) for value in group.comparison.grid[keys[0]]):
        return [_over_values(group, keys[0], look)]
    if len(keys) == 2:
        return _heat_maps(group, *keys)
    return []


def _by_base(group: Group) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in group.variants:
        found.setdefault(result.base, []).append(result)
    return found


def _over_values(group: Group, key: str, look: Mapping[str, Look]) -> Figure:
    """A line for each base over the values of a numeric key."""
    by = group.by
    values = sorted(float(value) for value in group.comparison.grid[key])
    plot = empty_plot(key, by.name)
    plot.update_layout(hovermode="closest")
    plot.update_yaxes(rangemode="normal", **({"tickformat": ".4~%"} if by.share else {}))
    logarithmic = values[0] > 0 and values[-1] >= _LOG * values[0]
    plot.update_xaxes(rangemode="normal", type="log" if logarithmic else "linear")
    if len(values) <= _MOST_TICKS:
        plot.update_xaxes(tickvals=values, ticktext=[f"{value:g}" for value in values])
    dashed = False
    for base, results in _by_base(group).items():
        of = score_key(results)
        own = of.startswith("clients_")
        points = sorted(
            (float(result.values[key]), score) for result in results if (score := result.figures.get(of))
        )  # fmt: skip
        if not points:
            continue
        dashed |= own
        scores = [score for _, score in points]
        ends = [(one.mean - one.deviation, one.mean + one.deviation) for one in scores if one.deviation is not None]
        add_curve(
            plot, [value for value, _ in points], [score.mean for score in scores], name=base, role=f"s-{base}",
            hover=f"{key} %{{x:.4~g}}: %{{y:{by.text()}}}", legendgroup=base,
            interval=[*zip(*ends, strict=True)] if len(ends) == len(points) else None,
            line={"dash": "dash" if own else "solid"},
            marker={"symbol": look[base].symbol + ("-open" if own else "")},
        )  # fmt: skip
    name, title = f"{by.key}-values", f"{by.title} over {key}"
    if not plot.data:
        return Figure(name, title, f"No {by.name} was measured.", None)
    data = "Solid: on the server's held-out data. Dashed: on the clients' own test splits." if dashed else (
        "On the server's held-out data."
    )  # fmt: skip
    several = " Lines: mean over the seeds; bands: their standard deviation." if len(group.comparison.seeds) > 1 else ""
    return Figure(name, title, f"The final result for each value. {data}{several}{_TEST}", plot)


def _heat_maps(group: Group, down: str, across: str) -> list[Figure]:
    """A heat map for each base, all with the same limits of colour."""
    by, grid = group.by, group.comparison.grid
    figures = []
    every: list[float] = []
    cells: dict[str, list[list[float | None]]] = {}
    for base, results in _by_base(group).items():
        of = score_key(results)
        found = {
            (result.values[down], result.values[across]): score.mean
            for result in results
            if (score := result.figures.get(of))
        }
        every += [score for score in found.values() if math.isfinite(score)]
        cells[base] = [[found.get((row, column)) for column in grid[across]] for row in grid[down]]
    for number, (base, values) in enumerate(cells.items(), start=1):
        name, title = f"{by.key}-values-{number}", f"{by.title} of {base} over {down} and {across}"
        known = [score for row in values for score in row if score is not None]
        if not known:
            figures.append(Figure(name, title, f"No {by.name} was measured.", None))
            continue
        x, y = _texts(grid[across]), _texts(grid[down])
        spoken = f"{base}: from {score_text(min(known))} to {score_text(max(known))}."
        plot = heatmap(
            values, x, y, across, down, f"{down} %{{y}}, {across} %{{x}}: %{{z:.4f}}", spoken,
            limits=(min(every), max(every)),
        )  # fmt: skip
        mean = ", mean over the seeds" if len(group.comparison.seeds) > 1 else ""
        caption = f"The final {by.name} of each combination{mean}; darker is higher, on one scale for all of them."
        figures.append(Figure(name, title, caption + _TEST, plot))
    return figures


def _texts(values: Sequence[object]) -> list[str]:
    return [value_text(value) for value in values]  # type: ignore[arg-type]
