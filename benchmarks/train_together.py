"""Milliseconds of a local training step of clients that train together, compared with the same clients one by one.

    python benchmarks/train_together.py [--clients 10] [--repeats 3] [--quick] [--json FILE]

Each client has two batches of random images; `train-together` stacks the clients. Figures are processor time for one
step of one client with one thread, medians over repeats taken in turn, without the first, which warms up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from measured import write_figures
from torch import nn

from tepal.client_app.objectives import Work
from tepal.client_app.stacked import fit_stacked
from tepal.models import build
from tepal.training.config import TrainingConfig
from tepal.training.loop import Batches

ROWS = [
    (model, side, batch)
    for model, side in (("linear", 8), ("cnn", 8), ("tiny-vit", 8), ("tiny-vit", 28), ("cnn", 28))
    for batch in (8, 32)
]


def works(model: str, side: int, batch: int, clients: int) -> list[Work]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for client in range(clients):
        images = torch.rand(2 * batch, 1, side, side, generator=generator)
        labels = torch.randint(0, 10, (2 * batch,), generator=generator)
        network = (
            nn.Sequential(nn.Flatten(), nn.Linear(side * side, 10))
            if model == "linear"
            else build(model, image_shape=(1, side, side), classes=10, seed=0)
        ).to(memory_format=torch.channels_last)
        config = TrainingConfig(local_epochs=1, batch_size=batch, optimizer="sgd", learning_rate=0.01)
        made.append(Work(network, Batches(images, labels, batch, client), config))
    return made


def measure(model: str, side: int, batch: int, clients: int, repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {"alone": [], "together": []}
    for repeat in range(repeats + 1):
        by_turns, stacked = (works(model, side, batch, clients) for _ in taken)
        begun = time.process_time()
        for work in by_turns:
            work.fit()
        between = time.process_time()
        fit_stacked(stacked)
        if repeat:
            taken["alone"].append(between - begun)
            taken["together"].append(time.process_time() - between)
    return {way: 1e3 * statistics.median(seconds) / (2 * clients) for way, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="three clients, the two smallest rows, once")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clients, repeats, rows = (3, 1, ROWS[:2]) if options.quick else (options.clients, options.repeats, ROWS)
    figures = {}
    for row in rows:
        figures[f"{row[0]}, {row[1]}x{row[1]}, batch {row[2]}"] = measure(*row, clients, repeats)
    if options.json:
        write_figures(options.json, figures)
    for name, row in figures.items():
        faster = row["alone"] / row["together"]
        print(f"{name}: alone {row['alone']:.2f} ms, together {row['together']:.2f} ms, {faster:.2f} x")


if __name__ == "__main__":
    main()
