"""How strategies look, and a comparison as an SVG picture: the score against bytes moved, one line a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import get_args
from zlib import crc32

from tepal.report.page import unit_of
from tepal.report.round_figures import TEST_DATA
from tepal.report.terminal import bytes_text, score_text
from tepal.server_app.config import StrategyName
from tepal.tools.compare.comparison import Curve, Point, Result, Results

STRATEGIES: tuple[str, ...] = get_args(StrategyName)

# --- looks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a strategy is drawn: colour on light and on dark ground, plotly's name of its mark, the mark as a path."""

    light: str
    dark: str
    symbol: str
    mark: str


# On light and on dark ground. Told apart by the colour-blind too (the first five after Okabe and Ito).
_COLOURS = (
    ("#5b5663", "#b9b2c2"),
    ("#0069a8", "#56b4e9"),
    ("#c04e00", "#f08f45"),
    ("#00795a", "#33c79c"),
    ("#a63d7f", "#e693c4"),
    ("#5a12b8", "#9a7dff"),
    ("#4a2a00", "#e8e04a"),
)

# Told apart where there is no colour. Their number and that of the colours have no common divisor.
_MARKS = (
    ("circle", "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z"),
    ("square", "M-3-3h6v6h-6z"),
    ("diamond", "M0-4.3L4.3 0L0 4.3L-4.3 0z"),
    ("triangle-up", "M0-4.2L4.2 3.2H-4.2z"),
    ("triangle-down", "M0 4.2L4.2-3.2H-4.2z"),
    ("cross", "M-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z"),
    ("x", "M-4-2.2L-2.2-4L0-1.8L2.2-4L4-2.2L1.8 0L4 2.2L2.2 4L0 1.8L-2.2 4L-4 2.2L-1.8 0z"),
    (
        "star",
        "M0-4.6L1.12-1.54L4.37-1.42L1.81.59L2.7 3.72L0 1.9L-2.7 3.72L-1.81.59L-4.37-1.42L-1.12-1.54z",
    ),
)
_LOOKS = len(_COLOURS) * len(_MARKS)


def looks(strategies: Iterable[str]) -> dict[str, Look]:
    """A look for each name, all different, and the same in every comparison: it follows from the strategy's name.

    (A name that is no strategy of this version may give way to another one of its kind.)
    """
    names = sorted(strategies, key=lambda name: (STRATEGIES.index(name) if name in STRATEGIES else _LOOKS, name))
    taken: dict[int, str] = {}
    for name in names:
        number = STRATEGIES.index(name) if name in STRATEGIES else crc32(name.encode())
        while number % _LOOKS in taken and len(taken) < _LOOKS:
            number += 1
        taken[number % _LOOKS] = name
    return {name: _look(number) for number, name in taken.items()}


def _look(number: int) -> Look:
    return Look(*_COLOURS[number % len(_COLOURS)], *_MARKS[number % len(_MARKS)])


# --- picture --------------------------------------------------------------------------------------------------------

_MANY = 8  # strategies; with more, lines are thin, marks few, bands left out, and the legend has one line for each
_WIDTH, _WIDER = 760, 880  # with more in a line of the legend
_LEFT, _RIGHT, _TOP = 58, 556, 46  # of the plot
_LEGEND = 580
_PLOT_HEIGHT, _NOTE, _BELOW = 274, 70, 104


def data_note(results: Sequence[Result]) -> tuple[str, ...]:
    """Whose data the lines are of; in the picture a text is one line."""
    own = [result.strategy for result in results if result.curve is not None and result.curve.of != "server"]
    if not own:
        return ("The result after each round, on the server's held-out data.",)
    held = "labels" if results[0].by.share else "examples"
    return (
        "Solid: the result on the server's held-out data. Dashed: on the clients' own test splits (the mean over",
        f"the clients). Those hold only their client's {held}, an easier task: not comparable with solid lines.",
    )


@dataclass(frozen=True)
class _Axes:
    """Where values lie in the picture."""

    divisor: float
    unit: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    bottom: float

    def x(self, moved: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * moved / self.divisor / self.x_ticks[-1], 2)

    def y(self, score: float) -> float:
        return round(self.bottom - (self.bottom - _TOP) * score / self.y_ticks[-1], 2)

    def at(self, point: Point) -> tuple[float, float]:
        assert point.moved is not None
        return self.x(point.moved), self.y(point.score)


