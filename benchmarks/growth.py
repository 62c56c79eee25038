"""Seconds and bytes by the number of clients, parameters, modes, and clients whose models are mixed.

    python benchmarks/growth.py [--quick] [--json FILE] [--svg docs/scaling.svg]

- by connected clients: the server's seconds before a message is sent, for a cohort of 50 (as in many_clients.py);
- by parameters: seconds of a round of FedAvg with ten clients without those in their apps, and bytes of a checkpoint;
- by modes: the same for Fed-ensemble, with 4 M parameters per mode;
- by clients that have replied: seconds of FedACS's similarities and mixtures for 50 of them, 250,000 parameters each.

The clients of a round are in this process and return the values that they received. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import nudging_app
from flwr.app import Array, ArrayRecord, Message
from many_clients import planning
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from measured import write_figures
from mixing import Clients, with_store

from tepal.strategies import FedAvg, FedEnsemble, join_modes
from tepal.strategies.in_process import InProcessGrid, Node
from tepal.strategies.rounds.report import RoundReport

CLIENTS = 10
SIDE = 1000  # entries are matrices of a million parameters
MODE = 4  # million parameters of a mode
ROWS = {
    "enter a list of nodes": "look, 1 % restarted", "FedAvg": "FedAvg", "FedFrozen": "FedFrozen",
    "SelectiveLayers": "SelectiveLayers", "Fed-ensemble": "FedEnsemble", "FedACS, of 500 reported": "FedACS",
}  # fmt: skip
"""What is drawn of a server's work before the first message, and what many_clients.py calls it."""


class TimedGrid(InProcessGrid):
    """Sums the seconds of the clients' side."""

    seconds = 0.0

    def _answer(self, message: Message) -> Message | None:
        before = time.perf_counter()
        reply = super()._answer(message)
        self.seconds += time.perf_counter() - before
        return reply


def model(millions: int) -> ArrayRecord:
    rng = np.random.default_rng(0)
    return ArrayRecord({f"layers.{k}.weight": Array(rng.random((SIDE, SIDE), np.float32)) for k in range(millions)})


def server(strategy: str, millions: int, modes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of a round without the clients' side, and bytes of a checkpoint."""
    spent: list[float] = []
    grid = TimedGrid([Node(nudging_app(), {}, name=f"site-{k}") for k in range(CLIENTS)])

    def on_round(report: RoundReport) -> None:
        spent.append(report.seconds - grid.seconds)
        grid.seconds = 0.0

    options: dict[str, Any] = {
        "fraction_evaluate": 0, "min_available_nodes": CLIENTS, "on_round": on_round, "checkpoints": folder,
    }  # fmt: skip
    record = model(millions)
    made = FedAvg(**options) if strategy == "fedavg" else FedEnsemble(modes=modes, **options)
    record = record if strategy == "fedavg" else join_modes([record] * modes)
    made.start(grid, record, num_rounds=rounds + 1, timeout=600)
    checkpoints = sorted(folder.glob("round-*"))
    size = sum(file.stat().st_size for file in checkpoints[-1].rglob("*") if file.is_file())
    return {"round s": statistics.median(spent[1:]), "checkpoint": float(size)}


def mixed(clients: int, parameters: int, rounds: int, folder: Path) -> float:
    options = SimpleNamespace(
        clients=clients, parameters=parameters, participants=min(50, clients), rounds=rounds, quantile=0.5
    )
    seconds = with_store(options, Clients(options), folder)["seconds"]  # type: ignore[arg-type]
    return float(seconds["similarity"] + seconds["mix"])


def measure(quick: bool) -> dict[str, Any]:
    runs = 2 if quick else 5
    found: dict[str, Any] = {"clients": {}, "parameters": {}, "modes": {}, "reported": {}}
    for clients in (200, 1000) if quick else (1000, 3000, 10_000, 30_000, 100_000):
        found["clients"][clients] = planning(clients, runs)
    with tempfile.TemporaryDirectory(prefix="tepal-growth-") as name:
        for millions in (1, 2) if quick else (1, 4, 16, 64):
            folder = Path(name) / f"parameters-{millions}"
            found["parameters"][millions] = server("fedavg", millions, 1, runs, folder)
        for modes in (1, 2) if quick else (1, 2, 4, 8):
            folder = Path(name) / f"modes-{modes}"
            found["modes"][modes] = server("fedensemble", 1 if quick else MODE, modes, runs, folder)
        for clients in (20, 40) if quick else (50, 100, 200, 400, 800):
            folder = Path(name) / f"reported-{clients}"
            folder.mkdir()
            found["reported"][clients] = mixed(clients, 250_000, runs, folder)
    return found


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Four plots with logarithmic axes, in which proportional growth is a straight line of slope 1."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.patch.set_facecolor("white")
    (clients, parameters), (modes, reported) = figure.subplots(2, 2)

    def plot(axes: Axes, title: str, lines: Mapping[str, Mapping[str, float]], below: str, left: str) -> None:
        for name, line in lines.items():
            axes.plot([float(x) for x in line], list(line.values()), marker="o", markersize=4, label=name)
        ticks = [float(x) for x in next(iter(lines.values()))]
        axes.set(title=title, xlabel=below, ylabel=left, xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.set_ylim(top=5 * axes.get_ylim()[1])
            axes.legend(fontsize=8, ncols=2, loc="upper left")

    def of(what: str, key: str, scale: float) -> dict[str, float]:
        return {size: scale * row[key] for size, row in found[what].items()}

    plans = {name: of("clients", row, 1e3) for name, row in ROWS.items()}
    plot(clients, "Before the first message, a cohort of 50", plans, "connected clients", "ms")
    for axes, what, title, below in (
        (parameters, "parameters", "FedAvg's server, ten clients", "million parameters"),
        (modes, "modes", f"Fed-ensemble's server, ten clients, {MODE} M a mode", "modes"),
    ):
        lines = {"a round without its clients, s": of(what, "round s", 1),
                 "a checkpoint, GB": of(what, "checkpoint", 1e-9)}  # fmt: skip
        plot(axes, title, lines, below, "")
    plot(reported, "FedACS: similarities and mixtures of a round", {"": found["reported"]},
         "clients that have reported, 250,000 parameters each", "s")  # fmt: skip
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small: whether it works at all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--svg", type=Path, help="file for the curves")
    options = parser.parse_args()
    found = measure(options.quick)
    if options.json:
        write_figures(options.json, found)
    if options.svg:
        draw(found, options.svg)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
