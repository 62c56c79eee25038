"""The page of a comparison: the table, curves per round and per byte, and every round of every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from tepal.records.columns import Column, bytes_text
from tepal.records.round_record import columns
from tepal.records.run_directory import REPORT
from tepal.report.page import Figure, add_curve, config_html, empty_plot, figure_html, page, unit_of
from tepal.report.round_figures import TEST_DATA
from tepal.report.table import Table
from tepal.report.templates import render
from tepal.tools.compare.comparison import Point, Result, Results
from tepal.tools.compare.picture import TEMPLATES, Look, data_note, looks
from tepal.tools.compare.tables import about_seeds, about_target, columns_of, how_it_ended, strategies_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MANY, _TALL = 8, 560  # with more strategies than the first, figures have the second's height (pixels) for legends

_BAND = " Lines: mean over the seeds; bands: their standard deviation."


def comparison_page(results: Results, above: str = "") -> str:
    """The whole page. `above`: HTML at its top."""
    comparison = results.comparison
    drawn = figures(results)
    names = comparison.strategies
    body = render(
        "comparison.html.j2",
        TEMPLATES,
        above=Markup(above),
        heading=" · ".join(names) if len(names) <= _MANY else f"{len(names)} strategies",
        comparison=comparison,
        unfinished=[how_it_ended(results, each) for each in results.unfinished],
        table=strategies_table(results, (*columns_of(results.by), Column("outcome", "outcome", left=True))).html(),
        seeds=about_seeds(results),
        target=about_target(results),
        figures=[figure_html(figure) for figure in drawn],
        by=results.by,
        rounds=_rounds_table(results).html(),
        runs=[each.run for result in results.strategies for each in result.runs],
        report=REPORT,
        config=config_html({**comparison.run_config, "seed": ", ".join(map(str, comparison.seeds))}),
    )
    return page(f"{comparison.task}: strategies compared", body, drawn, style=style(names))


# --- figures --------------------------------------------------------------------------------------------------------


def figures(results: Results) -> list[Figure]:
    """The score per round, per byte, and the results on the clients' own tests."""
    look = looks(results.comparison.strategies)
    return [_per_round(results, look), _per_byte(results, look), _on_own_tests(results)]


def _empty_plot(results: Results, x_title: str, *, rounds: int | None = None) -> go.Figure:
    plot = empty_plot(x_title, results.by.name, rounds=rounds)
    plot.update_layout(hovermode="closest")  # the values of all strategies would cover the figure
    plot.update_yaxes(rangemode="tozero", **({"tickformat": ".4~%"} if results.by.share else {}))
    if len(results.strategies) > _MANY:
        plot.update_layout(height=_TALL)
    return plot


def _per_round(results: Results, look: dict[str, Look]) -> Figure:
    by = results.by
    key, title = f"{by.key}-rounds", f"{by.title} per round"
    rounds = [len(result.curve.points) for result in results.strategies if result.curve]
    if not rounds:
        return Figure(key, title, f"No {by.name} was measured.", None)
    plot = _empty_plot(results, "round", rounds=max(rounds))
    for result in results.strategies:
        if result.curve:
            xs = [point.round for point in result.curve.points]
            _add_strategy(plot, result, look, result.curve.points, xs, f"round %{{x}}: %{{y:{by.text()}}}")
    return Figure(key, title, _caption(results), plot)


def _per_byte(results: Results, look: dict[str, Look]) -> Figure:
    by = results.by
    key, title = f"{by.key}-bytes", f"{by.title} over transferred bytes"
    known = [point.transferred or 0 for result in results.strategies for point in result.over_bytes]
    if not known:
        return Figure(key, title, f"No {by.name} was measured, or the bytes of the rounds are not known.", None)
    divisor, unit = unit_of(max(known))
    plot = _empty_plot(results, f"transferred so far, down and up, all clients ({unit})")
    hover = f"%{{x:.4~g}} {unit}, after round %{{customdata}}: %{{y:{by.text()}}}"
    for result in results.strategies:
        if points := result.over_bytes:
            xs = [(point.transferred or 0) / divisor for point in points]
            _add_strategy(plot, result, look, points, xs, hover)
    caption = " Where clients score the result, as after the last round, sending it to them counts in that round."
    return Figure(key, title, _caption(results) + caption, plot)


def _add_strategy(
    plot: go.Figure, result: Result, look: dict[str, Look], points: Sequence[Point], xs: Sequence[float], hover: str
) -> None:
    """A strategy's curve, above the band of its seeds."""
    name, of = result.strategy, result.curve.of if result.curve else ""
    dash, hollow = ("solid", "") if of == "server" else ("dash", "-open")
    ends = [point.interval for point in points if point.interval is not None]
    add_curve(
        plot, xs, [point.score for point in points], customdata=[point.round for point in points],
        name=f"{name}, {TEST_DATA[of][0]}", role=f"s-{name}", legendgroup=name, hover=hover,
        interval=[*zip(*ends, strict=True)] if len(ends) == len(points) else None,
        line={"dash": dash}, marker={"symbol": look[name].symbol + hollow},
    )  # fmt: skip


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
            x=[result.strategy], y=[score.mean], name=result.strategy, meta={"role": f"s-{result.strategy}"},
            error_y={"type": "data", "array": [whisker or 0], "thickness": 1.5, "width": 5},
            text=[format(score.mean, by.text(3))], textposition="inside", insidetextanchor="start", textangle=0,
            hovertemplate=f"%{{y:{by.text()}}} ± %{{error_y.array:{by.text()}}}",
        )  # fmt: skip
    if not plot.data:
        return Figure(key, title, "No result was scored on the clients' own test splits.", None)
    plot.update_layout(barmode="overlay", showlegend=False)
    caption = (
        "The result of each run on the same test splits: each client's personal model where there are such, else "
        "the global one, so that all strategies can be compared. Mean over the clients; whiskers: standard deviation "
        + ("of that mean over the seeds." if several else "over them.")
    )
    return Figure(key, title, caption, plot)


# --- table of rounds and style ---------------------------------------------------------------------------------------


def _rounds_table(results: Results) -> Table:
    key = results.by.key
    shown = columns("round", key, "accuracy_of", f"clients_{key}", "clients_spread", "bytes_down", "bytes_up")
    rows = [
        [each.run.strategy, each.run.seed, *(line.value(one.key) for one in shown), transferred, line.seconds]
        for result in results.strategies
        for each in result.runs
        for line, transferred in zip(each.metrics, each.transferred, strict=True)
    ]
    run, so_far = (Column("strategy", left=True), Column("seed")), Column("transferred so far", "", "bytes", bytes_text)
    return Table("Every round of every run", (*run, *shown, so_far, *columns("seconds")), rows)


def style(strategies: Iterable[str]) -> str:
    """The page's own CSS, with the strategies' colours."""
    look = looks(strategies)
    light = "".join(f"--s-{name}: {one.light}; " for name, one in look.items())
    dark = "".join(f"--s-{name}: {one.dark}; " for name, one in look.items())
    return (
        f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
        # plotly draws whiskers in one fixed grey.
        "path.yerror { stroke: var(--ink) !important; }\na { color: inherit; }\n.scroll + p { margin-top: 8px; }\n"
        + (f".plot {{ height: {_TALL}px; }}\n" if len(look) > _MANY else "")
    )
