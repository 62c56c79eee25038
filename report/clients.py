"""The clients of a run: the order of their names, and their table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from tepal.records.columns import Column
from tepal.records.live import TOTALS, ClientTotals
from tepal.report.table import Table
from tepal.report.templates import render

MOST_CLIENTS = 300  # rows of a table or figure


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which client-2 comes before client-10."""
    # A number by its digits, of which there may be more than Python converts.
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if place % 2 else (-1, part)
        for place, part in enumerate(re.split("([0-9]+)", name))
    ]


def clients_html(clients: Mapping[str, ClientTotals]) -> Markup:
    """The table of clients over the whole run, those with incidents first; "" without clients."""
    if not clients:
        return Markup()

    def incidents_first(name: str) -> tuple[int, Any]:
        return -(clients[name].refused + clients[name].lost), natural(name)

    shown = [{"client": name, **vars(clients[name])} for name in sorted(clients, key=incidents_first)[:MOST_CLIENTS]]
    known = (column for column in TOTALS.values() if any(one[column.key] not in (None, "") for one in shown))
    table = Table.of("Table of clients", (Column("client", "client", left=True), *known), shown)
    few = len(shown) < len(clients)
    note = f"The first {len(shown)} of {len(clients)}, those with incidents first." if few else ""
    return render("folded.html", summary="Every client, as a table", note=note, table=table.html())
