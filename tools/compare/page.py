"""The page of a comparison: the table, curves per round and per byte, and every round of every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from tepal.records.columns import Column, bytes_text
from tepal.records.round_record import columns
from tepal.records.run_directory import REPORT
from tepal.report.page import Figure, add_curve, config_html, empty_plot, figure_html, labels, page, toml_text, unit_of
from tepal.report.round_figures import TEST_DATA
from tepal.report.table import Table
from tepal.report.templates import render
from tepal.tools.compare.answers import answer
from tepal.tools.compare.comparison import Comparison, Group, Point, Result, Results
from tepal.tools.compare.figure_columns import group_columns
from tepal.tools.compare.grid.best import best_notes, grid_notes
from tepal.tools.compare.grid.figures import grid_figures
from tepal.tools.compare.picture import TEMPLATES, Look, data_note, looks
from tepal.tools.compare.sections import value_text
from tepal.tools.compare.tables import (
    about_seeds,
    about_target,
    changed_settings,
    group_notes,
    headline,
    how_it_ended,
    noun,
    variants_table,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MANY, _TALL = 8, 560  # with more curves than the first, figures have the second's height (pixels) for legends
_MANY_LABELS = 4  # the same for curves of combinations of values, whose names are longer
_MANY_TITLES = 3  # with more sections, the heading has their number

_BAND = " Lines: mean over the seeds; bands: their standard deviation."


def comparison_page(results: Results, above: str = "") -> str:
    """The whole page. `above`: HTML at its top."""
    comparison = results.comparison
    look = looks(comparison.coloured)
    numbered = enumerate(results.sections)
    groups = [_Shown(number, group, _group_figures(group, look, number)) for number, group in numbered]
    drawn = [figure for each in groups for figure in each.drawn]
    body = render(
        "comparison.html.j2",
        TEMPLATES,
        above=Markup(above),
        heading=_heading(comparison),
        comparison=comparison,
        notices=[*(how_it_ended(results, each) for each in results.unfinished), *changed_settings(results)],
        groups=groups,
        titled=any(section.title for section in comparison.sections),
        noun=noun(comparison),
        seeds=about_seeds(results),
        by=results.by,
        rounds=_rounds_table(results).html(),
        runs=[each.run for result in results.variants for each in result.runs],
        report=REPORT,
        config=config_html({**comparison.run_config, **_all_values(comparison)}),
        own="" if comparison.of_strategies else _own_settings(comparison).html(),
        varied=", ".join(comparison.grid),
        grid=grid_notes(results),
    )
    tall = [f"#{figure.key}" for figure in drawn if figure.plot and figure.plot.layout.height == _TALL]
    heights = f"{', '.join(tall)} {{ height: {_TALL}px; }}\n" if tall else ""
    return page(headline(results), body, drawn, style=style(comparison.coloured) + heights)


@dataclass(frozen=True)
class _Shown:
    """A section as its template shows it."""

    number: int
    group: Group
    drawn: Sequence[Figure]

    @property
    def table(self) -> Markup:
        return variants_table(self.group, (*group_columns(self.group), Column("outcome", "outcome", left=True))).html()

    @property
    def figures(self) -> list[Markup]:
        return [figure_html(figure) for figure in self.drawn]

    @property
    def notes(self) -> list[str]:
        return group_notes(self.group)

    @property
    def best(self) -> list[str]:
        return best_notes(self.group)

    @property
    def target(self) -> str:
        return about_target(self.group)

    @property
    def answer(self) -> str:
        return answer(self.group)


def _heading(comparison: Comparison) -> str:
    titles = [section.title for section in comparison.sections if section.title]
    names = titles or comparison.bases
    kind = "sections" if titles else "strategies" if comparison.of_strategies else "variants"
    heading = " · ".join(names) if len(names) <= (_MANY_TITLES if titles else _MANY) else f"{len(names)} {kind}"
    return f"{heading} over {' × '.join(comparison.grid)}" if comparison.grid and not titles else heading


def _all_values(comparison: Comparison) -> dict[str, str]:
    """The seeds and the varied keys, with all their values."""
    values = {key: ", ".join(map(value_text, values)) for key, values in comparison.grid.items()}
    return {**values, "seed": ", ".join(map(str, comparison.seeds))}


def _own_settings(comparison: Comparison) -> Table:
    """The keys in which the variants differ from the common run config, and the values of each; not the varied ones."""
    settings = {
        (variant.base, section.title if not (section.question and variant.values) else ""): {
            key: value for key, value in variant.run_config.items() if key not in variant.values
        }
        for section in comparison.sections
        for variant in section.variants
    }
    rows = [
        [*names, ", ".join(f"{key}={toml_text(own)}" for key, own in config.items())]
        for names, config in settings.items()
    ]
    heads = (Column("variant", left=True), Column("section", left=True), Column("keys of its own", left=True))
    return Table("Keys of each variant", heads, rows)


# --- figures --------------------------------------------------------------------------------------------------------


def figures(results: Results) -> list[Figure]:
    """Of each section the score over varied keys, per round and per byte, and on the clients' own tests."""
    look = looks(results.comparison.coloured)
    return [figure for number, group in enumerate(results.sections) for figure in _group_figures(group, look, number)]


def _group_figures(group: Group, look: dict[str, Look], number: int) -> list[Figure]:
    """The figures of a section; from the second section on, its number is part of their keys.

    A section that asks a question measures what answers it: a figure without data is left out.
    """
    drawn = [*grid_figures(group, look), _per_round(group, look), _per_byte(group, look), _on_own_tests(group)]
    if group.section.question:
        drawn = [figure for figure in drawn if figure.plot is not None]
    return [replace(figure, key=f"{figure.key}-{number + 1}") for figure in drawn] if number else drawn


