"""The picture of a comparison whose sections ask questions: a panel of horizontal bars for each, above its answer.

Like the other picture it is drawn without plotly and follows the reader's light or dark setting. It is narrow and its
letters are large, so that it can be read on a phone; it is not stretched on a wide screen. A name and its value stand
left and right of their bar or, where one of them is long, above it. The baseline's bars are grey.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tepal.host.text import visible
from tepal.records.columns import bytes_text, score_text
from tepal.report.templates import render
from tepal.tools.compare.answers import answer, compared_in, share_text, threshold
from tepal.tools.compare.comparison import Group, Result, Results, Statistic
from tepal.tools.compare.doubt import DOUBT_COLUMNS, FLAGGED
from tepal.tools.compare.picture import TEMPLATES, draw
from tepal.tools.compare.sections import BYTES, DOUBT, OWN_TESTS
from tepal.tools.compare.tables import about_seeds

WIDTH = 520  # pixels
_MARGIN = 20
FULL = WIDTH - 2 * _MARGIN
"""The length of a bar at the end of its scale, in pixels, below its name and value."""
BESIDE = 200
"""The same between its name and its value, for which so many letters have room:"""
_SHORT_NAME, _SHORT_VALUE = 19, 9
_TEXT, _HEAD = 16, 19  # pixels, sizes of letters
_LINE, _BAR = 22, 10  # pixels, heights
_LETTER = 0.56  # mean width of a letter, in sizes: some more than usual fonts take


def picture_of(results: Results) -> str:
    """The picture of a comparison: bars if its sections ask questions, otherwise curves over bytes."""
    return draw_bars(results) if results.comparison.asks else draw(results)


# --- what the bars show ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Bars of one figure: its heading, how a value is written, and the value at the scale's end, if that is fixed."""

    key: str
    heading: str
    write: Callable[[float], str]
    end: float | None = None
    missing: str = "not measured"


def scales_of(group: Group) -> Sequence[Scale]:
    """The figures of a section that its panel shows."""
    by = group.by
    end = 1.0 if by.share else None
    match group.section.question:
        case question if question == BYTES:
            until = f" until {threshold(group)}" if group.target else ""
            return (Scale("bytes_to_target", f"Bytes{until}", bytes_text, missing="does not reach it"),)
        case question if question == OWN_TESTS:
            return (Scale(f"clients_{by.key}", f"{by.title} on the clients' own tests", score_text, end),)
        case question if question == DOUBT:
            return tuple(_doubt_scale(key, heading) for key, heading in _DOUBT_HEADINGS.items())
    return (Scale(f"server_{by.key}", f"{by.title} on the server's data", score_text, end),)


_DOUBT_HEADINGS = {
    column.key: (
        f"Foreign images flagged: {column.key.removeprefix('flagged_')} (higher is better)"
        if column.key in FLAGGED
        else f"{column.heading[0].upper()}{column.heading[1:]} (lower is better)"
    )
    for column in DOUBT_COLUMNS
}


def _doubt_scale(key: str, heading: str) -> Scale:
    return Scale(key, heading, share_text, 1.0) if key in FLAGGED else Scale(key, heading, score_text)


def length(value: float, end: float, full: float = FULL) -> float:
    """The length of the bar of a value, in pixels; scales are linear and begin at 0."""
    return round(full * min(max(value, 0.0), end) / end, 2) if end > 0 else 0.0


# --- the picture ----------------------------------------------------------------------------------------------------


