"""What the pages of this project share: one HTML file with everything in it, that opens from disk and offline.

plotly.js is in it once, each figure as JSON, the style. A content security policy inside the page forbids any request,
so that neither plotly nor a name from a run can make the page load something. Templates are text in this file because
a Flower app bundle carries no other kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from string import Template
from typing import TYPE_CHECKING, Any

from tepal.records.run_directory import add

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
        script=_SCRIPT,
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

STYLE = """
:root {
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d1b20; --soft: #5f5a66; --rule: #e4e0e6; --grid: #ece9ee;
  --main: #a3295e; --second: #1f6f8b; --third: #8a6d00; --down: #2f6ea5; --up: #d9793a; --fedavg: #6b6573;
  --freeze: #a3295e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16141a; --card: #1f1c24; --ink: #efecf2; --soft: #aba4b4; --rule: #37323e; --grid: #2e2a35;
    --main: #f07fae; --second: #6cc3df; --third: #dfc15c; --down: #6aa9de; --up: #eb9a62; --fedavg: #b3acbc;
    --freeze: #f07fae;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1440px; margin: 0 auto; padding: clamp(20px, 4vw, 56px) clamp(16px, 4vw, 56px) 64px; }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.9rem, 4vw, 2.75rem); margin: 0; letter-spacing: -0.02em; }
h2 { font-size: 1.25rem; margin: 48px 0 16px; }
h3 { font-size: 1rem; margin: 0 0 4px; }
p { margin: 0 0 12px; }
code { font: 0.92em ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.run { color: var(--soft); margin: 0 0 8px; font-size: 0.9rem; }
.subtitle { color: var(--soft); font-size: 1.2rem; margin: 6px 0 0; overflow-wrap: anywhere; }
.notice { margin: 24px 0 0; padding: 12px 16px; border-left: 4px solid var(--main); background: var(--card); }
.headlines {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(150px, 42%), 1fr)); gap: 1px; margin: 32px 0 0;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden;
}
.headlines div { background: var(--card); padding: 16px 18px; }
.headlines dt { color: var(--soft); font-size: 0.85rem; }
.headlines dd { margin: 0; color: var(--soft); font-size: 0.82rem; line-height: 1.35; }
.headlines dt + dd {
  color: var(--ink); font-size: 1.6rem; font-weight: 650; line-height: 1.35; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap;
}
.headlines dt + dd.unknown { color: var(--soft); font-weight: 400; }
.figures { display: grid; grid-template-columns: minmax(0, 1fr); gap: 20px; }
@media (min-width: 960px) { .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
figure {
  margin: 0; padding: 18px 18px 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  display: flex; flex-direction: column; min-width: 0;
}
figcaption { color: var(--soft); font-size: 0.85rem; line-height: 1.45; margin-top: 6px; max-width: 72ch; }
.plot { min-height: 340px; }
.rounds { display: flex; gap: 10px; align-items: center; color: var(--soft); font-size: 0.85rem; }
.rounds input { flex: 1; accent-color: var(--main); min-width: 0; }
.rounds output { min-width: 2.5em; color: var(--ink); font-variant-numeric: tabular-nums; }
.empty { flex: 1; min-height: 140px; display: grid; place-items: center; margin: 8px 0; color: var(--soft);
  border: 1px dashed var(--rule); border-radius: 8px; }
.scroll { overflow: auto; max-height: 70vh; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--main); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: left; vertical-align: top; overflow-wrap: break-word; }
th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 600; vertical-align: bottom;
  box-shadow: inset 0 -1px 0 var(--rule); }
