"""Seconds and anonymous memory of a round of FedACS at a server with many models, compared with two simpler ways.

    python benchmarks/mixing.py [--clients 500] [--parameters 1000000] [--participants 50] [--rounds 3] [--quick]

Tepal has the models in a `ModelStore`. A round writes the models of its participants, updates the dot products, mixes
the participants' next models and writes these into another mapped file. It is compared with

- NumPy in memory: all models in one array, all similarities and mixtures computed again in every round;
- a loop over pairs of models, as torch code for personalised federated learning usually has it: each pair is flattened
  and compared, and each model added to each mixture, tensor by tensor.

Both are left out if they would not fit into memory or would take minutes. Memory is RssAnon of /proc/self/status
(Linux) in bytes, the highest of samples 5 ms apart, including the interpreter and its libraries. BLAS uses its default
number of threads.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.strategies.mixing import cosine, mix, mix_rows, update_gram
from tepal.strategies.personal.store import ModelStore

GROUPS = 10  # clients of a group share the larger part of their models, so that similarities differ
COPIES = 3.3  # of all models at once in the in-memory round: the models, normalised, mixed, and a reserve
PAIRS = 2e10  # largest clients² · parameters for the loop over pairs
SHARES = (0.001, 0.0, 0.05, 0.0, 0.94, 0.0, 0.009, 0.0)
"""Of a CNN's parameters, in its eight tensors: two convolutions and two dense layers, each with a bias."""
COLUMNS = TEPAL, NUMPY, LOOP = "Tepal", "NumPy in memory", "loop over pairs"
STAGES = {
    "first": "first similarity of all (once)",
    "write": "write the received models",
    "similarity": "similarity",
    "mix": "mix",
}


class Peak:
    """The highest anonymous memory of this process in bytes, while the context lasts."""

    def __enter__(self) -> Peak:
        self.bytes = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line RssAnon; this benchmark needs Linux")