@dataclass
class _Page:
    """Elements of the picture from top to bottom: `down` is where the next one begins."""

    down: float = 0.0
    texts: list[dict[str, Any]] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)

    def text(self, text: str, kind: str = "", size: int = _TEXT) -> None:
        for line in _wrapped(text, size):
            self.down += _LINE
            self.texts.append({"x": _MARGIN, "y": self.down, "kind": kind, "text": line, "end": False})

    def row(self, name: str, value: str, pixels: float | None, kind: str) -> None:
        """A name, its bar and its value in one line."""
        self.down += _LINE + 2
        self.texts.append({"x": _MARGIN, "y": self.down, "kind": "name", "text": name, "end": False})
        self.texts.append({"x": WIDTH - _MARGIN, "y": self.down, "kind": "value", "text": value, "end": True})
        left, top = _MARGIN + math.ceil(_SHORT_NAME * _LETTER * _TEXT) + 8, self.down - _BAR
        self.bars.append({"kind": kind, "x": left, "y": top, "full": BESIDE, "length": pixels, "height": _BAR})

    def bar(self, name: str, value: str, pixels: float | None, kind: str) -> None:
        """A name and a value, the value below the name where they do not fit on one line, and the bar below them."""
        self.down += _LINE
        self.texts.append({"x": _MARGIN, "y": self.down, "kind": "name", "text": name, "end": False})
        if (len(name) + len(value) + 2) * _LETTER * _TEXT > FULL:
            self.down += _LINE
        self.texts.append({"x": WIDTH - _MARGIN, "y": self.down, "kind": "value", "text": value, "end": True})
        self.down += 6
        self.bars.append({"kind": kind, "x": _MARGIN, "y": self.down, "full": FULL, "length": pixels, "height": _BAR})
        self.down += _BAR + 4


def draw_bars(results: Results) -> str:
    """The picture as an SVG; it follows the reader's colour scheme."""
    page, spoken = _Page(down=10.0), []
    title = f"{results.comparison.task}: variants compared"
    page.text(title, "task")
    for group in results.sections:
        spoken += _panel(page, group)
    page.down += 14
    page.text(about_seeds(results))
    return render(
        "bars.svg.j2",
        TEMPLATES,
        width=WIDTH,
        height=math.ceil(page.down + _MARGIN),
        title=title,
        spoken=" ".join(spoken),
        text_size=_TEXT,
        head_size=_HEAD,
        texts=page.texts,
        bars=page.bars,
    )


def _panel(page: _Page, group: Group) -> list[str]:
    """Draw the panel of a section. Returns what is read to those who do not see it."""
    page.down += 24
    page.text(group.section.title, "head", _HEAD)
    spoken = [f"{group.section.title}."]
    for scale in scales_of(group):
        known = {result.name: figure for result in group.variants if (figure := result.figures.get(scale.key))}
        if not known and group.section.question == DOUBT:
            continue  # the answer says that it was not measured
        page.down += 4
        page.text(scale.heading)
        end = scale.end or max((figure.mean for figure in known.values()), default=0.0)
        rows = [(result, known.get(result.name), _shown(result, known, scale, group)) for result in group.variants]
        short = all(len(one.short) <= _SHORT_NAME and len(value) <= _SHORT_VALUE for one, _, value in rows)
        for result, figure, value in rows:
            kind = "base" if result is group.baseline and group.section.question else "other"
            pixels = None if figure is None else length(figure.mean, end, BESIDE if short else FULL)
            (page.row if short else page.bar)(result.short, value, pixels, kind)
        values = ", ".join(f"{result.short} {scale.write(figure.mean)}" for result, figure, _ in rows if figure)
        spoken.append(f"{scale.heading}: {values or 'not measured'}.")
    if said := answer(group):
        page.down += 6
        page.text(said, "answer")
        spoken.append(said)
    return spoken


def _shown(result: Result, known: Mapping[str, Statistic], scale: Scale, group: Group) -> str:
    """What stands at the bar of a result: its value, or why it has none."""
    if result.name in known:
        return _value(known[result.name], scale, result, group)
    if scale.key == "bytes_to_target" and result.figures.get("rounds_to_target"):
        return "bytes not known"
    if not result.counted:
        return "no result yet"
    return (scale.key == "bytes_to_target" and result.lacks) or scale.missing


def _value(figure: Statistic, scale: Scale, result: Result, group: Group) -> str:
    """A figure as text, with its deviation over the seeds, and whether its difference to the baseline is undecided."""
    deviation = "" if figure.deviation is None else f" ± {scale.write(figure.deviation)}"
    counted = result.aimed if scale.key == "bytes_to_target" else len(result.counted)
    some = "" if figure.runs == counted else f" ({figure.runs} of {counted})"
    compared = next((one for one in compared_in(group) if one.key == scale.key), None)
    found = compared.of(result, group) if compared else None
    undecided = ", undecided" if found and found.undecided else ""
    return f"{scale.write(figure.mean)}{deviation}{some}{undecided}"


def _wrapped(text: str, size: int) -> list[str]:
    """The lines of a text that fit the picture."""
    return textwrap.wrap(visible(text), int(FULL / (size * _LETTER)), break_on_hyphens=False) or [""]
