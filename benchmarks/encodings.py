"""Bytes and seconds of the encodings, compared with float32, and their effect on accuracy.

    python benchmarks/encodings.py [--model vit-b-32] [--runs 5] [--seeds 1,2,3] [--data FILE] [--only bytes|accuracy]

- Bytes of one client's messages in a frozen round of FedFrozen, compared with a round of FedAvg in float32, and seconds
  (medians) to encode and decode one upload, and of the server and a client for one download: to encode the values or
  their differences, to keep what the client then has, and to read, verify and cache it. For a model by its name.
- Accuracy and MB of whole runs in one process with one thread, for every encoding and seed: on the digits of
  scikit-learn (10 clients, all in every round), or with `--data` on Fashion-MNIST (200 clients, ten per round) with
  conf/results/fashion-mnist.toml.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MODELS
from measured import write_figures
from rich.console import Console
from rich.table import Table

from tepal.client_app.app import app
from tepal.exchange.cache import ClientCache
from tepal.exchange.encodings import Encoding
from tepal.exchange.layout import Layout, Names
from tepal.exchange.packer import Packer, Wanted
from tepal.exchange.parts import pack, shapes_of, unpack_checked, unpacked
from tepal.exchange.references import References
from tepal.host.toml import parse_run_config
from tepal.models.blocks import find_blocks
from tepal.records.round_record import RoundRecord
from tepal.records.run_directory import read_metrics
from tepal.server_app.config import defaults
from tepal.server_app.run import run
from tepal.strategies.in_process import InProcessGrid, Node

ROOT = Path(__file__).resolve().parents[1]
ENCODINGS = {
    "float32": Encoding(),
    "float16": Encoding("float16", "float16"),
    "bfloat16": Encoding("bfloat16", "bfloat16"),
    "int8": Encoding("int8", "int8"),
    "int8 up": Encoding("float32", "int8"),
    "int8 up without feedback": Encoding("float32", "int8", error_feedback=False),
    "int4 up": Encoding(up="int4"),
    "ternary up": Encoding(up="ternary"),
    "sign up": Encoding(up="sign"),
    "sign up without feedback": Encoding(up="sign", error_feedback=False),
    "int8 down and sign up": Encoding("int8", "sign"),
    "int4 both ways": Encoding("int4", "int4"),
    "ternary both ways": Encoding("ternary", "ternary"),
    "sign both ways": Encoding("sign", "sign"),
    "top 10 % in signs both ways": Encoding("sign", "sign", 0.1, top_k_down=0.1),
    "the same with the first in int4": Encoding("sign", "sign", 0.1, top_k_down=0.1, whole="int4"),
    "rank 4 both ways": Encoding("rank4", "rank4"),
    "auto both ways": Encoding("auto", "auto"),
    "top 10 % up": Encoding(top_k=0.1),
    "top 10 % in signs up": Encoding(up="sign", top_k=0.1),
    "top 1 % up": Encoding(top_k=0.01),
    "top 1 % up without feedback": Encoding(top_k=0.01, error_feedback=False),
    "bfloat16 down and top 1 % in int8 up": Encoding("bfloat16", "int8", 0.01),
}


def bytes_and_seconds(chosen: Mapping[str, Encoding], name: str, repeats: int) -> dict[str, Any]:
    """Bytes of what one client is sent and sends in a frozen round, and seconds to make and read it, by encoding.

    Values and changes are random, with a normal distribution.
    """
    blocks = find_blocks(MODELS[name]())
    layout, names = blocks.layout, blocks.value
    return {
        label: {
            "FedAvg": layout.nbytes(), "value block": layout.nbytes(names),
            **seconds_up(layout, names, encoding, repeats), **seconds_down(layout, names, encoding, repeats),
        }
        for label, encoding in chosen.items()
    }  # fmt: skip


def values_like(layout: Layout, names: Names, seed: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    entries = [layout.by_name[name] for name in names]
    return {
        entry.name: (scale * rng.standard_normal(entry.shape, np.float32)).astype(entry.dtype) for entry in entries
    }


def medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    return {step: statistics.median(seconds) for step, seconds in taken.items()}


def seconds_up(layout: Layout, names: Names, encoding: Encoding, repeats: int) -> dict[str, float]:
    values = values_like(layout, names, 0, 1e-3)
    wire, shaped = encoding.upload, shapes_of(values, names)
    taken: dict[str, list[float]] = {"encode": [], "decode": []}
    for repeat in range(repeats):
        begun = time.perf_counter()
        packed = pack(values, names, wire, random=wire.random(repeat))
        taken["encode"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for _ in unpacked(packed, shaped, wire):
            pass
        taken["decode"].append(time.perf_counter() - begun)
    return {**medians(taken), "up": len(packed.data)}


def seconds_down(layout: Layout, names: Names, encoding: Encoding, repeats: int) -> dict[str, float]:
    """Of the server, which has new values in each repetition, and of a client that has those before them."""
    taken: dict[str, list[float]] = {"server": [], "client": []}
    values = values_like(layout, names, 0, 1.0)
    shaped = shapes_of(values, names)
    with tempfile.TemporaryDirectory(prefix="tepal-encodings-") as folder:
        packer = Packer(encoding, References(Path(folder, "references"), 8000.0) if encoding.differences_down else None)
        cache = ClientCache(Path(folder, "cache"), "e", "client")
        for repeat in range(repeats + 1):  # the first message is the whole
            packer.begin(repeat, dict.fromkeys(cache.holds(), 1))
            moved = values_like(layout, names, repeat + 1, 1e-3)
            values = {name: values[name] + moved[name] for name in names}
            begun = time.perf_counter()
            sent = packer.parcel(Wanted("model", "value", names, values), cache.holds())
            served = time.perf_counter()
            parcel = sent.parcel
            starts = partial(cache.base, parcel.base, parcel.part)
            found, _ = unpack_checked(sent.data, shaped, parcel.wire, parcel.part, parcel.base, starts)
            assert len(found) == len(names)
            if parcel.keep:
                cache.keep(parcel.part, found)
            down = len(sent.data.data)
            if repeat:
                taken["server"].append(served - begun)
                taken["client"].append(time.perf_counter() - served)
            del sent, found
    return {**medians(taken), "down": down}


def accuracies(
    chosen: Mapping[str, Encoding], data: Path | None, seeds: list[int], rounds: int, console: Console
) -> dict[str, Any]:
    """Accuracy of the last round by seed, and MB down and up of a run, by encoding."""
    torch.set_num_threads(1)
    clients, config = 10, {"model": "cnn", "num-server-rounds": 15, "evaluate-every": 5}
    if data:
        clients = 200
        config = {**parse_run_config([str(ROOT / "conf/results/fashion-mnist.toml")]), "dataset-path": str(data)}
    if rounds:
        config |= {"num-server-rounds": rounds, "evaluate-every": rounds}
    found: dict[str, Any] = {}
    for label, encoding in chosen.items():
        lines = []
        for seed in seeds:
            with console.status(f"{label}, seed {seed} …"):
                lines.append(one_run({**config, "strategy": "fedavg", "seed": seed, **keys(encoding)}, clients))
        found[label] = {
            "accuracy": [line[-1].accuracy for line in lines],
            "down": statistics.mean(sum(one.bytes_down for one in line) for line in lines),
            "up": statistics.mean(sum(one.bytes_up for one in line) for line in lines),
        }
    return found


def keys(encoding: Encoding) -> dict[str, Any]:
    return {
        "wire-dtype-down": encoding.down, "wire-dtype-up": encoding.up, "wire-top-k": encoding.top_k,
        "wire-top-k-down": encoding.top_k_down, "wire-dtype-whole": encoding.whole,
        "wire-error-feedback": encoding.error_feedback, "wire-left-out": encoding.left_out,
    }  # fmt: skip


def one_run(config: Mapping[str, Any], clients: int) -> list[RoundRecord]:
    with tempfile.TemporaryDirectory(prefix="tepal-encodings-") as folder:
        os.environ["TEPAL_CACHE"] = str(Path(folder, "cache"))
        whole = {**defaults(), **config, "runs": str(Path(folder, "runs"))}
        nodes = [Node(app, {"partition-id": k, "num-partitions": clients}) for k in range(clients)]
        return read_metrics(run(InProcessGrid(nodes, whole), whole))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vit-b-32")
    parser.add_argument("--runs", type=int, default=5, help="of encoding and decoding")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=0, help="other than the settings have")
    parser.add_argument("--data", type=Path, help="fashion_mnist.npz, or a folder with the files of Fashion-MNIST")
    listed = ", ".join(ENCODINGS).replace("%", "%%")
    parser.add_argument("--encodings", default=",".join(ENCODINGS), help=f"which of: {listed}")
    parser.add_argument("--only", choices=("bytes", "accuracy"))
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, two rounds: whether it works")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.model, options.runs, options.seeds, options.rounds = "tiny-vit", 1, "1", 2
    names = [name.strip() for name in options.encodings.split(",")]
    if unknown := [name for name in names if name not in ENCODINGS]:
        parser.error(f"--encodings has {', '.join(unknown)}; known are {', '.join(ENCODINGS)}")
    chosen = {name: ENCODINGS[name] for name in names}
    console = Console(width=None if sys.stdout.isatty() else 120)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    result: dict[str, Any] = {"model": options.model}
    if options.only != "accuracy":
        with tempfile.TemporaryDirectory(prefix="tepal-encodings-") as cache:
            os.environ["TEPAL_CACHE"] = cache
            result["bytes"] = bytes_and_seconds(chosen, options.model, options.runs)
    if options.only != "bytes":
        result["dataset"] = "fashion-mnist" if options.data else "digits"
        seeds = [int(seed) for seed in options.seeds.split(",")]
        result["runs"] = accuracies(chosen, options.data, seeds, options.rounds, console)
    if options.json:
        write_figures(options.json, result)
    for table in tables(result):
        console.print(table)


def tables(result: Mapping[str, Any]) -> list[Table]:
    made = []
    if "bytes" in result:
        title = f"{result['model']}: one client in a frozen round of FedFrozen"
        seconds = "encode", "decode", "server", "client"
        headings = ("encoding", "MB down", "MB up", "up / FedAvg as it is", *(f"{step} s" for step in seconds))
        table = headed(title, *headings)
        for label, row in result["bytes"].items():
            shares = f"{row['up'] / row['FedAvg']:.4f}"
            mega = (f"{row[way] / 1e6:,.2f}" for way in ("down", "up"))
            table.add_row(label, *mega, shares, *(f"{row[step]:.3f}" for step in seconds))
        made.append(table)
    if "runs" in result:
        first = next(iter(result["runs"].values()))
        title = f"FedAvg on {result['dataset']}, {len(first['accuracy'])} seeds: server's test examples, MB of a run"
        table = headed(title, "encoding", "accuracy", "±", "MB down", "MB up", "up", "both")
        for label, row in result["runs"].items():
            spread = statistics.stdev(row["accuracy"]) if len(row["accuracy"]) > 1 else 0.0
            both = (row["down"] + row["up"]) / (first["down"] + first["up"])
            table.add_row(
                label, f"{statistics.mean(row['accuracy']):.4f}", f"{spread:.4f}", f"{row['down'] / 1e6:,.1f}",
                f"{row['up'] / 1e6:,.1f}", f"{row['up'] / first['up']:.4f}", f"{both:.4f}",
            )  # fmt: skip
        made.append(table)
    return made


def headed(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "encoding" else "right", no_wrap=True)
    return table


if __name__ == "__main__":
    main()
