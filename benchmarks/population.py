"""Seconds and memory of a simulation whose cohorts are drawn from 100,000 clients, and from 1,000.

    python benchmarks/population.py [--clients 100000] [--of 1000] [--cohort 100] [--rounds 20] [--runs 3] [--quick]

`tepal simulate` as a command: FedAvg, Flower's quickstart CNN, 20 images of 28x28 pixels for each client (of 100,000
clients a .npz file of 1.6 GB), one epoch; no client scores. The runs are taken in turn. Seconds are those of the whole
command, and of its rounds, from the end of one to the end of the next. Memory is the largest sum of all its processes,
in which what they share is counted once (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measured import ROOT, Sampler, write_figures
from rich.console import Console
from rich.table import Table
from simulation import BATCH, MODELS, RATE, STOCK, ends_of_rounds

SAMPLES = 20  # images of a client
TESTS = 1000  # the server's
_BLOCK = 20_000  # images that are written at once, again and again


def write_images(path: Path, count: int) -> None:
    """Write random images in a file as numpy.savez does, without having them all in memory."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (min(count, _BLOCK), 28, 28), dtype=np.uint8)
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("x_train.npy", "w", force_zip64=True) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, 28, 28)}
            np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
            for begin in range(0, count, len(block)):
                file.write(block[: count - begin].tobytes())
        for name, array in {
            "y_train": rng.integers(0, 10, count),
            "x_test": block[:TESTS],
            "y_test": rng.integers(0, 10, min(TESTS, len(block))),
        }.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)  # type: ignore[arg-type]


def run(images: Path, clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Seconds of the command and of each round but the first, and the largest memory, in bytes."""
    with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as name:
        runs = Path(name) / "runs"
        settings: dict[str, Any] = {
            "strategy": "fedavg", "model": MODELS["small-cnn"], "dataset": str(images), "partitioner": "iid",
            "num-server-rounds": rounds, "fraction-train": cohort / clients, "fraction-evaluate": 0.0,
            "local-epochs": 1, "batch-size": BATCH, "optimizer": "sgd", "learning-rate": RATE, "weight-decay": 0.0,
            "schedule": "constant", "score-in-training": "false", "evaluate-every": 10_000, "runs": str(runs),
        }  # fmt: skip
        config = " ".join(
            f"{key}={value}" if value == "false" or not isinstance(value, str) else f'{key}="{value}"'
            for key, value in settings.items()
        )
        program = "from tepal.tools.cli.main import main; main()"
        command = [sys.executable, "-c", program, "simulate", str(ROOT), "--clients", str(clients), "-c", config]
        environment = {**os.environ, "TEPAL_CACHE": str(Path(name) / "cache")}
        begun = time.perf_counter()
        with (
            ends_of_rounds(runs) as ended,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
            Memory(process.pid) as memory,
        ):
            output, _ = process.communicate()
            whole = time.perf_counter() - begun
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{output.decode()}")
    return {"whole": whole, "rounds": list(np.diff(ended[-rounds:])), "bytes": memory.most}


class Memory(Sampler):
    """The largest memory of a process and all that it started, in bytes."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.most = 0

    def look(self) -> None:
        now = 0
        with contextlib.suppress(psutil.Error):  # the command has ended
            for each in (self._process, *self._process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    now += each.memory_full_info().pss
        self.most = max(self.most, now)


def measure(populations: list[int], cohort: int, rounds: int, runs: int) -> dict[int, dict[str, list[float]]]:
    """By population: seconds of each command, of each round, and bytes of memory."""
    found: dict[int, dict[str, list[float]]] = {n: {"whole": [], "rounds": [], "bytes": []} for n in populations}
    with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as name:
        files = {clients: Path(name) / f"of-{clients}.npz" for clients in populations}
        for clients, file in files.items():
            write_images(file, clients * SAMPLES)
        for _ in range(runs):
            for clients, file in files.items():
                one = run(file, clients, cohort, rounds)
                found[clients]["whole"].append(one["whole"])
                found[clients]["bytes"].append(one["bytes"])
                found[clients]["rounds"] += one["rounds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000, help="of the large population")
    parser.add_argument("--of", type=int, default=1000, help="of the small one")
    parser.add_argument("--cohort", type=int, default=100, help="clients in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3, help="of each, in turn; medians are shown")
    parser.add_argument("--quick", action="store_true", help="few clients, rounds and runs: whether it works at all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.of, options.cohort, options.rounds, options.runs = 1500, 40, 5, 3, 1
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(STOCK), os.environ.get("PYTHONPATH")]))
    found = measure([options.of, options.clients], options.cohort, options.rounds, options.runs)
    title = f"{options.cohort} clients a round, {options.rounds} rounds; medians of {options.runs}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("clients", "all, s", "a round, s", "memory, MB"):
        table.add_column(heading, justify="right")
    for clients, row in found.items():
        whole, one, most = (statistics.median(row[name]) for name in ("whole", "rounds", "bytes"))
        table.add_row(f"{clients:,}", f"{whole:.1f}", f"{one:.2f}", f"{most / 1e6:,.0f}")
    (Console() if sys.stdout.isatty() else Console(width=120)).print(table)
    if options.json:
        sizes = {name: getattr(options, name) for name in ("clients", "of", "cohort", "rounds")}
        write_figures(options.json, {**sizes, "populations": found})


if __name__ == "__main__":
    main()
