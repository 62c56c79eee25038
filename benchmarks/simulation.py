"""Seconds of simulated rounds: Tepal in one process and in Flower's runtime, compared with pfl-research and Flower.

    python benchmarks/simulation.py [--runs 3] [--only "in process,pfl,stock,inside"] [--model small-cnn] [--quick]

*Many clients*: 100 clients of 50 images (40 of them to train on) train a CNN for 20 rounds, one epoch with batches of
32 and SGD: the FedAvg paper's CNN, or with --model small-cnn that of Flower's quickstart; no client scores. Runs are
taken in turn, each with one PyTorch thread per client and as many clients at a time as there are cores. "All" is the
whole call, including start and end of all processes. "Rounds" is the time of all rounds except the first, in which a
run still starts processes, and "a round" their median, from the end of one to the end of the next. pfl-research trains
one client after the other, with as many PyTorch threads as there are cores; it is left out if it is not installed (`pip
install "tepal[bench]"`).

*Inside a round*: 20 clients of 100 images (80 to train on), in one process and one after the other, with five epochs
(the default) and with one: the time of a round relative to that of its training steps, by the clients' own clocks, with
and without the clients' scoring. It is compared with the same steps as a plain PyTorch loop in a process of its own.

*Population*: seconds of a round for each client in it, if 50 of 1,000 clients take part, and if all of 100 do, with the
settings of the first table.

The images are MNIST's if the folder TEPAL_TEST_DATA has mnist.npz, otherwise random ones of the same size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.records.run_directory import find_run, read_metrics
from tepal.tools.simulation.engine import cores_for
from tepal.tools.simulation.process_engine import ProcessEngine
from tepal.tools.simulation.ray_engine import RayEngine

ROOT = Path(__file__).parents[1]
STOCK = Path(__file__).parent / "simulation"
PFL = "pfl"
WAYS = {
    "in process": "Tepal, in one process",
    "in runtime": "Tepal, in Flower's runtime",
    PFL: "pfl-research",
    "stock": "Flower's FedAvg, in Flower's runtime",
}
INSIDE = "inside"
POPULATION = "population"
PARTS = (*WAYS, INSIDE, POPULATION)
MODELS = {"cnn": "cnn", "small-cnn": "stock_model:small_cnn"}
BATCH, RATE = 32, 0.05
UNSCORED = {"score-in-training": False, "fraction-evaluate": 0.0}

# The steps of one client on its share of the images, for each client; the first turn warms up.
LOOP = """
import sys, time
import numpy as np, torch
import torch.nn.functional as F
from tepal.models import build
path, clients, train, epochs, rounds, batch, rate = *sys.argv[1:2], *map(int, sys.argv[2:7]), float(sys.argv[7])
with np.load(path) as data:
    images = torch.from_numpy(data["x_train"].astype(np.float32) / 255).unsqueeze(1)
    labels = torch.from_numpy(data["y_train"])
model = build("cnn", image_shape=(1, 28, 28), classes=10, seed=0).train()
for turn in range(rounds + 1):
    begun = time.perf_counter()
    for client in range(clients):
        optimizer = torch.optim.SGD(model.parameters(), rate)
        for epoch in range(epochs):
            for chosen in (torch.randperm(train) + client * train).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                optimizer.step()
    if turn:
        print(time.perf_counter() - begun)
"""


def write_images(path: Path, count: int) -> str:
    """Write `count` images of 28x28 to train on and a test set to an .npz file; returns a description of them."""
    rng = np.random.default_rng(0)
    given = Path(os.environ.get("TEPAL_TEST_DATA", "")) / "mnist.npz"
    if "TEPAL_TEST_DATA" in os.environ and given.is_file():
        with np.load(given) as data:
            chosen = rng.permutation(len(data["y_train"]))[:count]
            sets = data["x_train"][chosen], data["y_train"][chosen], data["x_test"][:500], data["y_test"][:500]
            what = "MNIST"
    else:
        labels = np.arange(count + 500) % 10
        images = np.clip(rng.integers(0, 256, (10, 28, 28))[labels] + rng.normal(0, 64, (len(labels), 28, 28)), 0, 255)
        sets = images[:count], labels[:count], images[count:], labels[count:]
        what = "random"
    x, y, tests, their = sets
    np.savez(
        path, x_train=x.astype(np.uint8), y_train=y.astype(np.int64),
        x_test=tests.astype(np.uint8), y_test=their.astype(np.int64),
    )  # fmt: skip
    return what


def tepal(way: str, folder: Path, clients: int, rounds: int, **changes: object) -> tuple[list[float], float, float]:
    """A run of Tepal: seconds of each round, of the whole call, and of a round's training steps (median)."""
    config = {
        "strategy": "fedavg", "model": "cnn", "dataset": "mnist", "dataset-path": str(folder / "images.npz"),
        "partitioner": "iid", "num-server-rounds": rounds, "batch-size": BATCH, "optimizer": "sgd",
        "learning-rate": RATE, "weight-decay": 0.0, "schedule": "constant", "evaluate-every": 10_000,
        "runs": str(folder / "runs"), **changes,
    }  # fmt: skip
    kind = RayEngine if way == "in runtime" else ProcessEngine
    cpus = {} if way == INSIDE else {"cpus_per_client": 1.0}
    begun = time.perf_counter()
    with kind(ROOT, clients, cache=folder / "cache", **cpus) as engine, ends_of_rounds(folder / "runs") as ended:
        engine.run(config, log=folder / "log")
    whole = time.perf_counter() - begun
    steps = [line.step_seconds for line in read_metrics(find_run(folder / "runs")) if line.round]
    return list(np.diff([begun, *ended[-rounds:]])), whole, statistics.median(steps[1:])


