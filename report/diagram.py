"""The block diagram: the parts of a model, and what a round trains and transfers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from tepal.records.columns import bytes_text
from tepal.records.live import StoredSegment
from tepal.report.heatmaps import ArraysOfRounds
from tepal.report.templates import render
from tepal.strategies.rounds.travel import OTHER

WAYS = {"travel_down": ("↓", "sent to"), "travel_up": ("↑", "returned by")}
TRAINS = "travel_trains"
_MOST_ROWS, _MOST_KINDS = 300, 20
_CLOSE = 5e-4  # shares that differ by less have the same text


class _ShownSegment(NamedTuple):
    """A segment as the diagram shows it; shares of the clients as text, "" for none."""

    bytes: str
    trained: str
    ways: tuple[tuple[str, str, str], ...]


def diagram_html(segments: Sequence[StoredSegment], shares: Mapping[str, Sequence[float]], caption: str) -> Markup:
    """A table with a row for each stage of the model and a column for each kind of parts.

    Args:
        segments: The model's segments.
        shares: `travel_down`, `travel_up`, `travel_trains`: how often each part was transferred or trained, per client
            (`RoundReport.shares`).
        caption: names the round.
    """
    kinds = sorted({each["kind"] for each in segments}, key=lambda kind: (kind == OTHER, kind))
    stages = []
    for stage, members in groupby(enumerate(segments), key=lambda member: member[1]["stage"]):
        of_kind = {each["kind"]: _shown(each["bytes"], {key: shares[key][k] for key in shares}) for k, each in members}
        stages.append((stage, [of_kind.get(kind) for kind in kinds[:_MOST_KINDS]]))
    rows = _together(stages)
    if len(rows) > _MOST_ROWS:
        caption += f" The first {_MOST_ROWS} of {len(rows):,} parts."
    kinds = kinds[:_MOST_KINDS] if len(kinds) > 1 else [""]
    return render("diagram.html", caption=caption, kinds=kinds, rows=rows[:_MOST_ROWS])


def last_diagram(records: ArraysOfRounds, segments: Sequence[StoredSegment]) -> Markup:
    """The block diagram of the last round that is known; "" for a model in one part."""
    known = [(number, record) for number, record in records if len(record.get("travel_up", ())) == len(segments) > 1]
    if not known:
        return Markup()
    number, record = known[-1]
    shares = {key: record[key].tolist() for key in ("travel_trains", "travel_down", "travel_up")}
    caption = (
        f"Round {number}, the last: share of its training clients that trained each part and returned it, and of all "
        "its clients that were sent it."
    )
    return diagram_html(segments, shares, caption)


def _shown(nbytes: int, shares: Mapping[str, float]) -> _ShownSegment:
    ways = tuple((*WAYS[key], _of(shares[key])) for key in WAYS if key in shares)
    return _ShownSegment(bytes_text(nbytes), _of(shares.get(TRAINS, 0.0)), ways)


def _of(share: float) -> str:
    """A share of the clients as text, "" for none; it is more than 1 if some received the part twice."""
    if share < _CLOSE:
        return ""
    if abs(share - 1) < _CLOSE:
        return "all"
    return f"{share:.0%}" if share < 1 else f"all, × {share:.3g}"


def _together(stages: Sequence[tuple[str, list[_ShownSegment | None]]]) -> list[tuple[str, list[_ShownSegment | None]]]:
    """Join consecutive layers that look alike into one row."""
    rows = []
    for _, alike in groupby(stages, key=lambda stage: (stage[0].split(" ")[0], stage[1])):
        members = list(alike)
        first, last = members[0][0], members[-1][0]
        name = first if len(members) == 1 else f"layers {first.split(' ')[-1]} to {last.split(' ')[-1]}, each"
        rows.append((name, members[0][1]))
    return rows


DIAGRAM_STYLE = """
.diagram table { width: auto; min-width: min(100%, 34rem); }
.diagram caption { text-align: left; padding: 12px 12px 4px; color: var(--soft); }
.diagram tbody td { border-left: 6px solid var(--rule); white-space: normal; min-width: 8rem; }
.diagram tbody td.trained { border-left-color: var(--main); }
.diagram tbody td:empty { border-left-color: transparent; }
.diagram tbody th { position: static; box-shadow: none; border-top: 1px solid var(--grid); vertical-align: top; }
.diagram .way { display: inline-block; margin-right: 12px; white-space: nowrap; }
.diagram .word { color: var(--soft); }
.diagram .trained .word { color: var(--ink); }
.diagram .none { color: var(--soft); }
@media (max-width: 600px) {
  .diagram tbody td { min-width: 0; }
  .diagram tbody th { white-space: normal; }
  .diagram .said { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
}
"""
