"""The dashboard's two pages, as HTML, style and script: the list of runs, and a run whose parts `watched.py` sends.

Nothing is written into a page but by this project's own code: names from runs are escaped on the server, or set as text
by the script; a content security policy forbids anything else. Script and style are in `assets/`.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from tepal.report.diagram import DIAGRAM_STYLE
from tepal.report.script import DRAW_SCRIPT
from tepal.report.style import STYLE

SECTIONS = {
    "figures": "Rounds and bytes",
    "travel": "What travels",
    "method": "What the method tells",
    "clients": "Clients",
}
"""Sections with figures: id → heading."""


def runs_page(folder: str, table: str, version: str) -> str:
    """The list of runs, with the table as it is now."""
    body = (
        f'<header><p class="run">Tepal dashboard</p><h1>Runs</h1><p class="subtitle"><code>{escape(folder)}</code></p>'
        '</header><p class="filter"><label for="filter">Show runs with</label> '
        '<input id="filter" type="search" autocomplete="off" placeholder="a name, strategy, model, state …"></p>'
        f'<div data-part="problems"></div><div data-part="runs">{table}</div>'
    )
    return _page("Runs · Tepal", body, root="", version=version, plotly=False)


def run_page(name: str, subtitle: str, parent: str, version: str) -> str:
    """A run; its parts come as events. `parent`: the comparison that it belongs to, or ""."""
    root = "../" * (2 + name.count("/"))
    way = f'<a href="{root}">Runs</a>'
    if parent:
        way += f' / <a href="../">{escape(parent)}</a>'
    sections = "".join(
        f'<section aria-labelledby="s-{key}" id="{key}" hidden><h2 id="s-{key}">{heading}</h2>'
        f'{_ABOVE.get(key, "")}<div class="figures" data-figures="{key}"></div></section>'
        for key, heading in SECTIONS.items()
    )
    links = "".join(f'<a href="#{key}" hidden>{heading}</a>' for key, heading in SECTIONS.items())
    body = (
        f'<header><nav class="run" aria-label="Where this is">{way}</nav><h1>{escape(name.rsplit("/", 1)[-1])}</h1>'
        f'<p class="subtitle">{escape(subtitle)}</p></header>'
        '<div class="state" data-part="state"></div><p class="unseen" role="status" data-part="said"></p>'
        '<p class="notice" id="offline" hidden>No connection to the dashboard: what is shown here may be old.</p>'
        '<div data-part="problems"></div>'
        '<dl class="headlines" aria-label="Headline figures" data-part="headlines"></dl>'
        f'<nav class="sections" aria-label="On this page">{links}<a href="#numbers">Numbers and settings</a></nav>'
        f'{sections}<div data-part="trouble"></div>'
        '<section id="numbers" aria-labelledby="s-numbers"><h2 id="s-numbers">Numbers and settings</h2>'
        '<div data-part="rounds"></div><div data-part="config"></div></section>'
    )
    return _page(f"{name} · Tepal", body, root=root, version=version, plotly=True)


def message_page(title: str, text: str, root: str, version: str) -> str:
    """A page that says one thing: what is not there, or who may not see it."""
    body = f'<header><h1>{escape(title)}</h1></header><p class="notice" role="note">{escape(text)}</p>'
    return _page(f"{title} · Tepal", body, root=root, version=version, plotly=False)


def _page(title: str, body: str, *, root: str, version: str, plotly: bool) -> str:
    scripts = f'<script defer src="{root}assets/dashboard.js?v={version}"></script>'
    if plotly:  # it is large: fetched meanwhile, and run when there is something to draw
        scripts += f'<link rel="preload" as="script" id="plotly" href="{root}assets/plotly.js?v={version}">'
    return Template(_PAGE).substitute(title=escape(title), root=root, version=version, body=body, scripts=scripts)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="${root}assets/style.css?v=$version">
$scripts
</head>
<body>
<main>
$body
</main>
</body>
</html>
"""

_ABOVE = {
    "travel": '<div data-part="diagram"></div>',
    "clients": (
        '<p class="filter"><label for="client-filter">Show clients with</label> '
        '<input id="client-filter" type="search" autocomplete="off" placeholder="a name, state, reason …"> '
        '<span id="client-count" role="status"></span></p>'
        '<div class="scroll" role="region" tabindex="0" aria-label="Table of clients">'
        '<table id="client-table"><thead><tr></tr></thead>'
        "<tbody></tbody></table></div>"
    ),
}

_ASSETS = Path(__file__).parent / "assets"


def dashboard_style() -> str:
    """The style sheet: that of reports, and what the dashboard has beside them."""
    return STYLE + DIAGRAM_STYLE + (_ASSETS / "dashboard.css").read_text(encoding="utf-8")


def dashboard_script() -> str:
    """The script: what draws a figure in reports, too, and what puts parts into the page."""
    return DRAW_SCRIPT + (_ASSETS / "dashboard.js").read_text(encoding="utf-8")


def figure_library() -> str:
    """What draws figures: plotly.js with the kinds that have two axes. A browser starts it in a third of the time that
    the whole library takes, which the Python package brings for reports; its licence lies beside it.
    """
    return (_ASSETS / "plotly-cartesian.min.js").read_text(encoding="utf-8")
