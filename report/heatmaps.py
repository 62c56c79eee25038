"""Heat maps, of bounded size whatever a run recorded, and figures that a reader steps through round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tepal.report.clients import MOST_CLIENTS, natural
from tepal.report.page import empty_plot, labels

Arrays = Mapping[str, np.ndarray]
ArraysOfRounds = Sequence[tuple[int, Arrays]]

GAPS = 40
"""Rows or columns up to which cells have a gap between them."""
_MOST_CELLS = 300  # rows, and columns, of a heat map
_MOST_FRAMES, _MOST_NUMBERS = 24, 150_000  # of a matrix that is shown round by round


def heatmap(
    values: Any, x: Sequence[Any], y: Sequence[str], x_title: str, y_title: str, hover: str, spoken: str, *,
    limits: tuple[float, float] | None = None,
) -> Any:  # fmt: skip
    """A heat map, of at most _MOST_CELLS rows and columns.

    `limits`: the values of the lightest and the darkest colour, by default the least and the largest.
    """
    plot = empty_plot(_of_many(x_title, len(x)), _of_many(y_title, len(y)))
    named = bool(len(x)) and isinstance(x[0], str)
    x, y = labels(x[:_MOST_CELLS]) if named else x[:_MOST_CELLS], labels(y[:_MOST_CELLS])
    plot.add_heatmap(
        z=_written(values), x=list(x), y=y, showscale=False,
        xgap=int(len(x) <= GAPS), ygap=int(len(y) <= GAPS), meta={"role": "second", "spoken": spoken},
        hovertemplate=f"{hover}<extra></extra>",
    )  # fmt: skip
    if limits is not None:
        plot.update_traces(zmin=limits[0], zmax=limits[1])
    plot.update_yaxes(type="category", autorange="reversed", nticks=0)
    plot.update_xaxes(rangemode="normal", type="category" if named else "-")
    if not named and 0 < len(x) <= 12:
        plot.update_xaxes(tickvals=list(x))  # there is no round 1.5
    return plot


def _of_many(title: str, count: int) -> str:
    """The title of an axis; of more rows or columns than are drawn, with their number."""
    return title if count <= _MOST_CELLS else f"{title} (the first {_MOST_CELLS} of {count:,})".strip()


def z(values: Any) -> Any:
    import plotly.graph_objects as go

    return go.Heatmap(z=_written(values))


def _written(values: Any) -> list[list[float | None]]:
    drawn = (row[:_MOST_CELLS] for row in values[:_MOST_CELLS])
    return [[None if value is None else float(f"{value:.4g}") for value in row] for row in drawn]


def some(records: ArraysOfRounds, numbers: int) -> ArraysOfRounds:
    """The rounds to step through: evenly spaced with the last, and fewer, the more `numbers` each has."""
    most = max(min(_MOST_FRAMES, _MOST_NUMBERS // max(numbers, 1)), 1)
    if len(records) <= most:
        return records
    return [records[int(k)] for k in np.linspace(len(records) - 1, 0, most)][::-1]


def round_by_round(plot: Any, frames: Sequence[tuple[int, Sequence[Any]]]) -> None:
    """Let a reader choose the round. `frames`: (round, data of the figure's traces); the last is the figure itself."""
    import plotly.graph_objects as go

    if len(frames) > 1:
        plot.frames = [go.Frame(data=list(data), name=str(number)) for number, data in frames]


def shown(clients: Any) -> tuple[list[str], str]:
    """The clients that a figure shows, in their order, and a sentence on those that it omits."""
    names = sorted(clients, key=natural)
    shown = names[:MOST_CLIENTS]
    return shown, f" The first {len(shown)} of {len(names)} clients." if len(shown) < len(names) else ""


def placed(values: np.ndarray, of: list[str], by: list[str], rows: list[str], columns: list[str]) -> Any:
    """The values (of, by) in these rows and columns, by the clients' names; None for a client without a value."""
    row, column = ({name: k for k, name in enumerate(names)} for names in (of, by))
    places = [column.get(name) for name in columns]
    return [[None if k is None or name not in row else float(values[row[name], k]) for k in places] for name in rows]
