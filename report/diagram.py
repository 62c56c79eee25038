"""The block diagram: the parts of a model, and what a round trains and moves of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from tepal.report.method_figures import Records
from tepal.report.terminal import bytes_text
from tepal.strategies.rounds.travel import OTHER

WAYS = {"travel_down": ("↓", "sent to"), "travel_up": ("↑", "returned by")}
TRAINS = "travel_trains"
_CLOSE = 5e-4  # shares that differ by less are written alike


def diagram_html(cells: Sequence[Mapping[str, Any]], shares: Mapping[str, Sequence[float]], caption: str) -> str:
    """A table with a row for each stage of the model and a column for each kind of parts.

    Args:
        cells: as `blocks.json` has them: stage, kind, bytes.
        shares: `travel_down`, `travel_up`, `travel_trains`: how often each cell went, a client that was asked
            (`Travel.shares`).
        caption: what the table tells of.
    """
    kinds = sorted({cell["kind"] for cell in cells}, key=lambda kind: (kind == OTHER, kind))
    stages = []
    for stage, members in groupby(enumerate(cells), key=lambda member: member[1]["stage"]):
        of_kind = {cell["kind"]: _cell(cell["bytes"], {key: shares[key][k] for key in shares}) for k, cell in members}
        stages.append((stage, [of_kind.get(kind, "<td></td>") for kind in kinds]))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(columns)}</tr>' for name, columns in _together(stages)
    )
    head = "".join(f'<th scope="col">{escape(kind if len(kinds) > 1 else "")}</th>' for kind in kinds)
    return (
        f'<div class="scroll diagram" role="region" tabindex="0" aria-label="Block diagram">'
        f"<table><caption>{escape(caption)}</caption>"
        f'<thead><tr><th scope="col">part</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def last_diagram(records: Records, cells: Sequence[Mapping[str, Any]]) -> str:
    """The block diagram of the last round that is known; "" of a model in one part."""
    told = [(number, record) for number, record in records if len(record.get("travel_up", ())) == len(cells) > 1]
    if not told:
        return ""
    number, record = told[-1]
    shares = {key: record[key].tolist() for key in ("travel_trains", "travel_down", "travel_up")}
    return diagram_html(cells, shares, f"In round {number}, the last: what clients trained, were sent and returned.")


def _cell(nbytes: int, shares: Mapping[str, float]) -> str:
    trained = shares.get(TRAINS, 0.0)
    kind, word = ("still", "not trained") if trained < _CLOSE else ("trained", f"trained by {_of(trained)}")
    ways = "".join(
        f'<span class="way{" none" if shares[key] < _CLOSE else ""}">'
        f'<span aria-hidden="true">{arrow}</span> <span class="said">{said}</span> {_of(shares[key])}</span>'
        for key, (arrow, said) in WAYS.items()
        if key in shares
    )
    return f'<td class="{kind}"><b>{bytes_text(nbytes)}</b> <span class="word">{word}</span><div>{ways}</div></td>'


def _of(share: float) -> str:
    """A share of the clients in a word; more than 1 where some got it twice."""
    if share < _CLOSE:
        return "none"
    if abs(share - 1) < _CLOSE:
        return "all"
    return f"{share:.0%}" if share < 1 else f"all, × {share:.3g}"


def _together(stages: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
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