def _empty_plot(group: Group, x_title: str, *, rounds: int | None = None) -> go.Figure:
    plot = empty_plot(x_title, group.by.name, rounds=rounds)
    plot.update_layout(hovermode="closest")  # the values of all strategies would cover the figure
    plot.update_yaxes(rangemode="tozero", **({"tickformat": ".4~%"} if group.by.share else {}))
    if len(group.variants) > (_MANY_LABELS if group.varied else _MANY):
        plot.update_layout(height=_TALL)
    return plot


def _per_round(group: Group, look: dict[str, Look]) -> Figure:
    by = group.by
    key, title = f"{by.key}-rounds", f"{by.title} per round"
    rounds = [len(result.curve.points) for result in group.variants if result.curve]
    if not rounds:
        return Figure(key, title, f"No {by.name} was measured.", None)
    plot = _empty_plot(group, "round", rounds=max(rounds))
    for result in group.variants:
        if result.curve:
            xs = [point.round for point in result.curve.points]
            _add_variant(plot, result, look, result.curve.points, xs, f"round %{{x}}: %{{y:{by.text()}}}")
    _mark_target(plot, group)
    return Figure(key, title, _caption(group), plot)


def _per_byte(group: Group, look: dict[str, Look]) -> Figure:
    by = group.by
    key, title = f"{by.key}-bytes", f"{by.title} over transferred bytes"
    known = [point.transferred or 0 for result in group.variants for point in result.over_bytes]
    if not known:
        return Figure(key, title, f"No {by.name} was measured, or the bytes of the rounds are not known.", None)
    divisor, unit = unit_of(max(known))
    plot = _empty_plot(group, f"transferred so far, down and up, all clients ({unit})")
    hover = f"%{{x:.4~g}} {unit}, after round %{{customdata}}: %{{y:{by.text()}}}"
    for result in group.variants:
        if points := result.over_bytes:
            xs = [(point.transferred or 0) / divisor for point in points]
            _add_variant(plot, result, look, points, xs, hover)
    _mark_target(plot, group)
    caption = " Where clients score the result, as after the last round, sending it to them counts in that round."
    return Figure(key, title, _caption(group) + caption, plot)


def _mark_target(plot: go.Figure, group: Group) -> None:
    """The target as a dotted line, if there is one.

    Its text is on the left, where curves are far from it.
    """
    score = group.line
    if score is None:
        return
    plot.add_shape(type="line", xref="paper", x0=0, x1=1, y0=score, y1=score, line={"width": 1.5, "dash": "dot"})
    plot.add_annotation(
        xref="paper", x=0, xanchor="left", y=score, yanchor="bottom", text=f"target {score:{group.by.text()}}",
        showarrow=False, font_size=12,
    )  # fmt: skip


def _add_variant(
    plot: go.Figure, result: Result, look: dict[str, Look], points: Sequence[Point], xs: Sequence[float], hover: str
) -> None:
    """A strategy's or variant's curve, above the band of its seeds."""
    name, of = result.name, result.curve.of if result.curve else ""
    dash, hollow = ("solid", "") if of == "server" else ("dash", "-open")
    ends = [point.interval for point in points if point.interval is not None]
    add_curve(
        plot, xs, [point.score for point in points], customdata=[point.round for point in points],
        name=f"{result.short}, {TEST_DATA[of][0]}", role=f"s-{name}", legendgroup=name, hover=hover,
        interval=[*zip(*ends, strict=True)] if len(ends) == len(points) else None,
        line={"dash": dash}, marker={"symbol": look[name].symbol + hollow},
    )  # fmt: skip


def _caption(group: Group) -> str:
    target = ""
    if group.target and group.line is not None:
        mean = " (the mean of the seeds' targets)" if len(group.target.by_seed or ()) > 1 else ""
        target = f" Dotted: the target on {group.target.data}{mean}."
    return " ".join(data_note(group.variants)) + target + (_BAND if len(group.comparison.seeds) > 1 else "")


def _on_own_tests(group: Group) -> Figure:
    by = group.by
    key, title = "own-tests", f"{by.title} on the clients’ own test splits"
    plot = _empty_plot(group, "")
    several = len(group.comparison.seeds) > 1
    for result in group.variants:
        score, spread = result.figures.get(f"clients_{by.key}"), result.figures.get("clients_spread")
        if score is None:
            continue
        whisker = score.deviation if several else spread.mean if spread else None
        plot.add_bar(
            x=labels([result.short]), y=[score.mean], name=labels([result.short])[0],
            meta={"role": f"s-{result.name}"},
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
        [result.full_label, each.run.seed, *(line.value(one.key) for one in shown), transferred, line.seconds]
        for result in results.variants
        for each in result.runs
        for line, transferred in zip(each.metrics, each.transferred, strict=True)
    ]
    run = (Column(noun(results.comparison), left=True), Column("seed"))
    so_far = Column("transferred so far", "", "bytes", bytes_text)
    return Table("Every round of every run", (*run, *shown, so_far, *columns("seconds")), rows)


def style(names: Iterable[str]) -> str:
    """The page's own CSS, with the colours of strategies or variants."""
    look = looks(names)
    light = "".join(f"--s-{name}: {one.light}; " for name, one in look.items())
    dark = "".join(f"--s-{name}: {one.dark}; " for name, one in look.items())
    return (
        f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
        # plotly draws whiskers in one fixed grey.
        "path.yerror { stroke: var(--ink) !important; }\na { color: inherit; }\n.scroll + p { margin-top: 8px; }\n"
    )
