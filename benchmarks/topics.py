"""What each benchmark compares: its figures as rows, each with the figure that it is compared with, and a goal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tepal.records.columns import Column
from tepal.report.table import Table

Values = float | Sequence[float]
"""Of one figure: all that were measured, or their median alone."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a figure; the quartiles are None if only the median is known."""

    median: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(values: Values, scale: float = 1.0) -> Spread:
        if isinstance(values, Sequence) and len(values) > 1:
            low, middle, high = statistics.quantiles([scale * value for value in values], n=4, method="inclusive")
            return Spread(middle, low, high)
        (only,) = values if isinstance(values, Sequence) else (values,)
        return Spread(scale * only)

    def text(self, unit: str) -> str:
        shown = f"{_number(self.median)} {unit}".strip()
        if self.low is None or self.high is None or _number(self.low) == _number(self.high):
            return shown
        return f"{shown} ({_number(self.low)} to {_number(self.high)})"


def _number(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


@dataclass(frozen=True)
class Row:
    """A figure of Tepal, and one it may be compared with; `goal`: of their ratio, "≥ 3" or "≤ 1.25", "" for none."""

    what: str
    ours: Spread
    other: str
    theirs: Spread | None
    unit: str
    goal: str = ""
    faster: bool = True
    """Whether the ratio is a speed-up (theirs / ours), or a share (ours / theirs)."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Row:
        theirs = values["theirs"] and Spread(**values["theirs"])
        return Row(**{**values, "ours": Spread(**values["ours"]), "theirs": theirs})

    @property
    def ratio(self) -> float | None:
        if self.theirs is None:
            return None
        ours, theirs = self.ours.median, self.theirs.median
        return theirs / ours if self.faster else ours / theirs

    @property
    def met(self) -> bool | None:
        if not self.goal or self.ratio is None:
            return None
        sign, number = self.goal.split()
        return self.ratio >= float(number) if sign == "≥" else self.ratio <= float(number)

    def cells(self) -> list[str]:
        goal = {None: "", True: self.goal, False: f"{self.goal}: not met"}[self.met]
        first = [self.what, self.ours.text(self.unit)]
        if self.ratio is None or self.theirs is None:
            return [*first, "", "", "", goal]
        ratio = f"{self.ratio:,.2f} x" if self.faster else f"{self.ratio:,.3g}"
        return [*first, self.other, self.theirs.text(self.unit), ratio, goal]


COLUMNS = [
    Column("measurement", left=True), Column("Tepal"), Column("compared with", left=True), Column("its figure"),
    Column("ratio"), Column("goal", left=True),
]  # fmt: skip


def table(title: str, rows: Iterable[Row]) -> Table:
    """A table of rows, without the columns that are empty in all of them."""
    cells = [row.cells() for row in rows]
    used = [place for place in range(len(COLUMNS)) if any(row[place] for row in cells)]
    return Table(title, [COLUMNS[place] for place in used], [[row[place] for place in used] for row in cells])


@dataclass(frozen=True)
class Topic:
    """A script with its arguments, and a function that converts its figures into rows."""

    title: str
    script: str
    rows: Callable[[Any], Iterable[Row]]
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)


def compared(
    what: str, ours: Values, other: str, theirs: Values, unit: str, goal: str = "", *, scale: float = 1.0,
    faster: bool = True,
) -> Row:  # fmt: skip
    return Row(what, Spread.of(ours, scale), other, Spread.of(theirs, scale), unit, goal, faster)


def aggregation(figures: Mapping[str, Any]) -> Iterable[Row]:
    of, steps = figures["seconds of the mean"], figures["seconds of the whole way"]
    what = f"mean of {figures['replies']} replies, {figures['bytes'] / 1e6:,.0f} MB"
    yield compared(what, of["Tepal"], "Flower's aggregate_arrayrecords", of["Flower"], "s", "≥ 3")
    yield compared(what, of["Tepal"], "a copy of the same bytes", of["copy"], "s", "≥ 0.5")
    whole = sum(Spread.of(seconds).median for seconds in steps.values())
    for step, seconds in steps.items():
        yield compared(f"these replies: {step}", seconds, "from chunks to the next state", whole, "s", faster=False)


def judging(figures: Mapping[str, Any]) -> Iterable[Row]:
    for way, goal in (("estimated", "≤ 1.02"), ("measured", ""), ("clipped", "≤ 1.05")):
        low, middle, high = figures["of merging it as it is"][way]
        what, other = f"a reply whose update's norm is {way}", "read and merged as it is"
        yield Row(what, Spread(middle, low, high), other, Spread(1.0), "", goal, faster=False)


def robust(figures: Mapping[str, Any]) -> Iterable[Row]:
    means = figures["means"]
    plain = means["none"]["add"] + means["none"]["result"]
    for name in ("trimmed", "median", "krum", "rfa"):
        what = f"{name} mean of {figures['clients']} parts of {figures['millions']:g} M"
        ours = means[name]["add"] + means[name]["result"]
        yield compared(what, ours, "the weighted mean", plain, "s", faster=False)


def memory(figures: Mapping[str, Any]) -> Iterable[Row]:
    size = {each["clients"]: each["model"] for each in figures["runs"]}
    most = {(each["way"], each["clients"]): each["server"] for each in figures["runs"]}
    for clients, model in size.items():
        ours, what = most["tepal", clients], f"ServerApp, {clients} clients"
        yield compared(what, ours, "its model", model, "MB", "≤ 2.5", scale=1e-6, faster=False)
        if stock := most.get(("flower", clients)):
            yield compared(what, ours, "Flower's FedAvg", stock, "MB", scale=1e-6)


def memory_auto(figures: Mapping[str, Any]) -> Iterable[Row]:
    """The ServerApp's peak memory without what it used before the model was loaded, relative to the model.

    The goal is that of float32 and one model for the reference.
    """
    goals = {"tepal": ("float32", "≤ 2.5"), "auto": ("auto", "≤ 3.5")}
    for each in figures["runs"]:
        dtype, goal = goals[each["way"]]
        what, used = f"ServerApp in {dtype}, {each['clients']} clients", each["server"] - each["before"]
        yield compared(what, used, "its model", each["model"], "MB", goal, scale=1e-6, faster=False)


def latency(goals: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Iterable[Row]]:
    names = {"warm": "a round on warm nodes", "unchanged": "a round on flower-supernode"}

    def rows(figures: Mapping[str, Any]) -> Iterable[Row]:
        seconds = {way: each["seconds"] for way, each in figures.items()}
        other = "Flower's FedAvg, train and evaluate"
        for way in (each for each in goals if each in seconds and "stock" in seconds):
            yield compared(names[way], seconds[way], other, seconds["stock"], "s", goals[way])

    return rows


def encodings(figures: Mapping[str, Any]) -> Iterable[Row]:
    goals = {"float32": "", "bfloat16": "≤ 0.44", "int8": "≤ 0.23", "top 1 % up": ""}
    for name, goal in goals.items():
        row, what = figures["bytes"][name], f"upload in a frozen round of FedFrozen, {name}"
        yield compared(what, row["up"], "FedAvg in float32", row["FedAvg"], "MB", goal, scale=1e-6, faster=False)


def bytes_moved(figures: Mapping[str, Any]) -> Iterable[Row]:
    total = {name: sum(map(sum, ways.values())) for name, ways in figures["bytes"].items()}
    what, stock = f"FedFrozen, {figures['model']}", "Flower FedAvg"
    yield compared(what, total["FedFrozen"], stock, total[stock], "MB", scale=1e-6, faster=False)


def simulation(figures: Mapping[str, Any]) -> Iterable[Row]:
    found, clients = figures.get("many", {}), figures["clients"]
    goals = {"stock": "≥ 2", "pfl": "≥ 1"}
    for way, where in (("in process", "one process"), ("in runtime", "Flower's runtime")):
        for other, name in (("stock", "Flower's FedAvg, Flower's runtime"), ("pfl", "pfl-research")):
            if way in found and other in found and (way, other) != ("in runtime", "pfl"):
                goal = goals[other] if way == "in process" else ""
                of = f"{figures['model']}, {clients} clients, {where}"
                ours, theirs = found[way], found[other]
                if other == "stock":
                    what = f"{of}: {figures['rounds']} rounds with start and end"
                    yield compared(what, ours["all"], name, theirs["all"], "s", goal)
                    goal = ""
                yield compared(f"{of}: a round", ours["round"], name, theirs["round"], "s", goal)
    for name, row in figures.get("inside", {}).items():
        for kind, other, goal in (("loop", "a plain PyTorch loop", "≤ 1.15"), ("steps", "its training steps", "")):
            goal = goal if "not scored" in name else ""
            what = f"a round of 20 clients in turn, {name}"
            yield compared(what, row["round"], other, row[kind], "s", goal, faster=False)
    for name, row in figures.get("population", {}).items():
        what, other = f"a client's share of a round, {figures['model']}, {name}", f"all of {clients} take part"
        yield compared(what, row["some"], other, row["all"], "ms", "≤ 1.1", scale=1e3, faster=False)


def very_many(figures: Mapping[str, Any]) -> Iterable[Row]:
    large, small = (figures["populations"][str(figures[name])] for name in ("clients", "of"))
    what, other = f"{figures['cohort']} of {figures['clients']:,} clients", f"of {figures['of']:,} clients"
    whole = f"{what}: {figures['rounds']} rounds with start and end"
    yield compared(whole, large["whole"], other, small["whole"], "s", "≤ 1.2", faster=False)
    yield compared(f"{what}: a round", large["rounds"], other, small["rounds"], "s", faster=False)
    yield compared(f"{what}: memory", large["bytes"], "the goal", 1.5e9, "MB", "≥ 1", scale=1e-6)
    yield compared(f"{what}: memory", large["bytes"], other, small["bytes"], "MB", scale=1e-6, faster=False)


def pfllib(figures: Mapping[str, Any]) -> Iterable[Row]:
    goals = {"FedAvg": "≥ 1.2", "FedAMP": "≥ 3", "Ditto": "≥ 1.2"}
    for method, row in figures["seconds"].items():
        what = f"a round of {figures['clients']} clients, {method}"
        yield compared(what, row["Tepal"], "PFLlib", row["PFLlib"], "s", goals[method])


def mixing(figures: Mapping[str, Any]) -> Iterable[Row]:
    seconds = {
        name: found["seconds"]["similarity"] + found["seconds"]["mix"]
        for name, found in figures.items()
        if isinstance(found, Mapping)
    }
    what = f"FedACS, {figures['clients']} clients x {figures['parameters']:,} parameters"
    for other, goal in (("loop over pairs", "≥ 20"), ("NumPy in memory", "")):
        if other in seconds:
            yield compared(what, seconds["Tepal"], other, seconds[other], "s", goal)


def many_clients(figures: Mapping[str, Any]) -> Iterable[Row]:
    row = figures["rounds"][0]
    what = f"a round of {row['asked a round']:g} of {row['clients']:,} clients"
    yield compared(what, row["round s"], "its part in the clients' apps", row["of it at the apps s"], "s", faster=False)


def dashboard(figures: Mapping[str, Any]) -> Iterable[Row]:
    what, runs, listed = "TensorBoard", f"dashboard, {figures['runs']} runs", figures["list"]
    if theirs := figures[what]:
        first = "first paint"
        yield compared(f"{runs}, {first}", listed[first], what, theirs[first], "s")
        yield compared(f"{runs}, all listed", listed["all runs"], f"{what}, one listed", theirs["a run"], "s")
    large = f"dashboard, {figures['rounds']:,} rounds x {figures['clients']} clients"
    for name in ("figures in sight", "everything"):
        yield compared(f"{large}, {name}", figures["large run"][name], "the goal", 2.0, "s", "≥ 1")
    yield compared(f"{runs}, first paint", listed["first paint"], "the goal", 1.0, "s", "≥ 1")
    yield compared("dashboard, a round that has ended is shown", figures["update"], "the goal", 1.0, "s", "≥ 1")


def train_step(figures: Mapping[str, Any]) -> Iterable[Row]:
    whole = figures["all"]["milliseconds"]
    for name in ("top layer", "top 2 layers"):
        ours = figures[name]["milliseconds"]
        yield compared(f"a step of the {name}", ours, "of all layers", whole, "ms", faster=False)


def train_together(figures: Mapping[str, Any]) -> Iterable[Row]:
    for name, row in figures.items():
        yield compared(f"a client's step, {name}, ten together", row["together"], "alone", row["alone"], "ms")


def gpu(figures: Mapping[str, Any]) -> Iterable[Row]:
    (ours, mine), *others = figures["simulation"].items()
    what = f"CIFAR-10 simulation on {figures['device']}, {ours.removeprefix('Tepal, ')}"
    for name, row in others:
        yield compared(f"{what}: a round", mine["round"], name, row["round"], "s")
        yield compared(f"{what}: accuracy", mine["accuracy"], name, row["accuracy"], "", faster=False)


def first_steps(figures: Mapping[str, float]) -> Iterable[Row]:
    for what, seconds in figures.items():
        yield Row(what, Spread(seconds), "", None, "s")


def start(figures: Mapping[str, Values]) -> Iterable[Row]:
    for what, seconds in figures.items():
        yield compared(f"{what}: until the first training step", seconds, "the goal", 3.0, "s", "≥ 1")


MANY = "in process,in runtime,pfl,stock"
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
    "memory-auto": Topic(
        "The server's memory, auto both ways", "server_memory.py", memory_auto,
        ("--megabytes", "100", "--clients", "2,10", "--rounds", "3", "--ways", "tepal,auto"),
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
    "simulation": Topic("Simulation, CNN of the FedAvg paper", "simulation.py", simulation, ("--only", MANY)),
    "simulation-small": Topic(
        "Simulation, CNN of Flower's quickstart", "simulation.py", simulation,
        ("--only", MANY, "--model", "small-cnn"), ("--quick", "--only", "in process,stock", "--model", "small-cnn"),
    ),
    "inside": Topic(
        "A round, and the training in it", "simulation.py", simulation, ("--only", "inside"),
        ("--quick", "--only", "inside"),
    ),
    "population": Topic(
        "Few clients of many", "simulation.py", simulation, ("--only", "population", "--model", "small-cnn"),
        ("--quick", "--only", "population", "--model", "small-cnn"),
    ),
    "very-many": Topic("Few clients of very many", "population.py", very_many),
    "pfllib": Topic("Simulation, compared with PFLlib", "pfllib.py", pfllib),
    "mixing": Topic(
        "FedACS's similarities and mixtures", "mixing.py", mixing,
        ("--clients", "100", "--participants", "100", "--rounds", "5"),
    ),
    "many-clients": Topic("Many clients", "many_clients.py", many_clients),
    "dashboard": Topic("The dashboard in a browser", "dashboard.py", dashboard),
    "train-step": Topic("Training few layers", "train_step.py", train_step),
    "train-together": Topic("Clients trained together", "train_together.py", train_together),
    "gpu": Topic("A simulation on a GPU", "gpu.py", gpu, ("--only", "simulation")),
    "start": Topic("Start", "start.py", start),
    "first-steps": Topic("First steps", "first_steps.py", first_steps, quick=("--only", "savings")),
}  # fmt: skip
