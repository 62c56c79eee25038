"""A comparison as one HTML page (`page.py`): the table, curves per round and per byte, every round of every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

from tepal.records.run_directory import REPORT
from tepal.report.page import Figure, add_band, config_html, empty_plot, figure_html, page, table_html, unit_of
from tepal.report.round_figures import TEST_DATA
from tepal.report.terminal import bytes_text, score_text, seconds_text
from tepal.tools.compare.comparison import Curve, Measured, Point, Result, Results
from tepal.tools.compare.picture import Look, data_note, looks
from tepal.tools.compare.tables import NONE, about_seeds, about_target, columns_of, figure_text, how_it_ended

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MANY, _TALL = 8, 560  # with more strategies than this the legends need room: pixels

_BAND = " Lines: mean over the seeds; bands: their standard deviation."


def comparison_page(results: Results, above: str = "") -> str:
    """The whole page. `above`: HTML that goes before everything else."""
    comparison = results.comparison
    drawn = figures(results)
    names = comparison.strategies
    body = Template(_BODY).substitute(
        heading=escape(" · ".join(names) if len(names) <= _MANY else f"{len(names)} strategies"),
        subtitle=escape(f"{comparison.task}, {comparison.clients} simulated clients"),
        name=escape(comparison.folder.name),
        notices="".join(
            f'<p class="notice" role="note">{escape(how_it_ended(results, run))}</p>' for run in results.unfinished
        ),
        table=_table_html(results),
        seeds=escape(about_seeds(results)),
        target=escape(about_target(results)),
        figures="".join(map(figure_html, drawn)),
        measure=results.by.title,
        rounds=_rounds_html(results),
        runs="".join(_run_html(run, comparison.name(run.cell)) for result in results.strategies for run in result.runs),
        config=config_html({**comparison.run_config, "seed": ", ".join(map(str, comparison.seeds))}),
    )
    return page(f"{comparison.task}: strategies compared", above + body, drawn, style=style(names))


# --- figures --------------------------------------------------------------------------------------------------------


def figures(results: Results) -> list[Figure]:
    """The score per round, per byte, and the results on the clients' own tests."""
    look = looks(results.comparison.strategies)
    return [_per_round(results, look), _per_byte(results, look), _on_own_tests(results)]


def _empty_plot(results: Results, x_title: str, *, rounds: int | None = None) -> go.Figure:
    plot = empty_plot(x_title, results.by.name, rounds=rounds)
    plot.update_layout(hovermode="closest")  # the values of many strategies would cover the figure
    plot.update_yaxes(rangemode="tozero", **({"tickformat": ".4~%"} if results.by.share else {}))
    if len(results.strategies) > _MANY:
        plot.update_layout(height=_TALL)
    return plot


def _per_round(results: Results, look: dict[str, Look]) -> Figure:
    by = results.by
    key, title = f"{by.key}-rounds", f"{by.title} per round"
    curves = [(result, result.curve) for result in results.strategies if result.curve]
    if not curves:
        return Figure(key, title, f"No {by.name} was measured.", None)
    plot = _empty_plot(results, "round", rounds=max(len(curve.points) for _, curve in curves))
    for result, curve in curves:
        xs = [point.round for point in curve.points]
        _add_curve(plot, result, curve, curve.points, xs, look, hovertemplate=f"round %{{x}}: %{{y:{by.text()}}}")
    return Figure(key, title, _caption(results), plot)


def _per_byte(results: Results, look: dict[str, Look]) -> Figure:
    by = results.by
    key, title = f"{by.key}-bytes", f"{by.title} against bytes moved"
    curves = [(result, result.curve) for result in results.strategies if result.curve and result.curve.over_bytes]
    if not curves:
        return Figure(key, title, f"No {by.name} was measured, or the bytes of the rounds are not known.", None)
    divisor, unit = unit_of(max(point.moved or 0 for _, curve in curves for point in curve.over_bytes))
    plot = _empty_plot(results, f"sent so far, down and up, all clients ({unit})")
    hover = f"%{{x:.4~g}} {unit}, after round %{{customdata}}: %{{y:{by.text()}}}"
    for result, curve in curves:
        xs = [(point.moved or 0) / divisor for point in curve.over_bytes]
        _add_curve(plot, result, curve, curve.over_bytes, xs, look, hovertemplate=hover)
    caption = _caption(results) + (
        " Where clients score the result, as after the last round, its way down counts in that round."
    )
    return Figure(key, title, caption, plot)


def _add_curve(
    plot: go.Figure,
    result: Result,
    curve: Curve,
    points: tuple[Point, ...],
    xs: list[float] | list[int],
    look: dict[str, Look],
    *,
    hovertemplate: str,
) -> None:
    """A strategy's line, above the band of its seeds."""
    name, on_server = result.strategy, curve.of == "server"
    whose = {"meta": {"role": f"s-{name}"}, "legendgroup": name}
    if all(point.deviation is not None for point in points):
        spread = [(point.score, point.deviation or 0) for point in points]
        low, high = [mean - by for mean, by in spread], [mean + by for mean, by in spread]
        add_band(plot, xs, low, high, **whose)
    plot.add_scatter(
        x=xs,
        y=[point.score for point in points],
        customdata=[point.round for point in points],
        name=f"{name}, {TEST_DATA[curve.of][0]}",
        mode="lines+markers",
        line={"dash": "solid" if on_server else "dash"},
        marker={"symbol": look[name].symbol + ("" if on_server else "-open")},
        hovertemplate=hovertemplate,
        **whose,
    )


def _caption(results: Results) -> str:
    return " ".join(data_note(results.strategies)) + (_BAND if len(results.comparison.seeds) > 1 else "")


