"""Milliseconds and quality of the layer selection (P1): fast solver, exact program, and plain coordinate ascent.

    python benchmarks/layer_selection.py [--quick] [--json FILE] [--limit 20]

Plain coordinate ascent starts from each client's own best layers. Quality is the gap to the exact optimum, relative to
it, over the instances for which the exact program proves it within --limit seconds; larger instances are not given to
it. Milliseconds are medians of repeated solutions, except those of the exact program, which solves every instance once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.strategies.layer_selection import DISTANCES, objective, select_layers
from tepal.strategies.layer_selection.ascent import ascend
from tepal.strategies.layer_selection.exact import solve_exact
from tepal.strategies.layer_selection.problem import problem_of

SIZES = ((4, 5), (10, 12), (20, 12), (50, 24), (100, 32))
PROGRAM_UP_TO = {"hamming": 50 * 24, "squared": 20 * 12}  # largest clients × layers for the exact program


def instance(clients: int, layers: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared norms (n, L) of partly similar clients (odd seeds: of independent ones), and budgets (n,) from 1 to 4."""
    rng = np.random.default_rng(seed)
    common = rng.gamma(1.0, size=layers) * rng.lognormal(0, 0.7, size=(clients, layers))
    norms = rng.gamma(0.5, size=(clients, layers)) if seed % 2 else common
    return norms, rng.integers(1, min(4, layers) + 1, clients)


def couplings(clients: int, distance: str) -> list[float]:
    """A weak, a medium and a strong λ: from separate layers for each client to the same layers for all."""
    return [factor / clients / (4 if distance == "squared" else 1) for factor in (0.1, 0.5, 2.0)]


def coordinate_ascent(norms: np.ndarray, budgets: np.ndarray, coupling: float, distance: str) -> np.ndarray:
    """Each client in turn takes its best row, starting from each client's own best layers."""
    masks = select_layers(norms, budgets, 0)
    problem = problem_of(norms, budgets.astype(float), np.ones(norms.shape), coupling, distance)
    ascend(problem, masks)
    return masks


def timed(solve: Callable[[], np.ndarray], runs: int) -> tuple[np.ndarray, float]:
    """The result, and the median of its milliseconds."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        masks = solve()
        times.append(1e3 * (time.perf_counter() - start))
    return masks, statistics.median(times)


def measure(clients: int, layers: int, distance: str, instances: int, runs: int, limit: float) -> dict[str, Any]:
    times: dict[str, list[float]] = {"fast": [], "ascent": [], "exact": []}
    gaps: dict[str, list[float]] = {"fast": [], "ascent": []}
    behind, proven, asked = [], 0, 0
    for seed in range(instances):
        norms, budgets = instance(clients, layers, seed)
        for coupling in couplings(clients, distance):
            solvers: dict[str, Callable[[], np.ndarray]] = {
                "fast": lambda a=norms, r=budgets, c=coupling: select_layers(
                    a, r, c, distance=distance, solver="fast"
                ),
                "ascent": lambda a=norms, r=budgets, c=coupling: coordinate_ascent(a, r, c, distance),
            }  # fmt: skip
            values = {}
            for name, solve in solvers.items():
                masks, milliseconds = timed(solve, runs)
                times[name].append(milliseconds)
                values[name] = objective(masks, norms, coupling, distance=distance)
            behind.append(1 - values["ascent"] / values["fast"])
            if clients * layers > PROGRAM_UP_TO[distance]:
                continue
            asked += 1
            problem = problem_of(norms, budgets.astype(float), np.ones(norms.shape), coupling, distance)
            start = time.perf_counter()
            try:
                found, bound = solve_exact(problem, limit)
            except TimeoutError:
                continue
            times["exact"].append(1e3 * (time.perf_counter() - start))
            if bound - problem.value(found) > 1e-6 * bound:
                continue
            proven += 1
            optimum = bound * float(norms.max())
            for name in gaps:
                gaps[name].append(max(0.0, 1 - values[name] / optimum))
    return {
        "clients": clients, "layers": layers, "distance": distance, "proven": proven, "asked": asked,
        "ms": {name: statistics.median(series) if series else None for name, series in times.items()},
        "slowest fast ms": max(times["fast"]),
        "worst gap": {name: max(series) if series else None for name, series in gaps.items()},
        "ascent behind fast": max(behind),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes, one instance of each")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for the exact program, per instance")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of which the median is taken")
    parser.add_argument("--instances", type=int, default=3, help="per size and distance, each at three couplings")
    options = parser.parse_args()
    if options.quick:
        options.runs = options.instances = 1
    rows = [
        measure(clients, layers, distance, options.instances, options.runs, options.limit)
        for clients, layers in (SIZES[:2] if options.quick else SIZES)
        for distance in DISTANCES
    ]
    if options.json:
        write_figures(options.json, {"rows": rows})
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Layer selection (P1), milliseconds and worst gaps", title_justify="left", padding=(0, 0))
    for name in ("size", "distance"):
        table.add_column(name, no_wrap=True)
    for name in ("fast", "slowest", "ascent", "exact", "proven", "gap of\nfast", "of\nascent", "to\nfast"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['clients']}×{row['layers']}", row["distance"], f"{row['ms']['fast']:.1f}",
            f"{row['slowest fast ms']:.1f}", f"{row['ms']['ascent']:.1f}", figure(row["ms"]["exact"], ".1f"),
            f"{row['proven']}/{row['asked']}", figure(row["worst gap"]["fast"], ".1e"),
            figure(row["worst gap"]["ascent"], ".1e"), f"{row['ascent behind fast']:.1e}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print("gap: below the optimum, where it is proven. to fast: ascent below the fast solver.")


def figure(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


if __name__ == "__main__":
    main()
