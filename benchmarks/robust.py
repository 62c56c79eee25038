"""Seconds and peak memory of the robust means, compared with the weighted mean of the same parts.

    python benchmarks/robust.py [--clients 50] [--millions 22] [--quick] [--json FILE]

Each client's part is one float32 entry. Parts are made one at a time, so that the memory measured (as NumPy allocates
it, by tracemalloc) is the mean's own and one part. The robust means write all parts to a temporary file, in TMPDIR.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.strategies.robust import mean_factory

MEANS = ("none", "trimmed", "median", "krum", "rfa")


def measured(robust: str, clients: int, size: int) -> dict[str, float]:
    """Seconds of all `add` and of `result`, and the peak memory in units of a part."""
    mean = mean_factory(robust, 0.2, 0, None)()
    part = np.random.default_rng(0).random(size, np.float32)
    adding = 0.0
    tracemalloc.start()
    for k in range(clients):
        part[k::clients] += 0.1  # every part differs
        begun = time.perf_counter()
        mean.add({"w": part}, k + 1)
        adding += time.perf_counter() - begun
    begun = time.perf_counter()
    mean.result()
    result = time.perf_counter() - begun
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"add": adding, "result": result, "memory": peak / part.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--millions", type=float, default=22, help="parameters of the model, in millions")
    parser.add_argument("--quick", action="store_true", help="a small model, to test that it works")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    clients, millions = (5, 0.1) if options.quick else (options.clients, options.millions)
    means = {robust: measured(robust, clients, int(millions * 1e6)) for robust in MEANS}
    plain = means["none"]["add"] + means["none"]["result"]
    for each in means.values():
        each["times the mean"] = (each["add"] + each["result"]) / plain
    result = {"clients": clients, "millions": millions, "means": means}
    show(result)
    if options.json:
        write_figures(options.json, result)


def show(result: dict[str, Any]) -> None:
    title = f"{result['clients']} parts of {result['millions']:g} M float32 parameters"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("robust", "add, s", "result, s", "times the mean", "peak memory, parts"):
        table.add_column(heading, justify="right" if heading != "robust" else "left")
    for robust, each in result["means"].items():
        table.add_row(robust, *(f"{each[key]:.2f}" for key in ("add", "result", "times the mean", "memory")))
    Console().print(table)


if __name__ == "__main__":
    main()
