"""Seconds from the start of a simulation to the first training step of a client.

    python benchmarks/start.py [--runs 5] [--quick] [--json FILE]

Either a shell starts `tepal simulate`, or Python runs a script that imports Tepal and calls `tepal.simulate`. Both are
for one round of ten clients on scikit-learn's digits, in an empty folder. The model writes the time when it is first
called to be trained. The ways are taken in turn. Their first runs are not counted: they read files that the system then
keeps in memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured import write_figures

# A linear model, which appends the time of its training passes to a file.
MODEL = """
import os, time
from torch import nn

class Linear(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

    def forward(self, images):
        if self.training:
            with open(os.environ["STEPS"], "a") as file:
                file.write(f"{time.time()}\\n")
        return self.body(images)

def linear(image_shape, classes):
    import torch
    model = Linear(classes).eval()
    model(torch.zeros(1, *image_shape))
    return model
"""
SETTINGS = {"strategy": "fedavg", "model": "timed:linear", "local-epochs": 1}
SCRIPT = f"""
import tepal
tepal.simulate(rounds=1, clients=10, **{ {key.replace("-", "_"): value for key, value in SETTINGS.items()} })
"""
COMMAND = " ".join(f"{key}={value!r}".replace("'", '"') for key, value in SETTINGS.items())
TEPAL = str(Path(sys.executable).with_name("tepal"))
WAYS = {
    "tepal simulate": [TEPAL, "simulate", "-c", f"{COMMAND} num-server-rounds=1"],
    "tepal.simulate in Python": [sys.executable, "-c", SCRIPT],
}


def first_step(command: list[str]) -> float:
    """Seconds until the first training step."""
    with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as name:
        folder = Path(name)
        (folder / "timed.py").write_text(MODEL)
        path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "STEPS": str(folder / "steps")}
        begun = time.time()
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        return float((folder / "steps").read_text().split()[0]) - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one run, which is counted")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    runs = 1 if given.quick else given.runs + 1
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way, command in WAYS.items():
            seconds[way].append(first_step(command))
    counted = {way: each[min(1, runs - 1) :] for way, each in seconds.items()}
    for way, taken in counted.items():
        print(f"{way}: {statistics.median(taken):.2f} s to the first training step")
    if given.json:
        write_figures(given.json, counted)


if __name__ == "__main__":
    main()
