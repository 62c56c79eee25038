"""Examples per second of the input path, compared with a DataLoader and with training steps.

    python benchmarks/input_path.py [--images 20000] [--batch 32] [--repeats 5] [--device cpu] [--json FILE]

Random images of CIFAR's size (3x32x32) are in a .npz file. A client loads them as in a run (normalised), and takes
batches in a new order every epoch. The DataLoader reads the same arrays, and normalises and collates image by image.
Steps are forward, backward and SGD of models by name; if they are slower than the input path, training does not wait
for data. Figures are medians of runs that are taken in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import write_figures
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tepal import models
from tepal.training.config import TrainingConfig
from tepal.training.data.inputs import InputConfig, client_inputs
from tepal.training.loop import Batches, fit

MODELS = ("tiny-vit", "cnn", "resnet-20")
STEPS = 20
TEPAL, LOADER = "Tepal's batches", "DataLoader, image by image"


class OneByOne(Dataset[tuple[Tensor, int]]):
    """Byte images that are converted to floats and normalised one at a time."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (torch.from_numpy(self.images[index]).float() / 255 - 0.5) / 0.25, int(self.labels[index])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (options.images, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, options.images)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "images.npz", x=images, y=labels)
        config = InputConfig.from_run_config({"dataset": "local", "normalise": "0.5/0.25", "classes": 10})
        start = time.perf_counter()
        loaded = client_inputs(config, {"data-path": f"{folder}/images.npz"}, client="c").train
        to_load = time.perf_counter() - start
    inputs, targets = (torch.from_numpy(array).to(options.device) for array in (loaded.values, loaded.labels))
    batches = Batches(inputs, targets, options.batch, seed=0)
    epochs = iter(range(10**6))

    def of_batches() -> Iterator[tuple[Tensor, Tensor]]:
        return batches.epoch(next(epochs))

    def of_loader() -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(OneByOne(images, labels), options.batch, shuffle=True)
        return ((x.to(options.device), y.to(options.device)) for x, y in loader)

    def rate(path: Callable[[], Iterator[tuple[Tensor, Tensor]]], most: int) -> float:
        """Examples per second over at most a number of batches."""
        begun, taken = now(options.device), 0
        for _, labels in islice(path(), most):
            taken += len(labels)
        return taken / (now(options.device) - begun)

    training = TrainingConfig.of({"local-steps": STEPS, "optimizer": "sgd", "learning-rate": 0.01})
    built = {name: models.build(name, image_shape=(3, 32, 32), classes=10, seed=0) for name in MODELS}
    rows: dict[str, list[float]] = {name: [] for name in (TEPAL, LOADER, *MODELS)}
    for turn in range(-1, options.repeats):
        measured = {TEPAL: rate(of_batches, 1000), LOADER: rate(of_loader, 100)}
        for name, model in built.items():
            measured[name] = options.batch / fit(model.to(options.device), batches, training).step_seconds
        if turn >= 0:  # the first turn warms up
            for name, value in measured.items():
                rows[name].append(value)
    return {"seconds to load": to_load, "examples a second": {name: statistics.median(of) for name, of in rows.items()}}


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        write_figures(options.json, figures)
    show(figures, options)


def show(figures: dict[str, Any], options: argparse.Namespace) -> None:
    rates = figures["examples a second"]
    table = Table(title=f"Examples a second, 3x32x32, batch {options.batch}, {options.device}", title_justify="left")
    for column in ("", "a second", *(f"over {name}'s steps" for name in MODELS)):
        table.add_column(column, justify="left" if not column else "right")
    for name, rate in rates.items():
        ratios = [f"{rate / rates[model]:,.1f}" if name in (TEPAL, LOADER) else "" for model in MODELS]
        table.add_row(name, f"{rate:,.0f}", *ratios, end_section=name == LOADER)
    Console().print(table)
    loaded = 0.8 * options.images
    Console().print(f"{loaded:,.0f} images were loaded and normalised in {figures['seconds to load']:.2f} s.")


if __name__ == "__main__":
    main()
