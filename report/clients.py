"""The clients of a run: the order of their names, and the table of what each did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from tepal.records.columns import Column, bytes_text, seconds_text
from tepal.report.table import Table
from tepal.report.templates import render

MOST_CLIENTS = 300  # rows of a table or figure that can still be told apart

CLIENT_COLUMNS = (
    Column("rounds", "rounds"),
    Column("replied", "replied", "rounds"),
    Column("refused", "refused", "replies"),
    Column("lost", "lost", "replies"),
    Column("examples", "examples", text=lambda value: f"{value:,}"),
    Column("budget", "budget", "layers", lambda value: f"{value:g}"),
    Column("down", "bytes_down", "bytes", bytes_text),
    Column("up", "bytes_up", "bytes", bytes_text),
    Column("time", "seconds", text=seconds_text),
    Column("last incident", "reason", left=True),
)
"""Of the table of clients, after their names; keys are those of clients.json."""


def natural(name: str) -> list[tuple[int, str]]:
    """By which client-2 comes before client-10."""
    return [(int(part or 0), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def clients_html(clients: Mapping[str, Mapping[str, Any]]) -> Markup:
    """What each client did in the whole run, those with incidents first; "" where it is not known."""
    if not clients:
        return Markup()

    def incidents(name: str) -> tuple[int, Any]:
        return -(clients[name].get("refused", 0) + clients[name].get("lost", 0)), natural(name)

    shown = [{**clients[name], "client": name} for name in sorted(clients, key=incidents)[:MOST_CLIENTS]]
    known = (column for column in CLIENT_COLUMNS if any(one.get(column.key) not in (None, "") for one in shown))
    table = Table.of("Table of clients", (Column("client", "client", left=True), *known), shown)
    few = len(shown) < len(clients)
    note = f"The first {len(shown)} of {len(clients)}, those with incidents first." if few else ""
    return render("folded.html", summary="Every client, as a table", note=note, table=table.html())
