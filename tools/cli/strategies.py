"""`tepal strategies`: the strategies, their papers and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tepal.tools.cli import commands, reported

app = commands("strategies")


@app.command("strategies")
def strategies_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="strategies to show with their options; by default all are listed")
    ] = None,
) -> None:
    """List the strategies with what each transfers and its paper; for a name, its options and their defaults."""
    from tepal.tools.compare.checks import strategy_names

    with reported():
        Console().print(_table(strategy_names(",".join(names)) if names else ()), soft_wrap=True)


def _table(names: Sequence[str]) -> RenderableType:
    """Return a table of all strategies or, for names, their descriptions and options."""
    from tepal.server_app.config import about
    from tepal.strategies import STRATEGIES

    if not names:
        lines = Table(box=None, pad_edge=False)
        for heading in ("strategy", "what it does", "transfers per client and round", "paper"):
            lines.add_column(heading)
        for name, listed in STRATEGIES.items():
            lines.add_row(name, listed.does, listed.transfers, listed.paper)
        return lines
    parts: list[RenderableType] = []
    for name in names:
        listed = STRATEGIES[name]
        parts += [Text(f"{name}: {listed.does}", style="bold"), Text(f"{listed.paper}\n{listed.transfers}")]
        options = Table(box=None, pad_edge=False, show_header=False)
        for field in listed.options.model_fields.values():
            options.add_row(f"  {field.alias}", json.dumps(field.default), about(field))
        parts += [options, Text()]
    return Group(*parts)
