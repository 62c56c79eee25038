"""The report of a run: one HTML page with its figures, its tables and its run config."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TypeVar

from markupsafe import Markup

from tepal.host.text import visible
from tepal.records.columns import bytes_text
from tepal.records.run_directory import REPORT, ending, find_run, total, write_whole
from tepal.report.clients import clients_html
from tepal.report.diagram import DIAGRAM_STYLE, last_diagram
from tepal.report.headlines import headlines_html
from tepal.report.method_figures import label_figures, method_figures, travel_figures
from tepal.report.page import Figure, config_html, figure_html, page
from tepal.report.remarks import remarks
from tepal.report.round_figures import figures
from tepal.report.round_tables import rounds_html, trouble_html
from tepal.report.run_files import RunFiles
from tepal.report.templates import render
from tepal.report.uncertainty_figures import uncertainty_figures

T = TypeVar("T")

SECTIONS = {
    "figures": "Scores and transferred bytes",
    "uncertainty": "Uncertainty of the predictions",
    "travel": "Transfer and training of the model's parts",
    "method": "Method details",
    "clients": "Clients",
}
"""The sections that contain figures: id → heading."""


def write_report(run: Path) -> Path:
    """Write `report.html` for a run directory (or the `latest` link) and return its path.

    A run without `summary.json` (in progress, or stopped) gets the report of the rounds that have ended. Raises
    FileNotFoundError where there is no run, OSError naming the file where it cannot be written.
    """
    run = find_run(run)
    write_whole(run / REPORT, _page(RunFiles(run)).encode())
    return run / REPORT


def drawn_of(run: RunFiles) -> dict[str, list[Figure]]:
    """All figures of a run, by section.

    A section that cannot be drawn has one figure, without a plot, that has the reason. Raises OSError or
    ValueError where the rounds or the summary cannot be read.
    """
    drawn: dict[str, Callable[[], list[Figure]]] = {
        "figures": lambda: figures(run.metrics, run.summary),
        "uncertainty": lambda: uncertainty_figures(run.metrics),
        "travel": lambda: travel_figures(run.records, run.segments),
        "method": lambda: method_figures(run.records, run.metrics),
        "clients": lambda: label_figures(run.label_counts),
    }

    def failed(section: str) -> Callable[[str], list[Figure]]:
        return lambda why: [Figure(section, SECTIONS[section], why, None)]

    return {section: _whatever(make, failed(section)) for section, make in drawn.items()}


def _whatever(make: Callable[[], T], failed: Callable[[str], T]) -> T:
    """A part of the page or, where the files of the run do not allow it, what `failed` makes of the reason."""
    try:
        return make()
    except Exception as error:  # a file that is damaged in one part must not cost the others
        return failed(f"This part cannot be drawn: {type(error).__name__}: {visible(error, _LONGEST_REASON)}")


_LONGEST_REASON = 300  # characters
_MOST_ROUNDS, _MOST_INCIDENTS = 5000, 2000  # rows of the tables, the last ones


def _page(run: RunFiles) -> str:
    metrics, summary = run.metrics, run.summary
    drawn = drawn_of(run)
    name, failed, last = run.path.name, summary.get("stopped_by"), metrics[-1].round if metrics else 0
    ended, overhead = run.written_summary is not None, total(metrics, "bytes_overhead")
    strategy, model, dataset = (
        str(each or "") for each in (summary.get("strategy"), summary.get("model"), run.config.get("dataset"))
    )
    above = {
        "travel": _whatever(lambda: last_diagram(run.records, run.segments), lambda _: Markup()),  # figures have why
        "clients": _whatever(lambda: clients_html(run.clients), lambda why: render("notice.html", text=why)),
    }
    body = render(
        "run.html",
        name=name,
        heading=strategy or name,
        subtitle=" on ".join(part for part in (model, dataset) if part) or "model and dataset not recorded",
        ended=ended,
        # Rounds of a failed run may not count. In one that goes on, a round without a merge has ended all the same.
        done=(summary.get("rounds") or 0) if failed else last,
        planned=run.config.get("num-server-rounds"),
        failed=failed,
        last=last,
        ending=ending(summary),
        headlines=headlines_html(run.config, metrics, summary, ended=ended),
        remarks=_whatever(lambda: remarks(metrics), lambda why: [why]),
        sections=[
            (key, heading, above.get(key, ""), [figure_html(figure) for figure in drawn[key]])
            for key, heading in SECTIONS.items()
        ],
        incidents=trouble_html(metrics, _MOST_INCIDENTS),
        rounds=rounds_html(metrics, _MOST_ROUNDS),
        config=config_html(run.config),
        overhead=bytes_text(overhead) if metrics and overhead is not None else "",
    )
    title = " · ".join(part for part in (strategy, model, dataset) if part)
    return page(title or name, body, chain.from_iterable(drawn.values()), style=DIAGRAM_STYLE)
