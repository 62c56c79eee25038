"""`tepal strategies`: the strategies, their papers and options."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tepal.tools.cli import commands, reported

app = commands("strategies")


@app.command("strategies")
def strategies_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="show these in detail; by default all, a line each")
    ] = None,
) -> None:
    """List the strategies with what each transfers and its paper; for a name, its options and their defaults."""
    from tepal.server_app.catalogue import table
    from tepal.tools.compare.runs import strategy_names

    console = Console()
    with reported():
        console.print(table(strategy_names(",".join(names)) if names else ()), soft_wrap=True)
