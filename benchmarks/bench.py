"""Run all benchmarks, and write a table, the figures as JSON and a page of plots.

    make bench                                             (about an hour; do not use the machine meanwhile)
    python benchmarks/bench.py [--only aggregation,mixing] [--quick] [--folder runs/bench]

Every topic is a script of this folder, whose docstring says what it measures, compared with what, in which unit; it can
be run alone, and runs in a process of its own. Figures are medians of several runs, taken in turn with those that they
are compared with. The results describe the machine and its load before each topic: on a loaded machine only the ratios
are meaningful. If a topic fails, this is reported, the others continue, and the exit status is not 0. `--quick` only
tests that all of them work. If PFLLIB names a checkout of PFLlib (`PFLLIB=path make bench`), it is compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tepal.records.columns import Column
from tepal.report.page import Figure, empty_plot, figure_html, page
from tepal.report.table import Table as ReportTable

HERE = Path(__file__).resolve().parent
PFLLIB = "pfllib"


@dataclass(frozen=True)
class Row:
    """A figure of Tepal and the one it is compared with; `goal`: of their ratio, "≥ 3" or "≤ 1.25", "" for none."""

    what: str
    ours: float
    other: str
    theirs: float
    unit: str
    goal: str = ""
    faster: bool = True
    """Whether the ratio is a speed-up (theirs / ours), or a share (ours / theirs)."""

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours if self.faster else self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        if not self.goal:
            return None
        sign, number = self.goal.split()
        return self.ratio >= float(number) if sign == "≥" else self.ratio <= float(number)


@dataclass(frozen=True)
class Topic:
    """A script with its arguments, and a function that converts its figures into rows."""

    title: str
    script: str
    rows: Callable[[Any], Iterable[Row]]
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)


def aggregation(figures: Mapping[str, Any]) -> Iterable[Row]:
    of = figures["seconds of the mean"]
    what = f"mean of {figures['replies']} replies, {figures['bytes'] / 1e6:,.0f} MB"
    yield Row(what, of["Tepal"], "Flower's aggregate_arrayrecords", of["Flower"], "s", "≥ 3")
    yield Row(what, of["Tepal"], "a copy of the same bytes", of["copy"], "s", "≥ 0.5")


def judging(figures: Mapping[str, Any]) -> Iterable[Row]:
    of = figures["seconds of a reply"]
    for way, goal in (("estimated", "≤ 1.02"), ("clipped", "≤ 1.05")):
        what = f"a reply whose update is looked at, {way}"
        yield Row(what, 1e3 * of[way], "read and merged as it is", 1e3 * of["as it is"], "ms", goal, faster=False)


def robust(figures: Mapping[str, Any]) -> Iterable[Row]:
    means = figures["means"]
    plain = means["none"]["add"] + means["none"]["result"]
    for name in ("trimmed", "median", "krum", "rfa"):
        what = f"{name} mean of {figures['clients']} parts of {figures['millions']:g} M"
        ours = means[name]["add"] + means[name]["result"]
        yield Row(what, ours, "the weighted mean", plain, "s", faster=False)


def memory(figures: Mapping[str, Any]) -> Iterable[Row]:
    size = {each["clients"]: each["model"] for each in figures["runs"]}
    most = {(each["way"], each["clients"]): each["server"] for each in figures["runs"]}
    for clients, model in size.items():
        ours = most["tepal", clients]
        yield Row(f"ServerApp, {clients} clients", ours / 1e6, "its model", model / 1e6, "MB", "≤ 2.5", faster=False)
        if stock := most.get(("flower", clients)):
            yield Row(f"ServerApp, {clients} clients", ours / 1e6, "Flower's FedAvg", stock / 1e6, "MB")


def latency(goals: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Iterable[Row]]:
    names = {"warm": "a round on warm nodes", "unchanged": "a round on flower-supernode"}

    def rows(figures: Mapping[str, Any]) -> Iterable[Row]:
        median = {way: statistics.median(each["seconds"]) for way, each in figures.items()}
        for way, goal in goals.items():
            yield Row(names[way], median[way], "Flower's FedAvg, train and evaluate", median["stock"], "s", goal)

    return rows


def encodings(figures: Mapping[str, Any]) -> Iterable[Row]:
    goals = {"float32": "", "bfloat16": "≤ 0.44", "int8": "≤ 0.23", "top 1 % up": ""}
    for name, goal in goals.items():
        row = figures["bytes"][name]
        what = f"upload in a frozen round, {name}"
        yield Row(what, row["up"] / 1e6, "FedAvg in float32", row["FedAvg"] / 1e6, "MB", goal, faster=False)


def bytes_moved(figures: Mapping[str, Any]) -> Iterable[Row]:
    total = {name: sum(map(sum, ways.values())) / 1e6 for name, ways in figures["bytes"].items()}
    what = f"FedFrozen, {figures['model']}"
    yield Row(what, total["FedFrozen"], "Flower's FedAvg", total["Flower FedAvg"], "MB", faster=False)


def simulation(figures: Mapping[str, Any]) -> Iterable[Row]:
    many = {way: statistics.median(row["all"]) for way, row in figures["many"].items()}
    what = f"{figures['clients']} clients, {figures['rounds']} rounds"
    yield Row(f"{what}, one process", many["in process"], "Flower's simulation", many["stock"], "s", "≥ 2")
    if "pfl" in figures["many"]:
        ours, theirs = (statistics.median(figures["many"][way]["round"]) for way in ("in process", "pfl"))
        yield Row(f"a round of {figures['clients']} clients, one process", ours, "pfl-research", theirs, "s", "≥ 1")
    yield Row(f"{what}, Flower's runtime", many["in runtime"], "Flower's simulation", many["stock"], "s")
    for name, row in figures["inside"].items():
        whole, loop = statistics.median(row["round"]), statistics.median(row["loop"])
        goal = "≤ 1.25" if name == "5 epochs, not scored" else ""
        yield Row(f"a round of 20 clients, {name}", whole, "a plain PyTorch loop", loop, "s", goal, faster=False)


def pfllib(figures: Mapping[str, Any]) -> Iterable[Row]:
    for method, row in figures["seconds"].items():
        ours, theirs = (statistics.median(row[way]) for way in ("Tepal", "PFLlib"))
        what = f"a round of {figures['clients']} clients, {method}"
        yield Row(what, ours, "PFLlib", theirs, "s", "≥ 2" if method == "FedAvg" else "")


def mixing(figures: Mapping[str, Any]) -> Iterable[Row]:
    seconds = {
        name: found["seconds"]["similarity"] + found["seconds"]["mix"]
        for name, found in figures.items()
        if isinstance(found, Mapping)
    }
    what = f"{figures['clients']} clients x {figures['parameters']:,} parameters"
    for other, goal in (("loop over pairs", "≥ 20"), ("NumPy in memory", "")):
        if other in seconds:
            yield Row(what, seconds["Tepal"], other, seconds[other], "s", goal)


def many_clients(figures: Mapping[str, Any]) -> Iterable[Row]:
    row = figures["rounds"][0]
    what = f"a round of {row['asked a round']:g} of {row['clients']:,} clients"
    yield Row(what, row["round s"], "its part in the clients' apps", row["of it at the apps s"], "s", faster=False)


def dashboard(figures: Mapping[str, Any]) -> Iterable[Row]:
    def median(what: str, name: str) -> float:
        return statistics.median(figures[what][name])

    what, runs = "TensorBoard", f"the list of {figures['runs']} runs"
    if figures[what]:
        first = "first paint"
        yield Row(f"{runs}, {first}", median("list", first), what, median(what, first), "s")
        yield Row(f"{runs}, all listed", median("list", "all runs"), f"{what}, one listed", median(what, "a run"), "s")
    large = f"{figures['rounds']:,} rounds x {figures['clients']} clients"
    for name, most in (("figures in sight", 2.0), ("everything", 2.0)):
        yield Row(f"{large}, {name}", median("large run", name), "the goal", most, "s", "≥ 1")
    yield Row(f"{runs}, first paint", median("list", "first paint"), "the goal", 1.0, "s", "≥ 1")
    yield Row("a round that has ended is shown", statistics.median(figures["update"]), "the goal", 1.0, "s", "≥ 1")


def train_step(figures: Mapping[str, Any]) -> Iterable[Row]:
    whole = figures["all"]["milliseconds"]
    for name in ("top layer", "top 2 layers"):
        yield Row(f"a step of the {name}", figures[name]["milliseconds"], "of all layers", whole, "ms", faster=False)


TOPICS: Mapping[str, Topic] = {
    "aggregation": Topic("Merging replies", "aggregation.py", aggregation),
    "judging": Topic("The look at each update", "judging.py", judging),
    "robust": Topic("Robust means", "robust.py", robust),
    "memory": Topic(
        "The server's memory, 350 MB model", "server_memory.py", memory, ("--clients", "2,10,50", "--ways", "tepal"),
    ),
    "memory-stock": Topic(
        "The server's memory, compared with Flower's", "server_memory.py", memory,
        ("--clients", "2,10", "--ways", "tepal,flower"),
    ),
    "latency": Topic(
        "A round without its training, tiny model", "round_latency.py",
        latency({"unchanged": "≥ 3", "warm": "≥ 40"}), ("--runs", "3"),
    ),
    "large-model": Topic(
        "A round of a 350 MB model", "round_latency.py", latency({"unchanged": "≥ 2", "warm": "≥ 2"}),
        ("--model", "vit-b-32", "--runs", "2"),
    ),
    "encodings": Topic(
        "Encodings, ViT-B/32", "encodings.py", encodings, ("--only", "bytes", "--runs", "3"),
        ("--quick", "--only", "bytes"),
    ),
    "bytes": Topic("Bytes of FedFrozen", "bytes.py", bytes_moved, ("--model", "bert-base"), ("--rounds", "3")),
    "simulation": Topic("Simulation", "simulation.py", simulation),
    PFLLIB: Topic("Simulation, compared with PFLlib", "pfllib.py", pfllib),
    "mixing": Topic(
        "FedACS's similarities and mixtures", "mixing.py", mixing,
        ("--clients", "100", "--participants", "100", "--rounds", "5"),
    ),
    "many-clients": Topic("Many clients", "many_clients.py", many_clients),
    "dashboard": Topic("The dashboard in a browser", "dashboard.py", dashboard),
    "train-step": Topic("Training few layers", "train_step.py", train_step),
}  # fmt: skip


def machine() -> dict[str, Any]:
    """Description of the machine and of the versions of Python and libraries."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line)
        model = next(named, model)
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "processor": model, "cores": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB", "system": platform.platform(),
        "python": platform.python_version(), **{name: version(name) for name in ("flwr", "torch", "numpy")},
    }  # fmt: skip


