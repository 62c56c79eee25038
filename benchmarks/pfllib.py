"""Seconds of a round of FedAvg, FedAMP and Ditto, compared with PFLlib's, both in one process.

    PFLLIB=path/to/PFLlib python benchmarks/pfllib.py [--clients 100] [--rounds 20] [--runs 3] [--quick] [--json F]

PFLlib (github.com/TsingZ0/PFLlib) is a library of personalised methods that simulates clients one after the other. Its
checkout is not changed: its `system` folder is copied, and the clients' data is written next to the copy in its format,
one .npz per client. This was run with its commit d832e76 of November 2025, which imports torchvision, scikit-learn,
h5py, cvxpy, calmsize and matplotlib. Both train its CNN for images of 28x28 (582,026 parameters) by plain SGD
for an epoch, on 40 images per client in batches of 20, which PFLlib's loader does not shorten; no client is scored in
the rounds that are timed. PFLlib has PyTorch's default threads, Tepal one thread for each of as many clients at a time
as there are cores. Of each run, all rounds except the first are timed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from measured import write_figures
from rich.console import Console
from rich.table import Table
from simulation import RATE, STOCK, UNSCORED, tepal, write_images

METHODS = {
    "FedAvg": {"strategy": "fedavg"},
    "FedAMP": {"strategy": "fedamp", "fedamp.lambda": 0.001},  # PFLlib computes the proximal term, too
    "Ditto": {"strategy": "ditto"},
}
SAMPLES, BATCH = 50, 20
NAME = "MNIST"  # PFLlib chooses the CNN's input by the dataset's name
SPENT = re.compile(r"time cost -+ ([\d.]+)")


def written(images: Path, clients: int, target: Path) -> None:
    """Write each client's share of `images`, four fifths of it to train on, in PFLlib's format."""
    with np.load(images) as data:
        pixels = ((data["x_train"].astype(np.float32) / 255 - 0.5) / 0.5)[:, np.newaxis]
        labels = data["y_train"]
    for kind in ("train", "test"):
        (target / kind).mkdir(parents=True)
    for client in range(clients):
        share = np.arange(client * SAMPLES, (client + 1) * SAMPLES)
        for kind, part in (("train", share[: SAMPLES * 4 // 5]), ("test", share[SAMPLES * 4 // 5 :])):
            np.savez_compressed(target / kind / f"{client}.npz", data={"x": pixels[part], "y": labels[part]})


def theirs(checkout: Path, folder: Path, method: str, clients: int, rounds: int) -> list[float]:
    """Seconds of each round in PFLlib, without the first, in which it scores all clients."""
    shutil.copytree(checkout / "system", folder / "system", ignore=shutil.ignore_patterns("__pycache__"))
    written(folder / "images.npz", clients, folder / "dataset" / NAME)
    options = {
        "-data": NAME, "-m": "CNN", "-algo": method, "-gr": rounds, "-nc": clients, "-jr": 1.0, "-ls": 1,
        "-lbs": BATCH, "-lr": RATE, "-eg": 10 * rounds, "-dev": "cpu", "-go": "benchmark",
    }  # fmt: skip
    command = [sys.executable, "main.py", *(str(part) for option in options.items() for part in option)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=folder / "system", env=environment, capture_output=True, text=True)
    seconds = [float(found) for found in SPENT.findall(done.stdout)]
    if len(seconds) <= rounds:  # it runs one more than requested
        raise SystemExit(f"PFLlib's {method} ended with status {done.returncode} after {len(seconds)} rounds:\n"
                         f"{(done.stdout + done.stderr)[-3000:]}")  # fmt: skip
    return seconds[1 : rounds + 1]


def ours(folder: Path, method: str, clients: int, rounds: int) -> list[float]:
    changes = {**UNSCORED, "local-epochs": 1, "batch-size": BATCH, "model": "stock_model:pfllib_cnn"}
    return tepal("in process", folder, clients, rounds + 1, **METHODS[method], **changes)[0][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3, help="of each, in turn; medians are shown")
    parser.add_argument("--quick", action="store_true", help="few clients, rounds and runs: whether it works at all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    checkout = Path(os.environ.get("PFLLIB", ""))
    if "PFLLIB" not in os.environ or not (checkout / "system" / "main.py").is_file():
        parser.error("PFLLIB must name a checkout of PFLlib, with its requirements installed; it has a system/main.py")
    if options.quick:
        options.clients, options.rounds, options.runs = 4, 2, 1
    methods = options.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(f"--methods has {sorted(unknown)}, expected some of {', '.join(METHODS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STOCK), os.environ.get("PYTHONPATH")]))
    taken: dict[str, dict[str, list[float]]] = {method: {"Tepal": [], "PFLlib": []} for method in methods}
    for _ in range(options.runs):
        for method, row in taken.items():
            with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as name:
                folder = Path(name)
                write_images(folder / "images.npz", options.clients * SAMPLES)
                row["Tepal"] += ours(folder, method, options.clients, options.rounds)
                row["PFLlib"] += theirs(checkout, folder, method, options.clients, options.rounds)
    table = Table(title=f"{options.clients} clients; seconds a round", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "Tepal", "PFLlib", "faster"):
        table.add_column(heading, justify="right" if heading else "left")
    for method, row in taken.items():
        mine, their = (statistics.median(row[way]) for way in ("Tepal", "PFLlib"))
        table.add_row(method, f"{mine:.3f}", f"{their:.3f}", f"{their / mine:.2f} x")
    Console().print(table)
    if options.json:
        write_figures(options.json, {"clients": options.clients, "seconds": taken})


if __name__ == "__main__":
    main()
