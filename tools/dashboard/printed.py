"""Runs and comparisons as `tepal runs` and `tepal show` print them in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tepal.host.text import LONGEST_NAME, visible
from tepal.records.columns import UNKNOWN, bytes_text, score_text
from tepal.records.round_record import COLUMNS, INCIDENTS, WIRE, RoundRecord, columns
from tepal.records.run_directory import RMSE
from tepal.report.round_tables import mixed
from tepal.report.table import MISSING
from tepal.tools.compare.comparison import Results
from tepal.tools.compare.tables import comparison_table
from tepal.tools.dashboard.views import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    UNREADABLE,
    ComparisonView,
    RunView,
    Troubles,
    files_of,
    own_settings,
    troubles,
)
from tepal.tools.terminal import final_table, shown

_STYLES = {FINISHED: "green", RUNNING: "cyan", FAILED: "red", INTERRUPTED: "yellow", UNREADABLE: "red"}
_MOST_ROUNDS = 20  # lines of the table of rounds
_SHOWN = columns(
    "round", "phase", "clients_asked", "clients_replied", "refused", "lost", "accuracy", "accuracy_of", "rmse",
    "loss", "calibration_error", "flagged_letters", "flagged_noise", "flagged_covered", "train_loss", "bytes_down",
    "bytes_up", *WIRE, "seconds",
)  # fmt: skip
_LONGEST = 500  # characters of a cell
_WIDEST = 60  # of a cell that is not folded, so that the columns next to it have room
_PIPED_WIDTH = 240  # columns of a table that no terminal shows


def runs_table(facts: Sequence[Mapping[str, Any]]) -> Table:
    """The table of runs and comparisons, from their facts."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "strategy", "model", "dataset"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for heading in ("rounds", "state", "score", "bytes", "started (UTC)"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("state", "started (UTC)") else "right")
    for one in facts:
        score = one.get("score")
        done = (
            f"{one.get('runs', 0)}/{one['runs_asked']} runs"
            if "runs_asked" in one
            else f"{_or_unknown(one.get('rounds'))}/{_or_unknown(one.get('rounds_asked'))}"
        )
        table.add_row(
            shown(one["name"], LONGEST_NAME),
            *(shown(one.get(key) or "–", LONGEST_NAME) for key in ("strategy", "model", "dataset")),
            "–" if one["state"] == UNREADABLE else done,
            Text(one["state"], style=_STYLES[one["state"]]),
            "–" if score is None else f"{'RMSE ' if one['measure'] == RMSE.key else ''}{score_text(score)}",
            "–" if one.get("bytes") is None else bytes_text(one["bytes"]),
            one["started"][:16].replace("T", " "),
        )
    return table


def reasons(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each run that failed or cannot be read, with the reason."""
    return [visible(f"{one['name']}: {one['reason']}") for one in facts if one.get("reason")]


def run_page(view: RunView, usual: Mapping[str, Any], *, all_rounds: bool = False) -> Group:
    """A run for a terminal: its facts, settings, rounds, clients, bytes and files."""
    facts = view.facts()
    state = Text(facts["state"], style=_STYLES[facts["state"]])
    if facts["reason"]:
        state.append(f": {visible(facts['reason'])}", style="default")
    head = _pairs(
        {
            "run": shown(facts["path"]),
            "state": state,
            "rounds": f"{_or_unknown(facts['rounds'])} of {_or_unknown(facts['rounds_asked'])}",
            "started": f"{facts['started'][:19].replace('T', ' ')} UTC",
        }
    )
    own = own_settings(view.config, usual)
    parts: list[RenderableType] = [head, _heading("Settings that differ from the defaults")]
    parts.append(_pairs({key: repr(value) for key, value in own.items()}) if own else Text("  none"))
    if view.metrics:
        parts += [_heading("Rounds"), _rounds_table(view.metrics, all_rounds)]
    if troubled := troubles(view.metrics):
        parts += [_heading("Clients with incidents"), _troubles_table(troubled)]
    parts += [_heading("Bytes and scores"), final_table(view.summary, view.metrics)]
    files = {name: bytes_text(size) for name, size in files_of(view.path).items()}
    parts += [_heading("Files"), _pairs(files)]
    return Group(*parts)


def comparison_summary_page(view: ComparisonView, results: Results) -> Group:
    """A comparison for a terminal."""
    facts = view.facts()
    state = Text(facts["state"], style=_STYLES[facts["state"]])
    runs = f"{facts['runs']} of {facts['runs_asked']} finished"
    return Group(_pairs({"comparison": shown(facts["path"]), "state": state, "runs": runs}), comparison_table(results))


def console() -> Console:
    """Of the standard output: with colours in a terminal; elsewhere plain, and as wide as its tables."""
    if sys.stdout.isatty():
        return Console()
    return Console(force_terminal=False, color_system=None, width=_PIPED_WIDTH)


def some_of(count: int, most: int) -> list[int]:
    """Indices of at most `most` of `count` things, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _rounds_table(metrics: Sequence[RoundRecord], all_rounds: bool) -> Group:
    used = [column for column in _SHOWN if any(line.value(column.key) not in (None, []) for line in metrics)]
    if not mixed(metrics):
        used = [column for column in used if column.key != "accuracy_of"]
    table = Table(box=None, pad_edge=False)
    for column in used:
        table.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    places = some_of(len(metrics), len(metrics) if all_rounds else _MOST_ROUNDS)
    for line in (metrics[place] for place in places):
        values = ((column, line.value(column.key)) for column in used)
        table.add_row(*(MISSING if value is None else shown(column.text(value), _WIDEST) for column, value in values))
    if len(places) == len(metrics):
        return Group(table)
    left = f"{len(places)} of {len(metrics)} rounds; --all-rounds shows every one"
    return Group(table, Text(left, style="dim"))


def _troubles_table(troubled: Sequence[Troubles]) -> Table:
    kinds = [kind for kind in INCIDENTS if any(kind in each.counts for each in troubled)]
    table = Table(box=None, pad_edge=False)
    table.add_column("client", no_wrap=True)
    for kind in kinds:
        table.add_column(COLUMNS[kind].heading, justify="right")
    table.add_column("last incident", overflow="fold")
    for each in troubled:
        counts = (str(each.counts.get(kind, 0)) for kind in kinds)
        reason = shown(f"round {each.last_round}: {each.last_reason}", _LONGEST)
        table.add_row(shown(each.client, _WIDEST), *counts, reason)
    return table


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _pairs(values: Mapping[str, str | Text]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(shown(name, LONGEST_NAME), shown(value, _LONGEST) if isinstance(value, str) else value)
    return table


def _or_unknown(value: Any) -> str:
    return UNKNOWN if value is None else str(value)
