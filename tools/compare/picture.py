"""The look of each strategy or variant, and a comparison's picture: the score over transferred bytes, a line for each.

Pages and `figure_files.py` draw with plotly. This picture is drawn without it: plotly writes files only with a browser,
and its files do not follow the reader's light or dark setting, as a README's picture has to. Curves, intervals, units
and looks are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

from tepal.records.columns import bytes_text, score_text
from tepal.report.page import unit_of
from tepal.report.round_figures import TEST_DATA
from tepal.report.templates import render
from tepal.server_app.config import StrategyName
from tepal.tools.compare.comparison import Result, Results

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
TEMPLATES = Path(__file__).with_name("templates")

# --- looks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The look of a strategy: colours on a light and a dark background, plotly's name of its mark, the mark's path."""

    light: str
    dark: str
    symbol: str
    mark: str


# On a light and a dark background. Colour-blind readers can distinguish them (the first five after Okabe and Ito).
_COLOURS = (
    ("#5b5663", "#b9b2c2"),
    ("#0069a8", "#56b4e9"),
    ("#c04e00", "#f08f45"),
    ("#00795a", "#33c79c"),
    ("#a63d7f", "#e693c4"),
    ("#5a12b8", "#9a7dff"),
    ("#4a2a00", "#e8e04a"),
)

# For print without colour. Their number and that of the colours have no common divisor.
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
    """A look for each strategy or variant; it depends only on the name, so it is the same in every comparison.

    A name that is not a strategy of this version may get another look next to a second one of its kind. All are
    different, up to the number of looks.
    """
    names = sorted(strategies, key=lambda name: (STRATEGIES.index(name) if name in STRATEGIES else _LOOKS, name))
    taken: dict[str, int] = {}
    for name in names:
        number = (STRATEGIES.index(name) if name in STRATEGIES else crc32(name.encode())) % _LOOKS
        used = set(taken.values())
        while number in used and len(used) < _LOOKS:
            number = (number + 1) % _LOOKS
        taken[name] = number
    return {name: _look(number) for name, number in taken.items()}


def _look(number: int) -> Look:
    return Look(*_COLOURS[number % len(_COLOURS)], *_MARKS[number % len(_MARKS)])


# --- picture --------------------------------------------------------------------------------------------------------

_MANY = 8  # strategies; with more, lines are thin, marks few, bands omitted, and the legend has one line for each
_WIDTH, _WIDER = 760, 880  # pixels; the wider one for long lines in the legend
_LEFT, _RIGHT, _TOP = 58, 556, 46  # of the plot
_LEGEND = 580
_PLOT_HEIGHT, _NOTE, _BELOW = 274, 70, 104


def data_note(results: Sequence[Result]) -> tuple[str, ...]:
    """A note on the test data of the lines; each text is one line of the picture."""
    keys = [] if results[0].titled else results[0].values
    names = (f"After a name: its {', '.join(keys)}.",) if keys else ()
    own = [result.name for result in results if result.curve is not None and result.curve.of != "server"]
    if not own:
        return ("The result after each round, on the server's held-out data.", *names)
    held = "labels" if results[0].by.share else "examples"
    return (
        "Solid: the result on the server's held-out data. Dashed: on the clients' own test splits (the mean over",
        f"the clients). Those hold only their client's {held}, an easier task: not comparable with solid lines.",
        *names,
    )


@dataclass(frozen=True)
class _Axes:
    """Maps values to positions in the picture."""

    divisor: float
    unit: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    bottom: float

    def x(self, nbytes: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * nbytes / self.divisor / self.x_ticks[-1], 2)

    def y(self, score: float) -> float:
        return round(self.bottom - (self.bottom - _TOP) * min(max(score, 0), self.y_ticks[-1]) / self.y_ticks[-1], 2)


def draw(results: Results) -> str:
    """The score over transferred bytes as an SVG with a line per strategy; it follows the reader's colour scheme."""
    shown = results.variants
    many = len(shown) > _MANY
    legend, legend_bottom = _legend(shown, many)
    # The note below the plot is wider than the plot, so it begins below the legend.
    target, on = _target_of(results)
    axes = _axes(shown, max(_TOP + _PLOT_HEIGHT, legend_bottom - _NOTE + 12), target)
    if target is not None and not 0 <= target <= axes.y_ticks[-1]:
        target = None  # as of an accuracy plus a margin
    note = data_note(shown)
    spoken_target = [] if target is None else [f"Target: {target:.4f} on {on}."]
    return render(
        "picture.svg.j2",
        TEMPLATES,
        width=_width(results, legend, many),
        height=math.ceil(max(axes.bottom + _BELOW + 17 * (len(note) - 2), axes.bottom + _BELOW, legend_bottom)),
        title=f"{results.by.title} over transferred bytes, {results.comparison.task}",
        spoken=" ".join((*map(_spoken, shown), *note, *spoken_target)),
        target=target, target_on=on,
        many=many,
        looks=looks(result.name for result in shown),
        left=_LEFT, right=_RIGHT, top=_TOP, legend_left=_LEGEND, note_top=axes.bottom + _NOTE,
        axes=axes,
        measure=results.by.name,
        curves=[_curve(result, axes, many, number) for number, result in enumerate(shown) if result.over_bytes],
        legend=legend,
        note=note,
    )  # fmt: skip


