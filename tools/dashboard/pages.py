"""The dashboard's pages: the list of runs, and a run whose parts `watched.py` sends; with their style and script.

Names from runs are escaped by the templates or set as text by the script; a content security policy forbids any other
script. Templates are in `templates/`, script and style in `assets/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from tepal.report.diagram import DIAGRAM_STYLE
from tepal.report.run_page import SECTIONS
from tepal.report.script import DRAW_SCRIPT
from tepal.report.style import STYLE
from tepal.report.templates import render

TEMPLATES, _ASSETS = Path(__file__).with_name("templates"), Path(__file__).with_name("assets")


def runs_page(folder: str, table: str, version: str) -> str:
    """The list of runs, with the table as it is now."""
    return _page("runs.html.j2", "Runs", "", version, folder=folder, table=Markup(table))


def run_page(name: str, subtitle: str, parent: str, version: str) -> str:
    """A run; its parts come as events. `parent`: the comparison that it belongs to, or ""."""
    root = "../" * (2 + name.count("/"))
    return _page("run.html.j2", name, root, version, subtitle=subtitle, parent=parent, sections=SECTIONS)


def message_page(title: str, text: str, root: str, version: str) -> str:
    """A page with a message, such as that a page does not exist."""
    return _page("message.html.j2", title, root, version, text=text)


def _page(template: str, title: str, root: str, version: str, **values: Any) -> str:
    return render(template, TEMPLATES, title=title, root=root, version=version, **values)


def dashboard_style() -> str:
    """The style sheet: that of reports and the dashboard's own."""
    return STYLE + DIAGRAM_STYLE + (_ASSETS / "dashboard.css").read_text(encoding="utf-8")


def dashboard_script() -> str:
    """The script: that of reports, which draws figures, and the dashboard's own, which puts parts into the page."""
    return DRAW_SCRIPT + (_ASSETS / "dashboard.js").read_text(encoding="utf-8")


def figure_library() -> str:
    """plotly.js, with only the figures that have two axes: a browser starts it in a third of the time of the whole."""
    return (_ASSETS / "plotly-cartesian.min.js").read_text(encoding="utf-8")
