"""`tepal runs` and `tepal show`: list runs, and show one run in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tepal.records.run_directory import LATEST
from tepal.tools.cli import AsJson, commands, reported

app = commands("runs")


@app.command("runs")
def runs_command(
    folder: Annotated[Path, typer.Argument(help="folder of run directories, or of a comparison")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs and comparisons, the newest first: rounds, score and transferred bytes of each."""
    from tepal.tools.dashboard.printed import console, reasons, runs_table
    from tepal.tools.dashboard.views import facts_of, views

    with reported():
        facts = [facts_of(view) for view in views(folder)]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    elif facts:
        console().print(runs_table(facts), *map(Text, reasons(facts)), sep="\n")
    else:
        typer.echo(f"{folder} has no runs")


@app.command("show")
def show_command(
    run: Annotated[str, typer.Argument(help=f"a path, a name in the folder of runs, or {LATEST!r}")] = LATEST,
    runs: Annotated[Path, typer.Option(help="folder of the runs that can be given by name")] = Path("runs"),
    all_rounds: Annotated[bool, typer.Option("--all-rounds", help="a line for every round")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run (changed settings, rounds, clients with problems, bytes, files) or one comparison."""
    from tepal.server_app.config import defaults
    from tepal.tools.compare.comparison import is_comparison, measure
    from tepal.tools.dashboard.printed import comparison_summary_page, console, run_page
    from tepal.tools.dashboard.views import ComparisonView, RunView, comparison_facts, find, run_facts

    with reported():
        path = find(run, runs)
        if is_comparison(path):
            compared = ComparisonView(path)
            results = measure(compared.comparison)
            facts = comparison_facts(compared, results)
            page = comparison_summary_page(compared, results)
        else:
            view = RunView(path)
            facts = run_facts(view, defaults())
            page = run_page(view, defaults(), all_rounds=all_rounds)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(page)