def draw(results: Results) -> str:
    """The score against bytes moved as an SVG, one line a strategy; it follows the reader's light or dark setting."""
    shown = results.strategies
    look = looks(result.strategy for result in shown)
    many = len(shown) > _MANY
    legend, legend_bottom = _legend(shown, many)
    # What is said below the plot is wider than the plot, and begins where the legend has ended.
    axes = _axes(shown, max(_TOP + _PLOT_HEIGHT, legend_bottom - _NOTE + 12))
    curves = [_curve_svg(result, axes, many, number) for number, result in enumerate(shown)]
    note = data_note(shown)
    return Template(_PICTURE).substitute(
        width=_WIDER if many or len(results.comparison.seeds) > 1 else _WIDTH,
        height=math.ceil(max(axes.bottom + _BELOW, legend_bottom)),
        title=f"{results.by.title} against bytes moved, {escape(results.comparison.task)}",
        spoken=escape(" ".join((*map(_spoken, shown), *note))),
        stroke="1.3" if many else "2",
        colours="".join(f".s-{escape(name)}{{color:{one.light}}}" for name, one in look.items()),
        dark="".join(f".s-{escape(name)}{{color:{one.dark}}}" for name, one in look.items()),
        marks="".join(f'<path id="s-{escape(name)}" d="{one.mark}"/>' for name, one in look.items()),
        left=_LEFT,
        middle=(_LEFT + _RIGHT) / 2,
        centre=(_TOP + axes.bottom) / 2,
        below=axes.bottom + 42,
        unit=axes.unit,
        measure=results.by.name,
        drawn="\n".join([*_grid(axes), *curves, *legend]),
        note="\n".join(
            f'<text x="{_LEFT}" y="{axes.bottom + _NOTE + 17 * line}">{escape(said)}</text>'
            for line, said in enumerate(note)
        ),
    )


def _axes(results: Sequence[Result], bottom: float) -> _Axes:
    points = [point for result in results if result.curve for point in result.curve.over_bytes]
    most = max((point.moved or 0 for point in points), default=0)
    divisor, unit = unit_of(most)
    highest = max((point.score + (point.deviation or 0) for point in points), default=1)
    share = all(result.by.share for result in results)
    return _Axes(divisor, unit, _ticks(most / divisor), _ticks(min(highest, 1) if share else highest), bottom)


