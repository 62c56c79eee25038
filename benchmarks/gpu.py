"""Cost of a client's training on a GPU: steps per second, peak memory in bytes, seconds to start, and of a simulation.

    python benchmarks/gpu.py [--device cuda] [--batch 64] [--steps 30] [--hidden 768] [--quick] [--json FILE]
    python benchmarks/gpu.py --only simulation [--images cifar-10.npz] [--rounds 1500]

The model is that of train_step.py; with a width of 768 it is ViT-B/32. Measured:

- steps (forward, backward, AdamW) in float32 and with autocast to bfloat16, if everything trains, if query and key
  projections are frozen (FedFrozen after its warm-up), and if the top layer trains (selective layers);
- one, two and four processes that train at the same time on one device, as clients on one machine do;
- the time from a new process until its first step is done, which a warm node needs once and a client that is started
  for every message needs every time, compared with a further step;
- a simulation with the sizes of pfl-research's CIFAR-10 benchmark: 1,000 clients of 50 images, 50 of them in a round,
  batches of 10, one epoch of SGD at 0.1, its CNN without dropout. Tepal trains the 50 clients together
  (`train-together`), or one for each core at a time; pfl-research, if it is installed (`pip install "tepal[bench]"`),
  one after the other. Without `--images`, they are random, and the accuracy has no meaning.

`--device cpu` is for trying it out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measured import write_figures
from rich.console import Console
from rich.table import Table
from simulation import STOCK, UNSCORED, pfl, tepal
from torch import Tensor, nn
from torch.optim import AdamW
from train_step import CLASSES, build, choices, message_that_trains

from tepal.client_app import apply_plan
from tepal.models.blocks import find_blocks
from tepal.records.run_directory import find_run, read_metrics
from tepal.strategies.in_process import InProcessGrid
from tepal.training.config import TrainingConfig
from tepal.training.loop import autocast

AT_ONCE = (1, 2, 4)
STEPS, SIMULATION = "steps", "simulation"
CLIENTS, COHORT, IMAGES, ROUNDS, RATE = 1000, 50, 50, 1500, 0.1


def stepper(model: nn.Module, device: torch.device, batch: int, precision: str) -> Callable[[], None]:
    """A function that trains the given entries of the model for one step, and waits for its end."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(batch, 3, 224, 224, generator=generator).to(device)
    labels = torch.randint(0, CLASSES, (batch,), generator=generator).to(device)
    optimizer = AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-4)
    config = TrainingConfig.model_validate({"autocast": precision})

    def step() -> None:
        optimizer.zero_grad()
        with autocast(config, device):
            loss: Tensor = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def trainings(options: argparse.Namespace) -> dict[str, Any]:
    host = build(options.hidden)
    blocks = find_blocks(host)
    chosen = choices(blocks)
    what = {"all": chosen["all"], "query and key frozen": blocks.value, "top layer": chosen["top layer"]}
    InProcessGrid([])  # sets the identity that a Message needs
    messages = {name: message_that_trains(host, blocks, trains) for name, trains in what.items()}
    found: dict[str, Any] = {}
    for precision in ("no", "bf16"):
        for name, message in messages.items():
            model = build(options.hidden).to(options.device).train()
            apply_plan(model, message)
            step = stepper(model, options.device, options.batch, precision)
            if options.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(options.device)
            seconds = timed(step, options.steps)
            peak = torch.cuda.max_memory_allocated(options.device) if options.device.type == "cuda" else 0
            label = f"{name}, {'float32' if precision == 'no' else 'bfloat16'}"
            found[label] = {"steps a second": 1 / statistics.median(seconds), "peak bytes": peak}
            del model, step
    return found


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each step, without the first few."""
    seconds = []
    for number in range(-3, steps):
        begun = time.perf_counter()
        step()
        if number >= 0:
            seconds.append(time.perf_counter() - begun)
    return seconds


def trainer(options: argparse.Namespace) -> None:
    """One of several processes: reports the end of its first step, trains when asked to, and reports the seconds."""
    model = build(options.hidden).to(options.device).train()
    step = stepper(model, options.device, options.batch, "bf16")
    step()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(timed(step, options.steps)), flush=True)


def at_once(options: argparse.Namespace, count: int) -> tuple[float, float]:
    """Steps per second of `count` processes together, and seconds from a process's start to its first step."""
    command = [sys.executable, __file__, "--trainer", "--device", str(options.device), "--batch", str(options.batch)]
    command += ["--steps", str(options.steps), "--hidden", str(options.hidden)]
    begun = time.perf_counter()
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        first = time.perf_counter() - begun
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        seconds = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return sum(1 / statistics.median(each) for each in seconds), first


