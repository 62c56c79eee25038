"""`tepal report`: write the report of a run, or its figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tepal.tools.cli import commands, reported

app = commands("report")


@app.command("report")
def report_command(
    run: Annotated[
        Path, typer.Argument(help="a run directory, a folder of runs (the latest), or a comparison's folder")
    ] = Path("runs"),
    figures: Annotated[
        str, typer.Option(help="write the figures as files instead, for a paper: svg, png or pdf", show_default=False)
    ] = "",
    output: Annotated[
        Path | None, typer.Option(help="folder for these files", show_default="figures, next to the report")
    ] = None,
) -> None:
    """Write the report.html of a run, finished or in progress, or a comparison's files again, and print its path."""
    from tepal.records.run_directory import find_run
    from tepal.report.run_page import write_report
    from tepal.tools.compare.comparison import is_comparison, read_comparison
    from tepal.tools.compare.runs import write_comparison

    with reported():
        if figures or output:
            for path in _figure_files(run, figures, output):
                typer.echo(path)
        elif is_comparison(run):
            typer.echo(write_comparison(read_comparison(run)))
        else:
            typer.echo(write_report(find_run(run)))


def _figure_files(run: Path, kind: str, folder: Path | None) -> list[Path]:
    """Write a run's or comparison's figures, and return their paths. Raises OSError or ValueError."""
    from tepal.tools.compare.comparison import is_comparison, measure, read_comparison
    from tepal.tools.compare.figure_files import FiguresError, write_comparison_figures, write_run_figures

    if not kind:
        raise FiguresError(f"--output {folder} is for figures: give their format with --figures svg, png or pdf")
    if is_comparison(run):
        return write_comparison_figures(measure(read_comparison(run)), kind, folder)
    return write_run_figures(run, kind, folder)