td { border-top: 1px solid var(--grid); }
.number { text-align: right; }
td.number { white-space: nowrap; }
td:not(:last-child) { white-space: nowrap; }
td:last-child:not(.number) { min-width: 14rem; overflow-wrap: anywhere; }
details { margin: 0 0 12px; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
.provenance p { color: var(--soft); max-width: 78ch; }
@media (max-width: 480px) { figure { padding: 14px 10px 12px; } td:last-child:not(.number) { min-width: 10rem; }
  .headlines div { padding: 12px 14px; }
  .headlines dt + dd { font-size: 1.35rem; } }
@media print { figure { break-inside: avoid; } .scroll { max-height: none; } }
"""

# Of a figure that is saved for a paper, in pixels: as wide as two columns, so that in one its text has 7 pt. A legend
# of many has two columns, and makes the figure higher by its rows; a bar that is too thin for its number has none; a
# heat map, of which nobody can ask a cell, has a scale.
PAPER: dict[str, Any] = {
    "text": 14,
    "font": "Helvetica, Arial, 'Liberation Sans', sans-serif",
    "scale": 4,
    "layout": {
        "width": 504,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "uniformtext": {"minsize": 9, "mode": "hide"},
    },
    "heatmap": {"showscale": True, "colorbar": {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 12}}},
    "many": 3,
    "row": 20,
    "legend": {
        "xref": "container", "x": 0.01, "yref": "container", "y": 0, "yanchor": "bottom", "font": {"size": 12},
        "entrywidth": 0.48, "entrywidthmode": "fraction",
    },
}  # fmt: skip


def light_colours(style: str = "") -> dict[str, str]:
    """Role → colour on a light background, as the style sheet has it. `style`: the CSS that a page has beside it."""
    rules = re.findall(r"(@media[^{]*\{\s*)?:root \{([^}]*)\}", STYLE + style)
    return dict(pair for media, rule in rules if not media for pair in re.findall(r"--([\w-]+): ([^;]+);", rule))


# Draws one figure. Colours come from the style sheet, so that figures follow the reader's light or dark setting. What
# is saved is for paper, and has the light ones; `figure_files.py` paints alike.
DRAW_SCRIPT = """
const tepalPaint = ({data, layout}, colour, font) => {
  for (const trace of data) {
    const own = colour(trace.meta.role);
    if (trace.type === 'heatmap') { trace.colorscale = [[0, colour('card')], [1, own]]; continue; }
    if (trace.meta.band) { trace.fillcolor = own; continue; }
    if (trace.meta.edges) { trace.line = {...trace.line, color: own}; continue; }
    trace.marker = {...trace.marker, color: own, ...(trace.type === 'bar' || trace.marker?.size ? {} : {size: 6})};
    if (trace.type === 'bar') continue;
    trace.line = {...trace.line, color: own, width: 2};
    trace.cliponaxis = false;  // the first marker sits on the axis
  }
  for (const axis of [layout.xaxis, layout.yaxis])
    Object.assign(axis, {
      gridcolor: colour('grid'), linecolor: colour('rule'), tickcolor: colour('rule'), layer: 'below traces',
    });
  for (const shape of layout.shapes ?? []) shape.line.color = colour('freeze');
  for (const note of layout.annotations ?? []) note.font = {...note.font, color: colour('freeze')};
  layout.font = font;
};

// Saves a figure as `tepalDraw` was given it, in the round that the reader has chosen.
const tepalSave = (element, format) => {
  const paper = PAPER;
  const light = {};
  for (const sheet of document.styleSheets) for (const rule of sheet.cssRules) if (rule.selectorText === ':root')
    for (const name of rule.style) light[name.slice(2)] = rule.style.getPropertyValue(name).trim();
  const {data, layout, frames} = structuredClone(element.tepalFigure);
  const label = element.nextElementSibling;
  const round = label?.matches('label.rounds') ? label.rounds[+label.querySelector('input').value] : null;
  const chosen = (frames ?? []).find(frame => frame.name === round);
  chosen?.data.forEach((changed, k) => Object.assign(data[k], changed, {meta: data[k].meta}));
  tepalPaint({data, layout}, role => light[role], {family: paper.font, size: paper.text, color: light.ink});
  Object.assign(layout, paper.layout);
  const named = layout.showlegend ? data.filter(trace => trace.showlegend !== false).length : 0;
  if (named > paper.many) {
    Object.assign(layout.legend, paper.legend);
    layout.height += paper.row * Math.ceil(named / 2);
  }
  for (const trace of data) {
    if (trace.error_y) trace.error_y.color = light.ink;
    if (trace.type === 'heatmap') Object.assign(trace, paper.heatmap);
  }
  const run = document.querySelector('.run code, h1')?.textContent;
  Plotly.downloadImage({data, layout}, {
    format, width: layout.width, height: layout.height, scale: format === 'png' ? paper.scale : 1,
    // in the dashboard it is the element around it that has the name
    filename: [run, (element.id || element.parentElement.id).replace('figure-', '')].filter(Boolean).join('-'),
  });
};

const tepalButton = format => ({
  name: 'save-' + format,
  title: 'Save as ' + format.toUpperCase() + ', for a paper',
  // an arrow to a line, which is drawn for SVG and filled for PNG; plotly colours an icon's first path alone
  icon: {width: 24, height: 24, path: 'M5 20h14v2H5z M12 18L4 10h5V3h6v7h5z'
    + (format === 'svg' ? 'M11 5v7H8.5l3.5 3.5 3.5-3.5H13V5z' : '')},
  click: element => tepalSave(element, format),
});

window.tepalDraw = (element, {data, layout, frames}) => {
  element.tepalFigure = structuredClone({data, layout, frames});
  const touch = matchMedia('(pointer: coarse)').matches;
  const config = {
    displaylogo: false, plotlyServerURL: '', showSendToCloud: false, responsive: true,
    modeBarButtons: [[tepalButton('svg'), tepalButton('png'), 'resetScale2d']],
    displayModeBar: touch || innerWidth < 700 ? false : 'hover',  // on a phone it would cover the labels
  };
  const css = getComputedStyle(document.documentElement);
  const colour = name => css.getPropertyValue('--' + name).trim();
  const font = getComputedStyle(document.body).fontFamily;
  tepalPaint({data, layout}, colour, {family: font, size: 13, color: colour('soft')});
  layout.modebar = {bgcolor: 'transparent', color: colour('fedavg'), activecolor: colour('ink')};
  layout.hoverlabel = {
    bgcolor: colour('card'), bordercolor: colour('rule'), font: {family: font, color: colour('ink')},
  };
  if (touch) layout.dragmode = false;  // a finger on a figure scrolls the page
  Plotly.react(element, {data, layout, frames, config});
  if (frames?.length) tepalRounds(element, frames.map(frame => frame.name));
};

// The rounds of a figure, to step through; the last one follows the run unless the reader chose another.
window.tepalRounds = (element, rounds) => {
  let label = element.nextElementSibling, last = rounds.length - 1;
  if (!label?.matches('label.rounds')) {
    label = document.createElement('label');
    label.className = 'rounds';
    const input = document.createElement('input');
    input.type = 'range';
    input.min = 0;
    label.append('round ', document.createElement('output'), input);
    element.after(label);
    input.addEventListener('input', () => label.show());
  }
  const [output, input] = label.querySelectorAll('output, input');
  const before = label.rounds, kept = before && +input.value < before.length - 1;
  const chosen = kept ? rounds.indexOf(before[+input.value]) : last;
  input.max = last;
  input.value = chosen < 0 ? last : chosen;
  label.rounds = rounds;
  label.show = () => {
    output.textContent = rounds[+input.value];
    input.setAttribute('aria-valuetext', `round ${rounds[+input.value]}`);
    const how = {mode: 'immediate', frame: {duration: 0, redraw: true}, transition: {duration: 0}};
    Plotly.animate(element, [rounds[+input.value]], how);
  };
  output.textContent = rounds[+input.value];
  if (+input.value < last) label.show();
};
""".replace("PAPER", json.dumps(PAPER))

_SCRIPT = (
    DRAW_SCRIPT
    + """
(() => {
  if (!window.Plotly) return;
  const draw = () => {
    for (const source of document.querySelectorAll('script[data-for]'))
      tepalDraw(document.getElementById(source.dataset.for), JSON.parse(source.textContent));
  };
  draw();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
})();
"""
)