class Clients:
    """Makes random models, each the sum of values that its group shares and noise."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = np.random.default_rng(0)
        self.shared = self.rng.standard_normal((GROUPS, options.parameters), np.float32)

    def model(self, client: int) -> np.ndarray:
        model = self.rng.standard_normal(self.shared.shape[1], np.float32)
        model += self.shared[client % GROUPS]
        return model


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {stage: [0.0] for stage in STAGES}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.seconds[stage][-1] += time.perf_counter() - before

    def next_round(self) -> None:
        for seconds in self.seconds.values():
            seconds.append(0.0)

    def medians(self) -> dict[str, float]:
        """Medians over the rounds, without the first item, which precedes them."""
        first = {"first": self.seconds["first"][0]}
        return first | {stage: statistics.median(self.seconds[stage][1:]) for stage in STAGES if stage != "first"}


def with_store(options: argparse.Namespace, clients: Clients, folder: Path) -> dict[str, Any]:
    store = ModelStore(folder / "models", options.parameters)
    slots = [store.write([clients.model(client)]) for client in range(options.clients)]
    mixed = np.memmap(folder / "mixed", np.float32, "w+", shape=(options.participants, options.parameters))
    watch = Stopwatch()
    with Peak() as peak:
        with watch("first"):
            gram = update_gram(np.zeros((0, 0)), store.rows(slots), range(options.clients))
        for _ in range(options.rounds):
            watch.next_round()
            participants = clients.rng.choice(options.clients, options.participants, replace=False).tolist()
            for client in participants:
                model = clients.model(client)
                with watch("write"):
                    slots[client] = store.write([model])
            store.keep(slots)
            with watch("similarity"):
                gram = update_gram(gram, store.rows(slots), participants)
                similarity = cosine(gram)
            with watch("mix"):
                at = {client: [k, 0] for k, client in enumerate(participants)}
                for client, chunk in mix_rows(
                    store.rows(slots), participants, options.quantile, similarity=similarity
                ):
                    k, start = at[client]
                    mixed[k, start : start + chunk.size] = chunk
                    at[client][1] += chunk.size
    store.close()
    return {"seconds": watch.medians(), "peak bytes": peak.bytes}


def in_memory(options: argparse.Namespace, clients: Clients) -> dict[str, Any]:
    watch = Stopwatch()
    with Peak() as peak:
        models = np.empty((options.clients, options.parameters), np.float32)
        for client in range(options.clients):
            models[client] = clients.model(client)
        for _ in range(options.rounds):
            watch.next_round()
            for client in clients.rng.choice(options.clients, options.participants, replace=False):
                model = clients.model(client)
                with watch("write"):
                    models[client] = model
            with watch("similarity"):
                directions = models / np.linalg.norm(models, axis=1, keepdims=True)
                similarity = directions @ directions.T
                del directions
            with watch("mix"):
                delta = np.quantile(similarity, options.quantile)
                weights = np.where(similarity > delta, np.maximum(similarity, 0), 0)
                mixed = weights / weights.sum(axis=1, keepdims=True) @ models
            del mixed
    return {"seconds": watch.medians(), "peak bytes": peak.bytes}


def pair_by_pair(options: argparse.Namespace, clients: Clients) -> dict[str, Any]:
    bounds = np.cumsum([0, *(max(1, int(share * options.parameters)) for share in SHARES)])
    bounds[-1] = options.parameters
    models = np.stack([clients.model(client) for client in range(options.clients)])
    mixed = np.zeros((options.participants, options.parameters), np.float32)

    def tensors(row: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(row[start:stop]) for start, stop in itertools.pairwise(bounds)]

    def flat(model: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in model])

    watch = Stopwatch()
    with Peak() as peak:
        for _ in range(options.rounds):
            watch.next_round()
            participants = clients.rng.choice(options.clients, options.participants, replace=False).tolist()
            for client in participants:
                model = clients.model(client)
                with watch("write"):
                    models[client] = model
            state = [tensors(row) for row in models]
            with watch("similarity"):
                similarity = np.eye(options.clients)
                for i, one in enumerate(state):
                    for j, other in enumerate(state):
                        if i != j:
                            a, b = flat(one), flat(other)
                            similarity[i, j] = torch.dot(a, b) / (torch.linalg.norm(a) * torch.linalg.norm(b))
            with watch("mix"):
                delta = np.quantile(similarity, options.quantile)
                mixed[:] = 0
                for k, i in enumerate(participants):
                    weights = np.where(similarity[i] > delta, np.maximum(similarity[i], 0), 0)
                    weights[i] = 1
                    weights /= weights.sum()
                    mixture = tensors(mixed[k])
                    for weight, other in zip(weights.tolist(), state, strict=True):
                        for into, tensor in zip(mixture, other, strict=True):
                            into += weight * tensor
    expected, _, _ = mix(models, options.quantile)
    difference = float(np.abs(mixed - expected[participants]).max())
    return {"seconds": watch.medians(), "peak bytes": peak.bytes, "largest difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--participants", type=int, default=50, help="clients of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, help="where the models lie meanwhile (default: for temporary files)")
    parser.add_argument("--quick", action="store_true", help="40 clients, 20 000 parameters, 8 participants, 2 rounds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.parameters, options.participants, options.rounds = 40, 20_000, 8, 2
    options.participants = min(options.participants, options.clients)
    clients = Clients(options)
    result: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("clients", "parameters", "participants", "rounds", "quantile")},
        "bytes of all models": options.clients * options.parameters * 4,
        "peak bytes before": anonymous_bytes(),
    }
    with tempfile.TemporaryDirectory(prefix="tepal-mixing-", dir=options.folder) as folder:
        result[TEPAL] = with_store(options, clients, Path(folder))
    if COPIES * result["bytes of all models"] < psutil.virtual_memory().available:
        result[NUMPY] = in_memory(options, clients)
        if options.clients**2 * options.parameters <= PAIRS:
            result[LOOP] = pair_by_pair(options, clients)
    if options.json:
        write_figures(options.json, result)
    show(result)


def show(result: dict[str, Any]) -> None:
    columns = [name for name in COLUMNS if name in result]
    table = Table(
        title=f"{result['clients']} clients × {result['parameters']:,} float32 parameters, "
        f"{result['participants']} participants: medians of {result['rounds']} rounds",
        title_justify="left",
    )
    table.add_column("seconds")
    for name in columns:
        table.add_column(name, justify="right")
    for stage, words in STAGES.items():
        figures = [result[name]["seconds"][stage] for name in columns]
        table.add_row(words, *(f"{figure:,.3f}" if figure else "" for figure in figures))
    both = [result[name]["seconds"]["similarity"] + result[name]["seconds"]["mix"] for name in columns]
    table.add_row("similarity and mix", *(f"{figure:,.3f}" for figure in both))
    table.add_section()
    table.add_row("peak anonymous memory, MB", *(f"{result[name]['peak bytes'] / 1e6:,.0f}" for name in columns))
    console = Console()
    console.print(table)
    console.print(
        f"All models are {result['bytes of all models'] / 1e6:,.0f} MB; "
        f"{result['peak bytes before'] / 1e6:,.0f} MB of the memory were in use before the first."
    )
    if LOOP in result:
        console.print(
            f"A round's similarity and mix take {both[-1] / both[0]:.0f} times as long in a loop over pairs, whose "
            f"mixtures differ by {result[LOOP]['largest difference']:.1g} at most."
        )
    if NUMPY not in result:
        console.print(f"NumPy in memory is left out: it needs {COPIES:g} times all models, more than is free here.")


if __name__ == "__main__":
    main()
