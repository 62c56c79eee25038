"""What the pages of this project share: one HTML file with everything in it, that opens from disk and offline.

plotly.js is in it once, each figure as JSON, the style. A content security policy inside the page forbids any request,
so that neither plotly nor a name from a run can make the page load something. Template, style and script are text in
Python files (`style.py`, `script.py`) because a Flower app bundle carries no other kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from string import Template
from typing import TYPE_CHECKING, Any

from tepal.records.run_directory import add
from tepal.report.script import PAGE_SCRIPT
from tepal.report.style import STYLE

if TYPE_CHECKING:
    import plotly.graph_objects as go


_MOST_POINTS = 600  # of a curve: more than a figure is wide


def page(title: str, body: str, figures: Iterable[Figure], *, style: str = "") -> str:
    """A whole page.

    Args:
        title: text.
        body: HTML, with each of the figures where `figure_html` puts it.
        figures: those in the body; without any that is drawn, plotly.js stays away.
        style: CSS beside the common one.
    """
    return Template(_PAGE).substitute(
        title=escape(title),
        style=STYLE + style,
        body=body,
        plotly=plotly_js() if any(figure.plot for figure in figures) else "",
        script=PAGE_SCRIPT,
    )


@dataclass(frozen=True)
class Figure:
    """One figure of the page. `plot` is None where there is nothing to draw; `caption` then says why."""

    key: str
    title: str
    caption: str
    plot: go.Figure | None


def empty_plot(x_title: str, y_title: str, *, rounds: int | None = None) -> go.Figure:
    """Axes and legend without curves. `rounds`: how many there are, where the horizontal axis is that of rounds."""
    # Not at the top: plotly looks up its own version as it is imported, which fails now and then while Flower changes
    # sys.path in another thread. When a report is written, that is long over.
    import plotly.graph_objects as go

    plot = go.Figure()
    plot.update_layout(
        template="none",
        height=340,
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        hovermode="closest" if rounds is None else "x unified",
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "traceorder": "normal"},
        showlegend=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        bargap=0.25,
    )
    plot.update_xaxes(
        title={"text": x_title, "standoff": 8, "font_size": 13}, automargin=True, zeroline=False, showgrid=False
    )
    plot.update_yaxes(
        title={"text": y_title, "standoff": 8, "font_size": 13}, automargin=True, zeroline=False, nticks=6
    )
    if rounds is None:
        plot.update_xaxes(rangemode="tozero")
    elif rounds <= 12:
        plot.update_xaxes(dtick=1)  # no such thing as round 1.5
    return plot


def add_band(plot: go.Figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], **trace: Any) -> None:
    """A band around a curve; `trace`: its `meta`, with the role that colours it, and what else plotly shall know."""
    plot.add_scatter(
        x=[*x, *reversed(x)],
        y=[*high, *reversed(low)],
        mode="lines",
        fill="toself",
        opacity=0.18,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        **{**trace, "meta": {**trace["meta"], "band": True}},
    )


def unit_of(largest: float) -> tuple[float, str]:
    """Divisor and name of the unit of bytes: MB, unless the numbers would be awkward in it."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def scaled(value: float | None, divisor: float) -> float | None:
    """`value` in a unit; what is unknown stays so."""
    return None if value is None else value / divisor


def cumulative(values: Iterable[float | None]) -> list[float | None]:
    """Running sum; from the first unknown on it is unknown."""
    so_far: float | None = 0
    return [so_far := add(so_far, value) for value in values]


def figure_html(figure: Figure) -> str:
    """A figure with its title and caption, as `page` draws it."""
    title, caption = escape(figure.title), escape(figure.caption)
    if figure.plot is None:
        body = '<p class="empty">nothing to draw</p>'
    else:
        label = escape(spoken(figure))
        # to_json writes < and > as escapes, so no name can end the script element.
        body = (
            f'<div class="plot" id="{figure.key}" role="group" aria-label="{label}"></div>'
            f'<script type="application/json" data-for="{figure.key}">{figure.plot.to_json()}</script>'
        )
    return f"<figure><h3>{title}</h3>{body}<figcaption>{caption}</figcaption></figure>"


def plotly_js() -> str:
    """The library that draws, as plotly brings it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def spoken(figure: Figure) -> str:
    """First and last value of every curve, for those who do not see it."""
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
    """Leave of each curve or row of bars no more points than a screen can show, the extremes of each stretch among
    them; a heat map is not touched.
    """
    for trace in plot.data:
        count = len(trace.x) if trace.type in ("scatter", "bar") and trace.x is not None else 0
        if count <= _MOST_POINTS or trace.meta.get("band") or trace.meta.get("edges"):
            continue
        chosen = _extremes(trace.y, _MOST_POINTS)
        for key in ("x", "y", "customdata"):
            if (values := trace[key]) is not None:
                trace[key] = [values[k] for k in chosen]
    return plot


def _extremes(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of the first and last value, and of the least and largest of each of `most`/2 equal stretches."""
    edges = [round(k * len(values) / (most // 2)) for k in range(most // 2 + 1)]
    chosen = {0, len(values) - 1}
    for start, end in pairwise(edges):
        known = [k for k in range(start, end) if values[k] is not None]
        if known:
            chosen |= {min(known, key=lambda k: values[k]), max(known, key=lambda k: values[k])}  # type: ignore
    return sorted(chosen)


def config_html(config: Mapping[str, Any]) -> str:
    """A run config, folded."""
    if not config:
        return "<p>No config.toml was found beside this report.</p>"
    written = {True: "true", False: "false"}
    rows = [(key, written[value] if isinstance(value, bool) else value) for key, value in config.items()]
    table = table_html("The run config", ("key", "value"), rows, words={0, 1})
    return f"<details><summary>The whole run config</summary>{table}</details>"


def table_html(label: str, headings: Iterable[str], rows: Iterable[Sequence[Any]], *, words: set[int]) -> str:
    """A table that scrolls inside its frame, by keyboard too. `words`: the columns set flush left, the others are
    numbers.
    """

    def kind(column: int) -> str:
        return "" if column in words else ' class="number"'

    head = "".join(f'<th scope="col"{kind(i)}>{escape(text)}</th>' for i, text in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(f"<td{kind(i)}>{escape(str(cell))}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
<script>$plotly</script>
<script>$script</script>
</body>
</html>
"""