def run(topic: Topic, folder: Path, name: str, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """The topic's rows, and its command, seconds and the machine's load. Raises CalledProcessError."""
    file = folder / f"{name}.json"
    arguments = topic.quick if quick else topic.arguments
    load, begun = os.getloadavg()[0], time.monotonic()
    with open(folder / f"{name}.log", "w") as log:
        command = [sys.executable, str(HERE / topic.script), *arguments, "--json", str(file)]
        subprocess.run(command, cwd=HERE.parent, stdout=log, stderr=subprocess.STDOUT, check=True)
    took = time.monotonic() - begun
    command_text = " ".join(["python", f"benchmarks/{topic.script}", *arguments])
    return list(topic.rows(json.loads(file.read_text()))), {"command": command_text, "seconds": took, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in TOPICS if name != PFLLIB or "PFLLIB" in os.environ]
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
    host, rows, runs, failed = machine(), {}, {}, []
    for name in names:
        topic = TOPICS[name]
        try:
            with console.status(f"{topic.title} …"):
                rows[name], runs[name] = run(topic, folder, name, options.quick)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            console.print(f"[red]{topic.title}: {topic.script} failed ({error.returncode}): {folder / f'{name}.log'}")
            continue
        console.print(table(topic, rows[name]))
        write(folder, host, rows, runs)
    console.print(f"Figures and plots: {folder}", soft_wrap=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def cells(row: Row) -> list[str]:
    met = {None: "", True: "yes", False: "no"}[row.met]
    figures = [f"{number:,.3g}" if number < 1000 else f"{number:,.0f}" for number in (row.ours, row.theirs)]
    return [row.what, figures[0], row.other, figures[1], row.unit, f"{row.ratio:,.2f}", row.goal, met]


HEADINGS = ("", "Tepal", "compared with", "", "unit", "ratio", "goal", "met")


def table(topic: Topic, rows: Iterable[Row]) -> Table:
    made = Table(title=topic.title, title_justify="left", box=None, pad_edge=False)
    for column, heading in enumerate(HEADINGS):
        made.add_column(heading, justify="right" if column in (1, 3, 5) else "left", no_wrap=True)
    for row in rows:
        made.add_row(*cells(row))
    return made


def write(folder: Path, host: Mapping[str, Any], rows: Mapping[str, list[Row]], runs: Mapping[str, Any]) -> None:
    """Write `bench.json` and `index.html` with the finished topics."""
    result = {
        "machine": host,
        "topics": {
            name: {**runs[name], "rows": [{**vars(row), "ratio": row.ratio, "met": row.met} for row in of]}
            for name, of in rows.items()
        },
    }
    (folder / "bench.json").write_text(json.dumps(result, indent=1))
    figures = {name: figure(name, TOPICS[name], of) for name, of in rows.items()}
    parts = [f"<h1>Benchmarks</h1><p class='run'>{', '.join(f'{key} {value}' for key, value in host.items())}</p>"]
    for name, of in rows.items():
        how = f"{runs[name]['command']}; {runs[name]['seconds']:.0f} s, load before it {runs[name]['load']:.1f}"
        columns = [Column(heading, left=column not in (1, 3, 5)) for column, heading in enumerate(HEADINGS)]
        listed = ReportTable(TOPICS[name].title, columns, [cells(row) for row in of]).html()
        parts.append(f"<h2>{TOPICS[name].title}</h2><p><code>{how}</code></p>{figure_html(figures[name])}{listed}")
    (folder / "index.html").write_text(page("Benchmarks", "\n".join(parts), figures.values()))


def figure(name: str, topic: Topic, rows: list[Row]) -> Figure:
    """Bars of the ratios, speed-ups or shares."""
    plot = empty_plot("speed-up (if the goal is ≤: share)", "")
    labels = [f"{row.what} · {row.other}" for row in rows]
    spoken = " ".join(f"{label}: {row.ratio:.3g}." for label, row in zip(labels, rows, strict=True))
    plot.add_bar(x=[row.ratio for row in rows], y=labels, orientation="h", meta={"role": "main", "spoken": spoken})
    plot.update_layout(showlegend=False)
    plot.update_yaxes(autorange="reversed")  # the first row on top
    return Figure(name, topic.title, "Ratio to the figure that it is compared with; 1 is equal.", plot)


if __name__ == "__main__":
    main()
