"""The block diagram: the parts of a model, and what a round trains and transfers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from tepal.records.columns import bytes_text
from tepal.report.method_figures import Records
from tepal.report.templates import render
from tepal.strategies.rounds.travel import OTHER

WAYS = {"travel_down": ("↓", "sent to"), "travel_up": ("↑", "returned by")}
TRAINS = "travel_trains"
_CLOSE = 5e-4  # shares that differ by less are written alike


class _Cell(NamedTuple):
    """A part as the diagram shows it; shares of the clients in words, "" of none."""

    bytes: str
    trained: str
    ways: tuple[tuple[str, str, str], ...]


def diagram_html(cells: Sequence[Mapping[str, Any]], shares: Mapping[str, Sequence[float]], caption: str) -> Markup:
    """A table with a row for each stage of the model and a column for each kind of parts.

    Args:
        cells: as `blocks.json` has them: stage, kind, bytes.
        shares: `travel_down`, `travel_up`, `travel_trains`: how often each cell was transferred or trained, per client
            that was asked (`Travel.shares`).
        caption: which round it shows.
    """
    kinds = sorted({cell["kind"] for cell in cells}, key=lambda kind: (kind == OTHER, kind))
    stages = []
    for stage, members in groupby(enumerate(cells), key=lambda member: member[1]["stage"]):
        of_kind = {cell["kind"]: _cell(cell["bytes"], {key: shares[key][k] for key in shares}) for k, cell in members}
        stages.append((stage, [of_kind.get(kind) for kind in kinds]))
    return render("diagram.html", caption=caption, kinds=kinds if len(kinds) > 1 else [""], rows=_together(stages))


def last_diagram(records: Records, cells: Sequence[Mapping[str, Any]]) -> Markup:
    """The block diagram of the last round that is known; "" of a model in one part."""
    told = [(number, record) for number, record in records if len(record.get("travel_up", ())) == len(cells) > 1]
    if not told:
        return Markup()
    number, record = told[-1]
    shares = {key: record[key].tolist() for key in ("travel_trains", "travel_down", "travel_up")}
    caption = f"Round {number}, the last: share of its clients that trained each part, were sent it and returned it."
    return diagram_html(cells, shares, caption)


def _cell(nbytes: int, shares: Mapping[str, float]) -> _Cell:
    ways = tuple((*WAYS[key], _of(shares[key])) for key in WAYS if key in shares)
    return _Cell(bytes_text(nbytes), _of(shares.get(TRAINS, 0.0)), ways)


def _of(share: float) -> str:
    """A share of the clients in words, "" of none; more than 1 where some got it twice."""
    if share < _CLOSE:
        return ""
    if abs(share - 1) < _CLOSE:
        return "all"
    return f"{share:.0%}" if share < 1 else f"all, × {share:.3g}"


def _together(stages: Sequence[tuple[str, list[_Cell | None]]]) -> list[tuple[str, list[_Cell | None]]]:
    """Layers one after another that look alike, as one row."""
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
