"""Bytes that FedFrozen transfers, compared with FedAvg's and with the closed form.

    python benchmarks/bytes.py [--model bert-base] [--rounds 10] [--warmup 2] [--clients 3]

Measured: the bytes of all Arrays in all messages that pass the grid, in MB per round and direction, with FedFrozen,
Tepal's FedAvg and Flower's own FedAvg. Clients do not train (bytes do not depend on it); they change the entries that
the plan lets them train.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common import MODELS, nudging_app
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from measured import write_figures
from rich.console import Console
from rich.table import Table
from torch import nn

from tepal.models.blocks import find_blocks
from tepal.strategies import FedAvg, FedFrozen
from tepal.strategies.fedfrozen import cost_ratio
from tepal.strategies.in_process import InProcessGrid, Node


class CountingGrid(InProcessGrid):
    """Counts the bytes of all Arrays in both directions, for any strategy; `down` and `up` have one item per round."""

    def __init__(self, clients: int) -> None:
        self.down, self.up = [0], [0]
        nodes = [Node(nudging_app(), {"partition-id": k}) for k in range(clients)]
        super().__init__(nodes, spoil=self.count_reply)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self.down[-1] += sum(array_bytes(message) for message in messages)
        return super().push_messages(messages)

    def count_reply(self, node: Node, message: Message, reply: Message) -> Message:
        self.up[-1] += array_bytes(reply)
        return reply

    def next_round(self, *args: object) -> None:
        self.down.append(0)
        self.up.append(0)


def array_bytes(message: Message) -> int:
    records = message.content.array_records.values() if message.has_content() else []
    return sum(len(array.data) for record in records for array in record.values())


def measure(strategy: str, model: nn.Module, options: argparse.Namespace) -> CountingGrid:
    grid = CountingGrid(options.clients)
    initial = ArrayRecord(model.state_dict())
    if strategy == "Flower FedAvg":

        def between(server_round: int, arrays: ArrayRecord) -> None:
            if server_round:
                grid.next_round()

        FlowerFedAvg(fraction_evaluate=0).start(grid, initial, options.rounds, evaluate_fn=between)
    else:
        common: dict[str, Any] = {"fraction_evaluate": 0, "on_round": grid.next_round, "model": find_blocks(model)}
        ours = FedAvg(**common) if strategy == "FedAvg" else FedFrozen(warmup_rounds=options.warmup, **common)
        ours.start(grid, initial, options.rounds)
    return grid


def closed_form(model: nn.Module, options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Bytes (down, up) per round: the whole model in the warm-up, then θ, and Φ̄ once."""
    blocks = find_blocks(model)
    full = blocks.layout.nbytes()
    theta = blocks.layout.nbytes(blocks.value)
    rounds = range(1, options.rounds + 1)
    up = [options.clients * (full if t <= options.warmup else theta) for t in rounds]
    down = [options.clients * (full if t <= options.warmup + 1 else theta) for t in rounds]
    return down, up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny-vit")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TEPAL_CACHE"] = cache
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = MODELS[options.model]()
        grids = {name: measure(name, model, options) for name in ("Flower FedAvg", "FedAvg", "FedFrozen")}
    expected_down, expected_up = closed_form(model, options)
    rows = {name: (grid.down[: options.rounds], grid.up[: options.rounds]) for name, grid in grids.items()}
    result = {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "clients": options.clients,
        "bytes": {name: {"down": down, "up": up} for name, (down, up) in rows.items()},
        "closed form": {"down": expected_down, "up": expected_up},
        "equal to the closed form": rows["FedFrozen"] == (expected_down, expected_up),
        "uplink relative to FedAvg": sum(rows["FedFrozen"][1]) / sum(rows["FedAvg"][1]),
        "both ways relative to FedAvg": sum(map(sum, rows["FedFrozen"])) / sum(map(sum, rows["FedAvg"])),
        "cost_ratio": [cost_ratio(model, options.warmup, options.rounds, downlink=both) for both in (False, True)],
    }
    if options.json:
        write_figures(options.json, result)
    show(result, rows, expected_down, expected_up)


def show(
    result: dict[str, Any], rows: dict[str, tuple[list[int], list[int]]], down: list[int], up: list[int]
) -> None:
    console = Console()
    table = Table(title=f"Payload in MB, {result['model']}, {result['clients']} clients", title_justify="left")
    table.add_column("round", justify="right")
    for name in (*rows, "closed form"):
        table.add_column(f"{name}\ndown", justify="right")
        table.add_column("\nup", justify="right")
    columns = [series for pair in (*rows.values(), (down, up)) for series in pair]
    for number, figures in enumerate(zip(*columns, strict=True), start=1):
        table.add_row(str(number), *(f"{figure / 1e6:,.3f}" for figure in figures))
    table.add_section()
    table.add_row("all", *(f"{sum(series) / 1e6:,.3f}" for series in columns))
    console.print(table)
    by_count, by_count_both = result["cost_ratio"]
    console.print(
        f"FedFrozen relative to FedAvg: uplink {result['uplink relative to FedAvg']:.4f} (cost_ratio {by_count:.4f}), "
        f"both ways {result['both ways relative to FedAvg']:.5f} (cost_ratio {by_count_both:.5f}); "
        f"equal to the closed form: {result['equal to the closed form']}"
    )


if __name__ == "__main__":
    main()