def simulations(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Way → seconds of the whole run and of each round, and the accuracy on the test images."""
    clients, cohort = (12, 4) if options.quick else (CLIENTS, COHORT)
    how = {
        **UNSCORED, "model": "stock_model:pfl_cnn", "dataset": "cifar-10", "local-epochs": 1,
        "batch-size": 10, "learning-rate": RATE, "fraction-train": cohort / clients, "test-fraction": 1 / IMAGES,
        "evaluate-every": options.rounds,
    }  # fmt: skip
    sizes = {"clients": clients, "cohort": cohort, "samples": IMAGES, "train": IMAGES - 1, "rounds": options.rounds}
    found = {}
    for way, together in (("Tepal, the cohort together", cohort), ("Tepal, one for each core", 1), ("pfl-research", 0)):
        if not together and importlib.util.find_spec("pfl") is None:
            continue
        with tempfile.TemporaryDirectory(prefix="tepal-gpu-") as name:
            folder = Path(name)
            write_cifar(folder / "images.npz", clients * IMAGES, options.images)
            if together:
                changes = {**how, "train-together": together}
                seconds, whole, _ = tepal("in process", folder, clients, options.rounds, **changes)
                accuracy = read_metrics(find_run(folder / "runs"))[-1].accuracy
            else:
                rest = {"batch-size": 10, "learning-rate": RATE, "model": "pfl-cnn"}
                seconds, whole, accuracy = pfl(folder, **sizes, **rest)
        found[way] = {"all": whole, "round": seconds[1:], "accuracy": accuracy}
    return found


def write_cifar(path: Path, count: int, given: Path | None) -> None:
    """The first `count` training images and the test set of a file, or random ones of the same size."""
    if given is None:
        rng = np.random.default_rng(0)
        sizes = {"train": count, "test": 500}
        sets = {f"x_{of}": rng.integers(0, 256, (n, 32, 32, 3), np.uint8) for of, n in sizes.items()}
        sets |= {f"y_{of}": rng.integers(0, 10, n) for of, n in sizes.items()}
    else:
        with np.load(given) as data:
            sets = {f"{kind}_{of}": data[f"{kind}_{of}"] for kind in "xy" for of in ("train", "test")}
        if len(sets["y_train"]) < count:
            raise SystemExit(f"{given} has {len(sets['y_train']):,} training images; {count:,} are needed")
        sets |= {name: sets[name][:count] for name in ("x_train", "y_train")}
    np.savez(path, **sets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=768, help="width, a multiple of 64")
    parser.add_argument("--only", choices=(STEPS, SIMULATION), help="one part: of the training steps, or a simulation")
    parser.add_argument("--images", type=Path, help="an .npz file with x_train, y_train, x_test, y_test")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the simulation")
    parser.add_argument("--quick", action="store_true", help="width 192, few of everything: whether it works")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.batch, options.steps, options.rounds = 192, 2, 3, 3
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA device here. `--device cpu` tries this benchmark out.")
    if options.trainer:
        trainer(options)
        return
    result: dict[str, Any] = {"device": named(options.device)}
    if options.only != SIMULATION:
        result |= steps(options)
    if options.only != STEPS:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STOCK), os.environ.get("PYTHONPATH")]))
        result[SIMULATION] = simulations(options)
    if options.json:
        write_figures(options.json, result)
    show(result)


def steps(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tepal-gpu-") as cache:
        os.environ["TEPAL_CACHE"] = cache
        training = trainings(options)
        together = {count: at_once(options, count) for count in AT_ONCE}
    return {
        "batch": options.batch, "width": options.hidden, "training": training,
        "at once": {str(count): rate for count, (rate, _) in together.items()},
        "seconds to a first step": together[1][1],
    }  # fmt: skip


def named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def show(result: Mapping[str, Any]) -> None:
    console = Console()
    if "training" in result:
        show_steps(result, console)
    if SIMULATION in result:
        table = Table(title=f"{SIMULATION}, {result['device']}", title_justify="left")
        for column in ("", "s", "s a round", "accuracy"):
            table.add_column(column, justify="right" if column else "left")
        for way, row in result[SIMULATION].items():
            table.add_row(way, f"{row['all']:.1f}", f"{statistics.median(row['round']):.3f}", f"{row['accuracy']:.4f}")
        console.print(table)


def show_steps(result: Mapping[str, Any], console: Console) -> None:
    title = f"ViT of width {result['width']}, batch {result['batch']}, {result['device']}"
    table = Table(title=title, title_justify="left")
    table.add_column("trains, in")
    for column in ("steps/s", "peak MB"):
        table.add_column(column, justify="right")
    for name, row in result["training"].items():
        peak = f"{row['peak bytes'] / 1e6:,.0f}" if row["peak bytes"] else ""
        table.add_row(name, f"{row['steps a second']:.2f}", peak)
    console.print(table)
    rates = ", ".join(f"{count}: {rate:.2f}" for count, rate in result["at once"].items())
    console.print(f"steps a second of several processes together: {rates}")
    further = 1 / result["at once"]["1"]
    console.print(
        f"from the start of a process to its first step {result['seconds to a first step']:.1f} s; a further step on a "
        f"warm node {further:.3f} s"
    )


if __name__ == "__main__":
    main()