def _ticks(largest: float) -> list[float]:
    """Some five round numbers from 0 to `largest` or a little more."""
    if not largest > 0:
        return [0, 1]
    power = 10 ** math.floor(math.log10(largest / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= largest * 0.9999)
    return [round(step * k, 12) for k in range(math.ceil(largest / step - 1e-9) + 1)]


def _grid(axes: _Axes) -> list[str]:
    drawn = []
    for tick in axes.x_ticks:
        x = axes.x(tick * axes.divisor)
        drawn.append(f'<text class="tick" x="{x}" y="{axes.bottom + 20}" text-anchor="middle">{tick:g}</text>')
        drawn.append(f'<path class="grid" d="M{x} {_TOP}V{axes.bottom}"/>')
    for tick in axes.y_ticks:
        y = axes.y(tick)
        drawn.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        drawn.append(f'<path class="grid" d="M{_LEFT} {y}H{_RIGHT}"/>')
    return drawn


def _classes(strategy: str, curve: Curve) -> str:
    return f"s-{escape(strategy)} of-{'server' if curve.of == 'server' else 'clients'}"


def _curve_svg(result: Result, axes: _Axes, many: bool, number: int) -> str:
    points = result.curve.over_bytes if result.curve else ()
    if not points or result.curve is None:
        return ""
    at = [axes.at(point) for point in points]
    # Of many strategies each has marks at other rounds than its neighbours, and at its end.
    every = max(1, len(at) // 4) if many else 1
    marked = [one for k, one in enumerate(at) if (k - number) % every == 0 or k == len(at) - 1]
    marks = "".join(f'<use href="#s-{escape(result.strategy)}" x="{x}" y="{y}"/>' for x, y in marked)
    band = "" if many else _band(points, axes)
    line = " ".join(f"{x},{y}" for x, y in at)
    return f'<g class="curve {_classes(result.strategy, result.curve)}">{band}<polyline points="{line}"/>{marks}</g>'


def _band(points: Sequence[Point], axes: _Axes) -> str:
    """The standard deviation over the seeds around a line."""
    if any(point.deviation is None for point in points):
        return ""
    edges = [
        [(axes.x(point.moved or 0), axes.y(min(axes.y_ticks[-1], max(0, point.score + sign * (point.deviation or 0)))))
         for point in points]
        for sign in (1, -1)
    ]  # fmt: skip
    outline = " ".join(f"{x},{y}" for x, y in (*edges[0], *reversed(edges[1])))
    return f'<polygon points="{outline}"/>'


def _legend(results: Sequence[Result], many: bool) -> tuple[list[str], float]:
    """The legend beside the plot, and how far down it reaches."""
    lines, down = [], _TOP + 8.0
    for result in results:
        curve, x = result.curve, _LEGEND + 42
        small = _small_print(result)
        beside = f'<tspan class="small" dx="6">{escape(small[0])}</tspan>' if many else ""
        lines.append(f'<text class="name" x="{x}" y="{down + 4}">{escape(result.strategy)}{beside}</text>')
        if curve and curve.over_bytes:
            lines.append(f'<g class="{_classes(result.strategy, curve)}"><path d="M{_LEGEND} {down}h32"/>')
            lines.append(f'<use href="#s-{escape(result.strategy)}" x="{_LEGEND + 16}" y="{down}"/></g>')
        for text in () if many else small:
            down += 16
            lines.append(f'<text x="{x}" y="{down + 4}">{escape(text)}</text>')
        down += 19 if many else 26
    return lines, down


def _small_print(result: Result) -> list[str]:
    end = _end(result)
    if end is None:
        small = ["nothing measured"]
    else:
        deviation = "" if end.deviation is None else f" ±{end.deviation:.4f}"
        small = [f"{score_text(end.score)}{deviation}, {bytes_text(end.moved)}"]
        assert result.curve is not None
        small += [TEST_DATA[result.curve.of][0]] if result.curve.of != "server" else []
    return small + ([result.outcome] if result.outcome not in ("finished", "not run") else [])


def _end(result: Result) -> Point | None:
    points = result.curve.over_bytes if result.curve else ()
    return points[-1] if points else None


def _spoken(result: Result) -> str:
    """A line's end, for those who do not see it."""
    end = _end(result)
    if end is None or result.curve is None:
        return f"{result.strategy}: nothing measured."
    data = TEST_DATA[result.curve.of][0]
    return f"{result.strategy}: {score_text(end.score)} on the {data} after {bytes_text(end.moved)}."


_PICTURE = """<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" width="$width" height="$height" role="img" \
aria-labelledby="title desc">
<title id="title">$title</title>
<desc id="desc">$spoken</desc>
<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#5f5a66}
.head{font-size:15px;font-weight:600;fill:#1d1b20}.name{font-size:13px;font-weight:600;fill:#1d1b20}
.small{font-size:12px;font-weight:400;fill:#5f5a66}
.ground{fill:#fff}.grid{stroke:#e4e0e6;stroke-width:1}
polyline,g>path{fill:none;stroke:currentColor;stroke-width:$stroke;stroke-linejoin:round}
use{fill:currentColor;stroke:currentColor}polygon{fill:currentColor;opacity:.13}
.of-clients polyline,.of-clients>path{stroke-dasharray:6 4}.of-clients use{fill:#fff;stroke-width:1.5}
$colours
@media (prefers-color-scheme:dark){
text,.small{fill:#aba4b4}.head,.name{fill:#efecf2}.ground{fill:#1f1c24}.grid{stroke:#37323e}
.of-clients use{fill:#1f1c24}
$dark
}
</style>
<defs>$marks</defs>
<rect class="ground" width="$width" height="$height" rx="8"/>
<text class="head" x="$left" y="26">$title</text>
$drawn
<text x="$middle" y="$below" text-anchor="middle">$unit moved, all clients, both ways</text>
<text transform="translate(16 $centre) rotate(-90)" text-anchor="middle">$measure</text>
$note
</svg>
"""