@contextlib.contextmanager
def ends_of_rounds(runs: Path) -> Iterator[list[float]]:
    """Times at which the rounds of the only run in a folder end: as its metrics are written, a line for each round, and
    perhaps one before them for the initial model.

    So a round has all that a run does from one to the next, such as writing its record and its checkpoint.
    """
    ended: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            for metrics in runs.glob("*/metrics.jsonl"):
                if not metrics.parent.is_symlink():
                    lines = metrics.read_bytes().count(b"\n")
                    ended.extend([time.perf_counter()] * (lines - len(ended)))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield ended
    finally:
        time.sleep(0.02)
        over.set()
        watching.join()


def stock(folder: Path, clients: int, samples: int, rounds: int, model: str = "cnn") -> tuple[list[float], float]:
    """A run of Flower's FedAvg: seconds of each round, and of the whole call."""
    config = {
        "clients": clients, "rounds": rounds, "samples": samples, "data": str(folder / "images.npz"),
        "batch-size": BATCH, "learning-rate": RATE, "model": model, "output": str(folder / "ended.json"),
    }  # fmt: skip
    begun = time.perf_counter()
    with RayEngine(STOCK, clients) as engine:
        engine.run(config, log=folder / "log")
    whole = time.perf_counter() - begun
    return list(np.diff(json.loads((folder / "ended.json").read_text()))), whole


def pfl(folder: Path, **config: object) -> tuple[list[float], float, float]:
    """A run of pfl-research's FedAvg: seconds of each round and of the whole call, and the test accuracy."""
    files = {"images": str(folder / "images.npz"), "output": str(folder / "ended.json")}
    (folder / "config.json").write_text(json.dumps({**files, **config}))
    environment = os.environ | {"OMP_NUM_THREADS": str(cores_for())}
    begun = time.perf_counter()
    command = [sys.executable, str(STOCK / "pfl_fedavg.py"), str(folder / "config.json")]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    whole = time.perf_counter() - begun
    result = json.loads((folder / "ended.json").read_text())
    return list(np.diff(result["ended"])), whole, result["accuracy"]


