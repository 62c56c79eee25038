"""Run all benchmarks, and write a table, the figures as JSON and a page of plots.

    make bench                                             (about an hour; do not use the machine meanwhile)
    python benchmarks/bench.py [--only aggregation,mixing] [--quick] [--folder runs/bench]

Every topic is a script of this folder, whose docstring says what it measures, compared with what, in which unit; it can
be run alone, and runs in a process of its own. Figures are medians of several runs, taken in turn with those that they
are compared with. The results describe the machine and its load before each topic: on a loaded machine only the ratios
are meaningful. If a topic fails, this is reported, the others continue, and the exit status is not 0. `--quick` only
tests that all of them work. If PFLLIB names a checkout of PFLlib (`PFLLIB=path make bench`), it is compared, too; what
needs a GPU is measured where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from measured import read_figures
from rich.console import Console
from rich.table import Table
from topics import TOPICS, Row, Topic, table

from tepal.report.page import Figure, empty_plot, figure_html, page

HERE = Path(__file__).resolve().parent


def run(topic: Topic, folder: Path, name: str, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """The topic's rows, and the circumstances with the seconds that it took. Raises CalledProcessError."""
    file = folder / f"{name}.json"
    arguments = topic.quick if quick else topic.arguments
    begun = time.monotonic()
    with open(folder / f"{name}.log", "w") as log:
        command = [sys.executable, str(HERE / topic.script), *arguments, "--json", str(file)]
        subprocess.run(command, cwd=HERE.parent, stdout=log, stderr=subprocess.STDOUT, check=True)
    measured, figures = read_figures(file)
    return list(topic.rows(figures)), measured | {"seconds": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    possible = {"pfllib": "PFLLIB" in os.environ, "gpu": torch.cuda.is_available()}
    usual = [name for name in TOPICS if possible.get(name, True)]
    parser.add_argument("--only", default=",".join(usual), help=f"topics, of {', '.join(TOPICS)}")
    parser.add_argument("--quick", action="store_true", help="as little as possible, to test that everything works")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="for the folder of this run's results")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in TOPICS]:
        parser.error(f"--only has {', '.join(unknown)}; topics are {', '.join(TOPICS)}")
    folder = (options.folder / datetime.now().strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows, runs, failed = {}, {}, []
    for name in names:
        topic = TOPICS[name]
        try:
            with console.status(f"{topic.title} …"):
                rows[name], runs[name] = run(topic, folder, name, options.quick)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            console.print(f"[red]{topic.title}: {topic.script} failed ({error.returncode}): {folder / f'{name}.log'}")
            continue
        console.print(shown(topic, rows[name]))
        write(folder, rows, runs)
    console.print(f"Figures and plots: {folder}", soft_wrap=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def shown(topic: Topic, rows: Iterable[Row]) -> Table:
    made, of = Table(title=topic.title, title_justify="left", box=None, pad_edge=False), table(topic.title, rows)
    for column in of.columns:
        made.add_column(column.title, justify="left" if column.left else "right", no_wrap=True)
    for row in of.rows:
        made.add_row(*row)
    return made


def write(folder: Path, rows: Mapping[str, list[Row]], runs: Mapping[str, Any]) -> None:
    """Write `bench.json` and `index.html` with the finished topics."""
    result = {
        name: {"measured": runs[name], "rows": [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in of]}
        for name, of in rows.items()
    }
    (folder / "bench.json").write_text(json.dumps(result, indent=1))
    figures = {name: figure(name, TOPICS[name], of) for name, of in rows.items()}
    parts = ["<h1>Benchmarks</h1>"]
    for name, of in rows.items():
        title = TOPICS[name].title
        how = ", ".join(f"{key} {value}" for key, value in runs[name].items())
        parts.append(
            f"<h2>{title}</h2><p class='run'>{how}</p>{figure_html(figures[name])}{table(title, of).html()}"
        )
    (folder / "index.html").write_text(page("Benchmarks", "\n".join(parts), figures.values()))


def figure(name: str, topic: Topic, rows: list[Row]) -> Figure:
    """Bars of the ratios, speed-ups or shares."""
    plot = empty_plot("speed-up (if the goal is ≤: share)", "")
    ratios = {f"{row.what} · {row.other}": row.ratio for row in rows if row.ratio is not None}
    spoken = " ".join(f"{label}: {ratio:.3g}." for label, ratio in ratios.items())
    plot.add_bar(x=list(ratios.values()), y=list(ratios), orientation="h", meta={"role": "main", "spoken": spoken})
    plot.update_layout(showlegend=False)
    plot.update_yaxes(autorange="reversed")  # the first row on top
    return Figure(name, topic.title, "Ratio to the figure that it is compared with; 1 is equal.", plot)


if __name__ == "__main__":
    main()