def _on_own_tests(results: Results) -> Figure:
    by = results.by
    key, title = "own-tests", f"{by.title} on the clients’ own test splits"
    plot = _empty_plot(results, "")
    several = len(results.comparison.seeds) > 1
    for result in results.strategies:
        score, spread = result.figures.get(f"clients_{by.key}"), result.figures.get("clients_spread")
        if score is None:
            continue
        whisker = score.deviation if several else spread.mean if spread else None
        plot.add_bar(
            x=[result.strategy],
            y=[score.mean],
            error_y={"type": "data", "array": [whisker or 0], "thickness": 1.5, "width": 5},
            text=[format(score.mean, by.text(3))],
            textposition="inside",
            insidetextanchor="start",
            textangle=0,
            name=result.strategy,
            meta={"role": f"s-{result.strategy}"},
            hovertemplate=f"%{{y:{by.text()}}} ± %{{error_y.array:{by.text()}}}",
        )
    if not plot.data:
        return Figure(key, title, "No result was scored on the clients' own test splits.", None)
    plot.update_layout(barmode="overlay", showlegend=False)
    caption = (
        "The result of each run on the same test splits: each client's own model where the strategy has such, else the "
        "common one. Here all strategies can be compared. Mean over the clients; whiskers: standard deviation "
        + ("of that mean over the seeds." if several else "over them.")
    )
    return Figure(key, title, caption, plot)


# --- tables ---------------------------------------------------------------------------------------------------------


def _table_html(results: Results) -> str:
    columns = columns_of(results.by)
    headings = ("strategy", *(column.heading for column in columns), "outcome")
    rows = [
        (result.strategy, *(figure_text(result, column) for column in columns), result.outcome)
        for result in results.strategies
    ]
    return table_html("All strategies", headings, rows, words={0, len(headings) - 1})


def _rounds_html(results: Results) -> str:
    by = results.by
    headings = (
        "strategy", "seed", "round", by.name, "on whose test data", "clients’ own tests", "spread", "down", "up",
        "moved so far", "time",
    )  # fmt: skip

    def cell(value: Any, write: Callable[[Any], str]) -> str:
        return NONE if value is None else write(value)

    rows = [
        (
            run.cell.strategy,
            run.cell.seed,
            line["round"],
            cell(line.get(by.key), score_text),
            cell(line.get("accuracy_of"), str),
            cell(line.get(f"clients_{by.key}"), score_text),
            cell(line.get("clients_spread"), score_text),
            cell(line.get("bytes_down"), bytes_text),
            cell(line.get("bytes_up"), bytes_text),
            cell(moved, bytes_text),
            cell(line.get("seconds"), seconds_text),
        )
        for result in results.strategies
        for run in result.runs
        for line, moved in zip(run.metrics, run.moved, strict=True)
    ]
    table = table_html("Every round of every run", headings, rows, words={0, 4})
    return f"<details><summary>Every round of every run, as a table</summary>{table}</details>"


def _run_html(run: Measured, name: str) -> str:
    directory = run.cell.run
    if directory is None:
        return f"<li>{escape(name)}: {escape(run.cell.outcome)}</li>"
    folder = escape(directory.name)
    linked = f'<a href="{folder}/{REPORT}">{folder}</a>' if (directory / REPORT).exists() else f"<code>{folder}</code>"
    return f"<li>{escape(name)}: {linked}</li>"


def style(strategies: Iterable[str]) -> str:
    """CSS of the page beside the common one: the strategies' colours."""
    look = looks(strategies)
    light = "".join(f"--s-{name}: {one.light}; " for name, one in look.items())
    dark = "".join(f"--s-{name}: {one.dark}; " for name, one in look.items())
    return (
        f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
        # plotly draws whiskers in one fixed grey.
        "path.yerror { stroke: var(--ink) !important; }\na { color: inherit; }\n.scroll + p { margin-top: 8px; }\n"
        + (f".plot {{ height: {_TALL}px; }}\n" if len(look) > _MANY else "")
    )


_BODY = """<header>
<p class="run">Tepal comparison <code>$name</code></p>
<h1>$heading</h1>
<p class="subtitle">$subtitle</p>
</header>
$notices
<section aria-labelledby="results"><h2 id="results">What each reached, and what it moved</h2>
$table
<p>$seeds. $target.</p></section>
<section aria-labelledby="figures"><h2 id="figures">$measure, rounds and bytes</h2>
<noscript><p class="notice">The figures need JavaScript; the table of rounds below has every number.</p></noscript>
<div class="figures">$figures</div></section>
<section aria-labelledby="runs"><h2 id="runs">Runs and settings</h2>
<ul>$runs</ul>
$rounds
<p>The runs of a seed differ in their strategy alone: model, partition and cohorts follow from the seed. This is the run
config that all of them share:</p>
$config
</section>
<section class="provenance" aria-labelledby="origin"><h2 id="origin">Where the figures come from</h2>
<p>Bytes are payload, measured at the exchange, summed over the clients. FedAvg’s, which the share is of, are
calculated: every entry of the model, down and up, for the same clients in the same rounds of each run.</p>
<p>Rounds and bytes to the target are those up to the first round whose result reached it on the server’s held-out
data, over the runs that did; where clients have models of their own there is no such measure. Time is the server’s
clock over the rounds; the first has the clients’ start in it. A client’s step is the median over the rounds of the
median over the clients. Figures over seeds are of the runs that finished.</p>
<p>Everything here is read from <code>metrics.jsonl</code> and <code>summary.json</code> of the runs beside this file,
and from <code>comparison.json</code>.</p>
</section>"""