def _width(results: Results, legend: Sequence[Mapping[str, Any]], many: bool) -> int:
    width = _WIDER if many or len(results.comparison.seeds) > 1 else _WIDTH
    if not results.comparison.grid:
        return width
    # Names with values are longer: 8 and 6.5 pixels are some more than their letters take.
    longest = max(8 * len(entry["shown"]) + 6.5 * len(entry["beside"]) for entry in legend)
    return max(width, math.ceil(_LEGEND + 60 + longest))


def _target_of(results: Results) -> tuple[float | None, str]:
    """The target and the data that it is a score on, if all sections have the same."""
    targets = {(group.line, group.target.data if group.target else "") for group in results.sections}
    return targets.pop() if len(targets) == 1 else (None, "")


def _axes(results: Sequence[Result], bottom: float, target: float | None) -> _Axes:
    points = [point for result in results for point in result.over_bytes]
    most = max((point.transferred or 0 for point in points), default=0)
    divisor, unit = unit_of(most)
    highest = max((point.interval[1] if point.interval else point.score for point in points), default=1)
    highest = max(highest, target or 0)
    share = all(result.by.share for result in results)
    return _Axes(divisor, unit, _ticks(most / divisor), _ticks(min(highest, 1) if share else highest), bottom)


_LEAST = 1e-300  # less than this cannot be divided into ticks


def _ticks(largest: float) -> list[float]:
    """About five round numbers from 0 to `largest` or slightly more."""
    if not largest > _LEAST:
        return [0, 1]
    power = 10 ** math.floor(math.log10(largest / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= largest * 0.9999)
    return [round(step * k, 12) for k in range(math.ceil(largest / step - 1e-9) + 1)]


def _classes(result: Result) -> str:
    return f"s-{result.name} of-{'server' if result.curve and result.curve.of == 'server' else 'clients'}"


def _curve(result: Result, axes: _Axes, many: bool, number: int) -> dict[str, Any]:
    """A line, its marks, and the outline of its interval, each a list of positions."""
    points = result.over_bytes
    xs = [axes.x(point.transferred or 0) for point in points]
    line = [(x, axes.y(point.score)) for x, point in zip(xs, points, strict=True)]
    # With many strategies, each has marks at other rounds than its neighbours, and at its end.
    every = max(1, len(line) // 4) if many else 1
    marks = [place for k, place in enumerate(line) if (k - number) % every == 0 or k == len(line) - 1]
    ends = [] if many else [(x, *point.interval) for x, point in zip(xs, points, strict=True) if point.interval]
    band = [(x, axes.y(high)) for x, _, high in ends] + [(x, axes.y(low)) for x, low, _ in reversed(ends)]
    return {"classes": _classes(result), "mark": f"s-{result.name}", "line": line, "marks": marks, "band": band}


def _legend(results: Sequence[Result], many: bool) -> tuple[list[dict[str, Any]], float]:
    """The entries of the legend right of the plot, and the position of its lower end."""
    entries, down = [], _TOP + 8.0
    for result in results:
        small, drawn = _small_print(result), bool(result.over_bytes)
        below = [] if many else [(down + 16 * k + 4, text) for k, text in enumerate(small, start=1)]
        entries.append(
            {"name": result.name, "shown": result.short, "classes": _classes(result) if drawn else "", "y": down,
             "below": below, "beside": small[0] if many else ""}
        )  # fmt: skip
        down += 19 if many else 26 + 16 * len(small)
    return entries, down


def _small_print(result: Result) -> list[str]:
    if result.curve is None or not result.over_bytes:
        small = ["nothing measured"]
    else:
        end = result.over_bytes[-1]
        deviation = "" if end.deviation is None else f" ±{end.deviation:.4f}"
        small = [f"{score_text(end.score)}{deviation}, {bytes_text(end.transferred)}"]
        small += [TEST_DATA[result.curve.of][0]] if result.curve.of != "server" else []
    return small + ([result.outcome] if result.outcome not in ("finished", "not run") else [])


def _spoken(result: Result) -> str:
    """The end of a line, for readers who do not see it."""
    if result.curve is None or not result.over_bytes:
        return f"{result.label}: nothing measured."
    end = result.over_bytes[-1]
    data = TEST_DATA[result.curve.of][0]
    return f"{result.label}: {score_text(end.score)} on the {data} after {bytes_text(end.transferred)}."
