"""The common parts of all pages: a page is one HTML file that can be opened from disk and offline.

It contains plotly.js, each figure as JSON, and the style. A content security policy in the page forbids any request, so
that neither plotly nor a name from a run can make the page load something. Templates, style and script are text in
Python files (`templates.py`, `style.py`, `script.py`) because a Flower app bundle contains no other files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tepal.host.text import visible
from tepal.records.columns import Column
from tepal.records.run_directory import add
from tepal.report.script import PAGE_SCRIPT
from tepal.report.style import STYLE
from tepal.report.table import Table
from tepal.report.templates import render

if TYPE_CHECKING:
    import plotly.graph_objects as go


_MOST_POINTS = 600  # of a curve: more than a figure is wide


def page(title: str, body: str, figures: Iterable[Figure], *, style: str = "") -> str:
    """A whole page.

    Args:
        title: The title, as text.
        body: HTML, which contains the result of `figure_html` for each figure.
        figures: The figures in the body; plotly.js is only included if one of them has a plot.
        style: The page's own CSS.
    """
    plotly = plotly_js() if any(figure.plot for figure in figures) else ""
    return render(
        "page.html", title=title, style=Markup(STYLE + style), body=Markup(body), plotly=Markup(plotly),
        script=Markup(PAGE_SCRIPT),
    )  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One figure of a page. `plot` is None if there is nothing to draw; `caption` then has the reason."""

    key: str
    title: str
    caption: str
    plot: go.Figure | None


def empty_plot(x_title: str, y_title: str, *, rounds: int | None = None) -> go.Figure:
    """Axes and legend without curves. `rounds`: the number of rounds, if the horizontal axis is that of rounds."""
    # Not at the top: plotly looks up its own version as it is imported, which sometimes fails while Flower changes
    # sys.path in another thread. When a report is written, Flower has done that.
    import plotly.graph_objects as go

    plot = go.Figure()
    plot.update_layout(
        template="none", height=340, margin={"l": 8, "r": 12, "t": 34, "b": 8}, bargap=0.25, showlegend=True,
        hovermode="closest" if rounds is None else "x unified", paper_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "traceorder": "normal"},
        plot_bgcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    for update, title, own in (
        (plot.update_xaxes, x_title, {"showgrid": False}), (plot.update_yaxes, y_title, {"nticks": 6}),
    ):  # fmt: skip
        update(title={"text": title, "standoff": 8, "font_size": 13}, automargin=True, zeroline=False, **own)
    if rounds is None:
        plot.update_xaxes(rangemode="tozero")
    elif rounds <= 12:
        plot.update_xaxes(dtick=1)  # there is no round 1.5
    return plot


def add_curve(
    plot: go.Figure, x: Sequence[Any], y: Sequence[Any], *, name: str, role: str, hover: str,
    interval: Sequence[Sequence[float]] | None = None, **trace: Any,
) -> None:  # fmt: skip
    """A curve with a mark at each point, above the band of its interval.

    Args:
        x, y: The points; None in `y` is a gap.
        role: The name of the colour in the style sheet.
        interval: The lower and upper ends around each y.
        trace: Further properties of plotly's trace.
    """
    meta = {"role": role}
    if interval is not None:
        low, high = interval
        add_band(plot, x, low, high, meta=meta, legendgroup=trace.get("legendgroup"))
    [label] = labels([name])
    plot.add_scatter(
        **{"x": x, "y": y, "name": label, "mode": "lines+markers", "hovertemplate": hover, "meta": meta, **trace}
    )


def add_band(plot: go.Figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], **trace: Any) -> None:
    """A band around a curve. `trace`: properties of plotly's trace; its `meta` has the role that colours it."""
    plot.add_scatter(
        x=[*x, *reversed(x)], y=[*high, *reversed(low)], mode="lines", fill="toself", opacity=0.18, line={"width": 0},
        hoverinfo="skip", showlegend=False, **{**trace, "meta": {**trace["meta"], "band": True}},
    )  # fmt: skip


def labels(names: Sequence[str]) -> list[str]:
    """Names as plotly shows them: as text (it reads `<a href=…>` and other markup), bounded, each different."""
    shown: dict[str, None] = {}
    for name in names:
        text = first = escape(visible(name, _LONGEST_LABEL), quote=False)
        number = len(shown)
        while text in shown:
            number += 1
            text = f"{first} ({number})"
        shown[text] = None
    return list(shown)


_LONGEST_LABEL = 60  # characters


def unit_of(largest: float) -> tuple[float, str]:
    """Divisor and name of the unit of bytes for numbers up to `largest`: kB, MB or GB."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def scaled(value: float | None, divisor: float) -> float | None:
    """`value` divided; None stays None."""
    return None if value is None else value / divisor


def cumulative(values: Iterable[float | None]) -> list[float | None]:
    """The running sum; None from the first None on."""
    so_far: float | None = 0
    return [so_far := add(so_far, value) for value in values]


def figure_html(figure: Figure) -> Markup:
    """A figure with its title and caption, for the body of a `page`."""
    return render("figure.html", figure=figure, label=spoken(figure))


def plotly_js() -> str:
    """plotly.js, from the plotly package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def spoken(figure: Figure) -> str:
    """The first and last value of every curve, for readers who do not see the figure."""
    said = [f"{figure.title}."]
    for trace in figure.plot.data if figure.plot else ():
        if trace.meta.get("band") or trace.meta.get("edges"):
            continue
        if "spoken" in trace.meta:
            said.append(trace.meta["spoken"])
            continue
        values = [value for value in trace.y if value is not None]
        if values:
            said.append(f"{trace.name}: from {values[0]:.4g} to {values[-1]:.4g}.")
    return " ".join([*said, "Every number is in the table of rounds below."])


def thin(plot: go.Figure) -> go.Figure:
    """Reduce each curve or row of bars to the points that a screen can show, with the extremes of each section."""
    long = [
        trace
        for trace in plot.data
        if trace.type in ("scatter", "bar") and trace.x is not None and len(trace.x) > _MOST_POINTS
    ]
    bars: dict[int, set[int]] = {}  # of a round that is kept all are: they lie on each other
    for trace in long:
        if trace.type == "bar":
            bars.setdefault(len(trace.x), set()).update(_extremes(trace.y, _MOST_POINTS))
    for trace in long:
        if trace.meta.get("band") or trace.meta.get("edges"):
            continue
        chosen = sorted(bars[len(trace.x)]) if trace.type == "bar" else _extremes(trace.y, _MOST_POINTS)
        for key in ("x", "y", "customdata"):
            if (values := trace[key]) is not None:
                trace[key] = [values[k] for k in chosen]
    return plot


def _extremes(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of the first and last value, and of the least and largest of each of `most`/2 equal sections."""
    edges = [round(k * len(values) / (most // 2)) for k in range(most // 2 + 1)]
    chosen = {0, len(values) - 1}
    for start, end in pairwise(edges):
        known = [k for k in range(start, end) if values[k] is not None]
        if known:
            chosen |= {min(known, key=lambda k: values[k]), max(known, key=lambda k: values[k])}  # type: ignore
    return sorted(chosen)


def config_html(config: Mapping[str, Any]) -> Markup:
    """The table of a run config, folded."""
    if not config:
        return Markup("<p>No config.toml was found in this folder.</p>")
    columns = (Column("key", left=True), Column("value", text=toml_text, left=True))
    table = Table("Run config", columns, list(config.items()))
    return render("folded.html", summary="Run config, all keys", note="", table=table.html())


def toml_text(value: Any) -> str:
    """A value of a run config as text, as TOML writes it but without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)
