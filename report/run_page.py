"""The report of a run: one HTML page with its figures, its tables and its run config."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from tepal.records.columns import bytes_text
from tepal.records.run_directory import REPORT, find_run, total, write_whole
from tepal.report.clients import clients_html
from tepal.report.diagram import DIAGRAM_STYLE, last_diagram
from tepal.report.headlines import headlines_html
from tepal.report.method_figures import label_figures, method_figures, travel_figures
from tepal.report.page import Figure, config_html, figure_html, page
from tepal.report.round_figures import figures
from tepal.report.round_tables import rounds_html, trouble_html
from tepal.report.run_files import RunFiles
from tepal.report.templates import render

SECTIONS = {
    "figures": "Scores and transferred bytes",
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
    """All figures of a run, by section."""
    return {
        "figures": figures(run.metrics, run.summary),
        "travel": travel_figures(run.records, run.segments),
        "method": method_figures(run.records, run.metrics),
        "clients": label_figures(run.label_counts),
    }


def _page(run: RunFiles) -> str:
    summary, metrics, drawn = run.summary, run.metrics, drawn_of(run)
    name = run.path.name
    ended, overhead = run.written_summary is not None, total(metrics, "bytes_overhead")
    strategy, model, dataset = (
        str(each or "") for each in (summary.get("strategy"), summary.get("model"), run.config.get("dataset"))
    )
    above = {"travel": last_diagram(run.records, run.segments), "clients": clients_html(run.clients)}
    body = render(
        "run.html",
        name=name,
        heading=strategy or name,
        subtitle=" on ".join(part for part in (model, dataset) if part) or "model and dataset not recorded",
        ended=ended,
        done=metrics[-1].round if metrics else 0,
        planned=run.config.get("num-server-rounds"),
        headlines=headlines_html(run.config, metrics, summary, ended=ended),
        sections=[
            (key, heading, above.get(key, ""), [figure_html(figure) for figure in drawn[key]])
            for key, heading in SECTIONS.items()
        ],
        incidents=trouble_html(metrics),
        rounds=rounds_html(metrics),
        config=config_html(run.config),
        overhead=bytes_text(overhead) if metrics and overhead is not None else "",
    )
    title = " · ".join(part for part in (strategy, model, dataset) if part)
    return page(title or name, body, chain.from_iterable(drawn.values()), style=DIAGRAM_STYLE)
