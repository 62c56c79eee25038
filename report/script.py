"""The script that draws the figures of a page and saves them for a paper."""

from __future__ import annotations

import json
from typing import Any

# The layout of a figure that is saved for a paper, in pixels: as wide as two columns, so that in one its text has 7 pt.
# A legend with more than `many` entries has two columns, and each row makes the figure higher; a bar that is too thin
# for its number has none; a heat map has a scale, because its cells cannot be pointed at.
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

# Draws one figure. Colours come from the style sheet, so that figures follow the reader's light or dark setting. Saved
# figures have the light colours; `painted` in `figure_files.py` does the same.
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

PAGE_SCRIPT = (
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
