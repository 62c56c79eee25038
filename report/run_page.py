"""A run as one HTML page (`page.py`): it puts together the figures, the tables and the run config."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

from tepal.records.run_directory import REPORT, find_run, total, write_whole
from tepal.report.clients import clients_html, label_figures, natural
from tepal.report.diagram import DIAGRAM_STYLE, last_diagram
from tepal.report.headlines import headlines_html
from tepal.report.method_figures import method_figures, travel_figures
from tepal.report.page import Figure, config_html, figure_html, page
from tepal.report.round_figures import figures
from tepal.report.round_tables import rounds_html, trouble_html
from tepal.report.run_files import Lines, RunFiles
from tepal.report.terminal import bytes_text


def write_report(run: Path) -> Path:
    """Write `report.html` for a run directory (or the `latest` link) and return its path.

    A run without `summary.json` (in progress, or stopped) gets the report of the rounds that have ended. Raises
    FileNotFoundError where there is no run, OSError naming the file where it cannot be written.
    """
    run = find_run(run)
    write_whole(run / REPORT, _page(run.name, RunFiles.of(run)).encode())
    return run / REPORT


def drawn_of(run: RunFiles) -> dict[str, list[Figure]]:
    """All figures of a run, by section."""
    return {
        "figures": figures(run.metrics, run.summary),
        "travel": travel_figures(run.records, run.cells),
        "method": method_figures(run.records, run.metrics, natural),
        "clients": label_figures(run.label_counts),
    }


def _page(name: str, run: RunFiles) -> str:
    summary, metrics, drawn = run.summary, run.metrics, drawn_of(run)
    strategy, model, dataset = (
        str(each or "") for each in (summary.get("strategy"), summary.get("model"), run.config.get("dataset"))
    )
    sections = [
        ("figures", "Rounds and bytes", ""),
        ("travel", "What travels", last_diagram(run.records, run.cells)),
        ("method", f"What {strategy or 'the method'} tells", ""),
        ("clients", "Clients", clients_html(run.clients)),
    ]
    body = Template(_BODY).substitute(
        heading=escape(strategy or name),
        subtitle=escape(" on ".join(part for part in (model, dataset) if part) or "model and dataset not recorded"),
        run=escape(name),
        notice=_notice(metrics, run.config, run.written_summary is not None),
        headlines=headlines_html(run.config, metrics, summary, ended=run.written_summary is not None),
        sections="".join(
            f'<section aria-labelledby="{key}"><h2 id="{key}">{escape(heading)}</h2>{above}'
            f'<div class="figures">{"".join(map(figure_html, drawn[key]))}</div></section>'
            for key, heading, above in sections
            if above or drawn[key]
        ),
        replies=trouble_html(metrics),
        rounds=rounds_html(metrics),
        config=config_html(run.config),
        provenance=_provenance(metrics),
    )
    return page(run.title or name, body, chain.from_iterable(drawn.values()), style=DIAGRAM_STYLE)


def _notice(metrics: Lines, config: Mapping[str, Any], ended: bool) -> str:
    done = metrics[-1]["round"] if metrics else 0
    planned = config.get("num-server-rounds")
    of = f" of {planned}" if planned else ""
    if ended and planned and done < planned:
        text = f"This run ended after round {done}{of}."
    elif ended:
        return ""
    elif done:
        text = (
            f"This run has no summary yet: it is in progress, or it was stopped. What follows covers {done}{of} rounds."
        )
    else:
        text = "No round of this run has ended yet, so there is nothing to draw."
    return f'<p class="notice" role="note">{escape(text)}</p>'


def _provenance(metrics: Lines) -> str:
    overhead = total(metrics, "bytes_overhead")
    beside = f" ({bytes_text(overhead)} in this run)" if metrics and overhead is not None else ""
    return (
        "<p>Bytes are payload, measured at the exchange: the encoded arrays that the server handed over for each "
        "client and that each client handed back, summed over the clients of a round. "
        f"Names and digests{beside} are counted apart; what the transport adds (framing, TLS) is not counted.</p>"
        "<p>FedAvg’s bytes are calculated, not run: every entry of the model, down and up, for the same clients in the "
        "same rounds.</p>"
        "<p>Time is the server’s clock, per round. Everything here is drawn from <code>config.toml</code>, "
        "<code>metrics.jsonl</code>, <code>summary.json</code>, <code>labels.json</code>, "
        "<code>blocks.json</code>, <code>clients.json</code> and <code>rounds/</code> in the folder of this file.</p>"
    )


_BODY = """<header>
<p class="run">Tepal run <code>$run</code></p>
<h1>$heading</h1>
<p class="subtitle">$subtitle</p>
</header>
$notice
<dl class="headlines" aria-label="Headline figures">$headlines</dl>
<noscript><p class="notice">The figures need JavaScript; the table of rounds below has every number.</p></noscript>
$sections
$replies
<section><h2>Numbers and settings</h2>
$rounds
$config
</section>
<section class="provenance"><h2>Where the figures come from</h2>
$provenance
</section>"""