def many(
    ways: list[str], clients: int, samples: int, rounds: int, runs: int, model: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of the whole call and of all its rounds, for each run, and of each round of all runs, by engine."""
    taken: dict[str, dict[str, list[float]]] = {way: {"all": [], "rounds": [], "round": []} for way in ways}
    for _ in range(runs):
        for way in ways:
            with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as name:
                folder = Path(name)
                write_images(folder / "images.npz", clients * samples)
                if way == "stock":
                    seconds, whole = stock(folder, clients, samples, rounds, model)
                elif way == PFL:
                    sizes = {"clients": clients, "cohort": clients, "samples": samples, "train": samples * 4 // 5}
                    how = {"rounds": rounds, "batch-size": BATCH, "learning-rate": RATE, "model": model}
                    seconds, whole, _ = pfl(folder, **sizes, **how)
                else:
                    changes = {**UNSCORED, "local-epochs": 1, "model": MODELS[model]}
                    seconds, whole, _ = tepal(way, folder, clients, rounds, **changes)
            taken[way]["all"].append(whole)
            taken[way]["rounds"].append(sum(seconds[1:]))
            taken[way]["round"] += seconds[1:]
    return taken


def inside(
    clients: int, samples: int, rounds: int, runs: int, epochs_of: tuple[int, ...] = (5, 1)
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, of its steps (their median, for each run) and of a plain loop, by what is trained."""
    found: dict[str, dict[str, list[float]]] = {}
    train = samples * 4 // 5
    for _ in range(runs):
        for epochs in epochs_of:
            for scored, changes in (("scored", {}), ("not scored", UNSCORED)):
                row = found.setdefault(f"{epochs} epochs, {scored}", {"round": [], "steps": [], "loop": []})
                with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as name:
                    folder = Path(name)
                    write_images(folder / "images.npz", clients * samples)
                    seconds, _, step = tepal(INSIDE, folder, clients, rounds, **changes, **{"local-epochs": epochs})
                    loop = [sys.executable, "-c", LOOP, str(folder / "images.npz")]
                    loop += map(str, (clients, train, epochs, rounds - 1, BATCH, RATE))
                    done = subprocess.run(loop, cwd=ROOT, capture_output=True, text=True, check=True)
                row["round"] += seconds[1:]
                row["steps"].append(step * clients * epochs * -(-train // BATCH))
                row["loop"] += map(float, done.stdout.split())
    return found


def population(
    clients: int, cohort: int, of: int, rounds: int, runs: int, model: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round for each client in it: of `clients`, who all take part, and of a cohort of `of` clients."""
    taken: dict[str, list[float]] = {"some": [], "all": []}
    for _ in range(runs):
        for name, connected, part in (("all", clients, clients), ("some", of, cohort)):
            with tempfile.TemporaryDirectory(prefix="tepal-benchmark-") as folder:
                write_images(Path(folder) / "images.npz", connected * 50)
                changes = {**UNSCORED, "local-epochs": 1, "model": MODELS[model], "fraction-train": part / connected}
                seconds, _, _ = tepal("in process", Path(folder), connected, rounds, **changes)
            taken[name] += [each / part for each in seconds[1:]]
    return {f"{cohort} of {of:,}": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn; medians are shown")
    parser.add_argument("--only", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}")
    parser.add_argument("--clients", type=int, default=100, help="of the first table")
    parser.add_argument("--rounds", type=int, default=20, help="of the first table")
    parser.add_argument("--model", choices=MODELS, default="cnn", help="of the first table")
    parser.add_argument("--quick", action="store_true", help="few clients, rounds and runs: whether it works at all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.rounds, options.runs = 4, 3, 1
    wanted = [name.strip() for name in options.only.split(",")]
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only has {sorted(unknown)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(STOCK), os.environ.get("PYTHONPATH")]))
    figures: dict[str, object] = {name: getattr(options, name) for name in ("model", "clients", "rounds")}
    figures["load"] = os.getloadavg()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    if PFL in wanted and importlib.util.find_spec("pfl") is None:
        wanted.remove(PFL)
        console.print("pfl-research is not installed, and is left out.")
    if ways := [way for way in WAYS if way in wanted]:
        taken = figures["many"] = many(ways, options.clients, 50, options.rounds, options.runs, options.model)
        console.print(table_of_many(taken, options))
    if INSIDE in wanted:
        small = (3, 100, 2, 1, (1,))
        found = figures["inside"] = inside(*small) if options.quick else inside(20, 100, 4, options.runs)
        console.print(table_of_inside(found))
    if POPULATION in wanted:
        sizes = (4, 2, 8) if options.quick else (options.clients, 50, 1000)
        found = figures[POPULATION] = population(*sizes, options.rounds, options.runs, options.model)
        for name, row in found.items():
            some, every = (1e3 * statistics.median(row[key]) for key in ("some", "all"))
            console.print(f"a client's share of a round, ms: {name} {some:.2f}, all of {sizes[0]} {every:.2f}")
    if options.json:
        write_figures(options.json, figures)


def table_of_many(taken: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> Table:
    title = f"{options.model}, {options.clients} clients, {options.rounds} rounds; seconds, medians of {options.runs}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "all", "faster", "rounds", "faster", "a round"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    last = next(reversed(taken.values()))
    for way, row in taken.items():
        whole, rounds, one = (statistics.median(row[name]) for name in ("all", "rounds", "round"))
        faster = [statistics.median(last[name]) / value for name, value in (("all", whole), ("rounds", rounds))]
        table.add_row(
            WAYS[way], f"{whole:.1f}", f"{faster[0]:.2f} x", f"{rounds:.1f}", f"{faster[1]:.2f} x", f"{one:.2f}"
        )
    return table


def table_of_inside(found: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title="Inside a round; seconds", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "round", "its steps", "round / steps", "plain loop", "round / loop"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in found.items():
        whole, steps, loop = (statistics.median(row[key]) for key in ("round", "steps", "loop"))
        figures = whole, steps, whole / steps, loop, whole / loop
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    return table


if __name__ == "__main__":
    main()
