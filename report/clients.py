"""The clients of a run: the figure of their labels, and the table of what each did."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tepal.report.page import Figure, empty_plot, table_html
from tepal.report.terminal import bytes_text, seconds_text

_MOST_CLIENTS = 300  # rows of a figure that can still be told apart

# Column of the table of clients: heading, key in clients.json, how a value is written.
CLIENT_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rounds", "rounds", str),
    ("replied", "replied", str),
    ("refused", "refused", str),
    ("lost", "lost", str),
    ("examples", "examples", lambda value: f"{value:,}"),
    ("budget", "budget", lambda value: f"{value:g}"),
    ("down", "bytes_down", bytes_text),
    ("up", "bytes_up", bytes_text),
    ("time", "seconds", seconds_text),
    ("last trouble", "reason", str),
)


def label_figures(counts: Mapping[str, Sequence[int]]) -> list[Figure]:
    """`labels_figure`, where there is something to draw."""
    return [labels_figure(counts)] if counts else []


def labels_figure(counts: Mapping[str, Sequence[int]]) -> Figure:
    """How the classes are spread over the clients, by what these told: client → examples of each class."""
    clients = sorted(counts, key=natural)
    shown = clients[:_MOST_CLIENTS]
    classes = max(map(len, counts.values()))
    rows = [[*counts[client], *[0] * (classes - len(counts[client]))] for client in shown]
    plot = empty_plot("class", "client")
    plot.add_heatmap(
        z=[[count / (sum(row) or 1) for count in row] for row in rows],
        y=shown,
        customdata=rows,
        showscale=False,
        xgap=1 if classes <= 20 else 0,
        ygap=1 if len(shown) <= 40 else 0,
        meta={"role": "second", "spoken": f"{len(shown)} clients, {classes} classes."},
        hovertemplate="%{y}, class %{x}: %{customdata} examples, %{z:.0%} of its own<extra></extra>",
    )
    plot.update_yaxes(autorange="reversed", type="category")
    plot.update_xaxes(rangemode="normal", **({"dtick": 1} if classes <= 20 else {}))
    total = sum(map(sum, counts.values()))
    caption = f"The darker, the larger the class's share of the client's own examples. {total:,} examples"
    caption += f"; the first {len(shown)} of {len(clients)} clients." if len(shown) < len(clients) else "."
    return Figure("labels", "Labels at the clients", caption, plot)


def natural(name: str) -> list[tuple[int, str]]:
    """By which client-2 comes before client-10."""
    return [(int(part or 0), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def clients_html(clients: Mapping[str, Mapping[str, Any]]) -> str:
    """What each client did in the whole run, those with trouble first; "" where it is not known."""
    if not clients:
        return ""

    def trouble(name: str) -> tuple[int, Any]:
        return -(clients[name].get("refused", 0) + clients[name].get("lost", 0)), natural(name)

    names = sorted(clients, key=trouble)
    shown = names[:_MOST_CLIENTS]
    known = [
        column for column in CLIENT_COLUMNS if any(clients[name].get(column[1]) not in (None, "") for name in shown)
    ]
    rows = [
        (name, *("–" if clients[name].get(key) in (None, "") else text(clients[name][key]) for _, key, text in known))
        for name in shown
    ]
    words = {0, *(k for k, (_, key, _) in enumerate(known, start=1) if key == "reason")}
    table = table_html("Table of clients", ("client", *(heading for heading, _, _ in known)), rows, words=words)
    few = len(shown) < len(names)
    more = f"<p>The first {len(shown)} of {len(names)}, those with trouble first.</p>" if few else ""
    return f"<details><summary>Every client, as a table</summary>{more}{table}</details>"
