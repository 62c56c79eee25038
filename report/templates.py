"""The HTML of a run's page as Jinja2 templates, which escape every value that is not Markup.

Text is shown on one line, with every character visible and of bounded length (`visible`), also in the templates of the
dashboard and of comparisons.

They are text in a Python file because Flower's app bundles contain no files of a suitable other kind.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tepal.host.text import visible

# Style and scripts are this project's and plotly's; the body comes from templates, which have escaped their values.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
{% autoescape false %}
<style>{{ style }}</style>
</head>
<body>
<main>
{{ body }}
</main>
<script>{{ plotly }}</script>
<script>{{ script }}</script>
{% endautoescape %}
</body>
</html>
"""

# plotly writes < and > in JSON as escapes, so no name can end the script element.
_FIGURE = """<figure><h3>{{ figure.title }}</h3>
{% if figure.plot is none %}
<p class="empty">nothing to draw</p>
{% else %}
<div class="plot" id="{{ figure.key }}" role="group" aria-label="{{ label }}"></div>
<script type="application/json" data-for="{{ figure.key }}">{{ figure.plot.to_json()|safe }}</script>
{% endif %}
<figcaption>{{ figure.caption }}</figcaption></figure>
"""

# A macro joins each row, so that the cells of thousands of rows are not all kept in memory.
_TABLE = """{% macro line(row) %}
<tr>
{%- for column, cell in zip(columns, row) -%}
<td{% if not column.left %} class="number"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{%- endmacro %}
<div class="scroll" role="region" tabindex="0" aria-label="{{ title }}"><table>
<thead><tr>
{%- for column in columns -%}
<th scope="col"{% if not column.left %} class="number"{% endif %}>{{ column.title }}</th>
{%- endfor %}</tr></thead>
<tbody>
{% for row in rows %}
{{ line(row) }}
{% endfor %}
</tbody></table></div>
"""

_FOLDED = """<details><summary>{{ summary }}</summary>
{%- if note %}<p>{{ note }}</p>{% endif %}{{ table }}</details>
"""

_NOTICE = '<p class="notice" role="note">{{ text }}</p>'

_INCIDENTS = """<section aria-labelledby="incidents"><h2 id="incidents">Incidents</h2>
{%- if note %}<p>{{ note }}</p>{% endif %}{{ table }}</section>"""

_HEADLINES = """{% for name, value, note in headlines %}
<div><dt>{{ name }}</dt><dd{% if value == unknown %} class="unknown"{% endif %}>{{ value }}</dd>
{%- if note %}<dd>{{ note }}</dd>{% endif %}</div>
{% endfor %}
"""

_DIAGRAM = """<div class="scroll diagram" role="region" tabindex="0" aria-label="Block diagram">
<table><caption>{{ caption }}</caption>
<thead><tr><th scope="col">part</th>{% for kind in kinds %}<th scope="col">{{ kind }}</th>{% endfor %}</tr></thead>
<tbody>
{% for stage, cells in rows %}
<tr><th scope="row">{{ stage }}</th>
{%- for cell in cells -%}
{% if cell is none %}<td></td>{% else -%}
<td class="{{ "trained" if cell.trained else "still" }}"><b>{{ cell.bytes }}</b> <span class="word">
{{- "trained by " ~ cell.trained if cell.trained else "not trained" }}</span><div>
{%- for arrow, said, share in cell.ways -%}
<span class="way{{ "" if share else " none" }}"><span aria-hidden="true">{{ arrow }}</span> <span class="said">
{{- said }}</span> {{ share or "none" }}</span>
{%- endfor %}</div></td>
{%- endif %}{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
"""

_RUN = """<header>
<p class="run">Tepal run <code>{{ name }}</code></p>
<h1>{{ heading }}</h1>
<p class="subtitle">{{ subtitle }}</p>
</header>
{% if failed %}
<p class="notice" role="note">This run failed{% if last %} in round {{ last }}{% endif %}: {{ failed }}</p>
{% endif %}
{% if not ended or planned and done < planned %}
<p class="notice" role="note">
{%- if ended and ending %}{{ ending }}; {{ planned }} rounds were planned.
{%- elif ended %}This run ended after round {{ done }} of {{ planned }}.
{%- elif done %}This run has no summary yet: it is in progress, or it was stopped. What follows covers {{ done }}
{%- if planned %} of {{ planned }}{% endif %} rounds.
{%- else %}No round of this run has ended yet, so there is nothing to draw.{% endif %}</p>
{% endif %}
{% if ended and ending and not (planned and done < planned) %}
<p class="notice" role="note">{{ ending }}.</p>
{% endif %}
<dl class="headlines" aria-label="Headline figures">{{ headlines }}</dl>
{% for remark in remarks %}<p class="notice" role="note">{{ remark }}.</p>
{% endfor %}
<noscript><p class="notice">The figures need JavaScript; the table of rounds below has every number.</p></noscript>
{% for key, heading, above, figures in sections if above or figures %}
<section aria-labelledby="{{ key }}"><h2 id="{{ key }}">{{ heading }}</h2>{{ above }}
<div class="figures">{% for figure in figures %}{{ figure }}{% endfor %}</div></section>
{% endfor %}
{{ incidents }}
<section><h2>Rounds and run config</h2>
{{ rounds }}
{{ config }}
</section>
<section class="provenance"><h2>Definitions and data sources</h2>
<p>Bytes are payload, measured at the exchange: the encoded arrays that the server handed over for each client and that
each client handed back, summed over the clients of a round. Names and digests{% if overhead %} ({{ overhead }} in this
run){% endif %} are counted separately; what the transport adds (framing, TLS) is not counted.</p>
<p>FedAvg’s bytes are calculated, not run: every entry of the model, down and up, for the same clients in the same
rounds.</p>
<p>Time is the server’s clock, per round. Everything here is drawn from <code>config.toml</code>,
<code>metrics.jsonl</code>, <code>summary.json</code>, <code>labels.json</code>, <code>blocks.json</code>,
<code>clients.json</code> and <code>rounds/</code> in the folder of this file.</p>
</section>"""

_HERE = DictLoader(
    {
        "page.html": _PAGE, "figure.html": _FIGURE, "table.html": _TABLE, "folded.html": _FOLDED,
        "notice.html": _NOTICE, "incidents.html": _INCIDENTS, "headlines.html": _HEADLINES, "diagram.html": _DIAGRAM,
        "run.html": _RUN,
    }
)  # fmt: skip


def render(template: str, folder: Path | None = None, /, **values: Any) -> Markup:
    """Fill a template of this module, or a file in `folder`, with values, each escaped unless it is Markup."""
    return Markup(_environment(folder).get_template(template).render(values))


def _finalized(value: Any) -> Any:
    """What a template writes of a value: of text that others may have written, what is safe to show."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return visible(value) if value.strip(" ") else value  # a space between two values stays one


@cache
def _environment(folder: Path | None) -> Environment:
    loader = _HERE if folder is None else FileSystemLoader(folder)
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        auto_reload=False, finalize=_finalized,
    )  # fmt: skip
    made.globals["zip"] = zip
    return made
